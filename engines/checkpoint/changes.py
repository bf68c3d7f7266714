"""What changed in a partition, bit for bit: found while it is exported, applied where it is received.

A word has the size of the partition's smallest element (two bytes for bfloat16). Changed words travel as: their number
(uint64), how many of them lie in each block of 65,536 words (uint32 each), the place of each in its block (uint16
each), their new values. That is four bytes for a bfloat16 element.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from headrace.blocks.weights import Partition
from headrace.engines.checkpoint.plan import dtype_named

_BLOCK = 1 << 16
_CACHED = 1 << 18
"""Bytes that are compared at a time, so that they are in the cache still, and what they give is."""
_WORTH = 0.7
"""Changes are sent where they take less than this part of the whole: finding and applying them costs time as well."""


def word_bytes(partition: Partition) -> int:
    """Size of a word: 1, 2, 4 or 8 bytes."""
    return min((dtype_named(piece.dtype).itemsize for piece in partition.slices if piece.nbytes), default=1)


class Finder:
    """Makes a base what comes, and keeps what that changed. Used once."""

    def __init__(self, base: np.ndarray, word: int) -> None:
        """base: uint8 [n], n a multiple of ``word``; it is changed."""
        self._base, self._word = base.view(f"u{word}"), word
        self._found: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        """Of each piece, by its first word: changes in its blocks, uint32; their places in these, uint16; values."""
        self._most = (_WORTH * base.size - packed_bytes(0, base.size, word)) / (2 + word)
        self._count, self._lost = 0, False

    def rooms(self) -> Iterator[Tensor]:
        """Memory for the next bytes, uint8, part by part; taking the next says that the one before is filled."""
        size, nbytes = max(_CACHED, _BLOCK * self._word), self._base.nbytes
        room = torch.empty(min(size, nbytes), dtype=torch.uint8)
        for begin in range(0, nbytes, size):
            part = room[: min(size, nbytes - begin)]
            yield part
            self._look(begin // self._word, part.numpy())

    def pack(self, out: np.ndarray) -> int | None:
        """Writes the changes into ``out``, uint8; returns their bytes. None where sending them is not worth it."""
        count = sum(places.size for _, places, _ in self._found.values())
        if self._lost or count >= self._most:
            return None
        found = [self._found[begin] for begin in sorted(self._found)]
        parts = [np.array([count], np.uint64)]
        parts += [np.concatenate(column) for column in zip(*found, strict=True)]
        begin = 0
        for part in parts:
            out[begin : begin + part.nbytes] = part.view(np.uint8)
            begin += part.nbytes
        assert begin == packed_bytes(count, self._base.nbytes, self._word)
        return begin

    def _look(self, begin: int, fresh: np.ndarray) -> None:
        new = fresh.view(self._base.dtype)
        old = self._base[begin : begin + new.size]
        if self._count >= self._most:
            self._lost, old[:] = True, new
            return
        at = _places(old != new)
        counts = np.diff(np.searchsorted(at, np.arange(_blocks(new.nbytes, self._word) + 1) * _BLOCK))
        old[at] = values = new[at]
        self._found[begin] = counts.astype(np.uint32), at.astype(np.uint16), values  # the place: its last 16 bits
        self._count += at.size


def packed_bytes(changes: int, nbytes: int, word: int) -> int:
    """Bytes that this many changes of a partition take."""
    return 8 + 4 * _blocks(nbytes, word) + changes * (2 + word)


def apply(packed: np.ndarray, base: np.ndarray, word: int) -> None:
    """Changes ``base``, uint8 [n], in place. Raises ValueError when the changes do not fit it."""
    blocks = _blocks(len(base), word)
    count = int(packed[:8].view(np.uint64)[0]) if len(packed) >= 8 else -1
    if count < 0 or len(packed) != packed_bytes(count, len(base), word):
        raise ValueError(f"{len(packed)} bytes are not {count} changes")
    places, values = 8 + 4 * blocks, 8 + 4 * blocks + 2 * count
    counts = packed[8:places].view(np.uint32)
    if int(counts.sum()) != count:
        raise ValueError("the blocks do not add up")
    index = np.repeat(np.arange(blocks) * _BLOCK, counts) + packed[places:values].view(np.uint16)
    if count and index.max() >= len(base) // word:
        raise ValueError("a change lies beyond the partition")
    kind = np.dtype(f"u{word}")
    base.view(kind)[index] = packed[values:].view(kind)


def _blocks(nbytes: int, word: int) -> int:
    return -(-(nbytes // word) // _BLOCK)


def _places(changed: np.ndarray) -> np.ndarray:
    """Where a bool array is true: as ``np.flatnonzero``, in less time for 2% here and there, because it
    looks at eight at a time, and then into those that are left: the processor guesses wrong less often."""
    whole = changed.size // 8 * 8
    eights = changed[:whole].view(np.uint64)
    groups = np.flatnonzero(eights != 0)
    within = np.flatnonzero(eights[groups].view(np.bool_))
    found = (groups[within >> 3] << 3) | (within & 7)
    return found if whole == changed.size else np.append(found, np.flatnonzero(changed[whole:]) + whole)
