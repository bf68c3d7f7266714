"""Somebody in the middle who spoils what lies in shared memory, what travels, or what is said about it: all refused."""

import json
import mmap
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint import WeightError, publish, pull, release, reserve
from headrace.engines.checkpoint.carriers import shm
from headrace.engines.checkpoint.messages import HEAD, Message, encode
from headrace.engines.checkpoint.plan import read_plan
from headrace.engines.checkpoint.rendezvous import connect

PARTITION = 4096


@pytest.fixture(autouse=True)
def ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large enough for all of the model: somebody in the middle need not wait for anybody."""
    monkeypatch.setattr(shm, "RING_BYTES", 1 << 20)


Spoil = Callable[["Middle", Message], Message]


class Middle:
    """Passes messages both ways, and partitions through memory of its own; ``spoil`` sees what the publisher says."""

    def __init__(self, front: str, back: str, spoil: Spoil) -> None:
        self._spoil, self._back = spoil, back
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(front)
        self._listener.listen()
        self._listener.settimeout(20)

    def run(self) -> None:
        publisher, descriptors = connect(
            WeightSource(version=1, transport="shm", address=self._back),
            20,
            lambda what, advice: WeightError(what, advice=advice),
        )
        with self._listener, self._listener.accept()[0] as receiver, publisher:
            receiver.settimeout(20)
            publisher.settimeout(20)
            size = mmap.PAGESIZE + shm.RING_BYTES
            self.theirs = mmap.mmap(descriptors[0], size, prot=mmap.PROT_READ)
            descriptors += [os.memfd_create("middle"), os.memfd_create("middle-read")]
            os.ftruncate(descriptors[2], size)
            os.ftruncate(descriptors[3], mmap.PAGESIZE)
            self.mine = mmap.mmap(descriptors[2], size)
            socket.send_fds(receiver, [b"\0"], descriptors[2:])
            offer = read(publisher)
            sizes = [partition.nbytes for partition in read_plan(offer["plan"]).plan.partitions]
            self.begins = [0, *accumulate(-(-nbytes // shm._ALIGNED) * shm._ALIGNED for nbytes in sizes)]
            say(receiver, offer)
            back = threading.Thread(target=passes, args=(receiver, publisher))
            back.start()
            with suppress(EOFError, OSError):
                while True:
                    message = read(publisher)
                    passed_on = self._spoil(self, message)
                    if message["kind"] == "ready":
                        self.mine[:8] = self.begins[message["index"] + 1].to_bytes(8, "little")
                    say(receiver, passed_on)
            receiver.shutdown(socket.SHUT_RDWR)
            back.join(20)
            for descriptor in descriptors:
                os.close(descriptor)

    def copy(self, index: int, source: int | None = None) -> None:
        """A partition from the publisher's memory into the receiver's; or another one's bytes in its place."""
        begin, end = (mmap.PAGESIZE + self.begins[i] for i in (index, index + 1))
        at = mmap.PAGESIZE + self.begins[index if source is None else source]
        self.mine[begin:end] = self.theirs[at : at + end - begin]


def passes(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)


def read(end: socket.socket) -> Message:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (piece := end.recv(count - len(data))):
                raise EOFError
            data += piece
        return data

    return json.loads(exactly(int.from_bytes(exactly(HEAD), "big")))


def say(end: socket.socket, message: Message) -> None:
    end.sendall(encode(**message))


def honest(middle: Middle, message: Message) -> Message:
    if message["kind"] == "ready":
        middle.copy(message["index"])
    return message


def flipped(middle: Middle, message: Message) -> Message:
    honest(middle, message)
    if message.get("index") == 5:
        middle.mine[mmap.PAGESIZE + middle.begins[5] + 1234] ^= 1
    return message


def stale(middle: Middle, message: Message) -> Message:
    """Partition 5 is announced, in its place there is still what was there before."""
    return message if message.get("index") == 5 else honest(middle, message)


def swapped(middle: Middle, message: Message) -> Message:
    """Partition 5 is announced, in its place there is partition 4."""
    if message.get("index") == 5:
        middle.copy(5, source=4)
        return message
    return honest(middle, message)


