"""Both sides keep the bytes of the last version: unchanged partitions are not sent, of others only changed words.

They are kept in host memory, with the version's digest, which is that of verified bytes: a receiver names the digest of
its base when it joins, and gets changes only where it is the publisher's.
"""

from collections.abc import Generator
from typing import Literal

import torch
from torch import Tensor

from headrace.blocks.weights import Partition, Plan
from headrace.engines.checkpoint.changes import Finder, apply, word_bytes
from headrace.engines.checkpoint.plan import digest_of_hashes

Form = Literal["full", "same", "words"]


class Kept:
    """The bytes of the last version, on one side. Invalid from ``begin`` to ``commit``."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._blocks: list[Tensor] = []
        self._hashes: list[str] = []
        self._digest = ""
        self._finder: Finder | None = None

    def digest_for(self, plan: Plan) -> str:
        """The digest of what is kept, when it has that layout; else empty."""
        return self._digest if self._plan == plan else ""

    def begin(self, plan: Plan) -> None:
        """The blocks are about to change; until ``commit`` they are no base for anything."""
        if self._plan != plan:
            self._blocks = [torch.empty(partition.nbytes, dtype=torch.uint8) for partition in plan.partitions]
            self._plan, self._hashes = plan, []
        self._digest, self._finder = "", None

    def commit(self, hashes: list[str]) -> None:
        self._hashes, self._digest = list(hashes), digest_of_hashes(hashes)

    def room(self, partition: Partition, shared: bool) -> Generator[Tensor, None, None]:
        """The publisher: memory for the partition's bytes, as ``Sender.room``; what is written there is kept.

        shared: whether all receivers have this base, so that it is worth to find what changes.
        """
        block = self._blocks[partition.index]
        self._finder = Finder(block.numpy(), word_bytes(partition)) if shared and partition.nbytes else None
        if self._finder is None:
            yield block
        else:
            yield from self._finder.rooms()

    def give(self, partition: Partition, found: str, out: Tensor) -> tuple[Form, int]:
        """The publisher: writes what is to be sent of what ``room`` gave, whose hash is ``found``, into ``out``.
        Returns the form and the bytes in ``out``."""
        finder, self._finder = self._finder, None
        if finder is not None:
            if self._hashes[partition.index] == found:
                return "same", 0
            if (nbytes := finder.pack(out.numpy())) is not None:
                return "words", nbytes
        out.copy_(self._blocks[partition.index])
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
