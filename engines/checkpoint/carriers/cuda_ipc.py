"""Transport ``cuda-ipc``: receivers read the publisher's slots in GPU memory: where they are, or from another GPU of
the host into slots of their own."""

import base64
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from headrace.engines.checkpoint.carriers.base import Slots
from headrace.engines.checkpoint.carriers.names import SLOTS
from headrace.engines.checkpoint.link import Link

_BYTES = ("handle", "ref_counter_handle", "event_handle")
_FIELDS = (
    "device",
    "handle",
    "storage_bytes",
    "storage_offset",
    "requires_grad",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync",
)
"""What ``reduce_tensor`` gives after class, size, stride, offset, storage class and dtype."""


class CudaIpcCarrier(Slots):
    """See ``Carrier``."""

    def facts(self) -> dict[str, Any]:
        # Shared anew for each receiver: torch counts who has opened what it shared.
        _, arguments = reduce_tensor(self.memory)
        told = dict(zip(_FIELDS, arguments[6:], strict=True))
        told |= {name: base64.b64encode(bytes(told[name])).decode() for name in _BYTES}  # pyright: ignore[reportArgumentType]
        return {"ipc": told, "uuid": str(torch.cuda.get_device_properties(self.memory.device).uuid)}


_opened: dict[str, Tensor] = {}
"""The slots of the last publisher, by the GPU that they are on: opening them anew takes milliseconds, unless they are
open still."""


class CudaIpcIntake:
    """See ``Intake``."""

    begins = None

    def __init__(self, link: Link, slot_bytes: int, facts: dict[str, Any], device: torch.device) -> None:
        self._slot_bytes = slot_bytes
        seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        if facts["uuid"] not in seen:
            raise link.error(
                f"the publisher's GPU {facts['uuid']} is not visible to this engine",
                "the same CUDA_VISIBLE_DEVICES, or transport nccl, nixl or shm",
            )
        told = facts["ipc"] | {name: base64.b64decode(facts["ipc"][name]) for name in _BYTES}
        told["device"] = seen.index(facts["uuid"])
        fixed = (torch.Tensor, (SLOTS * slot_bytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8)
        try:
            self._memory: Tensor = rebuild_cuda_tensor(*fixed, *(told[name] for name in _FIELDS))
        except RuntimeError as error:
            raise link.error(f"the publisher's GPU memory cannot be opened: {error}", "transport shm") from error
        _opened[facts["uuid"]] = self._memory
        self.instant = self._memory.device == device
        if not self.instant:  # fetched once: hashing and loading would both read through the link
            self._slots, self._stream = Slots(slot_bytes, device), torch.cuda.Stream(device)
            self._done: dict[int, torch.cuda.Event] = {}

    def form(self, told: dict[str, Any]) -> None:
        """There is no group."""

    def fetch(self, link: Link, slot: int, nbytes: int, sizes: list[int], into: list[Tensor] | None) -> Tensor:
        theirs = self._memory[slot * self._slot_bytes :][:nbytes]
        if self.instant:
            return theirs
        mine = self._slots.slot(slot)[:nbytes]
        with torch.cuda.stream(self._stream):
            mine.copy_(theirs, non_blocking=True)
            self._done[slot] = torch.cuda.Event()
            self._done[slot].record()
        return mine

    def arrived(self, link: Link, slot: int) -> str:
        if not self.instant and slot in self._done:
            self._done.pop(slot).synchronize()
        return ""

    def close(self) -> None:
        """The mapping stays until another publisher's takes its place."""
        if not self.instant:
            self._stream.synchronize()


def make_carrier(transport: str, slot_bytes: int, device: torch.device) -> CudaIpcCarrier:
    return CudaIpcCarrier(slot_bytes, device)


def make_intake(transport: str, link: Link, offer: dict[str, Any], device: torch.device) -> CudaIpcIntake:
    return CudaIpcIntake(link, int(offer["slot_bytes"]), offer["facts"], device)