def dropped(middle: Middle, message: Message) -> Message:
    """Partition 5 is never announced; the one after it is."""
    honest(middle, message)
    return {**message, "index": 6} if message.get("index") == 5 else message


def renamed(middle: Middle, message: Message) -> Message:
    """Another content with its true hash: only the digest of the whole can tell."""
    honest(middle, message)
    return {**message, "digest": "0" * 32} if message["kind"] == "commit" else message


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (flipped, "partition 5: its hash is"),
        (stale, "partition 5: its hash is"),
        (swapped, "partition 5: its hash is"),
        (dropped, "partition 5: partition 6 came instead"),
        (renamed, "the digest of what came is"),
    ],
)
def test_it_is_refused(spoil: Spoil, why: str, model: dict[str, Tensor], metas: list, tmp_path: Path) -> None:
    names: list[str] = []
    with pytest.raises(WeightError, match=f"weight version 1, rank 0.*{why}"):
        transfer(spoil, model, metas, tmp_path, names)
    assert "half" not in names or spoil is renamed


def test_an_honest_one_changes_nothing(model: dict[str, Tensor], metas: list, tmp_path: Path) -> None:
    names: list[str] = []
    transfer(honest, model, metas, tmp_path, names)
    assert names == list(model)


def transfer(spoil: Spoil, model: dict[str, Tensor], metas: list, folder: Path, names: list[str]) -> None:
    front, back = str(folder / "front"), str(folder / "back")
    middle = Middle(front, back, spoil)
    settings: dict[str, Any] = {"version": 1, "train_step": 1, "transport": "shm", "deadline_s": 20}
    settings |= {"address": back, "partition_bytes": PARTITION, "receivers": 1}
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(publish, iter(model.items()), metas, **settings)
        pool.submit(middle.run)
        source = WeightSource(version=1, transport="shm", address=front)
        try:
            pull(source, lambda name, tensor: names.append(name), deadline_s=20)
        except WeightError:
            assert isinstance(sent.exception(20), WeightError)
            raise
        sent.result(20)


@pytest.mark.parametrize("placed", [False, True], ids=["slots", "places"])
def test_a_bit_that_flips_on_the_way_over_tcp_is_refused(placed: bool) -> None:
    tensor = torch.arange(1 << 18, dtype=torch.int32)  # 16 partitions; what else travels is little
    address = reserve("127.0.0.1")
    settings: dict[str, Any] = {"version": 1, "train_step": 1, "transport": "tcp", "deadline_s": 20}
    settings |= {"address": address, "partition_bytes": 1 << 17}
    host, _, rest = address.rpartition(":")
    port, _, secret = rest.partition("#")
    with ThreadPoolExecutor(2) as pool, socket.create_server(("127.0.0.1", 0)) as listener:
        sent = pool.submit(publish, iter([("a", tensor)]), [("a", "int32", [1 << 18])], **settings)
        between = pool.submit(flips, listener, (host, int(port)), at=tensor.nbytes // 2)
        front = f"127.0.0.1:{listener.getsockname()[1]}#{secret}"
        place = {"a": torch.zeros_like(tensor)}.get if placed else None
        with pytest.raises(WeightError, match=r"partition \d+: its hash is"):
            pull(WeightSource(version=1, transport="tcp", address=front), lambda *_: None, deadline_s=20, place=place)
        assert isinstance(sent.exception(20), WeightError)
        between.result(20)
    release(address)


def flips(listener: socket.socket, publisher: tuple[str, int], at: int) -> None:
    """Passes bytes both ways; one bit of the publisher's byte ``at`` is not the one that was sent."""
    with listener.accept()[0] as front, socket.create_connection(publisher) as back:
        other = threading.Thread(target=passes, args=(front, back))
        other.start()
        passed = 0
        with suppress(OSError):
            while data := bytearray(back.recv(1 << 16)):
                if passed <= at < passed + len(data):
                    data[at - passed] ^= 4
                passed += len(data)
                front.sendall(data)
        with suppress(OSError):
            front.shutdown(socket.SHUT_RDWR)
        other.join(20)
