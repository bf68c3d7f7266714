"""The publisher's side of the conversation with its receivers: one task for each, in one event loop.

A receiver hears of a partition as soon as it lies in a slot, and acknowledges it when it has loaded it. One that dies,
or is silent beyond the deadline, is dropped; the others go on.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headrace.blocks.weights import Plan
from headrace.engines.checkpoint.carriers.base import Carrier
from headrace.engines.checkpoint.carriers.names import SLOTS
from headrace.engines.checkpoint.delta import Form
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.messages import Message
from headrace.engines.checkpoint.peer import Peer
from headrace.engines.checkpoint.plan import digest_of_hashes
from headrace.engines.checkpoint.rendezvous import tune

log = logging.getLogger(__name__)

_ALIVE_S = 1.0
"""Time between two signs of life; below any receiver's deadline."""
_TEND_S = 0.001
_READ_S = 5e-5
"""Between two looks at how far receivers have read; the ring lasts ten times as long."""


@dataclass(frozen=True)
class _Ready:
    """A partition that lies in its slot."""

    data: Tensor
    """What lies there; empty where there is a ring."""
    form: Form
    nbytes: int
    hash: str


class Courier:
    """Talks to all receivers, in an event loop of its own thread. Each has its task and its pace."""

    def __init__(
        self,
        carrier: Carrier,
        offer: Message,
        plan: Plan,
        receivers: int,
        deadline_s: float,
        secret: str = "",
        base: str = "",
    ) -> None:
        self._carrier, self._offer, self._plan, self._receivers = carrier, offer, plan, receivers
        self._deadline_s, self._secret, self._base = deadline_s, secret, base
        self._ready: list[_Ready] = []
        """Every announced partition; the slots of those before the last SLOTS hold others by now."""
        self.shared = False
        """Whether every receiver has the publisher's base, so that changes are enough."""
        self._digest = ""
        self._partitions = len(plan.partitions)
        self._begun = False
        self._groups: dict[Peer, Message] = {}
        self._living: set[Peer] = set()
        self._lost: list[str] = []
        self._served = 0
        self._tasks: set[asyncio.Task] = set()
        self._tending: asyncio.Task | None = None
        self._open = True
        self._publisher_waits = True
        """While the publisher waits for receivers, or for more of them to come, the others hear ``alive``; while it
        exports, they hear nothing."""
        self._changed = asyncio.Event()
        """Replaced whenever anything changed."""
        self._exporter = threading.Condition()
        """What follows is for the exporting thread, as of the last change."""
        self._least, self._short = -1, False
        self._reading: tuple[Peer, ...] = ()
        self._draining, self._drained = False, 0.0
        """Whether the exporting thread waits for readers of the ring, and when it last did: of changes everybody hears
        before they are written, and who is silent then may only wait for the publisher."""
        self.broken: BaseException | None = None

    async def gather(self, listener: socket.socket) -> None:
        """Waits for the receivers; goes on with those that came when the deadline ends. Raises WeightError for none."""
        accepting = asyncio.create_task(self._accept(listener))
        if (tend := self._carrier.tend) is not None:
            self._tending = asyncio.create_task(self._tend(tend))
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._until(lambda: len(self._living) + len(self._lost) >= self._receivers), self._deadline_s
                )
        finally:
            self._open = False
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
        missing = self._receivers - len(self._living) - len(self._lost)
        if missing > 0:
            self._lost.append(f"{missing} of {self._receivers} did not come within {self._deadline_s:g} s")
            log.warning("weights go on without some receivers: %s", self._lost[-1])
        self._need_one()
        peers = sorted(self._living, key=lambda peer: (peer.joined["rank"], peer.joined["pid"]))
        self.shared = bool(self._base) and all(peer.joined["base"] == self._base for peer in peers)
        held = [peer.joined["held"] for peer in peers]
        group = self._carrier.group
        told = await asyncio.to_thread(group.form, held, self._deadline_s) if group else []
        self._groups = dict(zip(peers, told, strict=True)) if told else {}
        self._begun = True
        self._publisher_waits = False
        self._notify()
        if group:
            await asyncio.to_thread(group.join, self._deadline_s)

    def free(self, index: int) -> None:
        """The exporting thread waits until the slot of partition ``index`` may be written.

        Raises WeightError when nobody is left, or when a receiver neither acknowledges nor is dropped.
        """
        self._publisher_waits = True
        limit = 6 * self._deadline_s + 5  # each wait for a receiver has its own deadline; this is beyond all of them
        with self._exporter:
            in_time = self._exporter.wait_for(lambda: self._short or self.broken or self._least >= index - SLOTS, limit)
        self._publisher_waits = False
        if self.broken is not None:
            raise self.broken
        if self._short:
            raise self._nobody()
        if not in_time:
            raise WeightError(f"slots were not given back for {limit:g} s", version=self._offer["version"])

    def drained(self, count: int) -> int:
        """The exporting thread waits until all living receivers have read so many bytes from the ring; returns how many
        they have.

        Raises WeightError when nobody is left, or when a receiver neither reads nor is dropped.
        """
        self._publisher_waits = self._draining = True
        began = moved = time.monotonic()
        before = -1
        while True:
            # Each position is read once: it moves, and what is returned must hold for all.
            read, slowest = min(
                ((peer.position(), peer) for peer in self._reading), key=lambda one: one[0], default=(before, None)
            )
            if self.broken is not None:
                raise self.broken
            if self._short:
                raise self._nobody()
            if slowest is not None and read >= count:
                self._publisher_waits = self._draining = False
                self._drained = time.monotonic()
                return read
            now = time.monotonic()
            if read != before:
                before, moved = read, now
            if slowest is not None and now - moved > self._deadline_s:
                slowest.stuck = True  # its task drops it
            if now - began > 6 * self._deadline_s + 5:
                raise WeightError(f"a ring was not read for {now - began:g} s", version=self._offer["version"])
            time.sleep(_READ_S)

    def announce(self, data: Tensor, form: Form, nbytes: int, found: str) -> None:
        """Tells everybody of a partition. data: what lies in its slot, uint8; nbytes: that travel; found: its hash."""
        self._ready.append(_Ready(data, form, nbytes, found))
        self._notify()

    def fail(self, error: BaseException) -> None:
        """What was filled cannot be sent: the exporting thread hears of it where it waits."""
        with self._exporter:
            self.broken = self.broken or error
            self._exporter.notify()

    async def finish(self) -> list[str]:
        """Waits until every living receiver has confirmed the digest; returns the hashes."""
        self._publisher_waits = True
        hashes = [ready.hash for ready in self._ready]
        self._digest = digest_of_hashes(hashes)
        self._notify()
        await self._until(lambda: not self._living)
        if self._tending is not None:
            self._tending.cancel()
        if self._served < (len(self._groups) if self._carrier.group else 1):
            raise self._nobody()
        return hashes

    async def abort(self, reason: str) -> None:
        """Tells the living, as far as they listen, and ends all."""
        for peer in list(self._living):
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(peer.send("abort", reason=reason), 1)
        others = asyncio.all_tasks() - {asyncio.current_task()}  # the loop is this publish's own
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _tend(self, tend: Callable[[], None]) -> None:
        try:
            while True:
                tend()
                await asyncio.sleep(_TEND_S)
        except Exception as error:  # libraries' errors share no class; the exporting thread must hear of it
            what = f"transport {self._offer['transport']} failed while receivers fetched: {error}"
            self.fail(WeightError(what, version=self._offer["version"], advice="transport tcp"))

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            tune(connection)
            task = asyncio.create_task(self._serve(Peer(connection, self._deadline_s)))
            self._tasks.add(task)

    async def _serve(self, peer: Peer) -> None:
        try:
            await peer.welcome(self._secret, self._carrier)
            await peer.send("plan", **self._offer, facts=self._carrier.facts())
            peer.joined = joined = await peer.receive("join")
            peer.name = f"rank {joined['rank']} (process {joined['pid']})"
            if not self._open:
                raise WeightError("it joined after the first partition")
            self._living.add(peer)
            self._notify()
            await self._next(peer, lambda: self._begun)
            await peer.send("begin", group=self._groups.get(peer, {}))
            await self._deliver(peer)
            await self._next(peer, lambda: bool(self._digest))
            await peer.send("commit", digest=self._digest)
            await peer.receive("done")
            self._served += 1
        except TimeoutError:
            await self._lose(peer, f"it was silent for {self._deadline_s:g} s")
        except OSError as error:
            await self._lose(peer, await peer.last_words() or str(error))
        except (ValueError, KeyError, WeightError) as error:
            await self._lose(peer, str(error))
        finally:
            peer.close()
            self._living.discard(peer)
            self._notify()

    async def _deliver(self, peer: Peer) -> None:
        """All partitions, until the last one is acknowledged."""
        listening = asyncio.create_task(self._listen(peer))
        listening.add_done_callback(lambda _: self._notify())
        try:
            for index in range(self._partitions):
                await self._next(peer, lambda index=index: len(self._ready) > index or listening.done())
                if listening.done():
                    break
                await self._tell(peer, index)
            await self._next(peer, listening.done)
            listening.result()
        except OSError:
            if (await asyncio.wait({listening}, timeout=1))[0]:
                listening.result()  # what it said before it hung up
            raise
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _tell(self, peer: Peer, index: int) -> None:
        ready = self._ready[index]
        if peer.told == peer.acknowledged:
            peer.heard = time.monotonic()
        peer.told = index
        await peer.send("ready", index=index, slot=index % SLOTS, hash=ready.hash, form=ready.form, nbytes=ready.nbytes)
        if ready.data.numel() and (content := self._carrier.bytes_for(ready.data)) is not None:
            await peer.send_bytes(content)

    async def _listen(self, peer: Peer) -> None:
        """Until the last partition is acknowledged."""
        for index in range(self._partitions):
            if (await peer.hear("ack"))["index"] != index:
                raise WeightError(f"it acknowledged another partition than {index}")
            peer.acknowledged, peer.heard = index, time.monotonic()
            self._notify()

    async def _next(self, peer: Peer, ready: Callable[[], bool]) -> None:
        """Waits, with signs of life; raises TimeoutError when the receiver has something to do and is silent."""
        while not ready():
            try:
                async with asyncio.timeout(min(_ALIVE_S, self._deadline_s)):
                    await self._until(ready)
            except TimeoutError:
                busy = peer.told > peer.acknowledged and not self._draining
                if peer.stuck or (busy and time.monotonic() - max(peer.heard, self._drained) > self._deadline_s):
                    raise
                if self._publisher_waits or not self._begun:
                    await peer.send("alive")

    async def _lose(self, peer: Peer, why: str) -> None:
        if not peer.spoke:
            return  # whoever looked in was no receiver, or will come again
        self._lost.append(f"{peer.name}, after partition {peer.acknowledged}: {why}")
        log.warning("weights go on without %s", self._lost[-1])
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(peer.send("abort", reason=f"this receiver was dropped: {why}"), 1)

    def _need_one(self) -> None:
        if self._too_few():
            raise self._nobody()

    def _nobody(self) -> WeightError:
        return WeightError(
            f"{'a receiver of the group was lost' if self._living else 'no receiver is left'}: {'; '.join(self._lost)}",
            version=self._offer["version"],
            advice="see the rollout engines' logs, then publish the version again",
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        with self._exporter:
            self._least = min((peer.acknowledged for peer in self._living), default=-1)
            self._short = self._begun and self._too_few()
            self._reading = tuple(self._living)
            self._exporter.notify()

    def _too_few(self) -> bool:
        return not self._living or (self._carrier.group is not None and len(self._living) < len(self._groups))
