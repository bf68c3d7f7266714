"""How a weight version is cut into partitions, and the digest that names its content.

Tensors follow each other in the order given, row-major, without gaps. A tensor that does not fit into the rest of a
partition begins a new one; only tensors larger than a partition span several. Hashes are xxh3-128.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from headrace.blocks.fp8 import quantised, scales_name, scales_shape
from headrace.blocks.weights import Adapter, Partition, Plan, Quantization, TensorSlice
from headrace.engines.checkpoint.errors import WeightError

PARTITION_BYTES = 64 << 20
"""Default size of a partition in host memory."""

Meta = tuple[str, str, Sequence[int]]
"""Hugging Face name, torch's dtype name, shape."""


def dtype_named(name: str) -> torch.dtype:
    """torch's dtype of that name. Raises WeightError for any other name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise WeightError(f"{name!r} is no torch dtype")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wire_metas(metas: Iterable[Meta], wire_dtype: str, quantization: Quantization | None = None) -> list[Meta]:
    """The metas as they travel: floats of 16 bits and more in ``wire_dtype``, anything else unchanged. With
    ``quantization`` two tensors, values and their scales, for each that is quantised."""
    made: list[Meta] = []
    for name, dtype, shape in metas:
        if quantization and quantised(name, shape):
            made += [(name, "float8_e4m3fn", list(shape)), (scales_name(name), "float32", scales_shape(shape))]
        else:
            made.append((name, dtype_name(wire(dtype_named(dtype), wire_dtype)), list(shape)))
    return made


@lru_cache
def wire(dtype: torch.dtype, wire_dtype: str) -> torch.dtype:
    """What a tensor of that dtype travels as."""
    cast = dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return dtype_named(wire_dtype) if cast else dtype


def make_plan(metas: Iterable[Meta], partition_bytes: int = PARTITION_BYTES, adapter: Adapter | None = None) -> Plan:
    """Equal metas give an equal plan, on every machine. ``partition_bytes`` is rounded down to a multiple of 16.

    adapter: what the tensors are when they are no whole model.

    Raises ValueError when it is below 16, WeightError when a name occurs twice.
    """
    limit = partition_bytes // 16 * 16
    if limit < 16:
        raise ValueError(f"partition_bytes is {partition_bytes}; it must be at least 16")
    filled: list[list[TensorSlice]] = [[]]
    used, seen = 0, set[str]()
    for name, dtype, shape in metas:
        if name in seen:
            raise WeightError(f"tensor {name} occurs twice")
        seen.add(name)
        item = dtype_named(dtype).itemsize
        total = prod(shape) * item
        if used + total > limit or used % item:  # the second: every tensor is aligned to its element
            filled.append([])
            used = 0
        start = 0
        while True:
            nbytes = min(total - start, limit - used)
            piece = TensorSlice(name=name, dtype=dtype, shape=list(shape), start=start, nbytes=nbytes, offset=used)
            filled[-1].append(piece)
            start, used = start + nbytes, used + nbytes
            if start == total:
                break
            filled.append([])
            used = 0
    partitions = [slices for slices in filled if slices]
    return Plan(
        partitions=[
            Partition(index=index, nbytes=sum(piece.nbytes for piece in slices), slices=slices)
            for index, slices in enumerate(partitions)
        ],
        adapter=adapter,
    )


class Cut(NamedTuple):
    """A slice as tensors need it."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    nbytes: int
    total: int
    """Bytes of the whole tensor."""
    first: int
    count: int
    """Elements of the slice, and the first one's place in the tensor."""


def cuts_of(plan: Plan) -> list[list[Cut]]:
    """Of every partition, in order; without gaps, so sizes tell offsets."""
    return [[_cut(piece) for piece in partition.slices] for partition in plan.partitions]


