"""Transport ``shm``, the publisher: two slots of shared memory, and a unix socket for what is said about them.

The memory has no name (memfd); receivers get its descriptor, read-only, over the socket, so nothing can be left behind
but the socket's file, which the next publish replaces. Partition i lies in slot i % 2. A slot is written again when
every living receiver has acknowledged what was in it. Linux only.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import xxhash

from headrace.blocks.weights import Partition, Plan, WeightManifest
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.messages import HEAD, Message, decode, encode, length, short
from headrace.engines.checkpoint.plan import digest_of_hashes

log = logging.getLogger(__name__)
T = TypeVar("T")

_HASHING_S = 60.0
"""Far beyond what hashing a partition takes."""


class _Segment:
    """Two slots. Kept from one publish to the next: memory that was touched before is much faster to write."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._descriptor = os.memfd_create("headrace-weights")
        try:
            os.posix_fallocate(self._descriptor, 0, 2 * slot_bytes)
            self._memory = memoryview(mmap.mmap(self._descriptor, 2 * slot_bytes))
            self.readable = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(self._descriptor)
            raise WeightError(
                f"no shared memory for two partitions of {slot_bytes / 1e6:.0f} MB: {error.strerror}",
                advice="a smaller partition_bytes, or more memory for the container",
            ) from error

    def slot(self, partition: Partition) -> memoryview:
        begin = (partition.index % 2) * self.slot_bytes
        return self._memory[begin : begin + partition.nbytes]

    def close(self) -> None:
        # The mapping ends with its last view; only the descriptors are closed here.
        os.close(self.readable)
        os.close(self._descriptor)


_segments: dict[str, _Segment] = {}
_busy: set[str] = set()
_guard = threading.Lock()


def _claim(address: str, slot_bytes: int, version: int) -> _Segment:
    with _guard:
        if address in _busy:
            raise WeightError(f"another publish to {address} is under way", version=version)
        segment = _segments.get(address)
        if segment is None or segment.slot_bytes < slot_bytes:
            if segment is not None:
                _segments.pop(address).close()
            segment = _segments[address] = _Segment(slot_bytes)
        _busy.add(address)
        return segment


def release(address: str) -> None:
    """Gives back the shared memory that publishes to ``address`` keep in this process."""
    with _guard:
        if address not in _busy and (segment := _segments.pop(address, None)):
            segment.close()


def _listen(address: str, version: int) -> socket.socket:
    """A listening socket that appears under ``address`` in one step, so that whoever sees it can connect."""
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    try:
        os.makedirs(os.path.dirname(os.path.abspath(address)), exist_ok=True)
        with socket.socket(socket.AF_UNIX) as probe, short(address) as path:
            probe.settimeout(1)
            if probe.connect_ex(path) == 0:
                raise WeightError(
                    f"another process publishes at {address}", version=version, advice="an address for each trainer"
                )
        hidden = f"{address}.{os.getpid()}"
        with short(hidden) as path:
            listener.bind(path)
        os.chmod(hidden, 0o600)
        listener.listen(128)
        os.replace(hidden, address)
    except OSError as error:
        listener.close()
        raise WeightError(
            f"cannot listen at {address}: {error}", version=version, advice="a folder that this user may write"
        ) from error
    except WeightError:
        listener.close()
        raise
    return listener


