"""Transport ``store``: a version is a folder of safetensors files, one for each partition, and ``manifest.json``.

The layout, for any reader: partition i is ``part-<i>.safetensors`` (five digits). A tensor that lies whole in a
partition has its own name, dtype and shape there. A tensor larger than a partition is stored as entries
``<name>@<first byte>`` of type U8: joined in the order of partitions they are its row-major bytes, of the dtype and
shape that the manifest gives. ``manifest.json`` (a ``WeightManifest``) is written last; its hashes are those of the
files' data, which is all that follows the header. A committed version never changes.
"""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod

import torch
import xxhash
from pydantic import ValidationError
from torch import Tensor

from headrace.blocks.weights import Adapter, Partition, WeightManifest, WeightSource
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.export import Release
from headrace.engines.checkpoint.load import Assembler, Expect, Place, Settle, Sink, check_expected, overlap
from headrace.engines.checkpoint.plan import check_plan, digest_of_hashes, dtype_named
from headrace.engines.experience.files import Files, NotInStore, StoreError

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def _path(address: str, index: int) -> str:
    return f"{address}/part-{index:05d}.safetensors"


def _header(partition: Partition) -> bytes:
    """What a safetensors file has before its data; a multiple of 8 bytes."""
    entries: dict[str, dict] = {}
    for piece in partition.slices:
        if piece.dtype not in _CODES:
            raise WeightError(f"{piece.name}: safetensors has no {piece.dtype}", advice="another wire dtype")
        whole = piece.start == 0 and piece.nbytes == dtype_named(piece.dtype).itemsize * prod(piece.shape)
        entries[piece.name if whole else f"{piece.name}@{piece.start}"] = {
            "dtype": _CODES[piece.dtype] if whole else "U8",
            "shape": piece.shape if whole else [piece.nbytes],
            "data_offsets": [piece.offset, piece.offset + piece.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_manifest(files: Files, address: str, version: int) -> WeightManifest | None:
    """The manifest of a version's folder, None when it was never committed. Raises WeightError, StoreError."""
    try:
        manifest = WeightManifest.model_validate_json(files.get(f"{address}/manifest.json"))
    except NotInStore:
        return None
    except ValidationError as error:
        raise WeightError(f"{files.url}/{address}/manifest.json is damaged: {error}", version=version) from error
    if manifest.version != version:
        raise WeightError(f"{files.url}/{address} holds version {manifest.version}", version=version)
    check_plan(manifest.plan)
    if len(manifest.hashes) != len(manifest.plan.partitions) or digest_of_hashes(manifest.hashes) != manifest.digest:
        raise WeightError(f"{files.url}/{address}/manifest.json contradicts itself", version=version)
    return manifest


class StoreSender:
    """Writes one partition while the next is exported, in two buffers. (An object store's client copies one more.)"""

    def __init__(self, release: Release, *, store: str, address: str, deadline_s: float) -> None:
        self._files, self._address, self._deadline_s = Files(store), address, deadline_s
        self._release, self._plan, self._version = release, release.plan, release.version
        self._earlier = read_manifest(self._files, address, release.version)
        self._under_way: list[Future[str]] = []

    def __enter__(self) -> "StoreSender":
        self._headers = [_header(partition) for partition in self._plan.partitions]
        longest = max(len(head) + part.nbytes for head, part in zip(self._headers, self._plan.partitions, strict=True))
        self._memory = [torch.empty(longest, dtype=torch.uint8) for _ in self._headers[:2]]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-keep")
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def buffer(self, partition: Partition) -> Tensor:
        if partition.index >= 2:
            self._hash(partition.index - 2)
        head = len(self._headers[partition.index])
        return self._memory[partition.index % 2][head : head + partition.nbytes]

    def send(self, partition: Partition, found: str | None) -> None:
        assert found is not None
        self._under_way.append(self._pool.submit(self._keep, partition, found))

    def _file(self, partition: Partition) -> memoryview:
        nbytes = len(self._headers[partition.index]) + partition.nbytes
        return self._memory[partition.index % 2].numpy().data[:nbytes]

    def commit(self) -> WeightManifest:
        hashes = [self._hash(index) for index in range(len(self._under_way))]
        manifest = self._earlier or self._release.manifest(hashes, "xxh3")
        self._files.put(f"{self._address}/manifest.json", manifest.model_dump_json().encode())
        return manifest

    def _keep(self, partition: Partition, found: str) -> str:
        file, header = self._file(partition), self._headers[partition.index]
        file[: len(header)] = header
        if self._earlier and (self._earlier.plan != self._plan or self._earlier.hashes[partition.index] != found):
            raise WeightError(
                f"{self._files.url}/{self._address} is committed already, with other content; a version never changes",
                version=self._version,
                partition=partition.index,
                advice="the next version number, or another campaign",
            )
        self._files.put(_path(self._address, partition.index), file)
        return found

    def _hash(self, index: int) -> str:
        try:
            return self._under_way[index].result(self._deadline_s)
        except TimeoutError as error:
            where = f"{self._files.url}/{_path(self._address, index)}"
            raise WeightError(
                f"{where} was not written within {self._deadline_s:g} s", version=self._version, partition=index
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
    assembler = Assembler(sink, settle, place)
    hashes: list[str] = []

    def fetch() -> Iterator[tuple[Partition, memoryview]]:
        for partition in manifest.plan.partitions:
            header = _header(partition)
            path = _path(source.address, partition.index)
            why = ""
            try:
                data = memoryview(files.get(path))
            except StoreError as error:
                raise _refused(str(error), source, partition, rank) from error
            if len(data) != len(header) + partition.nbytes:
                why = f"has {len(data)} bytes, not {len(header) + partition.nbytes}"
            elif data[: len(header)] != header:
                why = "has another header than its plan"
            elif xxhash.xxh3_128_hexdigest(data[len(header) :]) != manifest.hashes[partition.index]:
                why = "has another hash than its manifest"
            if why:
                raise _refused(f"{files.url}/{path} {why}", source, partition, rank)
            yield partition, data[len(header) :]
            del data  # before the next one is read

    def use(step: tuple[Partition, memoryview]) -> None:
        partition, data = step
        assembler.feed(
            partition, torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        )
        hashes.append(manifest.hashes[step[0].index])

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
