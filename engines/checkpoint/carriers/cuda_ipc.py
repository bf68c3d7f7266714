"""Transport ``cuda-ipc``: receivers read the publisher's slots in GPU memory, also from another GPU of the host."""

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


class CudaIpcIntake:
    """See ``Intake``."""

    instant = True

    def __init__(self, link: Link, slot_bytes: int, facts: dict[str, Any]) -> None:
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

    def form(self, told: dict[str, Any]) -> None:
        """There is no group."""

    def fetch(self, link: Link, slot: int, nbytes: int) -> Tensor:
        return self._memory[slot * self._slot_bytes :][:nbytes]

    def close(self) -> None:
        """The mapping ends with its last view."""


def make_carrier(transport: str, slot_bytes: int, device: torch.device) -> CudaIpcCarrier:
    return CudaIpcCarrier(slot_bytes, device)


def make_intake(transport: str, link: Link, offer: dict[str, Any], device: torch.device) -> CudaIpcIntake:
    return CudaIpcIntake(link, int(offer["slot_bytes"]), offer["facts"])
