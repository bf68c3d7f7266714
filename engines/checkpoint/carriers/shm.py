"""Transport ``shm``: receivers read the publisher's slots where they are, through a read-only mapping.

The memory has no name: a memfd ends with the processes that hold it, so a killed publisher leaves nothing behind.
Receivers get its descriptor over the unix socket. Linux only.
"""

import mmap
import os
import socket
from typing import Any

import torch
from torch import Tensor

from headrace.engines.checkpoint.carriers.base import Slots
from headrace.engines.checkpoint.carriers.names import SLOTS
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.link import Link


class ShmCarrier(Slots):
    """See ``Carrier``."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._descriptor = os.memfd_create("headrace-weights")
        try:
            os.posix_fallocate(self._descriptor, 0, SLOTS * slot_bytes)
            self.memory = torch.frombuffer(mmap.mmap(self._descriptor, SLOTS * slot_bytes), dtype=torch.uint8)
            self._readable = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(self._descriptor)
            raise WeightError(
                f"no shared memory for {SLOTS} partitions of {slot_bytes / 1e6:.0f} MB: {error.strerror}",
                advice="a smaller partition_mb, or more memory for the container",
            ) from error

    def welcome(self, connection: socket.socket) -> None:
        socket.send_fds(connection, [b"\0"], [self._readable])

    def close(self) -> None:
        # The mapping ends with its last view; only the descriptors are closed here.
        os.close(self._readable)
        os.close(self._descriptor)


class ShmIntake:
    """See ``Intake``."""

    instant = True

    def __init__(self, link: Link, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        descriptor = link.descriptor()
        try:
            memory = mmap.mmap(descriptor, SLOTS * slot_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise link.error(f"the publisher's memory cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)

    def form(self, told: dict[str, Any]) -> None:
        """There is no group."""

    def fetch(self, link: Link, slot: int, nbytes: int, into: list[Tensor] | None) -> Tensor:
        return self._memory[slot * self._slot_bytes :][:nbytes]

    def arrived(self, link: Link, slot: int) -> None:
        """It has."""

    def close(self) -> None:
        """The mapping ends with its last view."""


def make_carrier(transport: str, slot_bytes: int, device: torch.device) -> ShmCarrier:
    return ShmCarrier(slot_bytes)


def make_intake(transport: str, link: Link, offer: dict[str, Any], device: torch.device) -> ShmIntake:
    return ShmIntake(link, int(offer["slot_bytes"]))
