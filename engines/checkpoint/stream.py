"""Publishing to receivers that pull: the same for every transport but the store.

Partition i lies in slot i % SLOTS. A slot is written again when every living receiver has acknowledged what was in it.
The first ones are filled while receivers come and are told the plan.
"""

import asyncio
import mmap
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.blocks.weights import Partition, WeightManifest
from headrace.engines.checkpoint.carriers.base import slot_bytes_for
from headrace.engines.checkpoint.carriers.names import LOCAL, SLOTS
from headrace.engines.checkpoint.claims import claim, unclaim
from headrace.engines.checkpoint.courier import Courier
from headrace.engines.checkpoint.delta import Form, Kept, kept_for
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.export import Release
from headrace.engines.checkpoint.hashes import Hashing, begin_hash, hashing_of
from headrace.engines.checkpoint.rendezvous import listen, turn_away, unlisten

T = TypeVar("T")
_LOOK_S = 0.2
"""Between two looks whether somebody still wants the publish."""
_TOLD_S = 5.0
"""A publish that fails before its receivers have come waits so long for them, to tell them why."""


class StreamSender:
    """One publish. ``room``, ``send`` and ``commit`` belong to the exporting thread; the courier has its own, and so
    have partitions on GPUs, and those that are broadcast: the next one is exported meanwhile."""

    def __init__(
        self,
        release: Release,
        plan_text: str,
        *,
        transport: str,
        address: str,
        receivers: int,
        device: torch.device,
        delta: bool,
        deadline_s: float,
        listening: Callable[[], None] | None,
        unwanted: Callable[[], bool],
    ) -> None:
        """plan_text: the release's plan as JSON. listening, unwanted: see ``publish``."""
        if receivers < 1:
            raise WeightError(
                f"receivers is {receivers}; transport {transport} needs one at least", version=release.version
            )
        self._release, self._transport, self._address = release, transport, address
        self._plan_text = plan_text
        self._receivers, self._device, self._deadline_s = receivers, device, deadline_s
        self._listening, self._unwanted = listening, unwanted
        self._kept: Kept | None = kept_for(address) if delta else None
        self._sending: list[Future[None]] = []

    def __enter__(self) -> "StreamSender":
        release, plan = self._release, self._release.plan
        slot_bytes = slot_bytes_for(plan.partitions, mmap.PAGESIZE)
        self._carrier = claim(self._address, self._transport, slot_bytes, self._device, release.version)
        if self._carrier.ring is not None:
            self._carrier.ring.begin()
        try:
            self._listener = listen(self._address, release.version, local=self._transport in LOCAL)
        except WeightError:
            unclaim(self._address)
            raise
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-send")
        self._hashing: Hashing = hashing_of(self._carrier.memory.device)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weights-courier", daemon=True)
        self._thread.start()
        offer = {
            "version": release.version,
            "transport": self._transport,
            "device": self._carrier.memory.device.type,
            "hashing": self._hashing,
            "changes": self._kept is not None,
            "slot_bytes": self._carrier.slot_bytes,
            "plan": self._plan_text,
        }
        base = self._kept.digest_for(plan) if self._kept else ""
        secret = self._address.partition("#")[2]
        self._courier = Courier(self._carrier, offer, plan, self._receivers, self._deadline_s, secret, base)
        self._gathering = self._begun(self._courier.gather(self._listener))
        self._met = False
        if self._kept is not None and self._carrier.ring is not None:
            self._changes = torch.empty(slot_bytes, dtype=torch.uint8)
        if self._listening is not None:
            self._listening()
        return self

    def __exit__(self, *raised: object) -> None:
        if raised and raised[1] is not None:
            if not self._met and not self._unwanted():
                wait([self._gathering], min(self._deadline_s, _TOLD_S))
            assert isinstance(raised[1], BaseException)
            self._courier.fail(raised[1])
            self._result(self._begun(self._courier.abort(str(raised[1]))), lambda: False)
            if self._carrier.group is not None:
                self._carrier.group.drop()  # a broadcast that not all have joined would meet the next version's
            if not self._met:
                unlisten(self._listener, self._address, local=self._transport in LOCAL)
            turn_away(self._address)
        self._pool.shutdown(wait=self._carrier.group is not None, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._deadline_s)
        self._loop.close()
        unclaim(self._address)

    def room(self, partition: Partition) -> Generator[Tensor, None, None]:
        if self._kept is not None:
            self._meet()  # what they have decides what is sent
            yield from self._kept.room(partition, self._courier.shared)
        elif (ring := self._carrier.ring) is not None:
            yield from ring.pieces(partition.nbytes, self._drained)
        else:
            if partition.index >= SLOTS:
                self._meet()
                self._courier.free(partition.index)
            yield self._slot(partition)

    def send(self, partition: Partition, found: str | None) -> None:
        if self._kept is not None:
            assert found is not None  # changes are found in host memory only
            self._courier.free(partition.index)
            self._give(self._kept, partition, found)
        elif self._carrier.ring is not None:
            assert found is not None  # rings are in host memory
            self._announce(partition, self._carrier.memory[:0], "full", partition.nbytes, found)
        else:
            slot = self._slot(partition)
            self._announce(partition, slot, "full", partition.nbytes, found or begin_hash(slot, self._hashing))

    def _give(self, kept: Kept, partition: Partition, found: str) -> None:
        """What changed since the version that is kept."""
        ring = self._carrier.ring
        out = self._slot(partition) if ring is None else self._changes
        form, nbytes = kept.give(partition, found, out[: partition.nbytes])
        self._announce(partition, out[: nbytes if ring is None else 0], form, nbytes, found)
        if ring is not None:
            begin = 0
            for piece in ring.pieces(nbytes, self._drained):
                piece.copy_(out[begin : begin + piece.numel()])
                begin += piece.numel()

    def commit(self) -> WeightManifest:
        self._meet()
        try:
            for sending in self._sending:
                sending.result(6 * self._deadline_s + 5)  # it has deadlines of its own
        except TimeoutError as error:
            raise WeightError(
                f"a partition was not sent within {6 * self._deadline_s + 5:g} s",
                version=self._release.version,
                advice="see the trainer's log; a longer deadlines.sync, if it is busy",
            ) from error
        hashes = self._result(self._begun(self._courier.finish()), self._unwanted)
        if self._kept is not None:
            self._kept.commit(hashes)
        return self._release.manifest(hashes, self._hashing)

    def _slot(self, partition: Partition) -> Tensor:
        return self._carrier.memory[partition.index % SLOTS * self._carrier.slot_bytes :][: partition.nbytes]

    def _drained(self, count: int) -> int:
        self._meet()
        return self._courier.drained(count)

    def _announce(
        self, partition: Partition, data: Tensor, form: Form, nbytes: int, found: str | Callable[[], str]
    ) -> None:
        """data: what lies in the slot."""
        if isinstance(found, str) and self._carrier.group is None:
            self._loop.call_soon_threadsafe(self._courier.announce, data, form, nbytes, found)
        else:
            sizes = [piece.nbytes for piece in partition.slices] if form == "full" else [nbytes]
            self._sending.append(self._pool.submit(self._send, data, form, sizes, found))

    def _send(self, data: Tensor, form: Form, sizes: list[int], found: str | Callable[[], str]) -> None:
        if self._courier.broken is not None:
            return
        try:
            known = found if isinstance(found, str) else found()
            if self._carrier.group is not None:
                self._result(self._gathering, lambda: False)  # until then there is no group
                if self._courier.broken is not None:
                    return
            self._loop.call_soon_threadsafe(self._courier.announce, data, form, data.numel(), known)
            if data.numel() and (group := self._carrier.group) is not None:
                group.spread(data, sizes, self._deadline_s)
        except CancelledError:  # who ended the publish says why
            return
        except BaseException as error:  # whatever it is, the exporting thread must hear of it where it waits
            self._courier.fail(error)
            raise

    def _meet(self) -> None:
        """Waits until the receivers are known. Raises WeightError when there is none."""
        if self._met:
            return
        self._result(self._gathering, self._unwanted)
        self._met = True
        unlisten(self._listener, self._address, local=self._transport in LOCAL)
        if self._kept is not None:
            self._kept.begin(self._release.plan)

    def _begun(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _result(self, running: Future[T], unwanted: Callable[[], bool]) -> T:
        # Every wait inside the courier has its own deadline; at most six of them follow each other in one call.
        end = time.monotonic() + 6 * self._deadline_s + 5
        while not wait([running], _LOOK_S).done:
            where = f"the receivers at {self._address.partition('#')[0]}"
            if unwanted():
                running.cancel()
                raise WeightError(f"{where} are not waited for any more", version=self._release.version)
            if time.monotonic() > end:
                raise WeightError(f"{where} could not be served in time", version=self._release.version)
        return running.result()
