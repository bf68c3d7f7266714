"""The optimal token baseline: at each position, returns weighted by the score function's energy so far."""

from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.advantages.data import Samples
from headrace.algorithms.advantages.registry import Estimate, estimator
from headrace.algorithms.advantages.returns import discounted_sum
from headrace.algorithms.batch import Segments

TINY = 1e-8


@estimator("optimal_token_baseline", compares_group=True)
def optimal_token_baseline(config: Any, x: Samples) -> Estimate:
    """G_t − Σ G_t W_t / Σ W_t over the group's samples that have a token at position t.

    G_t: reward-to-go. W_t = Σ_{j ≤ t} (1 − 2π_j + Σπ_j²) ρ_j², the expected squared norm of the score in logits; ρ: the
    importance weights of ``correction.importance``, 1 without. Where only one sample reaches, the baseline is 0.
    """
    kind = "optimal_token_baseline"
    energy = 1 - 2 * x.need("old", kind).exp() + x.need("sum_pi_squared", kind)
    if x.tokens.get("importance") is not None:
        energy = energy * x.need("importance", kind).square()
    returns = discounted_sum(x.token_rewards, x.segments, 1.0)
    weight = _running_sum(energy, x.segments).to(returns.dtype)
    column = _own_column(x.segments) if config.tool_integrated else x.columns
    cell = x.segments.expand(x.group) * (int(column.max()) + 1) + column
    _, cell, reached = cell.unique(return_inverse=True, return_counts=True)
    top = returns.new_zeros(len(reached)).index_add(0, cell, returns * weight)
    bottom = returns.new_zeros(len(reached)).index_add(0, cell, weight)
    baseline = torch.where(reached > 1, top / (bottom + TINY), 0.0)
    return Estimate(returns - baseline[cell], returns)


def _running_sum(values: Tensor, segments: Segments) -> Tensor:
    """Inclusive running sum inside each segment [N]; in float64, since it is a difference of sums over the batch."""
    running = values.double().cumsum(0)
    before = torch.cat([running.new_zeros(1), running])[segments.offsets[:-1]]
    return running - segments.expand(before)


def _own_column(segments: Segments) -> Tensor:
    """Place of each token among the policy's own tokens of its sample, int64 [N]."""
    return torch.arange(int(segments.offsets[-1]), device=segments.offsets.device) - segments.expand(
        segments.offsets[:-1]
    )
