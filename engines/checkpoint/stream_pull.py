"""Pulling what a publisher sends: the same for every transport but the store."""

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.blocks.weights import Adapter, Partition, WeightSource
from headrace.engines.checkpoint.carriers.base import Intake, make_intake
from headrace.engines.checkpoint.carriers.group import held
from headrace.engines.checkpoint.carriers.names import SLOTS
from headrace.engines.checkpoint.copying import copy_all_hashed
from headrace.engines.checkpoint.delta import Kept, kept_for
from headrace.engines.checkpoint.hashes import hash_of
from headrace.engines.checkpoint.link import Link
from headrace.engines.checkpoint.load import (
    Assembler,
    Expect,
    Place,
    Settle,
    Sink,
    check_expected,
    in_host_memory,
    overlap,
)
from headrace.engines.checkpoint.messages import Message
from headrace.engines.checkpoint.plan import digest_of_hashes, read_plan


class Joined:
    """A receiver that has joined a publish and taken its plan; no byte of a tensor has come yet."""

    def __init__(
        self,
        source: WeightSource,
        deadline_s: float,
        expect: Expect | None,
        adapter: Adapter | None,
        rank: int,
        device: torch.device,
        left: Callable[[], bool],
    ) -> None:
        """left: asked before it joins; one that has left takes nobody's place. Raises WeightError, of which the
        publisher hears."""
        self._link = Link(source, deadline_s, rank)
        try:
            self._pull = _Pull(self._link, source, expect, adapter, rank, device, left)
        except BaseException as error:
            if not left():  # a receiver that says nothing is none
                self._link.fail(error)
            self._link.close()
            raise

    def run(self, sink: Sink, settle: Settle | None, place: Place | None) -> tuple[str, int, int]:
        """Streams the version into ``sink``; returns the digest of what came, its bytes, and the bytes that travelled.
        Raises WeightError."""
        link, pulled = self._link, self._pull
        try:
            assembler = Assembler(pulled.cuts, sink, settle, place)
            try:
                digest = pulled.run(assembler)
            finally:
                pulled.intake.close()
            link.send("done", digest=digest)
            return digest, assembler.nbytes, pulled.wire_nbytes
        except BaseException as error:
            link.fail(error)
            raise

    def close(self) -> None:
        """The publisher goes on without a receiver that leaves before ``run`` has ended."""
        self._link.close()


