"""What changed since the last version, bit for bit: unchanged partitions are not sent, of others only changed words.

Both sides keep the bytes of the last version in host memory, and its digest, which is that of verified bytes: a
receiver names the digest of its base when it joins, and gets changes only where it is the publisher's. A word has the
size of the partition's smallest element (two bytes for bfloat16).

Changed words travel as: how many groups of eight bytes have changed, and how many words (uint64 each); a bit for each
group of the partition; a bit for each word of a changed group; the new values; what is left of the partition behind
its last group. With two words of a hundred changed at random places that is 4% of bfloat16 weights.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headrace.blocks.weights import Partition, Plan
from headrace.engines.checkpoint.plan import digest_of_hashes, dtype_named

Form = Literal["full", "same", "words"]

_GROUP = 8
_HEAD = 16
_WORTH = 0.7
"""Changes are sent where they take less than this part of the whole: finding and applying them costs time as well."""


def word_bytes(partition: Partition) -> int:
    """Size of a word: 1, 2, 4 or 8 bytes."""
    return min((dtype_named(piece.dtype).itemsize for piece in partition.slices if piece.nbytes), default=1)


def find_changes(base: np.ndarray, fresh: np.ndarray, word: int) -> list[np.ndarray] | None:
    """The parts of what travels, of two uint8 arrays [n]; None where sending them is not worth it."""
    wide = len(fresh) // _GROUP * _GROUP
    old, new = base[:wide].view(np.uint64), fresh[:wide].view(np.uint64)
    differs = old != new
    groups = int(np.count_nonzero(differs))
    if packed_bytes(groups, groups, len(fresh), word) > _WORTH * len(fresh):
        return None
    bits = np.packbits(differs, bitorder="little")
    kind = np.dtype(f"u{word}")
    was, now = _selected(old, bits).view(kind), _selected(new, bits).view(kind)
    changed = was != now
    inner = np.packbits(changed, bitorder="little")
    values = now[np.flatnonzero(changed)]
    if packed_bytes(groups, values.size, len(fresh), word) > _WORTH * len(fresh):
        return None
    return [np.array([groups, values.size], np.uint64), bits, inner, values, fresh[wide:]]


def _selected(values: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Those whose bit is set. Where few are, Arrow does it three times as fast as numpy."""
    import pyarrow as pa  # publishers have it, receivers need not

    def shared(kind: pa.DataType, count: int, data: np.ndarray) -> pa.Array:
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])

    kind = pa.from_numpy_dtype(values.dtype)
    return shared(kind, len(values), values).filter(shared(pa.bool_(), len(values), bits)).to_numpy()


def packed_bytes(groups: int, words: int, nbytes: int, word: int) -> int:
    """Bytes that this many changed groups with this many changed words take."""
    return _HEAD + -(-(nbytes // _GROUP) // 8) + -(-groups * (_GROUP // word) // 8) + words * word + nbytes % _GROUP


def pack(parts: list[np.ndarray], out: np.ndarray) -> int:
    """Writes what ``find_changes`` gave into the uint8 array ``out``; returns the bytes that were written."""
    begin = 0
    for part in parts:
        out[begin : begin + part.nbytes] = part.view(np.uint8)
        begin += part.nbytes
    return begin


def apply(packed: np.ndarray, base: np.ndarray, word: int) -> None:
    """Changes ``base``, uint8 [n], in place. Raises ValueError when the changes do not fit it."""
    wide = len(base) // _GROUP * _GROUP
    groups, words = map(int, packed[:_HEAD].view(np.uint64)) if len(packed) >= _HEAD else (0, 0)
    if max(groups, words) > len(base) or len(packed) != packed_bytes(groups, words, len(base), word):
        raise ValueError(f"{len(packed)} bytes are not {words} changes of {len(base)} bytes")
    bits = _HEAD + -(-(wide // _GROUP) // 8)
    inner = bits + -(-groups * (_GROUP // word) // 8)
    at = np.flatnonzero(_flags(packed[_HEAD:bits], wide // _GROUP))
    changed = _flags(packed[bits:inner], groups * (_GROUP // word))
    if at.size != groups or np.count_nonzero(changed) != words:
        raise ValueError("the marks of what has changed do not add up")
    kind = np.dtype(f"u{word}")
    whole = base[:wide].view(np.uint64)
    fresh = whole[at]
    fresh.view(kind)[np.flatnonzero(changed)] = np.frombuffer(packed[inner : inner + words * word].tobytes(), kind)
    whole[at] = fresh
    base[wide:] = packed[len(packed) - len(base) % _GROUP :]


def _flags(bits: np.ndarray, count: int) -> np.ndarray:
    return np.unpackbits(bits, count=count, bitorder="little").view(bool)


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
            base, new = block.numpy(), fresh.numpy()
            if (parts := find_changes(base, new, word_bytes(partition))) is not None:
                nbytes = pack(parts, out.numpy())
                block.copy_(fresh)
                return "words", nbytes
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
