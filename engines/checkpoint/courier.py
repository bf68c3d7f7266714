"""The publisher's side of the shm transport's conversation: one task for each receiver, in one event loop.

A receiver hears of partition i + 1 before it has acknowledged i, so that it can check one while it loads the other. A
receiver that dies, or is silent beyond the deadline, is dropped; the others go on.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any

import xxhash

from headrace.blocks.weights import Partition
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.messages import HEAD, Message, decode, encode, length
from headrace.engines.checkpoint.plan import digest_of_hashes
from headrace.engines.checkpoint.segment import Segment

log = logging.getLogger(__name__)

_ALIVE_S = 1.0
"""Time between two signs of life; below any receiver's deadline."""


class _Peer:
    """One receiver."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._socket, self._deadline_s = connection, deadline_s
        self.name = "a receiver that had not joined"
        self.spoke = False
        self.acknowledged = -1
        """Index of the last partition that it has loaded."""

    def welcome(self, descriptor: int) -> None:
        socket.send_fds(self._socket, [b"\0"], [descriptor])

    async def send(self, kind: str, **content: Any) -> None:
        sending = asyncio.get_running_loop().sock_sendall(self._socket, encode(kind, **content))
        await asyncio.wait_for(sending, self._deadline_s)

    async def receive(self, kind: str) -> Message:
        message = decode(await asyncio.wait_for(self._message(), self._deadline_s))
        self.spoke = True
        if message["kind"] == "abort":
            raise WeightError(message["reason"])
        if message["kind"] != kind:
            raise WeightError(f"it sent {message['kind']}, expected {kind}")
        return message

    async def last_words(self) -> str:
        """The reason that it gave before it hung up; empty when it gave none."""
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            while True:
                message = decode(await asyncio.wait_for(self._message(), 1))
                if message["kind"] == "abort":
                    return str(message["reason"])
        return ""

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


class Courier:
    """Talks to all receivers, in an event loop of its own thread. Each has its task and its pace."""

    def __init__(self, segment: Segment, offer: Message, partitions: int, receivers: int, deadline_s: float) -> None:
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
        except OSError as error:
            await self._lose(peer, await peer.last_words() or str(error))
        except (ValueError, KeyError, WeightError) as error:
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

    async def _next(self, peer: _Peer, ready: Callable[[], bool]) -> None:
        while not ready():
            try:
                await asyncio.wait_for(self._until(ready), _ALIVE_S)
            except TimeoutError:
                if self._publisher_waits:
                    await peer.send("alive")

    async def _lose(self, peer: _Peer, why: str) -> None:
        if not peer.spoke:
            return  # whoever looked in was no receiver, or will come again
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

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
