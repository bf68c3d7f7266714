"""The two sides of a transport, and which file implements them."""

import socket
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from headrace.blocks.weights import Partition
from headrace.engines.checkpoint.carriers.names import SLOTS
from headrace.engines.checkpoint.errors import WeightError

if TYPE_CHECKING:
    from headrace.engines.checkpoint.link import Link

_FILES = {"shm": "shm", "cuda-ipc": "cuda_ipc", "tcp": "tcp", "nixl": "nixl", "gloo": "group", "nccl": "group"}


class Carrier(Protocol):
    """The publisher's side: SLOTS slots, kept from one publish to the next, because touched memory is faster."""

    slot_bytes: int
    memory: Tensor
    """All slots, one after the other, or the ring; uint8."""

    @property
    def ring(self) -> "Ring | None":
        """Instead of slots."""
        ...

    group: "Group | None"
    """Where partitions are sent to all receivers at once. None: each fetches on its own, and may leave at any time."""

    tend: Callable[[], None] | None
    """What to do every millisecond while receivers may fetch; None for nothing."""

    def facts(self) -> dict[str, Any]:
        """What a receiver has to know, as JSON; travels with the plan."""
        ...

    def welcome(self, connection: socket.socket) -> Callable[[], int] | None:
        """Before the plan is sent to a receiver: hands over what JSON cannot. Of a ring it returns what tells how many
        bytes that receiver has read."""
        ...

    def bytes_for(self, data: Tensor) -> memoryview | None:
        """What to send to each receiver on its own connection; None where bytes do not travel there."""
        ...

    def close(self) -> None: ...


class Ring(Protocol):
    """Memory that bytes run through: receivers read them while more are written, before they are announced."""

    def begin(self) -> None:
        """A version, before its receivers come."""
        ...

    def pieces(self, nbytes: int, drained: Callable[[int], int]) -> Iterator[Tensor]:
        """Memory for that many bytes, uint8, part by part; taking the next says that the one before was written.

        drained: waits until all receivers have read so many bytes of the version, and returns how many they have.
        """
        ...


class Group(Protocol):
    """Receivers that are fixed once the first partition was sent: losing one ends the publish."""

    def form(self, held: list[str], deadline_s: float) -> list[dict[str, Any]]:
        """Once the receivers are known: what to tell each before the first partition.

        held: what each receiver kept from an earlier group, in order.
        """
        ...

    def join(self, deadline_s: float) -> None:
        """While the receivers hear what ``form`` returned: meets them."""
        ...

    def spread(self, data: Tensor, sizes: list[int], deadline_s: float) -> None:
        """After a partition was announced: begins to send its bytes, and waits until those of the partition before
        have gone. sizes: see ``Intake.fetch``."""
        ...

    def drop(self) -> None:
        """After a failure: ends what another thread waits for; the next version forms a new group."""
        ...


class Intake(Protocol):
    """The receiver's side of one pull."""

    instant: bool
    """Bytes need not be fetched: they can be read where the publisher wrote them."""

    begins: Callable[["Link"], None] | None
    """Waits until the next partition begins to come: it is fetched before it is announced, unless the publisher sends
    changes. None: it comes after that."""

    def form(self, told: dict[str, Any]) -> None:
        """What ``Group.form`` said to this receiver; called before the first partition."""
        ...

    def fetch(self, link: "Link", slot: int, nbytes: int, sizes: list[int], into: list[Tensor] | None) -> Tensor | None:
        """Begins to fetch the bytes that lie in the publisher's slot: uint8 [nbytes], valid from ``arrived`` until the
        slot is acknowledged.

        sizes: of the parts that they are made of. into: where those are used, if all are in the host's memory. A
        transport that can put them there at once does that, and returns None. Where there is a ring, it has fetched.
        """
        ...

    def arrived(self, link: "Link", slot: int) -> str:
        """Waits until what ``fetch`` began for this slot, if anything, is there. Returns its hash (xxh3), where that is
        known: of what was put where it is used it is."""
        ...

    def close(self) -> None:
        """After the last partition, or after a failure: then what was begun must not write into slots any more."""
        ...


def unusable(transport: str, *, cuda: bool, changes: bool = False) -> str:
    """Why this process cannot use the transport; empty when it can. cuda: whether its weights are on a GPU. changes:
    whether it is to find what changed."""
    if changes:
        try:
            import_module("headrace.engines.checkpoint.words")
        except ImportError as error:
            advice = "pip install numba, or weights.delta: false"
            return f"delta needs the package numba in the trainer's environment ({error}): {advice}"
    if transport in ("cuda-ipc", "nccl") and not (cuda and torch.cuda.is_available()):
        return f"transport {transport} moves weights between GPUs, and this engine has none; choose auto, shm or tcp"
    if transport == "nccl" and not torch.distributed.is_nccl_available():
        return "this PyTorch was built without NCCL; choose cuda-ipc, nixl or tcp"
    if transport == "gloo" and not torch.distributed.is_gloo_available():
        return "this PyTorch was built without gloo; choose tcp"
    if transport == "nixl" and not any(find_spec(name) for name in ("nixl_cu13", "nixl_cu12")):
        return "transport nixl needs the package nixl in this environment: pip install nixl; or choose tcp"
    return ""


def make_carrier(transport: str, slot_bytes: int, device: torch.device) -> Carrier:
    """Raises WeightError when this process cannot use the transport."""
    return _made(transport, device, "make_carrier")(transport, slot_bytes, device)


def make_intake(transport: str, link: "Link", offer: dict[str, Any], device: torch.device) -> Intake:
    """offer: the message ``plan``. Raises WeightError when this process cannot use the transport."""
    return _made(transport, device, "make_intake")(transport, link, offer, device)


def _made(transport: str, device: torch.device, name: str) -> Callable[..., Any]:
    if why := unusable(transport, cuda=device.type == "cuda"):
        raise WeightError(why)
    return getattr(import_module(f"headrace.engines.checkpoint.carriers.{_FILES[transport]}"), name)


class Slots:
    """Slots of ordinary memory on a device, and a carrier's parts that most transports do not need."""

    ring: Ring | None = None
    group: Group | None = None
    tend: Callable[[], None] | None = None

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self.slot_bytes = slot_bytes
        self.memory = torch.empty(SLOTS * slot_bytes, dtype=torch.uint8, device=device)

    def slot(self, index: int) -> Tensor:
        return self.memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def facts(self) -> dict[str, Any]:
        return {}

    def welcome(self, connection: socket.socket) -> None:
        """Nothing but the plan."""

    def bytes_for(self, data: Tensor) -> memoryview | None:
        return None

    def close(self) -> None:
        """The memory ends with its last tensor."""


def slot_bytes_for(partitions: list[Partition], unit: int) -> int:
    """The largest partition, rounded up."""
    return max(-(-partition.nbytes // unit) * unit for partition in partitions) or unit
