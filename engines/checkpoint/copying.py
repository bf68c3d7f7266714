"""Many copies at once: some hundred tensors, of which each alone would cost the host more time than the GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 8
"""Bytes. One kernel copies all tensors of a list element by element: at the memory's speed where those are wide."""


def copy_all(into: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """``into[i].copy_(parts[i])`` for all, of equal shapes; on a GPU it is queued on the current stream."""
    if not into:
        return
    with torch.no_grad():
        if into[0].device.type == "cpu" or parts[0].device != into[0].device:
            for target, part in zip(into, parts, strict=True):
                target.copy_(part)
            return
        pairs = [_words(target, part) for target, part in zip(into, parts, strict=True)]
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _words(target: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """The same two in words, where their bytes allow it."""
    plain = target.dtype == part.dtype and target.is_contiguous() and part.is_contiguous()
    if not plain or (target.data_ptr() | part.data_ptr() | target.nbytes) % _WORD:
        return target, part
    return target.view(-1).view(torch.int64), part.view(-1).view(torch.int64)
