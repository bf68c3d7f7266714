"""Estimators from the rewards that follow a token: GAE, REINFORCE++, ReMax."""

from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.advantages.data import Samples, whiten
from headrace.algorithms.advantages.discount import discounted_sum
from headrace.algorithms.advantages.registry import Estimate, estimator
from headrace.algorithms.batch import Segments
from headrace.algorithms.errors import AlgorithmError


@estimator("gae", compares_group=False)
def gae(config: Any, x: Samples) -> Estimate:
    """A_t = Σ (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} − V_t; returns A + V (Schulman et al., 2015, arXiv 1506.02438).

    t counts the policy's own tokens: what a tool wrote is skipped, as if value and advantage were carried through it.
    """
    values = x.need("values", "gae")
    following = torch.cat([values[1:], values.new_zeros(1)])
    last = _last_tokens(x.segments)
    following[last] = 0.0
    delta = x.token_rewards + config.gamma * following - values
    advantages = discounted_sum(delta, x.segments, config.gamma * config.lam)
    return Estimate(whiten(advantages) if config.whiten else advantages, advantages + values)


@estimator("reinforce_pp", compares_group=False)
def reinforce_pp(config: Any, x: Samples) -> Estimate:
    """Discounted reward-to-go, whitened over tokens (Hu et al., 2025, arXiv 2501.03262)."""
    returns = discounted_sum(x.token_rewards, x.segments, config.gamma)
    return Estimate(whiten(returns), returns)


@estimator("remax", compares_group=False)
def remax(config: Any, x: Samples) -> Estimate:
    """Reward-to-go minus the reward of the greedy answer (Li et al., 2023, arXiv 2310.10505)."""
    if x.greedy_rewards is None:
        raise AlgorithmError("advantage 'remax' needs 'greedy_rewards', which were not given")
    if x.tokens.get("token_rewards") is None:
        return Estimate(x.rewards - x.greedy_rewards, per_sample=True)
    return Estimate(x.reward_to_go() - x.segments.expand(x.greedy_rewards))


def _last_tokens(segments: Segments) -> Tensor:
    """Positions of each nonempty segment's last token."""
    return segments.offsets[1:][segments.lengths > 0] - 1
