"""Transport ``nixl``: receivers read the publisher's slots through NIXL (UCX: RDMA, NVLink, shared memory or TCP).

One agent for each process, because connecting takes a tenth of a second: agents, and what they know of each other, stay
from version to version. Without NIXL's progress thread, which would keep a core busy for as long as the trainer lives:
the receiver polls for what it reads, and the publisher, which is passive, lets its agent work every millisecond of a
publish.
"""

import base64
import os
import socket
import threading
import time
import uuid
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from headrace.engines.checkpoint.carriers.base import Slots
from headrace.engines.checkpoint.copying import hash_all
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.link import Link

_SPIN_S = 0.0002
"""Pause between two looks at a transfer: NIXL has nothing to wait on."""
_LEFT_S = 5.0
"""For reads that are under way when a pull fails: they cannot be called back."""


@lru_cache
def package() -> str:
    """Of NIXL's packages, the one that is here: two in one process do not go together."""
    return next(name for name in ("nixl_cu13", "nixl_cu12") if find_spec(name))


@lru_cache
def _failures() -> tuple[type[Exception], ...]:
    """NIXL's errors, which share no base class."""
    bindings = vars(import_module(f"{package()}._bindings"))
    return tuple(value for name, value in bindings.items() if name.startswith("nixl") and name.endswith("Error"))


