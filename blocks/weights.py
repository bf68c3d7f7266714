"""Weight versions as data: what a publish committed, where to pull it from, what an engine serves."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Transport = Literal["shm", "cuda-ipc", "tcp", "nixl", "gloo", "nccl", "store"]
"""How the bytes of a version travel; see docs/weights.md."""

Quantization = Literal["fp8"]
"""How the matrices of linear layers travel and are served; see ``headrace.blocks.fp8``."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorSlice(_Frozen):
    """A run of bytes of one tensor inside a partition."""

    name: str
    """Hugging Face name of the parameter."""
    dtype: str
    """torch's name, without the module: bfloat16, float32."""
    shape: list[int]
    """Shape of the whole tensor."""
    start: int
    """First byte of the tensor (row-major) that is in this partition."""
    nbytes: int
    offset: int
    """Where the bytes begin inside the partition."""


class Partition(_Frozen):
    """A bounded slice of a weight version: the unit of streaming, hashing and delta."""

    index: int
    nbytes: int
    slices: list[TensorSlice]


class Adapter(_Frozen):
    """Says that a version is a LoRA adapter, and of what: what is served is the base with this on top."""

    rank: int
    alpha: int
    """The product of the two matrices of a layer is multiplied by alpha / rank."""
    target_modules: tuple[str, ...]
    """Last parts of the adapted layers' names, sorted."""
    base: str
    """Hash of the base's folder, see ``engines.folder.model_id``."""


class Plan(_Frozen):
    """Deterministic layout of a version; equal for sender and receiver of the same model."""

    partitions: list[Partition]
    adapter: Adapter | None = None
    """None: the version is a whole model."""

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.partitions)


class WeightManifest(_Frozen):
    """Commits a version. Written last."""

    version: int
    train_step: int
    plan: Plan
    parent: int | None = None
    """The version that was published before it; None for the first of a publisher."""
    producer: str = ""
    """Who published it: host and process."""
    hashing: Literal["xxh3", "sums"] = "xxh3"
    """How partitions are hashed; see ``headrace.engines.checkpoint.hashes``."""
    hashes: list[str]
    """Hash of each partition's bytes, as hex, in order."""
    digest: str
    """xxh3-128 over the concatenated binary partition hashes: the name of the weights' content."""
    files: list[int] = []
    """Of a kept version: how many partitions lie in each of its files, in order."""


class WeightSource(_Frozen):
    """Where a receiver pulls a version from."""

    version: int
    transport: Transport
    address: str
    """shm, cuda-ipc: path of the publisher's unix socket; store: path of the version's folder below the store's root;
    all others: ``host:port#secret`` as ``reserve`` of the checkpoint engine gave it."""
    store: str = ""
    """URL of the store (transport ``store``)."""
    delta: bool = False
    """Keep what arrives in host memory, so that the next version can come as what changed."""


class Served(_Frozen):
    """What an engine serves, computed from what it loaded, never copied from what it was told."""

    version: int
    digest: str
    nbytes: int = 0
    """Size of the version."""
    wire_nbytes: int = 0
    """Bytes that travelled for it; less than ``nbytes`` where only changes were sent."""
    seconds: float = 0.0
    pause_seconds: float = 0.0
