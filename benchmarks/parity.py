"""The parity gate against real vLLM, healthy and broken on purpose: ``python -m benchmarks.parity [MODEL] [--gpu]``.

Eight cases on one model: our model engine and vLLM behind our rollout host, each a process of its own, through the
gate's two rounds at temperature 0.7. Prints each round's figures and the bounds that they pass, then whether the gate
said what it has to say: the four faults of vLLM's move from V0 to V1 are found, and told from each other, and healthy
engines stay within all bounds. HEADRACE_VLLM_PYTHON names vLLM's interpreter. MODEL: a Hugging Face folder, by default
the quickstart's. Exits with status 1 when one case does not come out as it must.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.blocks.home import model_folder
from headrace.blocks.recipe import VLLMRollout
from headrace.engines.model.spec import EngineSpec
from headrace.engines.rollout.spec import RolloutSpec
from tests.engines.parity.engines import Engines, Found, broken

TEMPERATURE = 0.7
# What the prompts share fills more than one block of the prefix cache: 128 tokens on CPUs.
SHARED = (
    "Here is a sentence that all the prompts have in common, so that more than one block of the cache is full. " * 9
)
FIGURES = {
    "kl_k1": "mismatch/kl_k1",
    "kl_k3": "mismatch/kl_k3",
    "p99.9": "mismatch/p999_abs_log_ratio",
    "max": "mismatch/max_abs_log_ratio",
    "ess": "mismatch/ess",
    "clipped": "mismatch/clip_fraction",
    "on grid": "behaviour/bfloat16_share",
}


@dataclass(frozen=True)
class Outcome:
    """The bounds that each round passed. ``before``: the first round's tokens under the weights before its update."""

    changed: list[str]
    own: list[str]
    before: list[str]


@dataclass(frozen=True)
class Case:
    says: str
    right: Callable[[Outcome], bool]
    fault: str = ""
    backend: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    rollout_head: str = "model"
    actor_head: str = "model"


def _healthy(o: Outcome) -> bool:
    return not o.changed and not o.own


CACHING = {"enable_prefix_caching": True}
CASES = {
    "healthy": Case("within all bounds", _healthy),
    "prefix cache": Case("within all bounds", _healthy, backend=CACHING),
    "float32 heads": Case("within all bounds", _healthy, rollout_head="float32", actor_head="float32"),
    "float32": Case("within the bounds of float32", _healthy, dtype="float32"),
    "raw log-probabilities": Case(
        "both rounds fail", lambda o: bool(o.changed and o.own), backend={"logprobs_mode": "raw_logprobs"}
    ),
    "lasting prefix cache": Case(
        "the second round alone fails",
        lambda o: bool(o.own) and not o.changed,
        fault="lasting prefix cache",
        backend=CACHING,
    ),
    "silent load": Case(
        "the first round fails, and fits the weights before",
        lambda o: bool(o.changed) and not o.before,
        fault="silent load",
    ),
    "bfloat16 head": Case(
        "the rollout head is named",
        lambda o: any("rollout head" in one for one in o.changed + o.own),
        actor_head="float32",
    ),
}


async def measure(name: str, given: argparse.Namespace, folder: Path, python: str) -> list[Found]:
    """(changed, own, before) of one case."""
    case = CASES[name]
    settings: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": given.cache,
        **case.backend,
    }
    if given.gpu:
        settings["gpu_memory_utilization"] = 0.03
    common = {"model": str(given.model), "dtype": case.dtype}
    actor = EngineSpec.model_validate(
        common | {"head_dtype": case.actor_head, "temperature": TEMPERATURE, "device": "cuda" if given.gpu else "cpu"}
    )
    rollout = RolloutSpec.model_validate(
        common
        | {
            "head_dtype": case.rollout_head,
            "gpus": int(given.gpu),
            "python": broken(python, case.fault, folder) if case.fault else python,
            "backend": VLLMRollout.model_validate(settings),
        }
    )
    prompts = [SHARED + f"What is {a} plus {a + 3}?" for a in range(given.prompts)]
    async with Engines(folder, prompts, n=given.n, temperature=TEMPERATURE, max_tokens=given.tokens) as engines:
        await engines.start(actor, rollout)
        return await engines.rounds()


async def run(name: str, given: argparse.Namespace, folder: Path, python: str, places: asyncio.Semaphore) -> bool:
    """Whether the gate said what it has to say. A case that cannot run is a miss, not the end."""
    case = CASES[name]
    (home := folder / name.replace(" ", "-")).mkdir()
    async with places:
        try:
            rounds = await measure(name, given, home, python)
        except Exception as error:
            print(f"{name}: did not run: {type(error).__name__}: {error}", flush=True)
            return False
    said = [[str(e) for e in found.excesses(case.dtype, case.actor_head)] for found in rounds]
    for weights, found, excesses in zip(("changed", "own", "before"), rounds, said, strict=True):
        figures = " ".join(f"{short} {found[metric]:.3g}" for short, metric in FIGURES.items() if metric in found)
        print(f"{name:22} {weights:8} {figures} | {'; '.join(excesses) or 'within bounds'}", flush=True)
    return case.right(Outcome(*said))


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=model_folder("smollm2-135m-instruct"))
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--parallel", type=int, default=1, help="cases at the same time")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=4, help="answers of each prompt")
    parser.add_argument("--tokens", type=int, default=16, help="longest answer")
    parser.add_argument("--cache", type=int, default=300_000_000, help="bytes of vLLM's KV cache")
    given = parser.parse_args()
    python = os.environ.get("HEADRACE_VLLM_PYTHON", "")
    if not python:
        parser.error("HEADRACE_VLLM_PYTHON must name the interpreter of vLLM's environment: make vllm-env")
    places = asyncio.Semaphore(given.parallel)
    with tempfile.TemporaryDirectory(prefix="headrace-parity-") as folder:
        right = await asyncio.gather(*(run(name, given, Path(folder), python, places) for name in given.only))
    for name, met in zip(given.only, right, strict=True):
        print(f"{name}: {CASES[name].says}: {'ok' if met else 'MISSED'}")
    return not all(right)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
