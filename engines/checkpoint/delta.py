"""What changed since the last version, bit for bit: unchanged partitions are not sent, of others only changed words.

Both sides keep the bytes of the last version in host memory, and its digest, which is that of verified bytes: a
receiver names the digest of its base when it joins, and gets changes only where it is the publisher's. A word has the
size of the partition's smallest element (two bytes for bfloat16).

Changed words travel as: their number (uint64), how many of them lie in each block of 65,536 words (uint32 each), the
place of each in its block (uint16 each), their new values. That is four bytes for a bfloat16 element.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headrace.blocks.weights import Partition, Plan
from headrace.engines.checkpoint.plan import digest_of_hashes, dtype_named

Form = Literal["full", "same", "words"]

_BLOCK = 1 << 16
_CACHED = 1 << 18
"""Bytes that are compared at a time, so that what they give is in the cache."""
_WORTH = 0.7
"""Changes are sent where they take less than this part of the whole: finding and applying them costs time as well."""


def word_bytes(partition: Partition) -> int:
    """Size of a word: 1, 2, 4 or 8 bytes."""
    return min((dtype_named(piece.dtype).itemsize for piece in partition.slices if piece.nbytes), default=1)


def take_changes(base: np.ndarray, fresh: np.ndarray, word: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Makes ``base`` what ``fresh`` is, both uint8 [n], and returns (index of each changed word, ascending int64 [k];
    its new value [k]). None where sending them is not worth it: then ``base`` is changed in part."""
    kind = np.dtype(f"u{word}")
    old, new = base.view(kind), fresh.view(kind)
    indices, values, count = [np.empty(0, np.int64)], [np.empty(0, kind)], 0
    for begin in range(0, new.size, _CACHED // word):
        here, there = old[begin : begin + _CACHED // word], new[begin : begin + _CACHED // word]
        at = np.flatnonzero(here != there)
        count += at.size
        if packed_bytes(count, len(fresh), word) >= _WORTH * len(fresh):
            return None
        here[at] = changed = there[at]
        indices.append(at + begin)
        values.append(changed)
    return np.concatenate(indices), np.concatenate(values)


def packed_bytes(changes: int, nbytes: int, word: int) -> int:
    """Bytes that this many changes of a partition take."""
    return 8 + 4 * _blocks(nbytes, word) + changes * (2 + word)


def pack(index: np.ndarray, values: np.ndarray, nbytes: int, out: np.ndarray) -> int:
    """Writes changes into the uint8 array ``out``; returns the bytes that were written."""
    blocks, count, word = _blocks(nbytes, values.itemsize), index.size, values.itemsize
    parts = (
        np.array([count], np.uint64),
        np.bincount(index >> 16, minlength=blocks).astype(np.uint32),
        (index & (_BLOCK - 1)).astype(np.uint16),
        values,
    )
    begin = 0
    for part in parts:
        out[begin : begin + part.nbytes] = part.view(np.uint8)
        begin += part.nbytes
    assert begin == packed_bytes(count, nbytes, word)
    return begin


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


class Kept:
    """The bytes of the last version, on one side. Invalid from ``begin`` to ``commit``."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._blocks: list[Tensor] = []
        self._hashes: list[str] = []
        self._digest = ""

    def digest_for(self, plan: Plan) -> str:
        """The digest of what is kept, when it has that layout; else empty."""
        return self._digest if self._plan == plan else ""

    def begin(self, plan: Plan) -> None:
        """The blocks are about to change; until ``commit`` they are no base for anything."""
        if self._plan != plan:
            self._blocks = [torch.empty(partition.nbytes, dtype=torch.uint8) for partition in plan.partitions]
            self._plan, self._hashes = plan, []
        self._digest = ""

    def commit(self, hashes: list[str]) -> None:
        self._hashes, self._digest = list(hashes), digest_of_hashes(hashes)

    def give(self, partition: Partition, fresh: Tensor, found: str, out: Tensor, shared: bool) -> tuple[Form, int]:
        """The publisher: writes what is to be sent of ``fresh`` (whose hash is ``found``) into ``out``, and keeps it.

        shared: whether all receivers have this base. Returns the form and the bytes in ``out``.
        """
        block = self._blocks[partition.index]
        if shared and self._hashes[partition.index] == found:
            return "same", 0
        if shared:
            changes = take_changes(block.numpy(), fresh.numpy(), word_bytes(partition))
            if changes is not None:
                return "words", pack(*changes, partition.nbytes, out.numpy())
        block.copy_(fresh)
        out.copy_(fresh)
        return "full", partition.nbytes

    def take(self, partition: Partition, form: str, came: Tensor) -> Tensor:
        """The receiver: the partition's bytes, kept. Raises ValueError when ``came`` is no change of what is kept."""
        block = self._blocks[partition.index]
        if form == "full":
            block.copy_(came)
        elif form == "words":
            apply(came.numpy(), block.numpy(), word_bytes(partition))
        elif form != "same":
            raise ValueError(f"there is no form {form!r}")
        return block


_kept: dict[tuple[str, int | None], Kept] = {}


def kept_for(address: str, rank: int | None = None) -> Kept:
    """What this process keeps for an address: as a receiver (``rank``) or as the publisher (None)."""
    return _kept.setdefault((address, rank), Kept())


def forget(address: str) -> None:
    """Gives the memory back; the next version then comes whole."""
    for key in [key for key in _kept if key[0] == address]:
        del _kept[key]
