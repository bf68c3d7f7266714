"""The sums of ``hashes`` on a GPU, at the speed of its memory. Needs Triton, which comes with PyTorch for CUDA.

``torch._int_mm`` computes the same, but with so few columns at a sixth of that speed.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_TILE_ROWS, _TILE_BYTES, _SPLITS = 64, 256, 4
"""A program takes this many rows, this many bytes of each at a time, and its part of their length: a partition has few
rows, a GPU many processors. Integer sums may be added in any order."""


@triton.jit
def _kernel(
    data,
    chunks,
    weights,
    sums,
    rows,
    ROW: tl.constexpr,
    SUMS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    LENGTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * LENGTH + tl.arange(0, TILE_BYTES)
    which = tl.arange(0, SUMS)
    at = row[:, None] * ROW + column[None, :]
    weight = weights + column[:, None] + which[None, :] * ROW
    found = tl.zeros((TILE_ROWS, SUMS), tl.int32)
    for begin in range(0, LENGTH, TILE_BYTES):
        piece = tl.load(data + at + begin, mask=at + begin < 16 * chunks, other=0)
        found = tl.dot(piece, tl.load(weight + begin), found, out_dtype=tl.int32)
    tl.atomic_add(sums + row[:, None] * SUMS + which[None, :], found, mask=row[:, None] < rows)


def row_sums(data: Tensor, weights: Tensor) -> Tensor:
    """int32 [rows, sums] on the GPU; data: int8 [n], weights: int8 [sums, bytes of a row], contiguous."""
    count, row = weights.shape
    rows = -(-data.numel() // row)
    sums = torch.zeros(rows, count, dtype=torch.int32, device=data.device)
    grid = (triton.cdiv(rows, _TILE_ROWS), _SPLITS)
    with torch.cuda.device(data.device):
        _kernel[grid](  # pyright: ignore[reportIndexIssue]
            data,
            data.numel() // 16,  # said so, the compiler reads 16 bytes at once
            weights,
            sums,
            rows,
            row,
            count,
            _TILE_ROWS,
            _TILE_BYTES,
            row // _SPLITS,
            num_warps=4,
            num_stages=4,
        )
    if rest := data.numel() % 16:
        first = data.numel() % row - rest
        sums[-1] += (data[-rest:].int() * weights[:, first : first + rest].int()).sum(1, dtype=torch.int32)
    return sums
