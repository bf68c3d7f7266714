"""The optimal token baseline: at each position, returns weighted by the score function's energy so far."""

from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.advantages.data import Samples
from headrace.algorithms.advantages.registry import Estimate, estimator
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
    returns = x.reward_to_go()
    weight = _running_sum(energy, x.segments)
    cell, cells = _cells(x, config.tool_integrated)
    top = returns.new_zeros(cells).scatter_add_(0, cell, returns * weight)
    bottom = torch.zeros_like(top).scatter_add_(0, cell, weight)
    baseline = torch.where(torch.bincount(cell, minlength=cells) > 1, top / (bottom + TINY), 0.0)
    return Estimate(returns - baseline.index_select(0, cell))


def _cells(x: Samples, own: bool) -> tuple[Tensor, int]:
    """(for each token the number of its group and position, int64 [N]; how many there are).

    Positions count the policy's own tokens, or all tokens of the response.
    """
    starts = x.segments.offsets[:-1] if own else x.batch.offsets[:-1][x.accepted]
    width = int((x.segments.lengths if own else x.batch.offsets.diff()).max())
    positions = None if own else x.batch.trained[0]
    if positions is None:
        positions = torch.arange(x.count, device=starts.device)
    return x.segments.expand(x.group * width - starts).add_(positions), x.groups * width


def _running_sum(values: Tensor, segments: Segments) -> Tensor:
    """Inclusive running sum inside each segment [N]; in float64, since it is a difference of sums over the batch."""
    running = values.double().cumsum(0)
    starts = segments.offsets[:-1]
    return running.sub_(segments.expand(running[starts] - values[starts])).to(values.dtype)
