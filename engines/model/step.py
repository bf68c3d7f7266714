"""One iteration of training: optimizer updates over minibatches, each a sum over micro-batches and ranks."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.algorithms.batch import Jagged
from headrace.algorithms.corrections import importance_weights
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.kl import adapt_coefficient
from headrace.algorithms.losses.covariance import select
from headrace.algorithms.objective import policy_objective
from headrace.algorithms.sums import Sums, finish_metrics
from headrace.blocks.algorithms import Algorithm
from headrace.engines.model.base import Experience, StepConfig
from headrace.engines.model.errors import BadBatch, OffPolicy
from headrace.engines.model.optim import apply_update, learning_rate
from headrace.engines.model.packing import minibatches

if TYPE_CHECKING:
    from headrace.engines.model.fsdp2 import FSDP2Engine


def train(engine: "FSDP2Engine", experience: Experience, config: StepConfig, number: int) -> dict[str, float]:
    """All updates of iteration ``number`` on a ``complete`` batch; returns what ``ModelEngine.train`` promises."""
    parts = minibatches(experience.samples, _trainable(experience), config.minibatches)
    everything: list[Sums] = []
    metrics: dict[str, float] = {"updates/done": 0.0, "updates/skipped": 0.0, "samples_computed": 0.0}
    norms: list[float] = []
    for index, part in enumerate(parts):
        batch = experience.jagged.accept(samples=part)
        useful = part & _has_effect(experience, config.algorithm)
        if not bool(useful.any()):
            continue
        sums = backward(engine, experience, config, batch, useful, check=index == 0 and len(parts) > 1)
        update = number * config.minibatches + index
        lr = learning_rate(config.optim, update, config.total_steps * config.minibatches)
        norm = apply_update(engine.trained().optimizer, config.optim, lr)
        engine.trained().weights.masters_changed()
        finite = norm == norm and abs(norm) != float("inf")
        metrics["updates/done" if finite else "updates/skipped"] += 1
        metrics["samples_computed"] += float(useful.sum())
        metrics["lr"] = lr
        norms += [norm] if finite else []
        everything.append(sums)
        _adapt_kl(engine, config.algorithm, sums)
    finished = finish_metrics(Sums.merged(everything)) if everything else {"tokens": 0.0, "samples": 0.0}
    for name in ("policy/loss", "reference/kl_loss", "policy/entropy_bonus"):
        if name in finished:
            finished[name] /= len(everything)  # each update's loss is a mean already
    if norms:
        metrics["grad_norm"] = sum(norms) / len(norms)
    return metrics | finished


def complete(engine: "FSDP2Engine", experience: Experience, config: StepConfig) -> Experience:
    """The batch, with ``old`` where it is needed before the step's own forward pass. Raises BadBatch."""
    algorithm = config.algorithm
    if algorithm.needs_critic or algorithm.loss.kind == "dpo":
        what = "a critic" if algorithm.needs_critic else "loss 'dpo'"
        raise BadBatch(f"the algorithm needs {what}, which this model engine does not train")
    kl, correction = algorithm.kl, algorithm.correction
    missing = []
    if experience.reference is None and kl is not None and kl.kind == "loss":
        missing.append("reference")
    if experience.behaviour is None and correction is not None and correction.importance is not None:
        missing.append("behaviour")
    if missing:
        raise BadBatch(f"the step needs log-probabilities that the batch does not have: {', '.join(missing)}")
    selects = algorithm.loss.kind in ("clip_cov", "kl_cov")
    if experience.old is None and (config.minibatches > 1 or selects or _normalised(algorithm) is not None):
        return replace(experience, old=engine.logprobs(experience.samples, "policy"))
    return experience


def _normalised(algorithm: Algorithm):
    importance = algorithm.correction.importance if algorithm.correction else None
    return importance if importance is not None and importance.normalise else None


def _trainable(experience: Experience) -> Tensor:
    """Samples with a token that is trained on, bool [S]."""
    return experience.jagged.lengths() > 0


