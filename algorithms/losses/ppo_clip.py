"""PPO's clipped surrogate (Schulman et al., 2017, arXiv 1707.06347), asymmetric as in DAPO (arXiv 2503.14476)."""

from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.losses.registry import policy_loss
from headrace.algorithms.tokens import LossTerms, Tokens


@policy_loss("ppo_clip")
def ppo_clip(config: Any, x: Tokens) -> LossTerms:
    """max(−A r, −A clip(r, 1 − clip_low, 1 + clip_high)).

    With ``dual_clip``, at most −A dual_clip for A < 0 (Ye et al., 2019, arXiv 1912.09729).
    """
    values, clipped, out = clipped_surrogate(x.ratio, x.advantages, config.clip_low, config.clip_high)
    if config.dual_clip is not None:
        bound = -config.dual_clip * x.advantages
        lower = (x.advantages < 0) & (values > bound)
        values = torch.where(lower, bound, values)
        clipped = clipped | lower
    return LossTerms(values, slope=torch.where(clipped, 0.0, values), clipped=clipped, out_of_range=out)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [N], clip changed it [N], ratio out of range [N]).

    The derivative by the log-ratio is the loss itself, or 0 where it was clipped.
    """
    bounded = ratio.clamp(1 - low, 1 + high)
    out = bounded != ratio
    free, held = -advantages * ratio, -advantages * bounded
    values = torch.maximum(free, held)
    return values, held > free, out
