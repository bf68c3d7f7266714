"""Copies: many at once on a GPU, where each alone would cost the host more time; in the host's memory with the hash."""

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

_CACHED = 1 << 20
"""Bytes that are copied and hashed at a time: a part of a core's second cache."""
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


def copy_hashed(into: Tensor, values: Tensor, state: xxhash.xxh3_128) -> None:
    """Copies flat tensors of one length into the host's memory, in any dtypes, and hashes what was written while it is
    in the cache."""
    # From a GPU's memory every copy costs the way there, from the host's it is the cache that counts.
    step = _CACHED // into.itemsize if values.device.type == "cpu" else max(into.numel(), 1)
    for begin in range(0, into.numel(), step):
        written = into[begin : begin + step]
        written.copy_(values[begin : begin + step])
        state.update(written.view(torch.uint8).numpy().data)
