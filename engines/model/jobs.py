"""The jobs of a model engine: manifests in, manifests out. Every rank runs every job; rank 0 writes."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch
from pydantic import BaseModel, ConfigDict

from headrace.algorithms.advantages import advantages
from headrace.algorithms.batch import Jagged
from headrace.algorithms.diagnostics import mismatch_sums
from headrace.algorithms.sums import finish_metrics
from headrace.blocks.algorithms import Algorithm
from headrace.blocks.manifest import Manifest, Part
from headrace.blocks.recipe import Optim
from headrace.blocks.weights import Quantization, Transport
from headrace.engines.checkpoint import PARTITION_BYTES, WeightError, partition_limit, publish, reserve
from headrace.engines.checkpoint.adapter import CONFIG, config_of
from headrace.engines.checkpoint.carriers.base import unusable
from headrace.engines.experience import schema
from headrace.engines.experience.store import Store
from headrace.engines.model import columns
from headrace.engines.model.base import Experience, StepConfig
from headrace.engines.model.crew import Asked, Unasked
from headrace.engines.model.errors import ModelEngineError, StepRefused
from headrace.engines.model.folder import beside
from headrace.engines.model.fsdp2 import FSDP2Engine
from headrace.engines.model.parity import compared


class _Params(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StageParams(_Params):
    """What every stage job has."""

    store: str
    key: str
    step: int
    shard: int = 0
    inputs: list[str]


class LogprobsParams(StageParams):
    """Job ``logprobs``: commits stage old-logprob or ref-logprob of one shard."""

    which: Literal["old", "ref"]
    generate: Manifest
    compare: Algorithm | None = None
    """Compares old with behaviour in detail, at the clip bounds of this algorithm; only for old."""


class AdvantageParams(StageParams):
    """Job ``advantage``: commits stage advantage of the whole iteration."""

    generate: list[Manifest]
    score: list[Manifest]
    old: list[Manifest] = []
    ref: list[Manifest] = []
    algorithm: Algorithm
    max_tokens: int | None = None
    """Longest response of the rollout; only part of the content key."""


class TrainParams(StageParams):
    """Job ``train``: one iteration; commits stage train."""

    generate: list[Manifest]
    old: list[Manifest] = []
    ref: list[Manifest] = []
    advantage: Manifest
    algorithm: Algorithm
    optim: Optim
    minibatches: int = 1
    total_steps: int
    on_policy_bound: float | None = 0.1
    """See ``StepConfig``."""


class PublishParams(_Params):
    """Job ``publish``: sends the weights as a version to the rollout engines, or keeps it in a store."""

    version: int
    step: int | None = None
    """Refused unless the trainer has trained so many iterations; None: whatever it holds, also the gate's probe."""
    transport: Transport
    address: str
    store: str = ""
    receivers: int = 1
    """Processes that pull."""
    partition_bytes: int = PARTITION_BYTES
    quantization: Quantization | None = None
    """As the rollout engines serve."""
    delta: bool = False
    deadline_s: float


class ProbeParams(_Params):
    """Job ``probe``: other weights for a while, or the old ones again."""

    on: bool


class ReserveParams(_Params):
    """Job ``reserve``: the address of this trainer's publishes over a network."""

    host: str
    """The name of this machine among the receivers."""
    transport: Transport


class SaveParams(_Params):
    """Job ``save``: trainer state after ``step`` iterations, with the data cursor."""

    path: Path
    step: int
    cursor: int


class LoadParams(_Params):
    """Job ``load``: back to saved state, or to the start model for null."""

    path: Path | None


