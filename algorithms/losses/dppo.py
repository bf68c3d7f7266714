"""Divergence PPO (2026, arXiv 2602.04879): a trust region on the sampled token's probability, not on its ratio."""

from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.losses.registry import policy_loss
from headrace.algorithms.tokens import LossTerms, Tokens


@policy_loss("dppo")
def dppo(config: Any, x: Tokens) -> LossTerms:
    """−A × sg(min(r, truncate)) × log-probability.

    0 for tokens that are out of the ball and that A pushes further out.
    """
    p, q = x.new.exp(), x.old.exp()
    inside = _inside_tv(config, x, p, q) if config.divergence == "tv" else _inside_kl(config, x, p, q)
    slope = torch.where(inside, -x.advantages * x.ratio.clamp(max=config.truncate), 0.0)
    return LossTerms(slope * x.new, slope, clipped=~inside, out_of_range=~inside)


def _inside_tv(config: Any, x: Tokens, p: Tensor, q: Tensor) -> Tensor:
    return torch.where(x.advantages > 0, p - q <= config.high, p - q >= -config.low)


def _inside_kl(config: Any, x: Tokens, p: Tensor, q: Tensor) -> Tensor:
    """Bernoulli KL(q ‖ p) of 'this token or another one' within the radius, or moving back towards q."""
    tiny = 1e-8
    divergence = q * (x.old - x.new) + (1 - q) * ((1 - q + tiny) / (1 - p + tiny)).log()
    return torch.where(x.advantages > 0, (divergence <= config.high) | (p <= q), (divergence <= config.low) | (p >= q))
