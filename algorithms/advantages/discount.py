"""Discounted sums over the tokens that follow."""

import torch
from torch import Tensor

from headrace.algorithms.batch import Segments

BLOCK = 64
"""Tokens that one matrix product carries back at once."""


def discounted_sum(values: Tensor, segments: Segments, discount: float) -> Tensor:
    """y_t = x_t + discount × y_{t+1} inside each segment, [N] → [N]."""
    if not len(values):
        return values.clone()
    if discount == 1.0:
        running = values.double().cumsum(0)
        ends = running[(segments.offsets[1:] - 1).clamp(min=0)]
        return (segments.expand(ends) - running).to(values.dtype).add_(values)
    return _carried_back(values, segments, discount)


def _carried_back(values: Tensor, segments: Segments, discount: float) -> Tensor:
    """By blocks of tokens: one product with a triangular matrix of powers for each, and a carry between them."""
    samples = len(segments.lengths)
    width = -(-int(segments.lengths.max()) // BLOCK) * BLOCK
    # Right-aligned, so that every sample ends in the last column.
    shift = width * torch.arange(1, samples + 1, device=values.device) - segments.offsets[1:]
    cell = segments.expand(shift).add_(torch.arange(len(values), device=values.device))
    padded = values.new_zeros(samples * width).scatter_(0, cell, values).view(samples, width)
    base = values.new_tensor(discount)
    power = torch.arange(BLOCK, device=values.device)
    distance = power[:, None] - power[None, :]
    matrix = torch.where(distance >= 0, base ** distance.clamp(min=0), 0.0)
    decay = base ** (BLOCK - power)
    carry = values.new_zeros(samples, 1)
    for start in range(width - BLOCK, -1, -BLOCK):
        block = torch.addmm(carry * decay, padded[:, start : start + BLOCK], matrix)
        padded[:, start : start + BLOCK] = block
        carry = block[:, :1]
    return padded.view(-1).index_select(0, cell)
