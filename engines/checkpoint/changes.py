"""What changed in a partition, bit for bit: found while it is exported, applied where it is received.

A word has the size of the partition's smallest element (two bytes for bfloat16). Changed words travel as: their number
(uint64), how many of them lie in each block of 65,536 words (uint32 each), the place of each in its block (uint16
each), their new values. That is four bytes for a bfloat16 element.
"""

import os
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from headrace.blocks.weights import Partition
from headrace.engines.checkpoint.copying import CACHED
from headrace.engines.checkpoint.plan import dtype_named

_BLOCK = 1 << 16
_HELPERS = min(4, (os.cpu_count() or 1) // 4)
"""Threads that find changes while the exporting one goes on; where there are few cores, it does it itself."""
_WORTH = 0.7
"""Changes are sent where they take less than this part of the whole: finding and applying them costs time as well."""


def word_bytes(partition: Partition) -> int:
    """Size of a word: 1, 2, 4 or 8 bytes."""
    return min((dtype_named(piece.dtype).itemsize for piece in partition.slices if piece.nbytes), default=1)


class Finder:
    """Makes a base what comes, and keeps what that changed. Used once."""

    def __init__(self, base: np.ndarray, word: int) -> None:
        """base: uint8 [n], n a multiple of ``word``; it is changed."""
        from headrace.engines.checkpoint.words import gather  # compiles, and only who publishes needs it

        self._base, self._word, self._gather = base.view(f"u{word}"), word, gather
        self._found: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        """Of each piece, by its first word: changes in its blocks, uint32; their places in these, uint16; values."""
        self._most = (_WORTH * base.size - packed_bytes(0, base.size, word)) / (2 + word)
        self._count, self._lost = 0, False

    def rooms(self) -> Generator[Tensor, None, None]:
        """Memory for the next bytes, uint8, part by part; taking the next says that the one before is filled."""
        size, nbytes = max(CACHED, _BLOCK * self._word), self._base.nbytes
        rooms = [torch.empty(min(size, nbytes), dtype=torch.uint8) for _ in range(_HELPERS + 1)]
        looks: deque[Future[None]] = deque()
        try:
            for number, begin in enumerate(range(0, nbytes, size)):
                if len(looks) > _HELPERS:
                    looks.popleft().result()
                part = rooms[number % len(rooms)][: min(size, nbytes - begin)]
                yield part
                if _HELPERS:
                    looks.append(_pool().submit(self._look, begin // self._word, part.numpy()))
                else:
                    self._look(begin // self._word, part.numpy())
            while looks:
                looks.popleft().result()
        finally:
            wait(looks)  # they write into the base

    def pack(self, out: np.ndarray) -> int | None:
        """Writes the changes into ``out``, uint8; returns their bytes. None where sending them is not worth it."""
        found = [self._found[begin] for begin in sorted(self._found)]
        count = sum(places.size for _, places, _ in found)
        if self._lost or count >= self._most:
            return None
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
        changed = np.packbits(old != new, bitorder="little")
        if changed.size % 8:
            changed = np.append(changed, np.zeros(-changed.size % 8, np.uint8))
        counts = np.empty(_blocks(new.nbytes, self._word), np.uint32)
        places, values = np.empty(new.size, np.uint16), np.empty(new.size, new.dtype)
        count = self._gather(changed.view(np.uint64), new, old, _BLOCK, counts, places, values)
        self._found[begin] = counts, places[:count].copy(), values[:count].copy()
        self._count += count


@lru_cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_HELPERS, thread_name_prefix="weights-changes")


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
