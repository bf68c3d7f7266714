"""What ``benchmarks.weights_fp8`` runs with vLLM's interpreter.

As an engine's program (``FD OPTIONS FLAG…``): vLLM's back end, which writes the model's parameters into the file that
HEADRACE_PARAMETERS names, after the first load. As ``online MODEL OUT``: vLLM quantises the model itself while it loads
it, and its parameters go into OUT.parameters; in how many places its conversion and ours differ, into OUT.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headrace.blocks.fp8 import quantised
from headrace.engines.checkpoint.fp8 import to_blocks
from headrace.engines.rollout import vllm_child

MEMORY = 0.25


def keep_in(path: str) -> Any:
    """A function of vLLM's worker that writes its model's parameters; it is sent there by value."""

    def keep(worker: Any) -> None:
        torch.save({n: p.detach().cpu().as_subclass(Tensor) for n, p in worker.get_model().named_parameters()}, path)

    return keep


class Showing(vllm_child.VLLM):
    async def load(self, source: str, expect: str, deadline_s: str) -> list[dict[str, Any]]:
        outcomes = await super().load(source, expect, deadline_s)
        if not Path(os.environ["HEADRACE_PARAMETERS"]).exists():
            await self.llm.collective_rpc(keep_in(os.environ["HEADRACE_PARAMETERS"]))
        return outcomes


def differing(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """How many values, and how many scales, of two conversions are not the same bits."""
    return int((one[0].view(torch.uint8) != other[0].view(torch.uint8)).sum()), int((one[1] != other[1]).sum())


def compare_conversions(model: Path) -> dict[str, int]:
    """vLLM's function as vLLM calls it (compiled) and as it is written (eager) against ours, on this device."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    counts: dict[str, int] = dict.fromkeys(
        ("values", "compiled_values", "compiled_scales", "eager_values", "eager_scales"), 0
    )
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in [name for name in file.keys() if quantised(name, file.get_slice(name).get_shape())]:  # noqa: SIM118
                weight = file.get_tensor(name).to(device, torch.bfloat16)
                ours = to_blocks(weight)
                counts["values"] += weight.numel()
                for how, stance in (("compiled", "default"), ("eager", "force_eager")):
                    with torch.compiler.set_stance(stance):
                        theirs = per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)
                    values, scales = differing(ours, theirs)
                    counts[f"{how}_values"] += values
                    counts[f"{how}_scales"] += scales
    return counts


def online(model: Path, out: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    sizes: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 16, "gpu_memory_utilization": MEMORY}
    llm = LLM(
        str(model),
        quantization="fp8_per_block",
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        **sizes,
    )
    llm.collective_rpc(keep_in(f"{out}.parameters"))
    Path(f"{out}.json").write_text(json.dumps(compare_conversions(model)))


if __name__ == "__main__":
    if sys.argv[1] == "online":
        online(Path(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(vllm_child.main(Showing))
