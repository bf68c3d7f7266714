"""Many copies at once: some hundred tensors, of which each alone would cost the host more time than the GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

_LARGE = 16 << 20
"""Bytes. From here on a copy of its own is faster than the kernel that copies lists (65% of the speed on an H200)."""


def copy_all(into: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """``into[i].copy_(parts[i])`` for all, of equal shapes; on a GPU it is queued on the current stream."""
    alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    with torch.no_grad():
        for target, part in zip(into, parts, strict=True):
            if target.device.type == "cpu" or target.nbytes >= _LARGE or part.device != target.device:
                target.copy_(part)
                continue
            kinds = target.dtype, part.dtype
            if kinds[0] == kinds[1] and kinds[0].itemsize == 1:  # FP8 has no such kernel
                target, part = target.view(torch.uint8), part.view(torch.uint8)
            targets, sources = alike.setdefault(kinds, ([], []))
            targets.append(target)
            sources.append(part)
        for targets, sources in alike.values():
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
