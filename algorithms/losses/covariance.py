"""Clip-Cov and KL-Cov (Cui et al., 2025, arXiv 2505.22617): a few tokens of high covariance lose their push.

Covariance of a token: (A − mean A) × (log-probability − mean log-probability), the means over the global batch. Which
tokens are selected is decided once for the whole batch (``select``), never inside a micro-batch: a choice by rank or by
micro-batch would make the loss depend on the partition.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.batch import Jagged
from headrace.algorithms.errors import AlgorithmError
from headrace.algorithms.losses.ppo_clip import clipped_surrogate
from headrace.algorithms.losses.registry import policy_loss
from headrace.algorithms.tokens import LossTerms, Tokens


def select(config: Any, *, logprobs: Tensor, advantages: Tensor, batch: Jagged, seed: int = 0) -> Tensor:
    """The tokens that ``clip_cov`` silences or ``kl_cov`` penalises, bool [T]; for the whole global batch at once.

    ``logprobs``: [T], the log-probabilities at the start of the step (old). KL-Cov takes the ``fraction`` of highest
    covariance. Clip-Cov draws as many at random, by ``seed``, among those between its bounds. At least one, if any.
    """
    positions, _ = batch.trained
    chosen = torch.zeros(len(batch.mask), dtype=torch.bool, device=batch.mask.device)
    if positions is None:
        positions = torch.arange(len(batch.mask), device=batch.mask.device)
    if not len(positions):
        return chosen
    a, logp = advantages[positions].double(), logprobs[positions].double()
    covariance = (a - a.mean()) * (logp - logp.mean())
    count = max(1, int(config.fraction * len(positions)))
    if config.kind == "kl_cov":
        chosen[positions[covariance.topk(count).indices]] = True
        return chosen
    candidates = positions[(covariance > config.covariance_low) & (covariance < config.covariance_high)]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(candidates), generator=generator)[:count]
    chosen[candidates[order.to(candidates.device)]] = True
    return chosen


@policy_loss("clip_cov")
def clip_cov(config: Any, x: Tokens) -> LossTerms:
    """PPO-clip; selected tokens that are not clipped already have loss 0."""
    selected = _selected(config, x)
    values, clipped, out = clipped_surrogate(x.ratio, x.advantages, config.clip_low, config.clip_high)
    silenced = selected & ~clipped
    values = torch.where(silenced, 0.0, values)
    return LossTerms(values, slope=torch.where(clipped, 0.0, values), clipped=clipped | silenced, out_of_range=out)


@policy_loss("kl_cov")
def kl_cov(config: Any, x: Tokens) -> LossTerms:
    """−A r, plus penalty × |log r| on the selected tokens."""
    selected = _selected(config, x)
    surrogate = -x.advantages * x.ratio
    penalty = config.penalty * selected.to(surrogate.dtype)
    return LossTerms(
        surrogate + penalty * x.log_ratio.abs(), slope=surrogate + penalty * x.log_ratio.sign(), clipped=selected
    )


def _selected(config: Any, x: Tokens) -> Tensor:
    if x.selected is None:
        raise AlgorithmError(
            f"loss '{config.kind}' needs 'selected': call losses.covariance.select on the global batch"
        )
    return x.selected