def _cut(piece: TensorSlice) -> Cut:
    dtype, shape = dtype_named(piece.dtype), torch.Size(piece.shape)
    size = dtype.itemsize
    place = piece.start // size, piece.nbytes // size
    return Cut(piece.name, dtype, shape, piece.start, piece.nbytes, size * shape.numel(), *place)


@dataclass(frozen=True)
class Planned:
    """A plan and what is made from it once, because every version has the same."""

    plan: Plan
    text: str
    """Its JSON."""
    cuts: list[list[Cut]]


@lru_cache(maxsize=4)
def planned(
    metas: tuple[tuple[str, str, tuple[int, ...]], ...],
    wire_dtype: str,
    quantization: Quantization | None,
    partition_bytes: int,
    adapter: Adapter | None = None,
) -> Planned:
    """The plan of a model's metas on the wire. Raises as ``make_plan``."""
    plan = make_plan(wire_metas(metas, wire_dtype, quantization), partition_bytes, adapter)
    return Planned(plan, plan.model_dump_json(), cuts_of(plan))


@lru_cache(maxsize=4)
def read_plan(text: str) -> Planned:
    """A plan from its JSON, checked.

    Raises ValueError or WeightError when it is none that ``make_plan`` could have made.
    """
    plan = Plan.model_validate_json(text)
    check_plan(plan)
    return Planned(plan, text, cuts_of(plan))


def check_plan(plan: Plan) -> None:
    """Raises WeightError unless the plan is one that ``make_plan`` could have made: every tensor whole, no gaps."""
    open_name, reached = "", 0
    for index, partition in enumerate(plan.partitions):
        offset = 0
        for piece in partition.slices:
            total = prod(piece.shape) * dtype_named(piece.dtype).itemsize
            expected = (open_name, reached, offset) if reached else (piece.name, 0, offset)
            if (piece.name, piece.start, piece.offset) != expected or piece.start + piece.nbytes > total:
                raise WeightError(f"the plan is not contiguous at {piece.name}", partition=index)
            offset += piece.nbytes
            open_name, reached = piece.name, (piece.start + piece.nbytes) % max(total, 1)
        if partition.index != index or partition.nbytes != offset:
            raise WeightError("the plan's partitions do not add up", partition=index)
    if reached:
        raise WeightError(f"the plan ends inside {open_name}")


def metas_of(plan: Plan) -> dict[str, tuple[str, list[int]]]:
    """name → (dtype, shape) of every tensor, in order."""
    return {piece.name: (piece.dtype, piece.shape) for part in plan.partitions for piece in part.slices}


def digest_of_hashes(hashes: Iterable[str]) -> str:
    """The digest of a version: xxh3-128 over the binary partition hashes, in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(value) for value in hashes))


def bytes_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor's values in ``dtype`` as a flat uint8 tensor on the CPU; no copy when it is that already."""
    return tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8)


def digest_of(named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], plan: Plan) -> str:
    """The digest of the tensors under the layout of ``plan``: equal to the manifest's if they are the published ones.

    Takes any order and any device. All tensors are held at once, so pass views of what is served. A tensor in another
    dtype than the plan's is converted, one at a time. Raises WeightError when one is missing or has another shape.
    """
    held = dict(named_tensors)
    hashes: list[str] = []
    name, flat = "", torch.empty(0, dtype=torch.uint8)
    for partition in plan.partitions:
        state = xxhash.xxh3_128()
        for piece in partition.slices:
            if piece.name not in held:
                raise WeightError(f"tensor {piece.name} is missing", partition=partition.index)
            tensor = held[piece.name]
            if list(tensor.shape) != piece.shape:
                raise WeightError(f"tensor {piece.name} has shape {list(tensor.shape)}, the plan says {piece.shape}")
            if piece.name != name:
                name, flat = piece.name, bytes_of(tensor, dtype_named(piece.dtype))
            state.update(flat[piece.start : piece.start + piece.nbytes].numpy().data)
        hashes.append(state.hexdigest())
    return digest_of_hashes(hashes)
