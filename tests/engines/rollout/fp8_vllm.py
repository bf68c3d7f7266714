"""vLLM's program with a kernel in plain torch for blockwise FP8 layers: vLLM's own for CPUs need AMX.

The kernel computes with exactly the weights that the layer holds, and keeps what it computed with: HEADRACE_TEST_SERVED
names a folder that gets ``<layer>.pt`` = (weight, scales) from the first use of each layer that has no file there.
With HEADRACE_TEST_IN_PLACE=1 weights are written in place, as on a GPU with a kernel that takes them as they come.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.model_executor.kernels import linear as kernels  # pyright: ignore[reportMissingImports]
from vllm.platforms import PlatformEnum  # pyright: ignore[reportMissingImports]

from headrace.engines.checkpoint.fp8 import from_blocks
from headrace.engines.rollout import vllm_child, vllm_worker
from headrace.engines.rollout.copies import Copies

SERVED = Path(os.environ["HEADRACE_TEST_SERVED"])


class PlainKernel(kernels.Fp8BlockScaledMMLinearKernel):
    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        held: tuple[Tensor, Tensor] = layer.weight.data, layer.weight_scale_inv.data  # pyright: ignore
        file = SERVED / f"{layer.prefix}.pt"
        if not file.exists():
            torch.save(held, file)
        return linear(x.float(), from_blocks(*held), None if bias is None else bias.float()).to(x.dtype)

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        raise NotImplementedError


class InPlace(vllm_worker._Loading):
    """Takes the device for a GPU, and then does what only CPUs need."""

    def __init__(self, model: Any, device: torch.device, copies: Copies) -> None:
        super().__init__(model, torch.device("cuda"), copies)
        assert self._in_place

    def finish(self, model_config: Any, version: int) -> None:
        super().finish(model_config, version)
        assert self._copies.known
        vllm_worker._repack_tied_head(self._model)


if __name__ == "__main__":
    if os.environ["HEADRACE_TEST_IN_PLACE"] == "1":
        PlainKernel.__name__ = "TritonFp8BlockScaledMMKernel"
        vllm_worker._Loading = InPlace
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [PlainKernel]
    sys.exit(vllm_child.main())
