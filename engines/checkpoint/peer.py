"""The publisher's end of the connection to one receiver."""

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Callable
from typing import Any

from headrace.engines.checkpoint.carriers.base import Carrier
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.messages import HEAD, Message, decode, encode, length

_HELLO_S = 5.0
"""For a stranger to say something."""


class Peer:
    """One receiver."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._socket, self._deadline_s = connection, deadline_s
        self._bulk = connection.dup()
        """For partitions: sent by a thread in one call, not in the event loop piece by piece."""
        self._bulk.settimeout(deadline_s)
        self._heard = b""
        """Bytes that came and were not yet read."""
        self.name = "a receiver that had not joined"
        self.spoke = False
        self.joined: Message = {}
        self.told = self.acknowledged = -1
        """Index of the last partition that it has heard of, and that it has loaded."""
        self.heard = 0.0
        """When it last acknowledged something, or got something to do."""
        self._read: Callable[[], int] | None = None
        self.stuck = False
        """It did not read for longer than the deadline, while others waited for it."""

    async def welcome(self, secret: str, carrier: Carrier) -> None:
        """Raises WeightError for somebody who does not know the address's secret."""
        if secret:
            said = await asyncio.wait_for(self._exactly(len(secret)), min(self._deadline_s, _HELLO_S))
            if not hmac.compare_digest(said, secret.encode()):
                raise WeightError("it does not know the secret of this address")
        self._read = carrier.welcome(self._socket)

    def position(self) -> int:
        """How many bytes it has read from the ring."""
        return self._read() if self._read is not None else 0

    async def send_bytes(self, data: memoryview) -> None:
        """A partition's bytes; raises TimeoutError when they were not taken within the deadline."""
        await asyncio.to_thread(self._bulk.sendall, data)

    async def send(self, kind: str, **content: Any) -> None:
        async with asyncio.timeout(self._deadline_s):  # not wait_for: a task for each message takes longer than sending
            await asyncio.get_running_loop().sock_sendall(self._socket, encode(kind, **content))

    async def receive(self, kind: str) -> Message:
        async with asyncio.timeout(self._deadline_s):
            return await self.hear(kind)

    async def hear(self, kind: str) -> Message:
        """Without a deadline."""
        message = decode(await self._message())
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
        while len(self._heard) < count:
            piece = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)
            if not piece:
                raise ConnectionError("it ended")
            self._heard += piece
        data, self._heard = self._heard[:count], self._heard[count:]
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a thread that still sends
        self._bulk.close()
        self._socket.close()
