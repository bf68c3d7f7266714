"""Geometric-mean policy optimisation (Zhao et al., 2025, arXiv 2507.20673)."""

from typing import Any

import torch

from headrace.algorithms.losses.registry import policy_loss
from headrace.algorithms.tokens import LossTerms, Tokens


@policy_loss("gmpo")
def gmpo(config: Any, x: Tokens) -> LossTerms:
    """−mean A × exp(mean of log r), one for each sample.

    log r is clipped to [−clip_low, clip_high], on the side that A pushes it to.
    """
    bounded = x.log_ratio.clamp(-config.clip_low, config.clip_high)
    up = x.advantages > 0
    held = torch.where(up, torch.minimum(x.log_ratio, bounded), torch.maximum(x.log_ratio, bounded))
    held = torch.where(x.advantages == 0, 0.0, held)
    clipped = (held != x.log_ratio) & (x.advantages != 0)
    values = -x.segments.mean(x.advantages) * x.segments.mean(held).exp()
    per_token = x.segments.expand(values / x.segments.lengths.clamp(min=1))
    slope = torch.where(clipped | (x.advantages == 0), 0.0, per_token)
    return LossTerms(values, slope, per_sample=True, clipped=clipped, out_of_range=bounded != x.log_ratio)
