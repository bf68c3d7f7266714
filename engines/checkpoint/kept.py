"""Transport ``store``: a version is a Hugging Face folder (see ``layout``) that ``manifest.json`` commits.

``manifest.json`` (a ``WeightManifest``) is written last; its hashes are those of the partitions' bytes. Before it comes
``config.json``, where there is one, so that no other program takes a folder for a model before all of it is there. What
a publish left that never committed is deleted by the next one. A committed version never changes.
"""

from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import torch
import xxhash
from pydantic import ValidationError
from torch import Tensor

from headrace.blocks.weights import Adapter, Partition, WeightManifest, WeightSource
from headrace.engines.checkpoint.adapter import CONFIG
from headrace.engines.checkpoint.copying import copy_all_hashed
from headrace.engines.checkpoint.errors import VersionExists, WeightError
from headrace.engines.checkpoint.export import Release
from headrace.engines.checkpoint.layout import FILE_BYTES, INDEX, MANIFEST, files_of, index_of, partitions_per_file
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
from headrace.engines.checkpoint.plan import check_plan, cuts_of, digest_of_hashes
from headrace.engines.experience.files import Files, NotInStore, StoreError


def read_manifest(files: Files, address: str, version: int) -> WeightManifest | None:
    """The manifest of a version's folder, None when it was never committed. Raises WeightError, StoreError."""
    where = f"{files.url}/{address}/{MANIFEST}"
    try:
        manifest = WeightManifest.model_validate_json(files.get(f"{address}/{MANIFEST}"))
    except NotInStore:
        return None
    except ValidationError as error:
        raise WeightError(f"{where} is damaged: {error}", version=version) from error
    if manifest.version != version:
        raise WeightError(f"{files.url}/{address} holds version {manifest.version}", version=version)
    check_plan(manifest.plan)
    partitions = len(manifest.plan.partitions)
    whole = len(manifest.hashes) == partitions == sum(manifest.files) and min(manifest.files, default=0) > 0
    if not whole or digest_of_hashes(manifest.hashes) != manifest.digest:
        raise WeightError(f"{where} contradicts itself", version=version)
    return manifest


class StoreSender:
    """Writes one partition while the next is exported, in two buffers. (An object store's client copies one more.)"""

    def __init__(
        self, release: Release, *, store: str, address: str, beside: Mapping[str, bytes], deadline_s: float
    ) -> None:
        self._files, self._address, self._deadline_s = Files(store), address, deadline_s
        self._release, self._beside = release, beside
        self._earlier = read_manifest(self._files, address, release.version)
        if self._earlier and self._earlier.plan != release.plan:
            raise self._committed_already(None)
        self._counts = self._earlier.files if self._earlier else partitions_per_file(release.plan, FILE_BYTES)
        self._layout = files_of(release.plan, self._counts)
        self._begins = {file.partitions[0].index: file for file in self._layout}
        self._ends = {file.partitions[-1].index for file in self._layout}
        self._under_way: list[Future[str]] = []
        self._open = ExitStack()
        """Of the file that is being written."""

    def __enter__(self) -> "StoreSender":
        if self._earlier is None:
            self._files.remove_folder(self._address)
        longest = max(partition.nbytes for partition in self._release.plan.partitions)
        self._memory = [torch.empty(longest, dtype=torch.uint8) for _ in self._release.plan.partitions[:2]]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-keep")
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        abandoned = WeightError("the publish ended before this file did")
        self._open.__exit__(type(abandoned), abandoned, None)

    def room(self, partition: Partition) -> Generator[Tensor, None, None]:
        if partition.index >= 2:
            self._hash(partition.index - 2)
        yield self._memory[partition.index % 2][: partition.nbytes]

    def send(self, partition: Partition, found: str | None) -> None:
        assert found is not None
        self._under_way.append(self._pool.submit(self._keep, partition, found))

    def commit(self) -> WeightManifest:
        hashes = [self._hash(index) for index in range(len(self._under_way))]
        manifest = self._earlier or self._release.manifest(hashes, "xxh3").model_copy(update={"files": self._counts})
        beside = dict(self._beside)
        if len(self._layout) > 1:
            beside[INDEX] = index_of(self._layout)
        last = {name: beside.pop(name) for name in ("config.json", CONFIG) if name in beside}
        for name, data in {**beside, **last, MANIFEST: manifest.model_dump_json().encode()}.items():
            self._files.put(f"{self._address}/{name}", data)
        return manifest

    def _keep(self, partition: Partition, found: str) -> str:
        index = partition.index
        if index:
            self._under_way[index - 1].result()  # raises what the one before raised: its file is gone
        if self._earlier and self._earlier.hashes[index] != found:
            raise self._committed_already(index)
        try:
            if (file := self._begins.get(index)) is not None:
                self._sink = self._open.enter_context(self._files.writing(f"{self._address}/{file.name}"))
                self._sink.write(file.header)
            self._sink.write(self._memory[index % 2][: partition.nbytes].numpy().data)
            if index in self._ends:
                self._open.close()
        except BaseException as error:
            self._open.__exit__(type(error), error, error.__traceback__)  # as a StoreError, where it is one
            raise
        return found

    def _committed_already(self, partition: int | None) -> VersionExists:
        return VersionExists(
            f"{self._files.url}/{self._address} is committed already, with other content; a version never changes",
            version=self._release.version,
            partition=partition,
            advice="the next version number, or another campaign",
        )

    def _hash(self, index: int) -> str:
        try:
            return self._under_way[index].result(self._deadline_s)
        except TimeoutError as error:
            raise WeightError(
                f"{self._files.url}/{self._address} took no bytes for {self._deadline_s:g} s",
                version=self._release.version,
                partition=index,
            ) from error


