"""Publish a weight version, pull a weight version: streaming, hashed, within two partitions of memory per side."""

import time
from collections.abc import Iterable, Iterator
from typing import Literal

from torch import Tensor

from headrace.blocks.weights import Plan, Served, WeightManifest, WeightSource
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.export import Export, Sender
from headrace.engines.checkpoint.kept import StoreSender, pull_store
from headrace.engines.checkpoint.load import Expect, Sink
from headrace.engines.checkpoint.plan import PARTITION_BYTES, Meta, make_plan, wire_metas
from headrace.engines.checkpoint.shm import ShmSender
from headrace.engines.checkpoint.shm_pull import pull_shm
from headrace.engines.experience.files import StoreError


def publish(
    tensors: Iterator[tuple[str, Tensor]],
    metas: Iterable[Meta],
    *,
    version: int,
    train_step: int,
    transport: Literal["shm", "store"],
    address: str,
    store: str = "",
    receivers: int = 1,
    partition_bytes: int = PARTITION_BYTES,
    wire_dtype: str = "bfloat16",
    deadline_s: float = 60.0,
) -> WeightManifest:
    """Sends ``tensors`` as weight version ``version`` and returns the manifest that commits it.

    tensors, metas: every tensor by its Hugging Face name, whole, in one order; floats are cast to ``wire_dtype``.
    shm: waits for ``receivers`` receivers at the unix socket ``address``; goes on with those that came when the
    deadline ends, and drops one that dies or is silent for ``deadline_s``. Two partitions of shared memory stay with
    the process for the next version (``release`` gives them back). store: keeps the version below ``store`` in the
    folder ``address``.
    deadline_s: the longest that one wait may take, in seconds. The iterator is always read to its end, so that other
    ranks which take part in its gathers are never left in one.

    Memory: two partitions, and one tensor of the iterator. Raises WeightError; the version then does not exist.
    """
    try:
        plan = make_plan(wire_metas(metas, wire_dtype), partition_bytes)
        if not plan.partitions:
            raise WeightError("there is no tensor to publish", version=version)
        export = Export(tensors, plan, wire_dtype, version)
        with _sender(plan, version, train_step, transport, address, store, receivers, deadline_s) as sender:
            export.run(sender)
            return sender.commit()
    except StoreError as error:
        raise WeightError(str(error), version=version) from error
    finally:
        for _ in tensors:
            pass


def pull(
    source: WeightSource,
    sink: Sink,
    *,
    deadline_s: float = 60.0,
    expect: Expect | None = None,
    rank: int = 0,
) -> Served:
    """Streams a version into ``sink(name, tensor)`` and returns what arrived: the digest is computed from its bytes.

    sink: gets every tensor, whole, on the CPU, in the wire dtype; the memory is read-only and only valid during the
    call, so copy out of it. Each partition's hash is checked before its tensors are handed over.
    deadline_s: the longest that one wait may take, in seconds; a receiver may come before its publisher.
    expect: name → (dtype, shape); anything else is refused before the first byte. rank: names this receiver in errors.

    Memory: two partitions, and one tensor when that is larger than a partition. Raises WeightError; what was loaded
    until then must not be served.
    """
    began = time.monotonic()
    nbytes = 0

    def counted(name: str, tensor: Tensor) -> None:
        nonlocal nbytes
        nbytes += tensor.nbytes
        sink(name, tensor)

    receive = pull_shm if source.transport == "shm" else pull_store
    try:
        digest = receive(source, counted, deadline_s, expect, rank)
    except StoreError as error:
        raise WeightError(str(error), version=source.version, rank=rank) from error
    return Served(version=source.version, digest=digest, nbytes=nbytes, seconds=time.monotonic() - began)


def _sender(
    plan: Plan,
    version: int,
    train_step: int,
    transport: str,
    address: str,
    store: str,
    receivers: int,
    deadline_s: float,
) -> Sender:
    if transport == "store":
        return StoreSender(store, address, plan, version, train_step, deadline_s)
    if transport == "shm":
        return ShmSender(address, plan, version, train_step, receivers, deadline_s)
    raise WeightError(f"there is no transport {transport!r}", version=version, advice="shm or store")
