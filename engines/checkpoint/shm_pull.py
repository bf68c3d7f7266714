"""Transport ``shm``, the receiver: partitions are read where the publisher wrote them, through a read-only mapping."""

import ctypes
import mmap
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import xxhash

from headrace.blocks.weights import Partition, Plan, WeightSource
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.load import Assembler, Expect, Sink, check_expected, overlap
from headrace.engines.checkpoint.messages import HEAD, Message, decode, encode, length, short
from headrace.engines.checkpoint.plan import check_plan, digest_of_hashes

_IN_MOVED_TO, _IN_CREATE, _IN_CLOEXEC, _IN_NONBLOCK = 0x80, 0x100, 0o2000000, 0o4000


class _Link:
    """The connection to a publisher. Each wait ends after ``deadline_s`` with a WeightError."""

    def __init__(self, source: WeightSource, deadline_s: float, rank: int) -> None:
        self._source, self._deadline_s, self._rank = source, deadline_s, rank
        self.index: int | None = None
        """The partition that is waited for, for errors."""
        self._socket, self.memory = _connect(source.address, deadline_s, self.error)
        self._out = self._socket.dup()  # sends and receives are in different threads, with timeouts of their own

    def error(self, what: str, advice: str = "") -> WeightError:
        return WeightError(what, version=self._source.version, rank=self._rank, partition=self.index, advice=advice)

    def send(self, kind: str, **content: Any) -> None:
        try:
            self._out.settimeout(self._deadline_s)
            self._out.sendall(encode(kind, **content))
        except OSError as error:
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

    def stop(self) -> None:
        """Ends a ``receive`` of another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        self._out.close()
        self._socket.close()
        os.close(self.memory)


def _connect(address: str, deadline_s: float, failed) -> tuple[socket.socket, int]:
    """A connection that was welcomed, and the descriptor of the memory that came with the welcome."""
    end = time.monotonic() + deadline_s
    folder = os.path.dirname(os.path.abspath(address))
    os.makedirs(folder, exist_ok=True)
    appeared = _watch(folder)
    try:
        while True:
            link = socket.socket(socket.AF_UNIX)
            with (
                suppress(OSError),
                short(address) as path,
            ):  # no socket yet, or that of a publisher which ended: wait for the next
                link.settimeout(max(end - time.monotonic(), 1e-3))
                link.connect(path)
                welcome, descriptors, _, _ = socket.recv_fds(link, 1, 1)
                if welcome and descriptors:
                    return link, descriptors[0]
            link.close()
            while not _named(appeared, os.path.basename(address), end - time.monotonic()):
                if time.monotonic() >= end:
                    raise failed(
                        f"no publisher listened at {address} for {deadline_s:g} s",
                        "publish to the same address, on the same machine",
                    )
    finally:
        os.close(appeared)


def _watch(folder: str) -> int:
    """An inotify descriptor that reports what appears in a folder: a wait that needs no polling."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(folder), _IN_MOVED_TO | _IN_CREATE) < 0:
        raise OSError(ctypes.get_errno(), f"cannot watch {folder}: {os.strerror(ctypes.get_errno())}")
    return descriptor


def _named(descriptor: int, name: str, timeout_s: float) -> bool:
    """True when something of that name appeared; False when anything else did or time is over."""
    if not select.select([descriptor], [], [], max(timeout_s, 0))[0]:
        return False
    return os.fsencode(name) in os.read(descriptor, 1 << 16)


def pull_shm(source: WeightSource, sink: Sink, deadline_s: float, expect: Expect | None, rank: int) -> str:
    """Streams the version that a publisher sends into ``sink``; returns the digest of what came. Raises WeightError."""
    with closing(_Link(source, deadline_s, rank)) as link:
        try:
            digest = _receive(link, source, sink, expect, rank)
            link.send("done", digest=digest)
            return digest
        except BaseException as error:
            with suppress(WeightError):  # the publisher may be the one that is gone
                link.send("abort", reason=f"{type(error).__name__}: {error}")
            raise


def _receive(link: _Link, source: WeightSource, sink: Sink, expect: Expect | None, rank: int) -> str:
    offer = link.receive("plan")
    if offer["version"] != source.version:
        raise link.error(f"the publisher at {source.address} sends version {offer['version']}")
    plan, slot_bytes = Plan.model_validate(offer["plan"]), int(offer["slot_bytes"])
    check_plan(plan)
    check_expected(plan, expect)
    memory = memoryview(mmap.mmap(link.memory, 2 * slot_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
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

    overlap(verified(), use, link.stop, None)
    link.index = None
    digest = digest_of_hashes(hashes)
    if (told := link.receive("commit")["digest"]) != digest:
        raise link.error(f"the digest of what came is {digest}, the publisher's is {told}", "publish the version again")
    return digest
