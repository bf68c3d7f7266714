"""A scripted engine behind the real program and the real host: it samples numbers that say what it was asked.

Its first token is the length of what it was given, then the seed's last digits, then 10, 11, 12 …, ten milliseconds
apart. ``HEADRACE_TEST_FAULT`` plants what a real engine may do wrong.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from headrace.engines.rollout.child import Heard, Program, Refused, Sampling, connect, refuse

FAULT = os.environ.get("HEADRACE_TEST_FAULT", "")


class Scripted:
    def __init__(self) -> None:
        self._dropped: set[str] = set()
        self._salts: list[str] = []

    def describe(self) -> dict[str, Any]:
        return {"engine": "scripted 9.9.1", "version": "9.9.1"}

    async def complete(self, name: str, prompt_ids: list[int], sampling: Sampling, heard: Heard) -> str:
        tokens = [len(prompt_ids), sampling.seed % 1000, *range(10, 10 + sampling.max_tokens)][: sampling.max_tokens]
        for token in tokens:
            await asyncio.sleep(0.01)
            if name in self._dropped:
                return "abort"
            if FAULT == "stops":
                return "abort"
            if FAULT == "dies" and token == 12:
                os._exit(3)
            heard([token], [-0.5, -0.5] if FAULT == "logprobs" else [-0.5])
        return "length"

    async def drop(self, names: list[str]) -> None:
        self._dropped |= set(names)

    async def join(self, source: str, expect: str, deadline_s: str) -> None:
        """It loads nothing."""

    async def load(self, source: str, expect: str, deadline_s: str) -> list[dict[str, Any]]:
        version = json.loads(source)["version"]
        if version == 666:
            return [{"error": "no such weights", "spoiled": False}]
        return [{"served": {"version": version, "digest": f"d{version}"}}]

    async def load_adapter(self, path: str, version: int) -> None:
        about = json.loads((Path(path) / "adapter_config.json").read_text())
        if version == 666 or about["r"] != 2 or not (Path(path) / "adapter_model.safetensors").is_file():
            raise ValueError("no such adapter")

    async def reset_caches(self) -> None: ...

    async def sleep(self, level: int) -> None: ...

    async def wake(self) -> None: ...

    async def health(self) -> None:
        if FAULT == "silent":
            await asyncio.sleep(3600)


async def main() -> int:
    sock = connect(int(sys.argv[1]))
    if FAULT == "loading":
        print("\n".join(f"line {n}" for n in range(100)), flush=True)
        return 7
    if FAULT == "memory":
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB", flush=True)
        return 1
    if FAULT == "lacks":
        return refuse(sock, Refused("UnsupportedEngine", "scripted 9.9.1 lacks AsyncLLM.abort"))
    try:
        await Program(Scripted(), json.loads(sys.argv[2])).serve(sock)
    except Refused:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
