"""Group sequence policy optimisation (Zheng et al., 2025, arXiv 2507.18071)."""

from typing import Any

import torch

from headrace.algorithms.losses.ppo_clip import clipped_surrogate
from headrace.algorithms.losses.registry import policy_loss
from headrace.algorithms.tokens import LossTerms, Tokens


@policy_loss("gspo")
def gspo(config: Any, x: Tokens) -> LossTerms:
    """Clipped surrogate of s = exp(mean over the sample of log r), at most e¹⁰.

    Each token carries s with its own log-probability's gradient (GSPO-token): with one advantage for the sample and
    seq-mean-token-mean this is the gradient of the sequence objective.
    """
    sequence = x.segments.mean(x.new - x.old).clamp(max=10.0).exp()
    values, clipped, out = clipped_surrogate(
        x.segments.expand(sequence), x.advantages, config.clip_low, config.clip_high
    )
    return LossTerms(values, slope=torch.where(clipped, 0.0, values), clipped=clipped, out_of_range=out)
