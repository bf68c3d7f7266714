"""Copies: many at once on a GPU, where each alone would cost the host more time; in the host's memory with the hash."""

from collections.abc import Iterator, Sequence

import torch
import xxhash
from torch import Tensor

CACHED = 1 << 20
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


def copy_all_hashed(into: Sequence[Tensor], data: Tensor) -> str:
    """Copies what lies in ``data``, uint8, into these places of the host's memory, one after the other, and returns the
    hash (xxh3) of what was written."""
    state = xxhash.xxh3_128()
    for target, view in zip(into, data.split_with_sizes([target.numel() for target in into]), strict=True):
        copy_hashed(target, view, state)
    return state.hexdigest()


def cached_pieces(memory: Tensor) -> Iterator[Tensor]:
    """Parts of a flat tensor in the host's memory that stay in the cache until they are hashed."""
    return iter(memory.split(CACHED // memory.itemsize))


def copy_hashed(into: Tensor, values: Tensor, state: xxhash.xxh3_128) -> None:
    """Copies flat tensors of one length into the host's memory, in any dtypes, and hashes what was written while it is
    in the cache."""
    # From a GPU's memory every copy costs the way there, from the host's it is the cache that counts.
    step = CACHED // into.itemsize if values.device.type == "cpu" else max(into.numel(), 1)
    for begin in range(0, into.numel(), step):
        written = into[begin : begin + step]
        written.copy_(values[begin : begin + step])
        state.update(written.view(torch.uint8).numpy().data)
