"""The sending half that all transports share: named tensors into the bytes of partitions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from headrace.blocks.fp8 import quantised, scales_name
from headrace.blocks.weights import Partition, Plan, Quantization, WeightManifest
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.fp8 import to_blocks
from headrace.engines.checkpoint.hashes import Hashing
from headrace.engines.checkpoint.plan import digest_of_hashes, dtype_name, dtype_named, wire

_CACHED = 1 << 20
"""Bytes that are copied and hashed at a time: a part of a core's second cache."""


@dataclass(frozen=True)
class Release:
    """What is published."""

    plan: Plan
    version: int
    train_step: int
    parent: int | None
    producer: str

    def manifest(self, hashes: list[str], hashing: Hashing) -> WeightManifest:
        """What commits it, given its partitions' hashes in order."""
        return WeightManifest(
            version=self.version,
            train_step=self.train_step,
            plan=self.plan,
            parent=self.parent,
            producer=self.producer,
            hashing=hashing,
            hashes=hashes,
            digest=digest_of_hashes(hashes),
        )


class Sender(Protocol):
    """One publish through one transport. Leaving its ``with`` block before ``commit`` aborts it."""

    def __enter__(self) -> "Sender": ...

    def __exit__(self, *raised: object) -> None: ...

    def buffer(self, partition: Partition) -> Tensor:
        """Memory for the partition's bytes, uint8 [nbytes]; waits until one of two is free."""
        ...

    def send(self, partition: Partition, found: str | None) -> None:
        """Hands over what ``buffer`` gave, with its hash where the bytes are in host memory; returns at once."""
        ...

    def commit(self) -> WeightManifest:
        """Waits until all of it has arrived, and commits."""
        ...


class Export:
    """Reads the iterator once, in the plan's order, and casts into the partitions: one tensor is alive at a time."""

    def __init__(
        self,
        tensors: Iterator[tuple[str, Tensor]],
        plan: Plan,
        wire_dtype: str,
        quantization: Quantization | None,
        version: int,
    ) -> None:
        self._tensors, self._plan, self._version = on_wire(tensors, wire_dtype, quantization), plan, version
        self._flat: Tensor | None = None

    def run(self, sender: Sender) -> None:
        """Fills and sends all partitions. Raises WeightError when the tensors are not those of the plan."""
        for partition in self._plan.partitions:
            sender.send(partition, self._fill(partition, sender.buffer(partition)))
        self._flat = None
        if (extra := next(self._tensors, None)) is not None:
            raise self._error(f"the tensors do not end where their metas do: {extra[0]} follows")

    def _fill(self, partition: Partition, memory: Tensor) -> str | None:
        """Returns the hash of what it wrote into host memory: made here, piece by piece, while it is in the cache."""
        state = xxhash.xxh3_128() if memory.device.type == "cpu" else None
        for piece in partition.slices:
            if piece.start == 0:
                self._flat = None  # before the next one is made
                self._flat = self._next(piece.name, piece.dtype, piece.shape)
            if piece.nbytes and self._flat is not None:
                dtype = dtype_named(piece.dtype)
                first = piece.start // dtype.itemsize
                target = memory[piece.offset : piece.offset + piece.nbytes]
                step = piece.nbytes if state is None else _CACHED
                for begin in range(0, piece.nbytes, step):
                    written = target[begin : begin + step]
                    source = first + begin // dtype.itemsize
                    written.view(dtype).copy_(self._flat[source : source + written.numel() // dtype.itemsize])
                    if state is not None:
                        state.update(written.numpy().data)
        return state.hexdigest() if state is not None else None

    def _next(self, name: str, dtype: str, shape: list[int]) -> Tensor:
        found, wanted, tensor = next(self._tensors, ("nothing", torch.float32, torch.empty(0)))
        made = dtype_name(wanted)
        if (found, made, list(tensor.shape)) != (name, dtype, shape):
            came = found if found == "nothing" else f"{found} {made} {list(tensor.shape)}"
            raise self._error(f"the tensors are not those of the metas: expected {name} {dtype} {shape}, got {came}")
        return tensor.detach().reshape(-1)

    def _error(self, what: str) -> WeightError:
        return WeightError(what, version=self._version, advice="metas and tensors from the same model, in one order")


def on_wire(
    tensors: Iterator[tuple[str, Tensor]], wire_dtype: str, quantization: Quantization | None
) -> Iterator[tuple[str, torch.dtype, Tensor]]:
    """(name, dtype on the wire, tensor) of everything that travels, as ``wire_metas`` has it; keeps no tensor."""
    for name, tensor in tensors:
        if quantization and quantised(name, tensor.shape):
            values, scales = to_blocks(tensor.detach())
            del tensor
            yield name, values.dtype, values
            del values
            yield scales_name(name), scales.dtype, scales
            del scales
        else:
            dtype = wire(tensor.dtype, wire_dtype)
            yield name, dtype, tensor
            del tensor
