"""Estimators that compare the samples of one group."""

from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.advantages.data import Samples, whiten
from headrace.algorithms.advantages.registry import Estimate, estimator
from headrace.algorithms.errors import AlgorithmError


@estimator("grpo", compares_group=True)
def grpo(config: Any, x: Samples) -> Estimate:
    """(r − mean) / (std + ε) (Shao et al., 2024, arXiv 2402.03300).

    Without ``std``, r − mean (Dr.GRPO; Liu et al., 2025, arXiv 2503.20783).
    """
    return Estimate(_relative(x, x.rewards, config.epsilon if config.std else None), per_sample=True)


@estimator("rloo", compares_group=True)
def rloo(config: Any, x: Samples) -> Estimate:
    """r − mean of the others (Kool et al., 2019; Ahmadian et al., 2024, arXiv 2402.14740), optionally / (std + ε)."""
    size = x.group_sizes[x.group]
    others = (x.group_sum(x.rewards)[x.group] - x.rewards) / (size - 1).clamp(min=1)
    advantage = x.rewards - others
    return Estimate(advantage / (x.group_std(x.rewards) + config.epsilon) if config.std else advantage, per_sample=True)


@estimator("opo", compares_group=True)
def opo(config: Any, x: Samples) -> Estimate:
    """r − Σ length r / Σ length over the group (Hao et al., 2025, arXiv 2505.23585)."""
    length = x.segments.lengths.to(x.rewards.dtype)
    baseline = x.group_sum(length * x.rewards) / x.group_sum(length)
    return Estimate(x.rewards - baseline[x.group], per_sample=True)


@estimator("gpg", compares_group=True)
def gpg(config: Any, x: Samples) -> Estimate:
    """α (r − mean) / norm, α = samples / samples of nonzero reward (Chu et al., 2025, arXiv 2504.02546)."""
    alpha = len(x.rewards) / max(1, int(x.rewards.count_nonzero()))
    return Estimate(alpha * _relative(x, x.rewards, None) / config.norm, per_sample=True)


@estimator("grpo_passk", compares_group=True)
def grpo_passk(config: Any, x: Samples) -> Estimate:
    """The best of a group gets its lead over the second best, optionally / (std + ε); others 0 (arXiv 2503.19595)."""
    by_reward = x.rewards.sort(descending=True, stable=True).indices
    order = by_reward[x.group[by_reward].sort(stable=True).indices]
    first = x.group_sizes.long().cumsum(0) - x.group_sizes.long()
    best = order[first]
    second = order[(first + 1).clamp(max=len(order) - 1)]
    lead = torch.where(x.group_sizes > 1, x.rewards[best] - x.rewards[second], 0.0)
    advantage = torch.zeros_like(x.rewards).index_copy(0, best, lead)
    return Estimate(advantage / (x.group_std(x.rewards) + config.epsilon) if config.std else advantage, per_sample=True)


@estimator("gdpo", compares_group=True)
def gdpo(config: Any, x: Samples) -> Estimate:
    """Σ weight × GRPO of each reward part, whitened over tokens (Liu et al., 2026, arXiv 2601.05242)."""
    missing = sorted(set(config.weights) - set(x.reward_parts))
    if missing:
        known = ", ".join(sorted(x.reward_parts))
        raise AlgorithmError(
            f"advantage 'gdpo' weighs reward parts that were not given: {', '.join(missing)} (given: {known})"
        )
    parts = [weight * _relative(x, x.reward_parts[name], config.epsilon) for name, weight in config.weights.items()]
    return Estimate(whiten(x.segments.expand(torch.stack(parts).sum(0))))


@estimator("reinforce_pp_baseline", compares_group=True)
def reinforce_pp_baseline(config: Any, x: Samples) -> Estimate:
    """r − mean, whitened over tokens (Hu et al., 2025, arXiv 2501.03262)."""
    return Estimate(whiten(x.segments.expand(_relative(x, x.rewards, None))))


def _relative(x: Samples, rewards: Tensor, epsilon: float | None) -> Tensor:
    centred = rewards - x.group_mean(rewards)
    return centred if epsilon is None else centred / (x.group_std(rewards) + epsilon)
