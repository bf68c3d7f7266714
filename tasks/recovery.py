"""Brings a fresh or found engine to the state that the campaign is in.

A trainer loads the last durable state and repeats the stored batches since: the same jobs on the same bytes, so on a
CPU the weights are the same bits. A rollout engine pulls the current version from the trainer.
"""

import asyncio
import json
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import xxhash
from prefect.logging import get_run_logger

from headrace.blocks.lease import Lease
from headrace.blocks.manifest import Manifest
from headrace.blocks.weights import Served, WeightSource
from headrace.engines.experience.store import Store
from headrace.engines.rpc.client import EngineClient
from headrace.engines.rpc.errors import JobFailed
from headrace.tasks import placement
from headrace.tasks.retention import Shelf, versions

if TYPE_CHECKING:
    from headrace.tasks.campaign import Campaign


class SyncMismatch(RuntimeError):
    """A rollout engine serves other weights than were published. The campaign stops: nothing may be trained on them."""


async def restore_actor(c: "Campaign", client: EngineClient) -> None:
    """Brings a trainer to the end of what the campaign has trained, and under the parity gate's probe if that is on."""
    await _replay(c, client)
    if c.probed is not None:
        job = f"probe-{c.attempt}-{next(c.sync_numbers)}"
        await client.call("probe", {"on": True}, job_id=job, deadline_s=c.recipe.deadlines.stage)


async def _replay(c: "Campaign", client: EngineClient, ahead: int = 1) -> None:
    """ahead: how many steps more than are committed the trainer may have done."""
    log = get_run_logger()
    trained = c.trained()
    at = (await client.health())["train_step"]
    # One more: the trainer stepped and the campaign died before it heard; the stage will ask again.
    if at is not None and len(trained) <= at <= len(trained) + ahead:
        return
    usable = [step for step in c.states.complete() if step <= len(trained)]
    start = usable[-1] if usable else 0
    log.info(
        "trainer is at step %d, the campaign at %d: restoring step %d and repeating the rest", at, len(trained), start
    )
    deadline = c.recipe.deadlines.stage
    load = {"path": str(c.folder / c.states.path(start))} if usable else {"path": None}
    await client.call("load", load, job_id=f"load-{start}-{c.attempt}-{client.lease.epoch}", deadline_s=deadline)
    for manifest in trained[start:]:
        params = json.loads(c.store.get(train_job_path(manifest.step)))
        job = f"replay-{manifest.step}-{c.attempt}-{client.lease.epoch}"
        await client.call("train", params, job_id=job, deadline_s=deadline)
    if trained[start:] and c.recipe.roles.actor.gpus:
        # Repeated on a GPU they may differ in the last bits: engines get what the trainer has now.
        c.engines.serving.clear()


def train_job_path(step: int) -> str:
    """Where the parameters of a train job are kept, to repeat it."""
    return f"jobs/train-{step:06d}.json"


def record_groups(c: "Campaign", step: int, advantages: Manifest, key: str) -> None:
    """Writes into the ledger what became of the groups of a trained step. Doing it again changes nothing."""
    table = c.store.read_table(advantages.part)
    trained: set[int] = set()
    dropped: dict[int, str] = {}
    rows = zip(*(table[name].to_pylist() for name in ("uid", "accepted", "drop_reason")), strict=True)
    for uid, accepted, reason in rows:
        group = int(uid.split("-")[0])
        if accepted:
            trained.add(group)
        else:
            dropped.setdefault(group, reason)
    # trained finishes the step in the ledger, so it comes last.
    c.ledger.dropped(step, {group: reason for group, reason in dropped.items() if group not in trained}, key)
    c.ledger.trained(step, sorted(trained), key)


def complete_ledger(c: "Campaign", trained: list[Manifest]) -> None:
    """Records the last trained step, in case the earlier attempt ended between training and recording."""
    if trained:
        last = trained[-1]
        params = json.loads(c.store.get(train_job_path(last.step)))
        record_groups(c, last.step, Manifest.model_validate(params["advantage"]), last.key)


async def _source(c: "Campaign", tag: str, rollouts: list[Lease]) -> WeightSource:
    """Where the rollout engines pull the current version from."""
    actor = await c.engines.client("actor", 0)
    transport = placement.transport_for(c.recipe, actor.lease, rollouts)
    store = ""
    if transport == "store":
        address, store = versions(c.store, c.weights_folder).path(c.version), c.url
    elif transport in placement.LOCAL:
        # One address for the campaign: the publisher reuses its memory from version to version.
        address = str(Path(tempfile.gettempdir()) / f"headrace-{xxhash.xxh3_64_hexdigest(c.url.encode())}.sock")
    else:
        where = {"host": urlsplit(actor.lease.url).hostname, "transport": transport}
        told = await c.engines.call("actor", 0, "reserve", where, job_id=f"reserve-{tag}")
        address = told["address"]
    return WeightSource(
        version=c.version, transport=transport, address=address, store=store, delta=c.recipe.weights.delta
    )


async def sync(c: "Campaign", rollouts: list[int]) -> list[Served]:
    """Publishes the current version from the actor, has these rollout engines load it and compares what they serve.

    A trainer that is a step ahead, of which the campaign has not heard, is brought back first: else its weights would
    be served under the version before.

    Raises:
        SyncMismatch: version or digest of an engine is not the published one.
        EngineLost: an engine died on the way.
    """
    try:
        return await _sync(c, rollouts)
    except JobFailed as error:
        if error.kind != "StepRefused":
            raise
    await _replay(c, await c.engines.client("actor", 0), ahead=0)
    return await _sync(c, rollouts)


