"""Transport ``tcp``: each receiver's bytes follow their announcement on its own connection. Any hosts, no packages."""

import time
from typing import Any

import torch
import xxhash
from torch import Tensor

from headrace.engines.checkpoint.carriers.base import Slots
from headrace.engines.checkpoint.copying import cached_pieces
from headrace.engines.checkpoint.link import Link


class TcpCarrier(Slots):
    """See ``Carrier``."""

    def bytes_for(self, data: Tensor) -> memoryview | None:
        return data.numpy().data


class TcpIntake:
    """See ``Intake``."""

    instant = False
    begins = None

    def __init__(self, slot_bytes: int) -> None:
        self._slots = Slots(slot_bytes, torch.device("cpu"))
        self._landed: dict[int, str] = {}

    def form(self, told: dict[str, Any]) -> None:
        """There is no group."""

    def fetch(self, link: Link, slot: int, nbytes: int, sizes: list[int], into: list[Tensor] | None) -> Tensor | None:
        if into is not None:
            state, end = xxhash.xxh3_128(), time.monotonic() + link.deadline_s
            for piece in (piece for place in into for piece in cached_pieces(place)):
                link.into(piece.data, end)
                state.update(piece.data)
            self._landed[slot] = state.hexdigest()
            return None
        data = self._slots.slot(slot)[:nbytes]
        link.into(data.numpy().data, time.monotonic() + link.deadline_s)
        return data

    def arrived(self, link: Link, slot: int) -> str:
        return self._landed.pop(slot, "")

    def close(self) -> None:
        """The memory ends with its last tensor."""


def make_carrier(transport: str, slot_bytes: int, device: torch.device) -> TcpCarrier:
    return TcpCarrier(slot_bytes, torch.device("cpu"))


def make_intake(transport: str, link: Link, offer: dict[str, Any], device: torch.device) -> TcpIntake:
    return TcpIntake(int(offer["slot_bytes"]))
