"""The receiver's side of the conversation with a publisher."""

import os
import select
import socket
import time
from contextlib import suppress
from typing import Any

from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.messages import HEAD, Message, decode, encode, length
from headrace.engines.checkpoint.rendezvous import connect, parse_address

_AHEAD = 4096
"""Bytes that are read at a time: several short messages."""


class Link:
    """The connection to a publisher. Each wait ends after ``deadline_s`` with a WeightError."""

    def __init__(self, source: WeightSource, deadline_s: float, rank: int) -> None:
        self._source, self.deadline_s, self._rank = source, deadline_s, rank
        self.index: int | None = None
        """The partition that is waited for, for errors."""
        self.gave_up: WeightError | None = None
        """Why the publisher ended this; it may write its slots anew from then on."""
        self._socket, self._descriptors = connect(source, deadline_s, self.error)
        self._out = self._socket.dup()  # sends and receives are in different threads, with timeouts of their own
        self._out.settimeout(deadline_s)
        self._timeout = 0.0
        """Of the socket; to set it takes as long as to receive something."""
        self._held = bytearray()
        """Bytes that came and were not yet read."""

    @property
    def host(self) -> str:
        """The publisher's host, as this receiver reaches it."""
        return parse_address(self._source.address)[0]

    def descriptors(self) -> list[int]:
        """What came with the welcome of transport shm; the caller closes them."""
        found, self._descriptors = self._descriptors, []
        return found

    def error(self, what: str, advice: str = "", partition: int | None = None) -> WeightError:
        """partition: the one that it is about, where that is not the one that is waited for."""
        at = self.index if partition is None else partition
        return WeightError(what, version=self._source.version, rank=self._rank, partition=at, advice=advice)

    def send(self, kind: str, **content: Any) -> None:
        try:
            self._out.sendall(encode(kind, **content))
        except OSError as error:
            if kind in ("join", "ack") and not isinstance(error, TimeoutError):
                return  # the publisher hung up; the next receive reads what it said before
            raise self._gone(error) from error

    def receive(self, kind: str) -> Message:
        """The next message, which must be of that kind."""
        while True:
            message = self._next(time.monotonic() + self.deadline_s)
            if message["kind"] == kind:
                return message
            if message["kind"] != "alive":
                raise self.error(f"the publisher sent {message['kind']}, expected {kind}")

    def look(self) -> None:
        """Finds out whether the publisher gave up, from what it has said already. For the thread that receives."""
        with suppress(WeightError):
            while self.gave_up is None and self.waits():
                self._next(time.monotonic() + 1)

    def waits(self) -> bool:
        """Whether something came that was not read, or the publisher has hung up."""
        looking = select.poll()  # unlike select it takes any descriptor
        looking.register(self._socket, select.POLLIN)
        return bool(self._held or looking.poll(0))

    def into(self, memory: memoryview, end: float) -> None:
        """Fills ``memory`` with the bytes that come next, until the time ``end``."""
        done = min(len(self._held), len(memory))
        memory[:done] = self._held[:done]
        del self._held[:done]
        while done < len(memory):
            done += self._receive(memory[done:], end)

    def ended(self) -> bool:
        """Whether the publisher has hung up."""
        if self._held or not self.waits():
            return False
        with suppress(BlockingIOError, TimeoutError):
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return False

    @property
    def where(self) -> str:
        """The publisher's address, without its secret."""
        return self._source.address.partition("#")[0]

    def _next(self, end: float) -> Message:
        try:
            message = decode(self._exactly(length(self._exactly(HEAD, end)), end))
        except ValueError as error:
            raise self.error(f"the publisher at {self.where} sent no message: {error}") from error
        if message["kind"] == "abort":
            self.gave_up = self.error(f"the publisher gave up: {message['reason']}", "see the trainer's log")
            raise self.gave_up
        return message

    def _exactly(self, count: int, end: float) -> bytes:
        while len(self._held) < count:
            some = memoryview(bytearray(_AHEAD))
            self._held += some[: self._receive(some, end)]
        data = bytes(self._held[:count])
        del self._held[:count]
        return data

    def _receive(self, memory: memoryview, end: float) -> int:
        """Bytes that came, one at least."""
        left = max(end - time.monotonic(), 1e-3)
        try:
            if abs(self._timeout - left) > 0.05 * left:
                self._timeout = left
                self._socket.settimeout(left)
            count = self._socket.recv_into(memory)
        except OSError as error:
            raise self._gone(error) from error
        if not count:
            raise self._gone(None)
        return count

    def silent(self) -> WeightError:
        what = f"the publisher at {self.where} was silent for {self.deadline_s:g} s"
        return self.error(what, "a longer deadline, if the trainer is busy; else see the trainer's log")

    def _gone(self, error: OSError | None) -> WeightError:
        if isinstance(error, TimeoutError):
            return self.silent()
        return self.error(
            f"the publisher at {self.where} ended, or dropped this receiver"
            + (f" ({error.strerror})" if error else ""),
            "see the trainer's log, then publish the version again",
        )

    def fail(self, error: BaseException) -> None:
        """Tells the publisher why this receiver ends, and ends a ``receive`` of another thread."""
        with suppress(WeightError):  # the publisher may be the one that is gone
            self.send("abort", reason=f"{type(error).__name__}: {error}")
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        self._out.close()
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
