"""How a kept version lies in files: as any Hugging Face folder, so that whoever reads those reads it.

The bytes of partitions follow each other in ``model.safetensors``, or, above ``FILE_BYTES``, in
``model-00001-of-00007.safetensors`` and so on with ``model.safetensors.index.json``. A tensor that spans partitions
lies whole in one file, so partitions stay small whatever the size of tensors. A LoRA adapter lies in
``adapter_model.safetensors``, as PEFT has it.
"""

import json
from dataclasses import dataclass
from math import prod

from headrace.blocks.weights import Partition, Plan
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.plan import dtype_named

FILE_BYTES = 4 << 30
"""Of a file at most, unless one tensor with those in its partitions is larger."""

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"

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


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file: its header, then the bytes of its partitions without gaps."""

    name: str
    header: bytes
    partitions: list[Partition]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(partition.nbytes for partition in self.partitions)

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors that lie in it."""
        return [piece.name for partition in self.partitions for piece in partition.slices if piece.start == 0]


def partitions_per_file(plan: Plan, limit: int) -> list[int]:
    """How many partitions each file takes. A file ends where no tensor is cut, and the next one is out of alignment or
    would make it larger than ``limit``."""
    chains: list[list[Partition]] = []
    for partition in plan.partitions:
        if partition.slices[0].start:
            chains[-1].append(partition)
        else:
            chains.append([partition])
    counts, used = [0], 0
    for chain in chains:
        nbytes = sum(partition.nbytes for partition in chain)
        widest = max(dtype_named(piece.dtype).itemsize for partition in chain for piece in partition.slices)
        if counts[-1] and (used + nbytes > limit or used % widest):
            counts.append(0)
            used = 0
        counts[-1] += len(chain)
        used += nbytes
    return counts


def files_of(plan: Plan, counts: list[int]) -> list[WeightFile]:
    """The files of a plan whose partitions are shared out by ``counts``. Raises WeightError for a dtype that
    safetensors has not."""
    files, first = [], 0
    stem = "adapter_model" if plan.adapter else "model"
    for number, count in enumerate(counts, 1):
        name = f"{stem}.safetensors" if len(counts) == 1 else f"{stem}-{number:05d}-of-{len(counts):05d}.safetensors"
        partitions = plan.partitions[first : first + count]
        files.append(WeightFile(name, _header(partitions), partitions))
        first += count
    return files


def index_of(files: list[WeightFile]) -> bytes:
    """What ``model.safetensors.index.json`` holds."""
    size = sum(partition.nbytes for file in files for partition in file.partitions)
    names = {name: file.name for file in files for name in file.tensors}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=1).encode()


def _header(partitions: list[Partition]) -> bytes:
    """What a safetensors file has before its data; a multiple of 8 bytes."""
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for partition in partitions:
        for piece in partition.slices:
            if piece.dtype not in _CODES:
                raise WeightError(f"{piece.name}: safetensors has no {piece.dtype}", advice="another wire dtype")
            if piece.start == 0:
                first = begin + piece.offset
                entries[piece.name] = {
                    "dtype": _CODES[piece.dtype],
                    "shape": piece.shape,
                    "data_offsets": [first, first + dtype_named(piece.dtype).itemsize * prod(piece.shape)],
                }
        begin += partition.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
