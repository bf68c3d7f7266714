"""Transport ``shm``: the bytes of a version run through a ring in shared memory, read while more are written.

The ring is small enough to stay in the cache that cores share, so a byte goes through the machine's memory no more
often than in a bare copy. The memory has no name: a memfd ends with the processes that hold it, so a killed publisher
leaves nothing behind. Over the unix socket a receiver gets two descriptors: the ring's, read-only, whose first number
says how many bytes were written, and that of a number of its own, which says how many it has read. Linux only.
"""

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from headrace.engines.checkpoint.carriers.base import Group, Ring, Slots
from headrace.engines.checkpoint.copying import CACHED, cached_pieces
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.link import Link

RING_BYTES = 8 << 20
"""Small against a cache of 32 MiB that cores share, and that others use too."""
_ALIGNED = 64
"""Every partition begins at a multiple of that many bytes."""
_LOOK_S = 5e-5
"""Between two looks at what the publisher has written: an event would cost both sides a system call for each piece."""

_order = threading.Lock()


class ShmCarrier:
    """See ``Carrier`` and ``Ring``."""

    group: Group | None = None
    tend: Callable[[], None] | None = None

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._descriptor = os.memfd_create("headrace-weights")
        size = mmap.PAGESIZE + RING_BYTES
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            self._written, memory = _parts(mmap.mmap(self._descriptor, size))
            self._readable = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(self._descriptor)
            raise WeightError(
                f"no shared memory for a ring of {size / 1e6:.0f} MB: {error.strerror}",
                advice="more shared memory for the container, or transport tcp",
            ) from error
        self.memory = torch.from_numpy(memory)
        self.begin()

    @property
    def ring(self) -> Ring:
        return self

    def begin(self) -> None:
        self._position = self._read = 0
        self._written[0] = 0

    def pieces(self, nbytes: int, drained: Callable[[int], int]) -> Iterator[Tensor]:
        size, left = self.memory.numel(), nbytes
        while left:
            at = self._position % size
            count = min(CACHED, left, size - at)
            if (over := self._position + count - size) > self._read:
                self._read = drained(over)
            yield self.memory[at : at + count]
            left -= count
            self._position += count if left else count + -count % _ALIGNED
            _fence()
            self._written[0] = self._position

    def facts(self) -> dict[str, Any]:
        return {}

    def welcome(self, connection: socket.socket) -> Callable[[], int]:
        own = os.memfd_create("headrace-weights-read")
        try:
            os.posix_fallocate(own, 0, mmap.PAGESIZE)
            read = np.frombuffer(mmap.mmap(own, mmap.PAGESIZE), np.int64, 1)
            socket.send_fds(connection, [b"\0"], [self._readable, own])
        finally:
            os.close(own)
        return lambda: int(read[0])

    def bytes_for(self, data: Tensor) -> memoryview | None:
        return None

    def close(self) -> None:
        # The mapping ends with its last view; only the descriptors are closed here.
        os.close(self._readable)
        os.close(self._descriptor)


class ShmIntake:
    """See ``Intake``."""

    instant = False

    def __init__(self, link: Link, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._slots: Slots | None = None
        ring, own = link.descriptors()
        try:
            read_only = {"flags": mmap.MAP_SHARED, "prot": mmap.PROT_READ}
            self._written, self._ring = _parts(mmap.mmap(ring, os.fstat(ring).st_size, **read_only))
            self._read = np.frombuffer(mmap.mmap(own, mmap.PAGESIZE), np.int64, 1)
        except (OSError, ValueError) as error:
            raise link.error(f"the publisher's memory cannot be mapped: {error}") from error
        finally:
            os.close(ring)
            os.close(own)
        self._position = 0
        self._found: dict[int, str] = {}

    def form(self, told: dict[str, Any]) -> None:
        """There is no group."""

    def fetch(self, link: Link, slot: int, nbytes: int, sizes: list[int], into: list[Tensor] | None) -> Tensor | None:
        staged, places = None, into
        if places is None:
            self._slots = self._slots or Slots(self._slot_bytes, torch.device("cpu"))
            staged = self._slots.slot(slot % 2)[:nbytes]
            places = [staged]
        state = xxhash.xxh3_128()
        for piece in (piece for place in places for piece in cached_pieces(place)):
            begin = 0
            while begin < piece.size:
                begin += self._some(link, piece[begin:], state)
        self._advance(-nbytes % _ALIGNED)
        self._found[slot] = state.hexdigest()
        return staged

    def begins(self, link: Link) -> None:
        self._available(link)

    def _some(self, link: Link, memory: np.ndarray, state: xxhash.xxh3_128) -> int:
        """Takes what there is, as far as it fits."""
        at = self._position % self._ring.size
        count = min(self._available(link), self._ring.size - at, memory.size)
        written = memory[:count]
        written[:] = self._ring[at : at + count]
        self._advance(count)
        state.update(written.data)
        return count

    def _available(self, link: Link) -> int:
        """Bytes that can be read, one at least."""
        end = time.monotonic() + link.deadline_s
        while (count := int(self._written[0]) - self._position) <= 0:
            if link.waits() and int(self._written[0]) <= self._position:
                link.receive("alive")  # or it says why it gave up
                end = time.monotonic() + link.deadline_s
            elif time.monotonic() > end:
                raise link.silent()
            time.sleep(_LOOK_S)
        _fence()
        return count

    def _advance(self, count: int) -> None:
        self._position += count
        _fence()
        self._read[0] = self._position

    def arrived(self, link: Link, slot: int) -> str:
        return self._found.pop(slot, "")

    def close(self) -> None:
        """The mappings end with their last views."""


def _parts(mapped: mmap.mmap) -> tuple[np.ndarray, np.ndarray]:
    """How many bytes were written, int64 [1], and the ring, uint8."""
    return np.frombuffer(mapped, np.int64, 1), np.frombuffer(mapped, np.uint8, offset=mmap.PAGESIZE)


def _fence() -> None:
    """On CPUs that reorder memory accesses (ARM): those before come before those after, because a lock is acquired
    after it was released."""
    with _order:
        pass
    with _order:
        pass


def make_carrier(transport: str, slot_bytes: int, device: torch.device) -> ShmCarrier:
    return ShmCarrier(slot_bytes)


def make_intake(transport: str, link: Link, offer: dict[str, Any], device: torch.device) -> ShmIntake:
    return ShmIntake(link, int(offer["slot_bytes"]))
