"""Transport ``tcp``: each receiver's bytes follow their announcement on its own connection. Any hosts, no packages."""

from typing import Any

import torch
from torch import Tensor

from headrace.engines.checkpoint.carriers.base import Slots
from headrace.engines.checkpoint.link import Link


class TcpCarrier(Slots):
    """See ``Carrier``."""

    def bytes_for(self, data: Tensor) -> memoryview | None:
        return data.numpy().data


class TcpIntake:
    """See ``Intake``."""

    instant = False

    def __init__(self, slot_bytes: int) -> None:
        self._slots = Slots(slot_bytes, torch.device("cpu"))

    def form(self, told: dict[str, Any]) -> None:
        """There is no group."""

    def fetch(self, link: Link, slot: int, nbytes: int) -> Tensor:
        data = self._slots.slot(slot)[:nbytes]
        link.into(data.numpy().data)
        return data

    def arrived(self, link: Link, slot: int) -> None:
        """It has."""

    def close(self) -> None:
        """The memory ends with its last tensor."""


def make_carrier(transport: str, slot_bytes: int, device: torch.device) -> TcpCarrier:
    return TcpCarrier(slot_bytes, torch.device("cpu"))


def make_intake(transport: str, link: Link, offer: dict[str, Any], device: torch.device) -> TcpIntake:
    return TcpIntake(int(offer["slot_bytes"]))
