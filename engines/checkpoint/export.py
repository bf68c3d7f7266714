"""The sending half that all transports share: named tensors into the bytes of partitions."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from headrace.blocks.fp8 import quantised, scales_name
from headrace.blocks.weights import Partition, Plan, Quantization, WeightManifest
from headrace.engines.checkpoint.copying import CACHED, LARGE, copy_all
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.fp8 import to_blocks
from headrace.engines.checkpoint.hashes import Hashing
from headrace.engines.checkpoint.plan import Cut, Planned, digest_of_hashes, dtype_name, wire

_TOGETHER = 64 << 20
"""Bytes of tensors, or a quarter of a slot if that is more, whose copies are queued on a GPU at a time, so that they
are alive together."""
_NONE = torch.empty(0)
_END = "nothing", torch.float32, _NONE


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

    def room(self, partition: Partition) -> Generator[Tensor, None, None]:
        """Memory for the partition's bytes, uint8, in as many parts as it has; waits until each is free. Taking the
        next one, or the end, says that the one before is filled."""
        ...

    def send(self, partition: Partition, found: str | None) -> None:
        """Hands over what ``room`` gave, with its hash where the bytes are in host memory; returns at once."""
        ...

    def commit(self) -> WeightManifest:
        """Waits until all of it has arrived, and commits."""
        ...


class Export:
    """Reads the iterator once, in the plan's order, and casts into the partitions: one tensor is alive at a time, on a
    GPU also those of 64 MiB or a quarter of a slot."""

    def __init__(
        self,
        tensors: Iterator[tuple[str, Tensor]],
        plan: Planned,
        wire_dtype: str,
        quantization: Quantization | None,
        version: int,
    ) -> None:
        self._tensors, self._version = on_wire(tensors, wire_dtype, quantization), version
        self._plan, self._cuts = plan.plan, plan.cuts
        self._flat = _NONE

    def run(self, sender: Sender) -> None:
        """Fills and sends all partitions. Raises WeightError when the tensors are not those of the plan."""
        for partition in self._plan.partitions:
            cuts = self._cuts[partition.index]
            # Closed after a failure, too: what the room began ends here, in this thread.
            with closing(sender.room(partition)) as room:
                memory = next(room, torch.empty(0, dtype=torch.uint8))
                on_host = memory.device.type == "cpu"
                sender.send(partition, self._fill_host(cuts, memory, room) if on_host else self._fill_gpu(cuts, memory))
        self._flat = _NONE
        if (extra := next(self._tensors, None)) is not None:
            raise self._error(f"the tensors do not end where their metas do: {extra[0]} follows")

    def _fill_host(self, cuts: list[Cut], memory: Tensor, room: Iterator[Tensor]) -> str:
        """Returns the hash of what it wrote: made here, piece by piece, while it is in the cache."""
        state, out, at = xxhash.xxh3_128(), memory.numpy(), 0
        for cut in cuts:
            values, size, done = self._values(cut), cut.dtype.itemsize, 0
            same = values.dtype == cut.dtype and values.device.type == "cpu" and values.is_contiguous()
            source = values.view(torch.uint8).numpy() if same else None
            # From a GPU's memory every copy costs the way there, from the host's it is the cache that counts.
            most = CACHED if values.device.type == "cpu" else cut.nbytes
            while done < cut.nbytes:
                if at == out.size:
                    out, at = next(room).numpy(), 0
                count = min(out.size - at, cut.nbytes - done, most)
                written = out[at : at + count]
                if source is not None:
                    written[:] = source[done : done + count]
                else:
                    part = values[done // size : (done + count) // size]
                    torch.from_numpy(written).view(cut.dtype).copy_(part)
                state.update(written.data)
                at, done = at + count, done + count
        next(room, None)
        return state.hexdigest()

    def _fill_gpu(self, cuts: list[Cut], memory: Tensor) -> None:
        # What the iterator made may get its memory back as soon as its copy is queued: the stream that made it waits.
        waiting: tuple[list[Tensor], list[Tensor]] = [], []
        held = 0
        with torch.no_grad():
            for cut, room in zip(cuts, memory.split_with_sizes([cut.nbytes for cut in cuts]), strict=True):
                target, part = room.view(cut.dtype), self._values(cut)
                if part.device != memory.device or (part.dtype != cut.dtype and cut.total >= LARGE):
                    target.copy_(part)
                else:
                    waiting[0].append(target)
                    waiting[1].append(part)
                    held += part.nbytes
                if held >= max(_TOGETHER, memory.numel() // 4):
                    copy_all(*waiting)
                    waiting, held = ([], []), 0
                del part  # before the next one is made
            copy_all(*waiting)

    def _values(self, cut: Cut) -> Tensor:
        """What goes into the slice: values of any dtype, flat."""
        if cut.start == 0:
            self._flat = _NONE  # before the next one is made
            self._flat = self._next(cut)
        return self._flat if cut.nbytes == cut.total else self._flat[cut.first : cut.first + cut.count]

    def _next(self, cut: Cut) -> Tensor:
        found, dtype, tensor = next(self._tensors, _END)
        if found != cut.name or tensor.shape != cut.shape or dtype != cut.dtype:
            made = dtype_name(dtype)
            came = found if found == "nothing" else f"{found} {made} {list(tensor.shape)}"
            wanted = f"{cut.name} {dtype_name(cut.dtype)} {list(cut.shape)}"
            raise self._error(f"the tensors are not those of the metas: expected {wanted}, got {came}")
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
