"""Clipped importance-sampling policy optimisation (MiniMax-M1, 2025, arXiv 2506.13585)."""

from typing import Any

from headrace.algorithms.losses.registry import policy_loss
from headrace.algorithms.tokens import LossTerms, Tokens


@policy_loss("cispo")
def cispo(config: Any, x: Tokens) -> LossTerms:
    """−sg(clip(r, 1 − clip_low, 1 + clip_high)) × A × log-probability.

    Without a lower bound it is what PipelineRL calls reinforce.
    """
    low = 0.0 if config.clip_low is None else 1 - config.clip_low
    weight = x.ratio.clamp(low, 1 + config.clip_high)
    out = weight != x.ratio
    slope = -weight * x.advantages
    return LossTerms(slope * x.new, slope, clipped=out, out_of_range=out)
