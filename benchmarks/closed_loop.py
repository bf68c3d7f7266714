"""A closed loop of requests against an OpenAI-compatible server: ``python closed_loop.py URL PROMPTS.json …``.

Needs aiohttp only. Prints output tokens per second as its last line. Kinds: ``text`` (/v1/completions), ``logprobs``
(the same with token ids and log-probabilities), ``tokens`` (vLLM's /inference/v1/generate with log-probabilities).
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp


def body(kind: str, model: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    if kind == "tokens":
        return {"model": model, "token_ids": prompt, "sampling_params": sampling | {"logprobs": 0, "detokenize": False}}
    wanted = {"logprobs": 0, "return_token_ids": True} if kind == "logprobs" else {}
    return {"model": model, "prompt": prompt} | sampling | wanted


async def measure(url: str, kind: str, model: str, prompts: list[list[int]], tokens: int, at_once: int) -> float:
    """Output tokens per second; raises when a request fails or answers with fewer tokens."""
    path = "/inference/v1/generate" if kind == "tokens" else "/v1/completions"
    queue = list(prompts)
    got = 0
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=1800)) as session:

        async def worker() -> None:
            nonlocal got
            while queue:
                async with session.post(url + path, json=body(kind, model, queue.pop(), tokens)) as answer:
                    if answer.status != 200:
                        raise RuntimeError(f"{path} answered {answer.status}: {(await answer.text())[:300]}")
                    said = await answer.json(content_type=None)
                usage = said.get("usage") or {}
                got += usage.get("completion_tokens") or len(said["choices"][0]["token_ids"])

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(at_once)))
        seconds = time.perf_counter() - began
    if got != tokens * len(prompts):
        raise RuntimeError(f"{got} tokens came for {tokens * len(prompts)}")
    return got / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("prompts", type=Path, help="JSON: a list of lists of token ids")
    parser.add_argument("--kind", choices=("text", "logprobs", "tokens"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--at-once", type=int, required=True)
    a = parser.parse_args()
    prompts = json.loads(a.prompts.read_text())
    print(asyncio.run(measure(a.url, a.kind, a.model, prompts, a.tokens, a.at_once)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
