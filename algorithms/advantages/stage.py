"""The advantage stage: who is trained on, and with which advantage."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.advantages.admission import Admission
from headrace.algorithms.advantages.data import Advantages, Samples
from headrace.algorithms.advantages.registry import Estimate, resolve
from headrace.algorithms.advantages.shaping import overlong_penalty
from headrace.algorithms.batch import Jagged
from headrace.algorithms.corrections import importance_weights
from headrace.algorithms.errors import AlgorithmError
from headrace.algorithms.kl import kl_estimate


def advantages(
    config: Any,
    *,
    rewards: Tensor,
    groups: Tensor,
    batch: Jagged,
    old: Tensor | None = None,
    behaviour: Tensor | None = None,
    reference: Tensor | None = None,
    values: Tensor | None = None,
    token_rewards: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
    reward_parts: Mapping[str, Tensor] | None = None,
    sum_pi_squared: Tensor | None = None,
    kl_coefficient: float | None = None,
) -> Advantages:
    """The advantage of every token of the whole global batch.

    ``config``: ``Algorithm``. ``rewards``: float [S], NaN where scoring failed; ``groups``: int64 [S], any ids. Where
    the configuration needs them: ``old`` and ``behaviour`` log-probabilities [T] (``correction.reject``), ``old`` and
    ``reference`` (``kl`` of kind reward), the critic's ``values`` [T] (gae), ``greedy_rewards`` [S] (remax),
    ``reward_parts`` [S] each (gdpo), ``sum_pi_squared`` [T] with ``old`` (optimal_token_baseline).
    ``token_rewards`` [T] are added to ``rewards``, and must be 0 where the policy did not write the token.
    ``kl_coefficient``: in place of the configured one.

    Order: scoring failed → empty response → an input that is not finite → rejected for mismatch → groups of one →
    groups of equal rewards → shaping → baseline. Whoever is dropped is in no baseline. With loss 'dpo' all advantages
    are 0. Raises ``AlgorithmError`` for a missing input or a wrong shape.
    """
    if rewards.shape != (batch.samples,) or groups.shape != (batch.samples,):
        shapes = f"rewards {list(rewards.shape)}, groups {list(groups.shape)}"
        raise AlgorithmError(f"the batch has {batch.samples} samples, but {shapes}")
    if token_rewards is not None and bool((token_rewards != 0).logical_and(~batch.mask).any()):
        raise AlgorithmError("'token_rewards' are not 0 at tokens that are not trained on; they would be lost")
    rewards, parts = rewards.detach(), dict(reward_parts or {})
    tokens = {"old": old, "values": values, "sum_pi_squared": sum_pi_squared, "token_rewards": token_rewards}
    written = batch.lengths()
    admission = Admission.of(batch)
    admission.drop(~rewards.isfinite(), "scoring_failed", "scoring failed")
    admission.drop(written == 0, "empty", "empty response")
    given = tokens | {"behaviour": behaviour, "reference": reference}
    used = {name: x for name, x in given.items() if name in _used(config)}
    admission.drop_not_finite(used, {"greedy_rewards": greedy_rewards} | _weighed(config, parts))
    _drop(config, admission, rewards, groups, old, behaviour)
    if config.overlong is not None:
        rewards = rewards + overlong_penalty(config.overlong, written)
    if config.kl is not None and config.kl.kind == "reward":
        penalty = _kl_reward(config.kl, old, reference, kl_coefficient)
        token_rewards = penalty if token_rewards is None else token_rewards + penalty
    if token_rewards is not None:
        token_rewards = token_rewards.detach().to(rewards.dtype)
    wanted = config.correction.importance if config.correction is not None else None
    if wanted is not None and old is not None and behaviour is not None:
        tokens["importance"] = importance_weights(wanted, old=old, behaviour=behaviour, batch=admission.batch)
    samples = _collect(admission, rewards, groups, token_rewards, greedy_rewards, parts)
    samples = replace(samples, tokens=tokens | {"token_rewards": token_rewards})
    estimate = _estimate(config, samples)
    final = admission.batch
    return Advantages(
        values=_spread(estimate, samples),
        accepted=admission.accepted,
        drop_reasons=admission.reasons,
        batch=final,
        returns=None if estimate.returns is None else final.scatter(estimate.returns),
        metrics=admission.counts | _summary(rewards, groups, samples, estimate),
    )


def _used(config: Any) -> set[str]:
    """The inputs by token that reach the advantages."""
    used = {"token_rewards"}
    kind = None if config.advantage is None else config.advantage.kind
    if kind in ("gae", "plugin"):
        used |= {"values"}
    if kind in ("optimal_token_baseline", "plugin"):
        used |= {"old", "behaviour", "sum_pi_squared"}
    if config.kl is not None and config.kl.kind == "reward":
        used |= {"old", "reference"}
    if config.correction is not None and config.correction.reject:
        used |= {"old", "behaviour"}
    return used


def _weighed(config: Any, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reward parts that the estimator uses."""
    return {name: part for name, part in parts.items() if name in getattr(config.advantage, "weights", {})}


