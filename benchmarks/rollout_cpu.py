"""Tokens per second of the CPU back end against ``transformers.generate``: ``python -m benchmarks.rollout_cpu``.

One process, one model, the same prompts and the same number of samples, temperature 1, bfloat16, the same threads. The
two take turns for several rounds, so that whatever else the machine does hits both. The bound is on the first variant
(every sample runs to its full length); the second stops at the end-of-turn token, as training does.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.engines.rollout.architecture import read_architecture
from headrace.engines.rollout.base import Request, Sampling
from headrace.engines.rollout.batch import Batch
from headrace.engines.rollout.counter import sample_seed
from headrace.engines.rollout.decoder import Decoder
from headrace.engines.rollout.slots import Storage

BOUND = 1.8
PROMPTS, SAMPLES, TOKENS = 8, 8, 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("HEADRACE_MODEL", ".headrace/models/smollm2-135m-instruct")
    parser.add_argument("model", nargs="?", type=Path, default=Path(default), help="Hugging Face folder of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arch = read_architecture(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompts = sums(tokenizer)
    decoder = Decoder(
        arch, dtype=torch.bfloat16, head_dtype=torch.bfloat16, device=torch.device("cpu"), folder=arguments.model
    )
    storage = Storage(arch, max_batch=PROMPTS * SAMPLES, dtype=torch.bfloat16, device=torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
    longest = max(map(len, prompts))
    print(f"{arguments.model}: {PROMPTS} prompts of {longest} tokens x {SAMPLES} samples, at most {TOKENS} new tokens,")
    print(f"{arguments.threads} threads, bfloat16, tokens per second")
    ratios = []
    for name, stops in (("full length", ()), ("with stop token", (tokenizer.eos_token_id,))):
        mine, other = ours(decoder, storage, prompts, stops), theirs(model, prompts, stops)
        ratios.append(compare(name, arguments.rounds, mine, other))
    print(f"ratio {ratios[0]:.2f} (bound {BOUND}), with stop token {ratios[1]:.2f}")
    return 0 if ratios[0] >= BOUND else 1


def sums(tokenizer) -> list[list[int]]:
    """Two-digit sums as chat prompts, as token ids."""
    draw = random.Random(0)
    pairs = [(draw.randint(10, 49), draw.randint(10, 49)) for _ in range(PROMPTS)]
    texts = [f"What is {a} + {b}? Answer with only the number." for a, b in pairs]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def ours(decoder: Decoder, storage: Storage, prompts: list[list[int]], stops: tuple[int, ...]) -> Callable[[int], int]:
    sampling = Sampling(1.0, TOKENS, stops)

    def run(round_: int) -> int:
        requests = [
            Request(group, prompt, [sample_seed(round_, group, n) for n in range(SAMPLES)], sampling)
            for group, prompt in enumerate(prompts)
        ]
        batch = Batch(decoder, storage, requests, version=0, prefill_tokens=2048)
        while not batch.done:
            batch.step()
        return batch.tokens

    return run


def theirs(model, prompts: list[list[int]], stops: tuple[int, ...]) -> Callable[[int], int]:
    """transformers with its dynamic cache, the fastest of its caches here, left-padded as it asks for."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    pad = -1 if not stops else stops[0]

    def run(round_: int) -> int:
        torch.manual_seed(round_)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=SAMPLES,
                max_new_tokens=TOKENS,
                eos_token_id=list(stops) or None,
                pad_token_id=max(pad, 0),
            )
        new = out[:, longest:]
        ended = torch.zeros(len(new), dtype=torch.bool)
        tokens = 0
        for column in new.T:
            tokens += int((~ended).sum())
            ended |= column == pad
        return tokens

    return run


def compare(name: str, rounds: int, mine: Callable[[int], int], other: Callable[[int], int]) -> float:
    """Prints the rounds of both and returns the median of the rounds' ratios."""
    ratios = []
    for round_ in range(-1, rounds):
        speeds = []
        for run in (mine, other):
            began = time.perf_counter()
            tokens = run(round_ + 1)
            speeds.append(tokens / (time.perf_counter() - began))
        if round_ >= 0:  # the first one warms up
            ratios.append(speeds[0] / speeds[1])
            print(
                f"  {name}: headrace {speeds[0]:.0f}, transformers {speeds[1]:.0f}, ratio {ratios[-1]:.2f}", flush=True
            )
    return statistics.median(ratios)


if __name__ == "__main__":
    sys.exit(main())
