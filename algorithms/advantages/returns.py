"""Estimators from the rewards that follow a token: GAE, REINFORCE++, ReMax."""

from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.advantages.data import Samples, whiten
from headrace.algorithms.advantages.registry import Estimate, estimator
from headrace.algorithms.batch import Segments
from headrace.algorithms.errors import AlgorithmError

BLOCK = 64
"""Tokens that one matrix product carries back at once."""


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
    returns = discounted_sum(x.token_rewards, x.segments, 1.0)
    if x.greedy_rewards is None:
        raise AlgorithmError("advantage 'remax' needs 'greedy_rewards', which were not given")
    return Estimate(returns - x.segments.expand(x.greedy_rewards), returns)


def discounted_sum(values: Tensor, segments: Segments, discount: float) -> Tensor:
    """y_t = x_t + discount × y_{t+1} inside each segment, [N] → [N].

    Blocks of tokens are carried back by one product with a triangular matrix of powers; only blocks are a loop.
    """
    lengths = segments.lengths
    if not len(values):
        return values.clone()
    width = -(-int(lengths.max()) // BLOCK) * BLOCK
    sample = torch.arange(len(lengths), device=values.device).repeat_interleave(lengths)
    # Right-aligned, so that every sample ends in the last column.
    column = torch.arange(len(values), device=values.device) + (width - segments.offsets[1:])[sample]
    padded = values.new_zeros(len(lengths), width)
    padded[sample, column] = values
    power = torch.arange(BLOCK, device=values.device)
    distance = power[:, None] - power[None, :]
    matrix = torch.where(
        distance >= 0, torch.tensor(discount, dtype=values.dtype, device=values.device) ** distance.clamp(min=0), 0.0
    )
    decay = torch.tensor(discount, dtype=values.dtype, device=values.device) ** (BLOCK - power)
    carry = values.new_zeros(len(lengths), 1)
    for start in range(width - BLOCK, -1, -BLOCK):
        block = padded[:, start : start + BLOCK] @ matrix + carry * decay
        padded[:, start : start + BLOCK] = block
        carry = block[:, :1]
    return padded[sample, column]


def _last_tokens(segments: Segments) -> Tensor:
    """Positions of each nonempty segment's last token."""
    return segments.offsets[1:][segments.lengths > 0] - 1