def _has_effect(experience: Experience, algorithm: Algorithm) -> Tensor:
    """Samples whose loss depends on the weights, bool [S]: where advantages are all 0, only KL and entropy terms do."""
    if algorithm.entropy_coefficient or (algorithm.kl is not None and algorithm.kl.kind == "loss"):
        return torch.ones(len(experience.samples), dtype=torch.bool)
    return experience.jagged.accept(tokens=experience.advantages != 0).lengths() > 0


def backward(
    engine: "FSDP2Engine", experience: Experience, config: StepConfig, batch: Jagged, useful: Tensor, check: bool
) -> Sums:
    """Gradient of one update's loss, summed over this rank's micro-batches and, by the sharding, over ranks."""
    algorithm, policy, device = config.algorithm, engine.trained(), engine.gang.device
    denominators = _denominators(experience, algorithm, batch)
    columns = {
        "advantages": experience.advantages,
        "behaviour": experience.behaviour,
        "reference": experience.reference,
        "old": experience.old,
        "selected": _selected(experience, algorithm, batch, engine.spec.seed),
    }
    with_entropy = algorithm.entropy_coefficient > 0
    policy.optimizer.zero_grad()  # a step that failed may have left some
    sums = Sums()
    for packed in engine.micro_batches(experience.samples, useful):
        new, entropy = policy.weights.module(packed, engine.spec.temperature, entropy=with_entropy)
        count = len(packed.tokens)
        new, entropy = new[:count], None if entropy is None else entropy[:count]
        places = packed.tokens.cpu()
        given = {name: None if x is None else x[places].to(device) for name, x in columns.items()}
        if given["old"] is None:
            given["old"] = new.detach()
        objective = policy_objective(
            algorithm,
            new=new,
            entropy=entropy,
            batch=Jagged(packed.offsets, batch.mask[places].to(device)),
            denominators=denominators,
            kl_coefficient=engine.kl_coefficient,
            **given,
        )
        # Sharding averages gradients over ranks; the loss is a sum over them.
        (objective.loss * engine.gang.size).backward()
        policy.weights.collect_gradients()
        sums = sums.merge(objective.sums)
    if engine.gang.size > 1:
        added, largest = (x.to(device) for x in sums.to_tensors())
        dist.all_reduce(added)
        if len(largest):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        sums = sums.from_tensors(added, largest)
    if check and config.on_policy_bound is not None:
        _assert_on_policy(finish_metrics(sums), config.on_policy_bound)
    return sums


def _denominators(experience: Experience, algorithm: Algorithm, batch: Jagged) -> Denominators:
    """Counted over the whole batch of the update, which every rank has."""
    importance = _normalised(algorithm)
    if importance is None:
        return Denominators.of(batch)
    assert experience.old is not None and experience.behaviour is not None
    weights = importance_weights(importance, old=experience.old, behaviour=experience.behaviour, batch=batch)
    return Denominators.of(batch, weights=weights)


def _selected(experience: Experience, algorithm: Algorithm, batch: Jagged, seed: int) -> Tensor | None:
    if algorithm.loss.kind not in ("clip_cov", "kl_cov"):
        return None
    assert experience.old is not None
    return select(algorithm.loss, logprobs=experience.old, advantages=experience.advantages, batch=batch, seed=seed)


def _assert_on_policy(metrics: dict[str, float], bound: float) -> None:
    gap = metrics.get("ratio/mean_abs_log", 0.0)
    if gap > bound:
        raise OffPolicy(
            f"mean |log(new/old)| of the first minibatch is {gap:.3g} nats (bound {bound:g}), but nothing was "
            f"trained since 'old' was computed: it belongs to other weights, another temperature or other tokens"
        )


def _adapt_kl(engine: "FSDP2Engine", algorithm: Algorithm, sums: Sums) -> None:
    kl = algorithm.kl
    if kl is None or kl.adaptive is None:
        return
    metrics = finish_metrics(sums)
    before = kl.coefficient if engine.kl_coefficient is None else engine.kl_coefficient
    if "reference/kl_k1" in metrics:
        engine.kl_coefficient = adapt_coefficient(kl, before, metrics["reference/kl_k1"], int(metrics["samples"]))