def _kl_reward(term: Any, old: Tensor | None, reference: Tensor | None, coefficient: float | None) -> Tensor:
    """What KL(old ‖ reference) takes off each token's reward [T]."""
    if old is None or reference is None:
        raise AlgorithmError("kl of kind 'reward' needs 'old' and 'reference' log-probabilities")
    return kl_estimate(old, reference, term.estimator)[0] * -(term.coefficient if coefficient is None else coefficient)


def _drop(
    config: Any, admission: Admission, rewards: Tensor, groups: Tensor, old: Tensor | None, behaviour: Tensor | None
) -> None:
    """What the configuration refuses: mismatch, then groups of one, then groups of equal rewards."""
    if config.correction is not None and config.correction.reject:
        admission.reject_mismatch(config.correction.reject, old, behaviour)
    if config.advantage is None or resolve(config.advantage)[0].compares_group:
        admission.drop_lone(groups, getattr(config.advantage, "lone_group", "drop"))
    if config.filter is not None:
        admission.drop_equal(groups, rewards, config.filter.tolerance)


def _collect(
    admission: Admission,
    rewards: Tensor,
    groups: Tensor,
    token_rewards: Tensor | None,
    greedy_rewards: Tensor | None,
    reward_parts: Mapping[str, Tensor],
) -> Samples:
    """The accepted samples, without inputs by token."""
    batch, accepted = admission.batch, admission.accepted
    segments = batch.trained[1].only(accepted)
    own = rewards[accepted]
    whole = own if token_rewards is None else own + segments.sum(batch.gather(token_rewards))
    return Samples(
        rewards=whole,
        group=groups[accepted].unique(return_inverse=True)[1],
        segments=segments,
        batch=batch,
        accepted=accepted,
        own_rewards=own,
        greedy_rewards=None if greedy_rewards is None else greedy_rewards[accepted],
        reward_parts={name: part[accepted] for name, part in reward_parts.items()} | {"reward": whole},
    )


def _spread(estimate: Estimate, samples: Samples) -> Tensor:
    """Advantages of all tokens [T]; 0 at those that are not trained on."""
    if not estimate.per_sample:
        return samples.batch.scatter(estimate.advantages)
    of_sample = samples.rewards.new_zeros(len(samples.accepted))
    of_sample[samples.accepted] = estimate.advantages
    everywhere = of_sample.repeat_interleave(samples.batch.offsets.diff())
    return everywhere if samples.batch.trained[0] is None else torch.where(samples.batch.mask, everywhere, 0.0)


def _estimate(config: Any, samples: Samples) -> Estimate:
    if config.advantage is None:
        return Estimate(torch.zeros_like(samples.rewards), per_sample=True)
    estimator, settings = resolve(config.advantage)
    if not len(samples.rewards):
        nothing = samples.rewards.new_zeros(0)
        return Estimate(nothing, nothing)
    return estimator.function(settings, samples)


def _summary(rewards: Tensor, groups: Tensor, samples: Samples, estimate: Estimate) -> dict[str, float]:
    """Counts, and the distribution of all scored rewards and of the advantages (of samples, or of tokens)."""
    metrics = {
        "samples": float(len(rewards)),
        "groups": float(len(groups.unique())),
        "accepted/samples": float(len(samples.rewards)),
        "accepted/groups": float(samples.groups),
        "accepted/tokens": float(samples.count),
    }
    for name, values in (("reward", rewards[rewards.isfinite()]), ("advantage", estimate.advantages)):
        if len(values):
            mean, (low, high) = values.mean(), values.aminmax()
            deviation = torch.linalg.vector_norm(values - mean) / len(values) ** 0.5
            metrics |= {f"{name}/mean": float(mean), f"{name}/std": float(deviation)}
            metrics |= {f"{name}/min": float(low), f"{name}/max": float(high)}
    return metrics