@lru_cache
def _agent(passive: bool) -> Any:
    """The one that is read from (``passive``), or the one that reads: a process may be both."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # UCX leaves GPU memory out when the CUDA context comes after the agent
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    api = import_module(f"{package()}._api")
    config = api.nixl_agent_config(
        enable_prog_thread=False, backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    try:
        return api.nixl_agent(f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}", config)
    except _failures() as error:
        raise WeightError(
            f"NIXL's UCX back end does not start here: {error}", advice="UCX_TLS and UCX_NET_DEVICES, or transport tcp"
        ) from error


_known: dict[str, str] = {}
"""What this process's agent knows of a publisher's, by its name: the metadata that it was told last."""


def _peer(metadata: str) -> str:
    """The publisher's agent, known to this process's from its metadata."""
    agent = _agent(False)
    for name, told in _known.items():
        if told == metadata:
            return name
    made = agent.add_remote_agent(base64.b64decode(metadata))
    name = made.decode() if isinstance(made, bytes) else made
    if name in _known:  # it has other memory now; NIXL adds that to what it knew, and looks into the old one first
        agent.remove_remote_agent(name)
        agent.add_remote_agent(base64.b64decode(metadata))
    _known[name] = metadata
    return name


Places = tuple[tuple[int, int], ...]
"""Address and bytes of each."""


class _Registered(Slots):
    """Slots that NIXL may reach."""

    def __init__(self, slot_bytes: int, device: torch.device, passive: bool) -> None:
        super().__init__(slot_bytes, device)
        self.agent = _agent(passive)
        self._registration = self.agent.register_memory(self.memory)
        self._reached: dict[Places, tuple[Any, list[Tensor]]] = {}
        """With the tensors: while an address is registered, its memory is not given to anything else."""

    def reach(self, places: list[Tensor]) -> Places:
        """Lets NIXL write into these as well, until ``keep`` is called without what this returns."""
        key = tuple((place.data_ptr(), place.numel()) for place in places)
        if key not in self._reached:
            self._reached[key] = self.agent.register_memory(places), places
        return key

    def keep(self, used: set[Places]) -> None:
        for key in self._reached.keys() - used:
            self.agent.deregister_memory(self._reached.pop(key)[0])

    def close(self) -> None:
        self.keep(set())
        self.agent.deregister_memory(self._registration)


class NixlCarrier(_Registered):
    """See ``Carrier``."""

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        super().__init__(slot_bytes, device, passive=True)
        self.tend = self.agent.get_new_notifs  # there are none, but looking for them lets the agent answer receivers

    def facts(self) -> dict[str, Any]:
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        where = self.memory.device
        return {"agent": metadata, "base": self.memory.data_ptr(), "gpu": where.index if where.type == "cuda" else None}


class NixlIntake:
    """See ``Intake``. Its slots stay registered with the process for the next pull. Two threads use it in turn, because
    NIXL's agent knows no locks of its own here."""

    instant = False
    begins = None

    def __init__(self, link: Link, slot_bytes: int, facts: dict[str, Any], device: torch.device) -> None:
        self._slots = _slots(slot_bytes, device)
        self._base, self._kind = int(facts["base"]), "DRAM" if facts["gpu"] is None else "VRAM"
        self._device_id = facts["gpu"] or 0
        self._under_way: dict[int, tuple[Any, list[Tensor] | None]] = {}
        """By slot: the handle, None once it has ended, and where the bytes go."""
        self._used: set[Places] = set()
        self._turn = threading.Lock()
        try:
            self._peer = _peer(facts["agent"])
        except _failures() as error:
            raise link.error(f"NIXL cannot reach the publisher: {error}", "transport tcp") from error

    def form(self, told: dict[str, Any]) -> None:
        """There is no group."""

    def fetch(self, link: Link, slot: int, nbytes: int, sizes: list[int], into: list[Tensor] | None) -> Tensor | None:
        data, agent = self._slots.slot(slot)[:nbytes], self._slots.agent
        begin = self._base + slot * self._slots.slot_bytes
        mine = into if into is not None else [data]
        theirs = []
        for part in mine:
            theirs.append((begin, part.numel(), self._device_id))
            begin += part.numel()
        try:
            with self._turn:
                if into is not None:
                    self._used.add(self._slots.reach(into))
                remote = agent.get_xfer_descs(theirs, self._kind)
                handle = agent.initialize_xfer("READ", agent.get_xfer_descs(mine), remote, self._peer)
                self._under_way[slot] = handle, into
                # Within a host UCX reads it all before this returns: then the other thread need not wait for its turn.
                if agent.transfer(handle) == "DONE":
                    agent.release_xfer_handle(handle)
                    self._under_way[slot] = None, into
        except _failures() as error:
            raise self._failed(link, error) from error
        return data if into is None else None

    def arrived(self, link: Link, slot: int) -> str:
        if slot not in self._under_way:  # no bytes, or here already
            return ""
        handle, into = self._under_way[slot]
        if handle is None:
            del self._under_way[slot]
            return "" if into is None else hash_all(into)
        agent, state = self._slots.agent, "PROC"
        end = time.monotonic() + link.deadline_s
        try:
            while state == "PROC" and time.monotonic() < end and not link.ended():
                with self._turn:
                    state = agent.check_xfer_state(handle)
                if state == "PROC":
                    time.sleep(_SPIN_S)
            if state == "DONE":
                with self._turn:
                    agent.release_xfer_handle(self._under_way.pop(slot)[0])
        except _failures() as error:
            raise self._failed(link, error) from error
        if state != "DONE":
            why = "failed" if state == "ERR" else f"did not end within {link.deadline_s:g} s"
            raise link.error(f"NIXL's read {why}", "the network between the hosts, or transport tcp")
        return "" if into is None else hash_all(into)

    def _failed(self, link: Link, error: Exception) -> WeightError:
        return link.error(f"NIXL could not read it: {error}", "publish the version again, or transport tcp")

    def close(self) -> None:
        """The slots and this pull's places are kept for the next one, unless something may still be written to them."""
        if self._under_way:  # after a failure: the next pull connects anew
            _known.update(dict.fromkeys(_known, ""))
        end = time.monotonic() + _LEFT_S
        while self._under_way and time.monotonic() < end:
            for slot, (handle, _) in list(self._under_way.items()):
                if handle is None or not self._writes(handle):
                    del self._under_way[slot]
            time.sleep(_SPIN_S)
        if not self._under_way:
            self._slots.keep(self._used)
            return
        _abandoned.append((self._slots, self._under_way))
        _mine.clear()

    def _writes(self, handle: Any) -> bool:
        try:
            with self._turn:
                return self._slots.agent.check_xfer_state(handle) == "PROC"
        except _failures():
            return False


_mine: list[_Registered] = []
"""This process's slots as a receiver: one at most."""
_abandoned: list[Any] = []
"""Slots that a read which never ended may still write to, and its handles: never given to anything else."""


def _slots(slot_bytes: int, device: torch.device) -> _Registered:
    if _mine and (_mine[0].slot_bytes, _mine[0].memory.device) != (slot_bytes, device):
        _mine.pop().close()
    if not _mine:
        _mine.append(_Registered(slot_bytes, device, passive=False))
    return _mine[0]


def make_carrier(transport: str, slot_bytes: int, device: torch.device) -> NixlCarrier:
    return NixlCarrier(slot_bytes, device)


def make_intake(transport: str, link: Link, offer: dict[str, Any], device: torch.device) -> NixlIntake:
    return NixlIntake(link, int(offer["slot_bytes"]), offer["facts"], device)