class Jobs:
    """Runs jobs on this rank."""

    def __init__(self, engine: FSDP2Engine) -> None:
        self.engine = engine
        self._last: Manifest | None = None
        self._published: int | None = None
        """Version of the last publish."""
        self._parent: int | None = None
        """The version before that."""
        self._address = ""
        self._methods: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "logprobs": lambda params: self.logprobs(LogprobsParams(**params)).model_dump(mode="json"),
            "advantage": lambda params: self.advantage(AdvantageParams(**params)).model_dump(mode="json"),
            "train": lambda params: self.train(TrainParams(**params)).model_dump(mode="json"),
            "probe": lambda params: self.probe(ProbeParams(**params)),
            "reserve": lambda params: self.reserve(ReserveParams(**params)),
            "save": lambda params: self.save(SaveParams(**params)),
            "load": lambda params: self.load(LoadParams(**params)),
        }

    def run(self, method: str, params: dict[str, Any], asked: Asked | None = None) -> dict[str, Any]:
        """The job's result; only that of rank 0 counts."""
        if method == "publish":
            return self.publish(PublishParams(**params), asked or Unasked())
        if method not in self._methods:
            known = ", ".join(["publish", *self._methods])
            raise ModelEngineError(f"a model engine has no job {method!r}; it has {known}")
        return self._methods[method](params)

    @property
    def _first(self) -> bool:
        return self.engine.gang.rank == 0

    def logprobs(self, params: LogprobsParams) -> Manifest:
        """Log-probabilities of a shard's tokens, unless the store has them under the same key."""
        old = params.which == "old"
        stage, name = ("old-logprob", "old_logprobs") if old else ("ref-logprob", "ref_logprobs")
        store = Store(params.store)
        if (done := self._lookup(store, stage, params)) is not None:
            return done
        began = time.perf_counter()
        table = columns.read(store, [params.generate])
        samples = columns.samples_of(table)
        metrics = {"tokens": float(samples.tokens)}
        info: dict[str, Any] = {"column": name}
        mask, behaviour = (columns.tokens_of(table, c, samples) for c in ("response_mask", "behaviour_logprobs"))
        if old and params.compare is not None:
            found, entropies = self.engine.logprobs_and_entropies(samples, "policy")
            spec = self.engine.spec
            figures, info["parity"] = compared(
                params.compare, table, samples, found, entropies, spec.temperature, Path(spec.model)
            )
            metrics |= figures
        else:
            found = self.engine.logprobs(samples, "policy" if old else "reference")
            if old and mask is not None and behaviour is not None:
                batch = Jagged(samples.offsets, mask.bool())
                metrics |= finish_metrics(mismatch_sums(old=found, behaviour=behaviour, batch=batch))
        metrics["seconds"] = time.perf_counter() - began
        made = pa.table(
            [table["uid"], columns.lists_of(found, samples.offsets)],
            schema=schema.OLD_LOGPROB if old else schema.REF_LOGPROB,
        )
        return self._commit(store, stage, params, made, metrics, info)

    def advantage(self, params: AdvantageParams) -> Manifest:
        """Advantages of the whole iteration. No rank needs another for them."""
        store = Store(params.store)
        if (done := store.lookup("advantage", params.step, params.shard, params.key)) is not None:
            return done
        began = time.perf_counter()
        table = columns.read(store, params.generate, params.score, params.old, params.ref)
        samples = columns.samples_of(table)
        mask = columns.tokens_of(table, "response_mask", samples)
        assert mask is not None
        rewards, parts = columns.rewards_of(table)
        given = {name: columns.tokens_of(table, f"{name}_logprobs", samples) for name in ("old", "ref", "behaviour")}
        kl = params.algorithm.kl
        found = advantages(
            params.algorithm,
            rewards=rewards,
            groups=samples.groups,
            batch=Jagged(samples.offsets, mask.bool()),
            old=given["old"],
            behaviour=given["behaviour"],
            reference=given["ref"],
            reward_parts=parts,
            kl_coefficient=self.engine.kl_coefficient if kl is not None and kl.kind == "reward" else None,
        )
        refused = mask.bool() & ~found.batch.mask & found.accepted.repeat_interleave(samples.offsets.diff())
        values = found.values.masked_fill(refused, float("nan"))
        made = pa.table(
            [
                table["uid"],
                columns.lists_of(values, samples.offsets),
                pa.array(found.accepted.tolist(), pa.bool_()),
                pa.array(found.drop_reasons, pa.string()),
            ],
            schema=schema.ADVANTAGE,
        )
        metrics = found.metrics | {"seconds": time.perf_counter() - began}
        return self._commit(store, "advantage", params, made, metrics, {})

    def train(self, params: TrainParams) -> Manifest:
        """One iteration. Asked for the step that was done last, under the same key, returns what it gave then.

        Raises:
            StepRefused: the engine is at another step; its state has to be restored first.
        """
        engine, store = self.engine, Store(params.store)
        if engine.train_step == params.step + 1 and engine.last_key == params.key:
            done = self._last or store.lookup("train", params.step, params.shard, params.key)
            if done is not None:
                return store.commit(done) if self._first else done
        if engine.train_step != params.step:
            at = "half-way in a step that failed" if engine.train_step is None else f"at step {engine.train_step}"
            raise StepRefused(
                f"the trainer is {at} (its last train job is {engine.last_key or 'none'}), but was asked for step "
                f"{params.step} with key {params.key}: load the state of step {params.step} first"
            )
        experience = self._experience(store, params)
        config = StepConfig(
            params.algorithm, params.optim, params.minibatches, params.total_steps, params.on_policy_bound
        )
        metrics = engine.train(experience, config)
        engine.last_key = params.key
        info = {"train_step": engine.train_step, "ranks": engine.gang.size}
        self._last = self._manifest("train", params, None, metrics, info)
        return store.commit(self._last) if self._first else self._last

    def _experience(self, store: Store, params: TrainParams) -> Experience:
        table = columns.read(store, params.generate, params.old, params.ref, [params.advantage])
        samples = columns.samples_of(table)
        mask, values = (columns.tokens_of(table, name, samples) for name in ("response_mask", "advantages"))
        assert mask is not None and values is not None
        accepted = torch.tensor(table["accepted"].to_pylist(), dtype=torch.bool)
        trained = mask.bool() & accepted.repeat_interleave(samples.offsets.diff()) & ~values.isnan()
        return Experience(
            samples=samples,
            mask=trained,
            advantages=values.nan_to_num(0.0),
            behaviour=columns.tokens_of(table, "behaviour_logprobs", samples),
            old=columns.tokens_of(table, "old_logprobs", samples),
            reference=columns.tokens_of(table, "ref_logprobs", samples),
        )

    def publish(self, params: PublishParams, asked: Asked) -> dict[str, Any]:
        """Sends the weights; the other ranks take part in gathering them. Its figure ``listening`` says when receivers
        may come. Raises StepRefused, WeightError."""
        engine = self.engine
        if params.step not in (None, engine.train_step):
            raise StepRefused(
                f"the trainer is at step {engine.train_step}, not {params.step}: version {params.version} was not "
                "published"
            )
        if not self._first:
            for _ in engine.named_tensors():
                pass
            return {}
        began = time.perf_counter()
        kept = params.transport == "store"
        parent = self._parent if params.version == self._published else self._published
        manifest = publish(
            engine.named_tensors(),
            engine.metas(),
            train_step=engine.train_step or 0,
            wire_dtype=engine.spec.dtype,
            parent=parent,
            adapter=engine.adapter,
            device="cpu" if engine.adapter else str(engine.gang.device),  # it is small, and rollout hosts have no GPU
            beside=self._beside() if kept else None,
            listening=lambda: asked.progress(listening=1),
            unwanted=asked.cancelled.is_set,
            **params.model_dump(exclude={"step"}),
        )
        self._published, self._parent = manifest.version, parent
        seconds = time.perf_counter() - began
        return {
            "version": manifest.version,
            "digest": manifest.digest,
            "hashing": manifest.hashing,
            "quantization": params.quantization,
            "partition_bytes": partition_limit(params.transport, params.partition_bytes),
            "nbytes": manifest.plan.nbytes,
            "seconds": seconds,
        }

    def probe(self, params: ProbeParams) -> dict[str, Any]:
        """See ``ModelEngine.probe``."""
        self.engine.probe(params.on)
        return {"train_step": self.engine.train_step}

    def reserve(self, params: ReserveParams) -> dict[str, Any]:
        """One address for the life of this process. Raises WeightError when it cannot use the transport."""
        if why := unusable(params.transport, cuda=self.engine.gang.device.type == "cuda"):
            raise WeightError(why)
        if self._first and not self._address:
            self._address = reserve(params.host)
        return {"address": self._address}

    def save(self, params: SaveParams) -> dict[str, Any]:
        """Raises StepRefused when the engine is not at the step that the state is asked for."""
        if self.engine.train_step != params.step:
            raise StepRefused(f"the trainer is at step {self.engine.train_step}, not {params.step}: nothing was saved")
        self.engine.save(params.path, params.cursor)
        return {"train_step": params.step}

    def load(self, params: LoadParams) -> dict[str, Any]:
        """Returns the step and the data cursor of what was loaded."""
        self._last = None
        cursor = self.engine.load(params.path)
        return {"train_step": self.engine.train_step, "cursor": cursor}

    def _beside(self) -> dict[str, bytes]:
        """The files that make kept weights a folder for other programs."""
        model, adapter = self.engine.spec.model, self.engine.adapter
        return {CONFIG: config_of(adapter, model)} if adapter else beside(Path(model), self.engine.spec.dtype)

    def _lookup(self, store: Store, stage: str, params: StageParams) -> Manifest | None:
        """What the store has; rank 0 decides for all, as every rank has to take part or none."""
        found = store.lookup(stage, params.step, params.shard, params.key) if self._first else None
        return found if self.engine.gang.agree(found is not None) else None

    def _commit(
        self,
        store: Store,
        stage: str,
        params: StageParams,
        table: pa.Table,
        metrics: dict[str, float],
        info: dict[str, Any],
    ) -> Manifest:
        if not self._first:
            return self._manifest(stage, params, None, metrics, info)
        part = store.write_table(f"experience/{params.step:06d}/{stage}-{params.shard}.arrow", table)
        return store.commit(self._manifest(stage, params, part, metrics, info))

    def _manifest(
        self, stage: str, params: StageParams, part: Part | None, metrics: dict[str, float], info: dict[str, Any]
    ) -> Manifest:
        return Manifest(
            stage=stage,
            step=params.step,
            shard=params.shard,
            key=params.key,
            part=part,
            inputs=params.inputs,
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},  # JSON has no others
            info=info,
        )