def pull_store(
    source: WeightSource,
    sink: Sink,
    deadline_s: float,
    expect: Expect | None,
    adapter: Adapter | None,
    rank: int,
    settle: Settle | None,
    place: Place | None,
) -> tuple[str, int]:
    """Streams a kept version into ``sink``; returns the digest of what was read, and its bytes. Raises WeightError."""
    files = Files(source.store)
    manifest = read_manifest(files, source.address, source.version)
    if manifest is None:
        raise WeightError(
            f"{files.url}/{source.address} has no manifest: the version was not published, or not to its end",
            version=source.version,
            rank=rank,
            advice="publish the version again",
        )
    check_expected(manifest.plan, expect, adapter)
    assembler = Assembler(cuts_of(manifest.plan), sink, settle, place)
    hashes: list[str] = []

    def fetch() -> Iterator[tuple[Partition, memoryview]]:
        for file in files_of(manifest.plan, manifest.files):
            path = f"{source.address}/{file.name}"
            if (size := files.size(path)) not in (None, file.nbytes):
                why = f"{files.url}/{path} has {size} bytes, not {file.nbytes}"
                raise _refused(why, source, file.partitions[0], rank)
            at, header = 0, file.header
            for partition in file.partitions:
                wanted = len(header) + partition.nbytes
                try:
                    data = memoryview(files.get(path, at, at + wanted) if wanted else b"")
                except StoreError as error:
                    raise _refused(str(error), source, partition, rank) from error
                why = ""
                if data[: len(header)] != header:
                    why = "has another header than its plan"
                elif xxhash.xxh3_128_hexdigest(data[len(header) :]) != manifest.hashes[partition.index]:
                    why = "has another hash than its manifest"
                if why:
                    raise _refused(f"{files.url}/{path} {why}", source, partition, rank)
                yield partition, data[len(header) :]
                del data  # before the next one is read
                at, header = at + wanted, b""

    def use(step: tuple[Partition, memoryview]) -> None:
        partition, data = step
        came = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        places, expected = assembler.places(partition), manifest.hashes[partition.index]
        if (host := in_host_memory(places)) is None:
            assembler.feed(partition, came, places)
        else:
            if (found := copy_all_hashed(host, came)) != expected:
                raise _refused(f"the hash of what was written is {found}, not {expected}", source, partition, rank)
            assembler.landed(partition)
        hashes.append(expected)

    try:
        overlap(fetch(), use, lambda error: None, deadline_s)
    except TimeoutError as error:
        raise WeightError(
            f"{files.url}: no partition came for {deadline_s:g} s",
            version=source.version,
            rank=rank,
            partition=len(hashes),
        ) from error
    return digest_of_hashes(hashes), assembler.nbytes


def _refused(what: str, source: WeightSource, partition: Partition, rank: int) -> WeightError:
    return WeightError(
        what, version=source.version, rank=rank, partition=partition.index, advice="publish the version again"
    )
