"""The critic's loss."""

from typing import Any

import torch
from torch import Tensor

from headrace.algorithms import diagnostics
from headrace.algorithms.aggregation import token_weights, weighted_sum
from headrace.algorithms.attach import attach
from headrace.algorithms.batch import Jagged
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.inputs import Inputs
from headrace.algorithms.objective import Objective
from headrace.algorithms.sums import Sums, count, squares, total


def value_objective(
    config: Any, *, new: Tensor, old: Tensor, returns: Tensor, batch: Jagged, denominators: Denominators
) -> Objective:
    """½ max((v − R)², (clip(v, V ± clip) − R)²), aggregated as the policy loss is (PPO2's clipped value loss).

    ``config``: ``Algorithm``. ``new`` v carries the gradient; ``old`` V are the values before the step, ``returns`` R;
    all float [T]. ``value/explained_variance`` is 1 − mean (v − R)² / variance of R.
    """
    x = Inputs.of(batch, new=new, old=old, returns=returns)
    v, before, target = (x.need(name, "the value loss") for name in ("new", "old", "returns"))
    clip = config.value.clip
    error = v - target
    squared, clipped = error.square(), torch.zeros_like(v, dtype=torch.bool)
    if clip is not None:
        held = torch.clamp(v, before - clip, before + clip) - target
        clipped = held.square() > squared
        squared = torch.where(clipped, held.square(), squared)
    weights = x.silence(token_weights(config.aggregation, x.segments, denominators, v), v)
    loss = 0.5 * weighted_sum(squared, weights)
    slope = torch.where(clipped, 0.0, error) * weights
    sums = Sums(
        per_token={
            "value/mean": total(v),
            "value/squared_error": squares(error),
            "value/return_mean": total(target),
            "value/return_square": squares(target),
            "value/clip_fraction": count(clipped),
        },
        totals=diagnostics.counts(x.segments) | {"nonfinite_tokens": x.bad_count(), "value/loss": loss.double()},
    )
    return Objective(attach(new, loss, slope, batch), sums)
