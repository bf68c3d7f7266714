"""Weights into blockwise FP8 (``headrace.blocks.fp8`` has the layout), bit for bit as vLLM does it when it quantises a
bfloat16 model itself: the scale of a block is its largest magnitude divided by the largest number of float8_e4m3fn,
and every weight is multiplied by the scale's reciprocal, in float32."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from headrace.blocks.fp8 import BLOCK

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
_LEAST = 1e-4
"""Magnitude that a block of zeros is taken to have."""
_AT_A_TIME = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Elements that are converted at a time: ten bytes each beside the result; GPUs want more for each launch."""


@torch.no_grad()
def to_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] floats → (float8_e4m3fn [n, k], float32 scales [ceil(n / 128), ceil(k / 128)]), on the same device.

    What is converted are the values in bfloat16. Division by a constant is torch's, which on GPUs is a multiplication:
    the bits are those that vLLM gets on the same kind of device.
    """
    rows, columns = weight.shape
    made = torch.empty(rows, columns, dtype=DTYPE, device=weight.device)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK), dtype=torch.float32, device=weight.device)
    step = max(1, _AT_A_TIME[weight.device.type] // (BLOCK * max(columns, 1)))
    for first in range(0, len(scales), step):
        strip = weight[first * BLOCK : (first + step) * BLOCK].to(torch.bfloat16)
        count = len(strip)
        if columns % BLOCK or count % BLOCK:
            strip = pad(strip, (0, -columns % BLOCK, 0, -count % BLOCK))
        blocks = strip.reshape(-1, BLOCK, scales.shape[1], BLOCK)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True).float().clamp(min=_LEAST) / LARGEST
        values = (blocks * (1.0 / scale)).to(DTYPE).reshape(strip.shape)
        made[first * BLOCK : first * BLOCK + count] = values[:count, :columns]
        scales[first : first + step] = scale[:, 0, :, 0]
    return made, scales


def from_blocks(quantised: Tensor, scales: Tensor) -> Tensor:
    """The float32 weights [n, k] that ``to_blocks`` gave as (float8_e4m3fn [n, k], scales)."""
    rows, columns = quantised.shape
    each = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return quantised.float() * each
