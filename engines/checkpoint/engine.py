"""Publish a weight version, pull a weight version: streaming, hashed, in memory of a fixed size."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext

import torch
from torch import Tensor

from headrace.blocks.weights import Adapter, Quantization, Served, Transport, WeightManifest, WeightSource
from headrace.engines.checkpoint.carriers.base import unusable
from headrace.engines.checkpoint.carriers.names import ON_GPU, SLOTS
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.export import Export, Release, Sender
from headrace.engines.checkpoint.kept import StoreSender, pull_store
from headrace.engines.checkpoint.load import Expect, Place, Settle, Sink
from headrace.engines.checkpoint.plan import PARTITION_BYTES, Meta, planned
from headrace.engines.checkpoint.stream import StreamSender
from headrace.engines.checkpoint.stream_pull import Joined
from headrace.engines.experience.files import StoreError


def publish(
    tensors: Iterator[tuple[str, Tensor]],
    metas: Iterable[Meta],
    *,
    version: int,
    train_step: int,
    transport: Transport,
    address: str,
    store: str = "",
    beside: Mapping[str, bytes] | None = None,
    receivers: int = 1,
    partition_bytes: int = PARTITION_BYTES,
    wire_dtype: str = "bfloat16",
    quantization: Quantization | None = None,
    parent: int | None = None,
    delta: bool = False,
    adapter: Adapter | None = None,
    device: str = "cpu",
    deadline_s: float = 60.0,
    listening: Callable[[], None] | None = None,
    unwanted: Callable[[], bool] = lambda: False,
) -> WeightManifest:
    """Sends ``tensors`` as weight version ``version`` and returns the manifest that commits it.

    tensors, metas: every tensor by its Hugging Face name, whole, in one order; floats are cast to ``wire_dtype``.
    quantization: fp8 sends the matrices of linear layers in 8 bits, each with its scales (``headrace.blocks.fp8``).
    store: keeps the version below ``store`` in the folder ``address``, with the files ``beside`` (name → content:
    configuration, tokenizer), so that it is a plain Hugging Face folder. What lies there without a manifest is deleted
    first. All other transports wait for ``receivers`` receivers at ``address`` (shm, cuda-ipc: a unix socket's path;
    else what ``reserve`` gave), go on with those that came when the deadline ends, and drop one that dies or is silent
    for ``deadline_s`` (gloo, nccl: losing one ends the publish). Two partitions of memory stay with the process for the
    next version (``release`` gives them back).
    parent: the version before this one. delta: keep this version in host memory, and send only what changed since the
    one that is kept to receivers that all have it. adapter: what the tensors are when they are no whole model.
    device: where the weights are; nixl's slots are there.
    listening: called as soon as receivers are expected; who is asked to come only then never waits for a publish that
    failed before it. unwanted: asked while this waits for receivers; ends the publish when it says so (listening and
    unwanted: all transports but the store).
    deadline_s: the longest that one wait may take, in seconds. The iterator is always read to its end, so that other
    ranks which take part in its gathers are never left in one.

    Memory: twice ``partition_bytes`` (in four slots, which hold partitions of half that size; the store takes two whole
    ones, and shm 8 MiB), and one tensor of the iterator; with ``delta`` one copy of the version more, over shm a
    partition as well. Raises WeightError; the version then does not exist.
    """
    try:
        found = tuple((name, dtype, tuple(shape)) for name, dtype, shape in metas)
        made = planned(found, wire_dtype, quantization, partition_limit(transport, partition_bytes), adapter)
        if not made.plan.partitions:
            raise WeightError("there is no tensor to publish", version=version)
        release = Release(made.plan, version, train_step, parent, f"{socket.gethostname()}:{os.getpid()}")
        export = Export(tensors, made, wire_dtype, quantization, version)
        where = _slots_on(transport, device, version, changes=delta)
        sender: Sender
        if transport == "store":
            sender = StoreSender(release, store=store, address=address, beside=beside or {}, deadline_s=deadline_s)
        else:
            sender = StreamSender(
                release,
                made.text,
                transport=transport,
                address=address,
                receivers=receivers,
                device=where,
                delta=delta,
                deadline_s=deadline_s,
                listening=listening,
                unwanted=unwanted,
            )
        if delta and (transport == "store" or where.type != "cpu"):
            raise WeightError(f"transport {transport} here has no delta", version=version, advice="delta off, or tcp")
        with sender:
            export.run(sender)
            return sender.commit()
    except StoreError as error:
        raise WeightError(str(error), version=version) from error
    finally:
        for _ in tensors:
            pass


def partition_limit(transport: Transport, partition_bytes: int) -> int:
    """Bytes of a partition at most, where each side takes twice ``partition_bytes`` of memory. With the same limit and
    hashing the same weights have the same digest, whatever way they take."""
    return partition_bytes if transport in ("store", "shm") else 2 * partition_bytes // SLOTS


def pull(
    source: WeightSource,
    sink: Sink,
    *,
    deadline_s: float = 60.0,
    expect: Expect | None = None,
    adapter: Adapter | None = None,
    rank: int = 0,
    device: str = "cpu",
    settle: Settle | None = None,
    place: Place | None = None,
    ahead: "Ahead | None" = None,
) -> Served:
    """Streams a version into ``sink(name, tensor)`` and returns what arrived: the digest is computed from its bytes.

    sink: gets every tensor, whole, in the wire dtype, on the CPU (cuda-ipc, nccl, and nixl between GPUs: on the GPU);
    the memory is read-only and only valid during the call, so copy out of it. Each partition's hash is checked before
    its tensors are handed over. settle: called after the tensors of each partition; they are valid until then.
    place: name → the tensor's own memory (contiguous, wire dtype, whole), where it has one that is used as it is: then
    the bytes go there at once, before their hash is compared and without the sink, also of a tensor that spans
    partitions; in host memory the hash is that of what was written there.
    deadline_s: the longest that one wait may take, in seconds. A receiver may come before its publisher, half a minute
    at most.
    expect: name → (dtype, shape), and adapter: what they are when they are no whole model; anything else is refused
    before the first byte. rank: names this receiver in errors. device: where this engine's weights are.
    ahead: of the same source, expect, adapter, rank and device: it has joined already.

    Memory: twice ``partition_bytes``, and one tensor when that spans partitions; with ``source.delta`` one copy of the
    version more. Raises WeightError; what was loaded until then must not be served.
    """
    began = time.monotonic()
    try:
        if source.transport == "store":
            digest, nbytes = pull_store(source, sink, deadline_s, expect, adapter, rank, settle, place)
            travelled = nbytes
        else:
            with closing(
                ahead.joined() if ahead else _join(source, deadline_s, expect, adapter, rank, device)
            ) as joined:
                digest, nbytes, travelled = joined.run(sink, settle, place)
    except StoreError as error:
        raise WeightError(str(error), version=source.version, rank=rank) from error
    seconds = time.monotonic() - began
    return Served(version=source.version, digest=digest, nbytes=nbytes, wire_nbytes=travelled, seconds=seconds)


class Ahead:
    """Joins a publish in a thread of its own, while the engine still works: when it pauses, the conversation before the
    first partition has been had. Not for transport store."""

    def __init__(
        self,
        source: WeightSource,
        *,
        deadline_s: float = 60.0,
        expect: Expect | None = None,
        adapter: Adapter | None = None,
        rank: int = 0,
        device: str = "cpu",
    ) -> None:
        """See ``pull``."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="weights-join")
        self._left = threading.Event()
        self._joining = pool.submit(_join, source, deadline_s, expect, adapter, rank, device, self._left.is_set)
        pool.shutdown(wait=False)

    def joined(self) -> Joined:
        """Waits for it. Raises WeightError."""
        return self._joining.result()

    def close(self) -> None:
        """For one that nobody pulls from; one that has not joined yet takes nobody's place."""
        self._left.set()
        self._joining.add_done_callback(lambda done: done.exception() or done.result().close())


def _join(
    source: WeightSource,
    deadline_s: float,
    expect: Expect | None,
    adapter: Adapter | None,
    rank: int,
    device: str,
    left: Callable[[], bool] = lambda: False,
) -> Joined:
    where = _slots_on(source.transport, device, source.version, rank)
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext():
        return Joined(source, deadline_s, expect, adapter, rank, where, left)


def _slots_on(
    transport: str, device: str, version: int, rank: int | None = None, changes: bool = False
) -> torch.device:
    """Where the slots of this side lie. Raises WeightError when this process cannot use the transport."""
    here = torch.device(device)
    if why := unusable(transport, cuda=here.type == "cuda", changes=changes):
        raise WeightError(why, version=version, rank=rank)
    if transport not in (*ON_GPU, "nixl") or here.type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if here.index is None else here.index)