class _Pull:
    """One version."""

    def __init__(
        self,
        link: Link,
        source: WeightSource,
        expect: Expect | None,
        adapter: Adapter | None,
        rank: int,
        device: torch.device,
        left: Callable[[], bool],
    ) -> None:
        self._link = link
        offer = link.receive("plan")
        if offer["version"] != source.version:
            raise link.error(f"the publisher at {link.where} sends version {offer['version']}")
        try:
            read = read_plan(offer["plan"])
        except ValueError as error:
            raise link.error(f"the publisher's plan cannot be used: {error}") from error
        self.plan, self.cuts = read.plan, read.cuts
        check_expected(self.plan, expect, adapter)
        if offer["transport"] != source.transport:
            raise link.error(f"the publisher sends over {offer['transport']}, not {source.transport}")
        where = torch.device(offer["device"])
        if where.type != device.type:
            raise link.error(
                f"the publisher's slots are on {where.type}, this engine's on {device.type}", "transport tcp or store"
            )
        self._hashing = offer["hashing"]
        self.intake: Intake = make_intake(source.transport, link, offer, device)
        self._begins = None if offer["changes"] else self.intake.begins
        self._kept: Kept | None = kept_for(source.address, rank) if source.delta else None
        self.hashes: list[str] = []
        self.wire_nbytes = 0
        base = self._kept.digest_for(self.plan) if self._kept else ""
        group = held(source.transport) if source.transport in ("gloo", "nccl") else ""
        if left():
            raise link.error("this engine has left")
        link.send("join", rank=rank, pid=os.getpid(), base=base, held=group)
        told = link.receive("begin")
        if self._kept is not None:
            self._kept.begin(self.plan)
        self.intake.form(told["group"])

    def run(self, assembler: Assembler) -> str:
        """Returns the digest of what came."""
        link = self._link

        def use(came: _Came) -> None:
            partition, data = came.partition, came.data
            host = in_host_memory(came.places) if self._hashing == "xxh3" else None
            found = came.found or self.intake.arrived(link, came.slot)
            fed = False
            if data is not None and host is not None:
                found = copy_all_hashed(host, data)
            elif data is not None and not found:
                placed = [place for place in came.places if place is not None]
                if fed := self._hashing == "sums" and len(placed) == len(came.places):
                    found = assembler.feed_hashed(partition, data, placed)
                else:
                    found = hash_of(data, self._hashing)
            self._verify(found, came.announced, partition, listens=self.intake.instant)
            self.hashes.append(found)
            if data is None or host is not None:
                assembler.landed(partition)
            elif not fed:
                assembler.feed(partition, data, came.places)
            link.send("ack", index=partition.index)

        fetched = self._fetched(assembler)
        if self.intake.instant:
            for came in fetched:
                use(came)
        else:
            overlap(fetched, use, link.fail, None, ahead=SLOTS - 1 if self.intake.begins is None else 1)
        link.index = None
        digest = digest_of_hashes(self.hashes)
        if (told := link.receive("commit")["digest"]) != digest:
            raise link.error(
                f"the digest of what came is {digest}, the publisher's is {told}", "publish the version again"
            )
        if self._kept is not None:
            self._kept.commit(self.hashes)
        return digest

    def _verify(self, found: str, announced: str, partition: Partition, *, listens: bool) -> None:
        """listens: whether this thread is the one that receives. Who was dropped may have read what was written since;
        then the publisher has said so before."""
        if found == announced:
            return
        link = self._link
        if listens:
            link.look()
        what = f"its hash is {found}, the publisher's is {announced}"
        raise link.gave_up or link.error(what, "publish the version again", partition.index)

    def _fetched(self, assembler: Assembler) -> Iterator["_Came"]:
        link = self._link
        for partition in self.plan.partitions:
            link.index = partition.index
            slot = partition.index % SLOTS
            ready = self._announced(partition) if self._begins is None else None
            if self._begins is not None and partition.nbytes:
                self._begins(link)
            # Not before a byte came: who is asked for places takes them for spoilt from then on.
            places = assembler.places(partition)
            if ready is not None:
                data = self._data(partition, ready, places)
            else:
                data = self._whole(partition, slot, places)
                ready = self._announced(partition)
                if self._kept is not None and data is not None:
                    data = self._kept.take(partition, "full", data)
            found = ""
            if self.intake.begins is not None:  # a ring was read: only this thread hears that it was written again
                found = self.intake.arrived(link, slot) or hash_of(_not_placed(data), self._hashing)
                self._verify(found, ready["hash"], partition, listens=True)
            yield _Came(partition, slot, ready["hash"], places, data, found)

    def _announced(self, partition: Partition) -> Message:
        ready = self._link.receive("ready")
        if ready["index"] != partition.index:
            raise self._link.error(f"partition {ready['index']} came instead")
        return ready

    def _whole(self, partition: Partition, slot: int, places: list[Tensor | None]) -> Tensor | None:
        """All bytes of a partition; None where they come where they are used."""
        self.wire_nbytes += partition.nbytes
        if not partition.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        sizes = [cut.nbytes for cut in self.cuts[partition.index]]
        into = in_host_memory(places) if self._kept is None and self._hashing == "xxh3" else None
        return self.intake.fetch(self._link, slot, partition.nbytes, sizes, into)

    def _data(self, partition: Partition, ready: Message, places: list[Tensor | None]) -> Tensor | None:
        """The same, however they were sent."""
        form, nbytes, slot = ready["form"], int(ready["nbytes"]), partition.index % SLOTS
        if form != "full" and self._kept is None:
            raise self._link.error("only its changes were sent, but this engine keeps no base")
        if not 0 <= nbytes <= partition.nbytes or (form == "full" and nbytes != partition.nbytes):
            raise self._link.error(f"{nbytes} bytes were announced for {partition.nbytes}")
        if form == "full":
            came = self._whole(partition, slot, places)
        else:
            self.wire_nbytes += nbytes
            came = torch.empty(0, dtype=torch.uint8)
            if nbytes:
                came = self.intake.fetch(self._link, slot, nbytes, [nbytes], None)
        if self._kept is None or came is None:
            return came
        self.intake.arrived(self._link, slot)
        try:
            return self._kept.take(partition, form, came)
        except ValueError as error:
            raise self._link.error(f"its changes make no sense: {error}", "publish the version again") from error


def _not_placed(data: Tensor | None) -> Tensor:
    assert data is not None  # what was put into places has a hash
    return data


class _Came(NamedTuple):
    """A partition that was fetched, or is being fetched."""

    partition: Partition
    slot: int
    announced: str
    """The publisher's hash."""
    places: list[Tensor | None]
    data: Tensor | None
    """Its bytes; None where they are in its places, or will have ``arrived`` there."""
    found: str
    """Its hash, where that is known."""
