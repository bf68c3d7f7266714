"""Transport ``shm``, the receiver: partitions are read where the publisher wrote them, through a read-only mapping."""

import mmap
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import xxhash

from headrace.blocks.weights import Partition, Plan, WeightSource
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.load import Assembler, Expect, Sink, check_expected, overlap
from headrace.engines.checkpoint.messages import HEAD, Message, decode, encode, length
from headrace.engines.checkpoint.plan import check_plan, digest_of_hashes
from headrace.engines.checkpoint.rendezvous import connect


class _Link:
    """The connection to a publisher. Each wait ends after ``deadline_s`` with a WeightError."""

    def __init__(self, source: WeightSource, deadline_s: float, rank: int) -> None:
        self._source, self._deadline_s, self._rank = source, deadline_s, rank
        self.index: int | None = None
        """The partition that is waited for, for errors."""
        self._socket, self.memory = connect(source.address, deadline_s, self.error)
        self._out = self._socket.dup()  # sends and receives are in different threads, with timeouts of their own

    def error(self, what: str, advice: str = "") -> WeightError:
        return WeightError(what, version=self._source.version, rank=self._rank, partition=self.index, advice=advice)

    def send(self, kind: str, **content: Any) -> None:
        try:
            self._out.settimeout(self._deadline_s)
            self._out.sendall(encode(kind, **content))
        except OSError as error:
            if kind in ("join", "ack") and not isinstance(error, TimeoutError):
                return  # the publisher hung up; the next receive reads what it said before
            raise self._gone(error) from error

    def receive(self, kind: str) -> Message:
        """The next message, which must be of that kind."""
        while True:
            end = time.monotonic() + self._deadline_s
            try:
                message = decode(self._exactly(length(self._exactly(HEAD, end)), end))
            except ValueError as error:
                raise self.error(f"the publisher at {self._source.address} sent no message: {error}") from error
            if message["kind"] == "abort":
                raise self.error(f"the publisher gave up: {message['reason']}", "see the trainer's log")
            if message["kind"] == kind:
                return message
            if message["kind"] != "alive":
                raise self.error(f"the publisher sent {message['kind']}, expected {kind}")

    def _exactly(self, count: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                self._socket.settimeout(max(end - time.monotonic(), 1e-3))
                piece = self._socket.recv(count - len(data))
            except OSError as error:
                raise self._gone(error) from error
            if not piece:
                raise self._gone(None)
            data += piece
        return bytes(data)

    def _gone(self, error: OSError | None) -> WeightError:
        if isinstance(error, TimeoutError):
            what = f"the publisher at {self._source.address} was silent for {self._deadline_s:g} s"
            return self.error(what, "a longer deadline, if the trainer is busy; else see the trainer's log")
        return self.error(
            f"the publisher at {self._source.address} ended, or dropped this receiver"
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
        os.close(self.memory)


def pull_shm(source: WeightSource, sink: Sink, deadline_s: float, expect: Expect | None, rank: int) -> str:
    """Streams the version that a publisher sends into ``sink``; returns the digest of what came. Raises WeightError."""
    with closing(_Link(source, deadline_s, rank)) as link:
        try:
            digest = _receive(link, source, sink, expect, rank)
            link.send("done", digest=digest)
            return digest
        except BaseException as error:
            link.fail(error)
            raise


def _receive(link: _Link, source: WeightSource, sink: Sink, expect: Expect | None, rank: int) -> str:
    offer = link.receive("plan")
    if offer["version"] != source.version:
        raise link.error(f"the publisher at {source.address} sends version {offer['version']}")
    slot_bytes = int(offer["slot_bytes"])
    try:
        plan = Plan.model_validate(offer["plan"])
        memory = memoryview(mmap.mmap(link.memory, 2 * slot_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:
        raise link.error(f"the publisher's plan and memory cannot be used: {error}") from error
    check_plan(plan)
    check_expected(plan, expect)
    link.send("join", rank=rank, pid=os.getpid())
    assembler = Assembler(sink)
    hashes: list[str] = []

    def verified() -> Iterator[tuple[Partition, memoryview]]:
        for partition in plan.partitions:
            link.index = partition.index
            ready = link.receive("ready")
            if ready["index"] != partition.index:
                raise link.error(f"partition {ready['index']} came instead")
            begin = (partition.index % 2) * slot_bytes
            data = memory[begin : begin + partition.nbytes]
            found = xxhash.xxh3_128_hexdigest(data)
            if found != ready["hash"]:
                raise link.error(
                    f"its hash is {found}, the publisher's is {ready['hash']}", "publish the version again"
                )
            hashes.append(found)
            yield partition, data

    def use(step: tuple[Partition, memoryview]) -> None:
        assembler.feed(*step)
        link.send("ack", index=step[0].index)

    overlap(verified(), use, link.fail, None)
    link.index = None
    digest = digest_of_hashes(hashes)
    if (told := link.receive("commit")["digest"]) != digest:
        raise link.error(f"the digest of what came is {digest}, the publisher's is {told}", "publish the version again")
    return digest