async def _sync(c: "Campaign", rollouts: list[int]) -> list[Served]:
    spec, deadline = c.recipe.weights, c.recipe.deadlines.sync
    tag = f"{c.version}-{c.attempt}-{next(c.sync_numbers)}"
    receivers = await asyncio.gather(*(c.engines.client("rollout", index) for index in rollouts))
    source = await _source(c, tag, [client.lease for client in receivers])
    publish = {
        "version": c.version,
        "step": c.version if c.probed is None else None,
        "transport": source.transport,
        "address": source.address,
        "store": source.store,
        "receivers": len(rollouts) * placement.workers(c.recipe),
        "partition_bytes": (spec.partition_mb or placement.partition_mb(c.recipe, source.transport)) << 20,
        "quantization": getattr(c.recipe.rollout.backend, "quantization", None),
        "delta": spec.delta,
        "deadline_s": deadline,
    }
    load = {"source": source.model_dump(), "deadline_s": deadline}
    try:
        async with asyncio.TaskGroup() as tasks:
            listening = asyncio.Event()
            sending = tasks.create_task(_publish(c, publish, tag, listening))
            # An engine that is asked to load waits, and so do its requests: not for a publish that may never begin.
            await listening.wait()
            loading = [
                tasks.create_task(
                    c.engines.call_on(client, "rollout", index, "load_weights", load, f"load-{tag}", deadline)
                )
                for index, client in zip(rollouts, receivers, strict=True)
            ]
    except BaseExceptionGroup as group:
        # One side's failure cancels the other; the first is the cause.
        raise group.exceptions[0] from group
    served = [Served.model_validate(task.result()) for task in loading]
    published = sending.result() or publish | {"digest": served[0].digest, "hashing": "xxh3"}
    digest = published["digest"]
    for index, answer in zip(rollouts, served, strict=True):
        if (answer.version, answer.digest) != (c.version, digest):
            raise SyncMismatch(
                f"rollout-{index} serves version {answer.version} with digest {answer.digest}, but version {c.version} "
                f"was published with digest {digest}. Nothing was trained on it. Look at the log of its engine host; "
                f"starting the campaign again loads the weights again"
            )
    if c.probed is None:
        trained = c.trained()[c.version - 1] if c.version else None
        record_version(c.store, c.version, published, trained, c.weights_folder)
    for index in rollouts:
        c.engines.serving[index] = c.version
    if source.transport == "store":
        c.defer(tidy_versions(c, versions(c.store, c.weights_folder)))
    return served


async def _publish(c: "Campaign", params: dict[str, Any], tag: str, listening: asyncio.Event) -> dict[str, Any] | None:
    """What the publish job gives; ``listening`` is set when receivers may come.

    None where the version is committed already and the trainer cannot repeat it: the kernels of a GPU may add in
    another order, so a trainer that repeated its steps after a crash may have other last bits than the version that it
    published before. That version stays what the engines serve.
    """
    deadline = c.recipe.deadlines.sync

    def heard(figures: dict[str, float]) -> None:
        if figures.get("listening"):
            listening.set()

    made = None
    try:
        made = await c.engines.call(
            "actor", 0, "publish", params, job_id=f"publish-{tag}", deadline_s=deadline, on_progress=heard
        )
    except JobFailed as error:
        if error.kind != "VersionExists" or not c.recipe.roles.actor.gpus:
            raise
        get_run_logger().warning(
            "version %d is committed, and the trainer, which repeated its steps, has other bits: engines serve the "
            "committed ones (%s)", c.version, error,
        )  # fmt: skip
    listening.set()
    return made


def tidy_versions(c: "Campaign", shelf: Shelf) -> Coroutine[Any, Any, None]:
    """Deletes the versions that may go now: neither served, nor the last checkpoint's, nor kept by the recipe."""
    needed = {c.version, *c.engines.serving.values(), *c.states.complete()[-1:]}
    return asyncio.to_thread(shelf.tidy, c.recipe.weights.keep, c.version, needed)


def version_path(version: int, folder: str = "weights") -> str:
    """Where it is kept which weights a version was."""
    return f"{folder}/v{version:06d}.json"


def record_version(
    store: Store, version: int, published: dict[str, Any], trained: Manifest | None, folder: str = "weights"
) -> None:
    """Keeps the digest of a version that is served, and what it depends on, beside the train stage that made it.

    published: what the publish job gave: digest, hashing, partition_bytes, quantization. Digests under which the
    version was served before, which only a GPU's repeated steps change, are kept as ``earlier``.

    Raises SyncMismatch when the version has the bits of the one before although its train stage moved the weights: the
    trainer then published something else than what it trained.
    """
    before, digest = version_path(version - 1, folder), published["digest"]
    moved = trained is not None and all(trained.metrics.get(name) for name in ("updates/done", "lr", "grad_norm"))
    if moved and store.exists(before) and json.loads(store.get(before))["digest"] == digest:
        raise SyncMismatch(
            f"version {version} has the same bits as version {version - 1} (digest {digest}), but the train stage "
            f"between them stepped the optimizer: what was published is not what was trained, or the learning rate is "
            f"too small for the weights' dtype. Look at the actor's log; raise train.optim.lr"
        )
    path = version_path(version, folder)
    known = json.loads(store.get(path)) if store.exists(path) else {}
    earlier = [*known.get("earlier", []), *([known["digest"]] if known and known["digest"] != digest else [])]
    layout = {name: published[name] for name in ("hashing", "partition_bytes", "quantization")}
    made = {"version": version, "digest": digest, **layout, "trained": trained.key if trained else ""}
    store.put(path, json.dumps(made | ({"earlier": earlier} if earlier else {})).encode())
