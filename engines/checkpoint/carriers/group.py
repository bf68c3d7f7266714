"""Transports ``gloo`` and ``nccl``: every partition is broadcast to a fixed group, for fleets that do not change.

The publisher is rank 0; whoever had joined when it began is in the group. It is kept while the same receivers come
again, because NCCL takes about a second to connect. Losing a receiver ends the publish: that is what static means.
"""

import contextlib
import time
import uuid
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from headrace.engines.checkpoint.carriers.base import Slots
from headrace.engines.checkpoint.copying import copy_all
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.link import Link

_LOOK_S = 0.0001
"""Between two looks at a broadcast. Of the publisher's one more is queued by then: it looks less often, because the
exporting thread works meanwhile."""
_ALONE = 1 << 20
"""Bytes. Parts of a partition that are larger are broadcast on their own, from gloo's slots to where they are used."""


def _messages(kind: str, sizes: list[int]) -> list[list[int]]:
    """The parts of each broadcast of a partition: the same on both sides, for whatever they do with them."""
    together: list[list[int]] = []
    for size in sizes:
        if together and (kind == "nccl" or sum(together[-1]) + size <= _ALONE or not sum(together[-1])):
            together[-1].append(size)
        else:
            together.append([size])
    return together


class _Group:
    """A process group of its own: neither the trainer's gang nor the engine's workers know of it."""

    def __init__(
        self, kind: str, store: Store, key: str, rank: int, size: int, deadline_s: float, device: torch.device
    ) -> None:
        self.key, self.rank, self.size, self._store = key, rank, size, store
        store, limit = PrefixStore(key, store), timedelta(seconds=deadline_s)
        if kind == "gloo":
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, limit)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        self._left = False
        # NCCL waits for what the current stream has queued: on this one that is nothing.
        self._stream = torch.cuda.Stream(device) if kind == "nccl" else None

    def broadcast(self, data: Tensor) -> Any:
        """Begins to send ``data`` from rank 0, where it must be complete, into that of all others; see ``wait``."""
        with torch.cuda.stream(self._stream):
            return self._group.broadcast([data], dist.BroadcastOptions())

    def wait(self, work: Any, deadline_s: float) -> None:
        """Until that broadcast has ended. Raises RuntimeError, TimeoutError."""
        end = time.monotonic() + deadline_s
        while not work.is_completed():
            if self._left:
                raise RuntimeError("this side has left the group")
            if time.monotonic() > end:
                raise TimeoutError(f"a broadcast did not end within {deadline_s:g} s")
            time.sleep(_LOOK_S if self.rank else 3 * _LOOK_S)
        work.wait()

    def abort(self) -> None:
        """Ends what another thread waits for."""
        self._left = True
        with contextlib.suppress(RuntimeError):
            self._group.abort()


class GroupCarrier(Slots):
    """See ``Carrier`` and ``Group``."""

    def __init__(self, kind: str, slot_bytes: int, device: torch.device) -> None:
        super().__init__(slot_bytes, device)
        self.group = self
        self._kind = kind
        self._group: _Group | None = None
        self._members = 0
        self._store: TCPStore | None = None
        self._key = ""
        self._under_way: list[Any] = []

    def form(self, held: list[str], deadline_s: float) -> list[dict[str, Any]]:
        group, size = self._group, len(held) + 1
        if group is not None and group.size == size and sorted(held) == [f"{group.key}/{r}" for r in range(1, size)]:
            return [{"key": group.key, "rank": int(one.rpartition("/")[2]), "size": size} for one in held]
        self.drop()
        # Every address of this machine: receivers use the one that they came to.
        self._store = TCPStore(
            "0.0.0.0", 0, is_master=True, timeout=timedelta(seconds=deadline_s), wait_for_workers=False
        )
        self._key, self._members = uuid.uuid4().hex, size
        port = self._store.port
        return [{"key": self._key, "rank": rank, "size": size, "port": port} for rank in range(1, size)]

    def join(self, deadline_s: float) -> None:
        if self._group is None:
            assert self._store is not None
            try:
                device = self.memory.device
                self._group = _Group(self._kind, self._store, self._key, 0, self._members, deadline_s, device)
            except RuntimeError as error:
                raise WeightError(f"the {self._kind} group of {self._members} did not form: {error}") from error

    def spread(self, data: Tensor, sizes: list[int], deadline_s: float) -> None:
        assert self._group is not None
        try:
            messages = data.split_with_sizes([sum(parts) for parts in _messages(self._kind, sizes)])
            before, self._under_way = self._under_way, [self._group.broadcast(message) for message in messages]
            for work in before:
                self._group.wait(work, deadline_s)
        except (RuntimeError, TimeoutError) as error:
            self.drop()
            raise WeightError(
                f"the {self._kind} broadcast to {self._members - 1} receivers failed: {str(error).splitlines()[0]}",
                advice="see the rollout engines' logs; transports tcp, shm and nixl survive the loss of a receiver",
            ) from error

    def drop(self) -> None:
        """See ``Group``."""
        if self._group is not None:
            self._group.abort()
        self._group = self._store = None
        self._under_way = []

    def close(self) -> None:
        self.drop()


