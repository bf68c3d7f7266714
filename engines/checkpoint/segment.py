"""Shared memory without a name: two slots, kept for each address from one publish to the next.

A memfd ends with the processes that hold it, so a killed publisher leaves no memory behind.
"""

import mmap
import os
import threading

from headrace.blocks.weights import Partition
from headrace.engines.checkpoint.errors import WeightError


class Segment:
    """Two slots. Kept from one publish to the next: memory that was touched before is much faster to write."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._descriptor = os.memfd_create("headrace-weights")
        try:
            os.posix_fallocate(self._descriptor, 0, 2 * slot_bytes)
            self._memory = memoryview(mmap.mmap(self._descriptor, 2 * slot_bytes))
            self.readable = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(self._descriptor)
            raise WeightError(
                f"no shared memory for two partitions of {slot_bytes / 1e6:.0f} MB: {error.strerror}",
                advice="a smaller partition_bytes, or more memory for the container",
            ) from error

    def slot(self, partition: Partition) -> memoryview:
        begin = (partition.index % 2) * self.slot_bytes
        return self._memory[begin : begin + partition.nbytes]

    def close(self) -> None:
        # The mapping ends with its last view; only the descriptors are closed here.
        os.close(self.readable)
        os.close(self._descriptor)


_segments: dict[str, Segment] = {}
_busy: set[str] = set()
_guard = threading.Lock()


def claim(address: str, slot_bytes: int, version: int) -> Segment:
    """The memory of an address, made anew where it is too small. Raises WeightError when it is in use."""
    with _guard:
        if address in _busy:
            raise WeightError(f"another publish to {address} is under way", version=version)
        segment = _segments.get(address)
        if segment is None or segment.slot_bytes < slot_bytes:
            if segment is not None:
                _segments.pop(address).close()
            segment = _segments[address] = Segment(slot_bytes)
        _busy.add(address)
        return segment


def unclaim(address: str) -> None:
    """Ends the use of ``claim``; the memory stays for the next publish."""
    with _guard:
        _busy.discard(address)


def release(address: str) -> None:
    """Gives back the shared memory that publishes to ``address`` keep in this process."""
    with _guard:
        if address not in _busy and (segment := _segments.pop(address, None)):
            segment.close()
