"""The fused kernel for log-probabilities on a Hopper GPU: Liger's, where ``liger-kernel[cutedsl]`` is installed."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def available(device: torch.device) -> bool:
    """Whether the kernel is installed and made for this device (compute capability 9.0)."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return all(find_spec(name) is not None for name in ("liger_kernel", "cutlass", "tvm_ffi"))


def applies(hidden: Tensor, bias: Tensor | None) -> bool:
    """The kernel has bfloat16 products and no bias, and wants at least one token."""
    return hidden.dtype == torch.bfloat16 and bias is None and len(hidden) > 0 and available(hidden.device)


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """As ``logprobs.token_logprobs``; logits never reach the GPU's memory in the forward pass."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction  # pyright: ignore[reportMissingImports]

    kernel = LigerFusedLinearScaledCrossEntropyFunction.apply
    outputs = kernel(hidden.contiguous(), weight.contiguous(), targets, temperature, -100, 1, entropy)
    return (-outputs[0], outputs[1]) if entropy else (-outputs, None)
