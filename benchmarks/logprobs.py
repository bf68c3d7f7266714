"""Memory and time of log-probabilities from hidden states: ``python -m benchmarks.logprobs``.

8,192 tokens × 150,000 words, forward and backward. Peak extra memory must be at most 1/8 of the naive way (logits,
float32 log-softmax, gather); exits 1 otherwise. On a GPU both are measured as they are, and Liger's fused kernel where
it is installed. On the CPU each runs in a process of its own and its peak resident memory counts; the naive way would
take 20 GB there, so it is measured at 512 and 1,024 tokens and continued on the straight line through both.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch

from headrace.algorithms import fused
from headrace.algorithms.logprobs import token_logprobs

TOKENS, VOCABULARY, BOUND = 8192, 150_000, 1 / 8


def run(way: str, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    if way == "naive":
        logits = (hidden @ weight.t()).float()
        logprobs = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    else:
        # A chunk, given or not, has no part in the fused kernel; 'chunked' keeps it out by a bias of zero.
        bias = weight.new_zeros(len(weight)) if way == "chunked" and fused.available(hidden.device) else None
        logprobs = token_logprobs(hidden, weight, targets, bias=bias)
        assert isinstance(logprobs, torch.Tensor)
    logprobs.sum().backward()


def inputs(tokens: int, width: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=dtype, device=device).requires_grad_()
    weight = (torch.randn(VOCABULARY, width, dtype=dtype, device=device) * 0.05).requires_grad_()
    return [hidden, weight, torch.randint(0, VOCABULARY, (tokens,), device=device)]


def child(way: str, tokens: int) -> None:
    """Prints the peak resident memory that the computation adds to its inputs, and its seconds."""
    torch.set_num_threads(1)
    given = inputs(tokens, 64, torch.float32, "cpu")
    run(way, *[x[:8].detach().requires_grad_() if i == 0 else x[:8] if i == 2 else x for i, x in enumerate(given)])
    given[1].grad = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    run(way, *given)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"bytes": (peak - before) * 1024, "seconds": time.perf_counter() - start}))


def in_turns(dtype: torch.dtype, rounds: int = 5) -> float:
    """CPU seconds of the naive way / ours for a small model's head: 600 tokens × 49,152 words, width 576."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(600, 576, dtype=dtype).requires_grad_()
    weight = (torch.randn(49152, 576, dtype=dtype) * 0.05).requires_grad_()
    targets = torch.randint(0, 49152, (600,))
    seconds: dict[str, list[float]] = {"naive": [], "chunked": []}
    for _ in range(rounds + 1):
        for way, taken in seconds.items():
            hidden.grad = weight.grad = None
            start = time.process_time()
            run(way, hidden, weight, targets)
            taken.append(time.process_time() - start)
    return min(seconds["naive"][1:]) / min(seconds["chunked"][1:])


def measure(way: str, tokens: int) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.logprobs", "--child", way, "--tokens", str(tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    result = json.loads(done.stdout)
    return result["bytes"], result["seconds"]


def on_cpu() -> bool:
    half, full = measure("naive", 512)[0], measure("naive", 1024)[0]
    naive = full + (full - half) / 512 * (TOKENS - 1024)
    ours, seconds = measure("chunked", TOKENS)
    print(f"naive, 1,024 tokens measured    {full / 2**30:8.2f} GiB")
    print(f"naive, {TOKENS:,} tokens continued  {naive / 2**30:8.2f} GiB")
    print(f"ours,  {TOKENS:,} tokens measured   {ours / 2**30:8.2f} GiB  {seconds:6.1f} s")
    print(f"ours / naive {ours / naive:.3f} (bound {BOUND})")
    for dtype in (torch.float32, torch.bfloat16):
        print(f"time of the naive way / ours, 600 tokens × 49,152 words, {dtype}: {in_turns(dtype):.2f}")
    return ours <= BOUND * naive


def on_gpu() -> bool:
    ways = ["naive", "chunked"] + ["fused"] * fused.available(torch.device("cuda", torch.cuda.current_device()))
    given = inputs(TOKENS, 2048, torch.bfloat16, "cuda")
    reference: list[torch.Tensor] = []
    peaks: dict[str, int] = {}
    for way in ways:
        seconds = []
        for _ in range(4):
            given[0].grad = given[1].grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated(), time.perf_counter()
            run(way, *given)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            peaks[way] = torch.cuda.max_memory_allocated() - before
        grads = [x.grad.float() for x in given[:2] if x.grad is not None]
        reference = reference or grads
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(grads, reference, strict=True)]
        print(f"{way:8} {peaks[way] / 2**30:7.2f} GiB {min(seconds[1:]) * 1e3:8.1f} ms  gradients differ by {errors}")
    print(f"chunked / naive {peaks['chunked'] / peaks['naive']:.3f} (bound {BOUND})")
    return all(peaks[way] <= BOUND * peaks["naive"] for way in ways[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.tokens)
        return 0
    return 0 if (on_gpu() if torch.cuda.is_available() else on_cpu()) else 1


if __name__ == "__main__":
    sys.exit(main())