class _Peer:
    """One receiver."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._socket, self._deadline_s = connection, deadline_s
        self.name = "a receiver that had not joined"
        self.acknowledged = -1
        """Index of the last partition that it has loaded."""

    def welcome(self, descriptor: int) -> None:
        socket.send_fds(self._socket, [b"\0"], [descriptor])

    async def send(self, kind: str, **content: Any) -> None:
        sending = asyncio.get_running_loop().sock_sendall(self._socket, encode(kind, **content))
        await asyncio.wait_for(sending, self._deadline_s)

    async def receive(self, kind: str) -> Message:
        message = decode(await asyncio.wait_for(self._message(), self._deadline_s))
        if message["kind"] == "abort":
            raise WeightError(message["reason"])
        if message["kind"] != kind:
            raise WeightError(f"it sent {message['kind']}, expected {kind}")
        return message

    async def _message(self) -> bytes:
        return await self._exactly(length(await self._exactly(HEAD)))

    async def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = await asyncio.get_running_loop().sock_recv(self._socket, count - len(data))
            if not piece:
                raise ConnectionError("it ended")
            data += piece
        return data

    def close(self) -> None:
        self._socket.close()


class _Courier:
    """Talks to all receivers, in an event loop of its own thread. Each has its task and its pace."""

    def __init__(self, segment: _Segment, offer: Message, partitions: int, receivers: int, deadline_s: float) -> None:
        self._segment, self._offer, self._receivers, self._deadline_s = segment, offer, receivers, deadline_s
        self._hashes: list[str] = []
        self._digest = ""
        self._partitions = partitions
        self._living: set[_Peer] = set()
        self._lost: list[str] = []
        self._served = 0
        self._tasks: set[asyncio.Task] = set()
        self._open = True
        self._publisher_waits = True
        """While the publisher waits for receivers, the others hear ``alive``; while it exports, they hear nothing."""
        self._changed = asyncio.Condition()

    async def gather(self, listener: socket.socket) -> None:
        """Waits for the receivers; goes on with those that came when the deadline ends. Raises WeightError for none."""
        accepting = asyncio.create_task(self._accept(listener))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                self._until(lambda: len(self._living) + len(self._lost) >= self._receivers), self._deadline_s
            )
        self._open = False
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        self._publisher_waits = False
        missing = self._receivers - len(self._living) - len(self._lost)
        if missing > 0:
            self._lost.append(f"{missing} of {self._receivers} did not come within {self._deadline_s:g} s")
            log.warning("weights go on without some receivers: %s", self._lost[-1])
        self._need_one()

    async def free(self, index: int) -> None:
        """Waits until the slot of partition ``index`` may be written. Raises WeightError when nobody is left."""
        self._publisher_waits = True
        await self._until(lambda: all(peer.acknowledged >= index - 2 for peer in self._living))
        self._publisher_waits = False
        self._need_one()

    async def announce(self, partition: Partition) -> None:
        """Hashes a filled slot and tells everybody."""
        self._hashes.append(await asyncio.to_thread(xxhash.xxh3_128_hexdigest, self._segment.slot(partition)))
        await self._notify()

    async def finish(self) -> list[str]:
        """Waits until every living receiver has confirmed the digest; returns the hashes."""
        await self._until(lambda: len(self._hashes) == self._partitions)
        self._digest = digest_of_hashes(self._hashes)
        self._publisher_waits = True
        await self._notify()
        await self._until(lambda: not self._living)
        if not self._served:
            self._need_one()
        return self._hashes

    async def abort(self, reason: str) -> None:
        """Tells the living, as far as they listen, and ends all."""
        for peer in list(self._living):
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(peer.send("abort", reason=reason), 1)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            task = asyncio.create_task(self._serve(_Peer(connection, self._deadline_s)))
            self._tasks.add(task)

    async def _serve(self, peer: _Peer) -> None:
        try:
            peer.welcome(self._segment.readable)
            await peer.send("plan", **self._offer)
            joined = await peer.receive("join")
            peer.name = f"rank {joined['rank']} (process {joined['pid']})"
            if not self._open:
                raise WeightError("it joined after the first partition")
            self._living.add(peer)
            await self._notify()
            for index in range(self._partitions):
                await self._next(peer, lambda index=index: len(self._hashes) > index)
                await peer.send("ready", index=index, slot=index % 2, hash=self._hashes[index])
                if index:
                    await self._acknowledged(peer, index - 1)
            await self._acknowledged(peer, self._partitions - 1)
            await self._next(peer, lambda: bool(self._digest))
            await peer.send("commit", digest=self._digest)
            await peer.receive("done")
            self._served += 1
        except TimeoutError:
            await self._lose(peer, f"it was silent for {self._deadline_s:g} s")
        except (OSError, ValueError, KeyError, WeightError) as error:
            await self._lose(peer, str(error))
        finally:
            peer.close()
            self._living.discard(peer)
            await self._notify()

    async def _acknowledged(self, peer: _Peer, index: int) -> None:
        if (await peer.receive("ack"))["index"] != index:
            raise WeightError(f"it acknowledged another partition than {index}")
        peer.acknowledged = index
        await self._notify()

    async def _next(self, peer: _Peer, ready) -> None:
        while not ready():
            try:
                await asyncio.wait_for(self._until(ready), self._deadline_s / 4)
            except TimeoutError:
                if self._publisher_waits:
                    await peer.send("alive")

    async def _lose(self, peer: _Peer, why: str) -> None:
        self._lost.append(f"{peer.name}, after partition {peer.acknowledged}: {why}")
        log.warning("weights go on without %s", self._lost[-1])
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(peer.send("abort", reason=f"this receiver was dropped: {why}"), 1)

    def _need_one(self) -> None:
        if not self._living:
            raise WeightError(
                f"no receiver is left: {'; '.join(self._lost)}",
                version=self._offer["version"],
                advice="see the rollout engines' logs, then publish the version again",
            )

    async def _until(self, condition) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class ShmSender:
    """One publish. ``buffer``, ``send`` and ``commit`` belong to the exporting thread, the courier has its own."""

    def __init__(
        self, address: str, plan: Plan, version: int, train_step: int, receivers: int, deadline_s: float
    ) -> None:
        if receivers < 1:
            raise WeightError(f"receivers is {receivers}; transport shm needs one at least", version=version)
        self._address, self._plan, self._version, self._train_step = address, plan, version, train_step
        self._receivers, self._deadline_s = receivers, deadline_s
        self._announcing: Future[None] | None = None

    def __enter__(self) -> "ShmSender":
        page = mmap.PAGESIZE
        slot_bytes = max(-(-partition.nbytes // page) * page for partition in self._plan.partitions) or page
        self._segment = _claim(self._address, slot_bytes, self._version)
        try:
            listener = _listen(self._address, self._version)
        except WeightError:
            _busy.discard(self._address)
            raise
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weights-courier", daemon=True)
        self._thread.start()
        offer = {"version": self._version, "slot_bytes": self._segment.slot_bytes, "plan": self._plan.model_dump()}
        count = len(self._plan.partitions)
        self._courier = _Courier(self._segment, offer, count, self._receivers, self._deadline_s)
        try:
            self._ask(self._courier.gather(listener))
        except BaseException as error:
            self.__exit__(type(error), error)
            raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._address)
            listener.close()
        return self

    def __exit__(self, *raised: object) -> None:
        if raised and raised[1] is not None:
            self._ask(self._courier.abort(str(raised[1])))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._deadline_s)
        self._loop.close()
        _busy.discard(self._address)

    def buffer(self, partition: Partition) -> memoryview:
        self._ask(self._courier.free(partition.index))
        return self._segment.slot(partition)

    def send(self, partition: Partition) -> None:
        if self._announcing is not None:
            self._announcing.result(_HASHING_S)  # hashes are made in order, one behind the export
        self._announcing = asyncio.run_coroutine_threadsafe(self._courier.announce(partition), self._loop)

    def commit(self) -> WeightManifest:
        hashes = self._ask(self._courier.finish())
        return WeightManifest(
            version=self._version,
            train_step=self._train_step,
            plan=self._plan,
            hashes=hashes,
            digest=digest_of_hashes(hashes),
        )

    def _ask(self, coroutine: Coroutine[Any, Any, T]) -> T:
        # Every wait inside the courier has its own deadline; at most six of them follow each other in one call.
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(6 * self._deadline_s + 5)