_joined: dict[str, _Group] = {}
"""The group of each transport that this process is a receiver in."""


def held(kind: str) -> str:
    """What this receiver kept: ``key/rank``, or nothing."""
    group = _joined.get(kind)
    return f"{group.key}/{group.rank}" if group else ""


class _Message(NamedTuple):
    """A broadcast that is under way."""

    work: Any
    memory: Tensor
    used: list[Tensor]
    """Where its parts are used; empty where they are read from ``memory``, which may be the only one of these."""


class GroupIntake:
    """See ``Intake``."""

    instant = False
    begins = None

    def __init__(self, kind: str, link: Link, slot_bytes: int, device: torch.device) -> None:
        self._kind, self._link, self._device = kind, link, device
        self._slots = Slots(slot_bytes, device)
        self._under_way: dict[int, list[_Message]] = {}

    def form(self, told: dict[str, Any]) -> None:
        link = self._link
        if held(self._kind) == f"{told['key']}/{told['rank']}":
            return
        if (old := _joined.pop(self._kind, None)) is not None:
            old.abort()
        try:
            limit = timedelta(seconds=link.deadline_s)
            store = TCPStore(link.host, told["port"], is_master=False, timeout=limit)
            place = told["key"], told["rank"], told["size"]
            _joined[self._kind] = _Group(self._kind, store, *place, link.deadline_s, self._device)
        except RuntimeError as error:
            raise link.error(f"the {self._kind} group of {told['size']} did not form: {error}") from error

    def fetch(self, link: Link, slot: int, nbytes: int, sizes: list[int], into: list[Tensor] | None) -> Tensor | None:
        data, begin, places = self._slots.slot(slot)[:nbytes], 0, iter(into or ())
        self._under_way[slot] = messages = []
        try:
            for parts in _messages(self._kind, sizes):
                memory = data[begin : begin + sum(parts)]
                used = [next(places) for _ in parts] if into is not None else []
                if len(used) == 1:
                    memory = used[0]
                messages.append(_Message(_joined[self._kind].broadcast(memory), memory, used))
                begin += sum(parts)
        except (RuntimeError, KeyError) as error:  # KeyError: the other thread has left the group
            raise self._failed(link, error) from error
        return data if into is None else None

    def arrived(self, link: Link, slot: int) -> str:
        state, placed = xxhash.xxh3_128(), False
        try:
            for work, memory, used in self._under_way.get(slot, ()):
                placed = bool(used)
                _joined[self._kind].wait(work, link.deadline_s)
                if len(used) > 1:
                    copy_all(used, memory.split_with_sizes([place.numel() for place in used]))
                for place in used:
                    state.update(place.numpy().data)
        except (RuntimeError, TimeoutError, KeyError) as error:
            raise self._failed(link, error) from error
        self._under_way.pop(slot, None)
        return state.hexdigest() if placed else ""

    def _failed(self, link: Link, error: Exception) -> WeightError:
        self._leave()
        return link.error(f"the {self._kind} broadcast failed: {str(error).splitlines()[0]}")

    def close(self) -> None:
        """The group is kept, unless something is still under way in it."""
        if self._under_way:
            self._leave()

    def _leave(self) -> None:
        if (group := _joined.pop(self._kind, None)) is not None:
            group.abort()


def make_carrier(transport: str, slot_bytes: int, device: torch.device) -> GroupCarrier:
    return GroupCarrier(transport, slot_bytes, device)


def make_intake(transport: str, link: Link, offer: dict[str, Any], device: torch.device) -> GroupIntake:
    return GroupIntake(
        transport, link, int(offer["slot_bytes"]), device if transport == "nccl" else torch.device("cpu")
    )
