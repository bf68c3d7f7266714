"""How far two back ends agree on the same tokens: old/behaviour in the tails, by label, and the dtype behind it."""

import math
from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.batch import Jagged, Segments
from headrace.algorithms.diagnostics import mismatch_sums
from headrace.algorithms.losses import resolve
from headrace.algorithms.sums import Sums, count, finish_metrics
from headrace.algorithms.tokens import Tokens

TAIL_QUANTILE = 0.999
BFLOAT16_STEP = 2.0**-7
"""Two bfloat16 numbers of magnitude 1 or more differ by a multiple of this."""
STEP_TOLERANCE = 0.005
"""How far from a multiple, in steps, still counts: float32 log-probabilities round to a few 1e-4 of a step."""
EDGES = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Where the histogram of |log(old / behaviour)| is cut (nats)."""


def compare(loss: Any, *, old: Tensor, behaviour: Tensor, batch: Jagged) -> dict[str, float]:
    """The ``mismatch/*`` metrics of an iteration, and what needs all tokens at once.

    Args:
        loss: configuration of a policy loss; ``mismatch/clip_fraction`` is at its bounds.
        old, behaviour: float [T], log-probabilities in nats of the same tokens.

    Adds ``mismatch/p999_abs_log_ratio``: 99.9th percentile of |log(old / behaviour)|, the largest below 1000 tokens
    """
    sums = mismatch_sums(old=old, behaviour=behaviour, batch=batch)
    a, b = batch.gather(old.detach()), batch.gather(behaviour.detach())
    sums.add(mismatch_clips(loss, old=a, behaviour=b, segments=batch.trained[1]))
    metrics = finish_metrics(sums)
    if len(a):
        size = (a - b).abs()
        metrics["mismatch/p999_abs_log_ratio"] = float(size.kthvalue(math.ceil(TAIL_QUANTILE * len(size))).values)
    return metrics


def mismatch_clips(loss: Any, *, old: Tensor, behaviour: Tensor, segments: Segments) -> Sums:
    """``mismatch/clip_fraction``: the tokens [N] whose old/behaviour is out of the bounds of the policy loss.

    So many tokens would be clipped if behaviour stood in the place of old. Losses without bounds, and those of other
    packages, have none.
    """
    if loss.kind in ("plugin", "dpo"):
        return Sums()
    function, settings = resolve(loss)
    nothing = torch.zeros_like(old, dtype=torch.bool)
    terms = function(settings, Tokens(old, behaviour, torch.ones_like(old), segments, nothing))
    return Sums() if terms.out_of_range is None else Sums({"mismatch/clip_fraction": count(terms.out_of_range)})


def positions(batch: Jagged) -> Tensor:
    """Label of each token's place in its response, int64 [T]: 0 for the first, then k for places 2ᵏ⁻¹ … 2ᵏ − 1."""
    lengths = batch.offsets.diff()
    place = torch.arange(len(batch.mask)) - batch.offsets[:-1].repeat_interleave(lengths)
    return torch.where(place > 0, place.clamp(min=1).double().log2().floor() + 1, 0).long()


def by_label(labels: Tensor, *, old: Tensor, behaviour: Tensor, batch: Jagged) -> dict[int, dict[str, float]]:
    """For each label (int64 [T]) with trained tokens: tokens, kl_k3, mean_abs and max_abs of log(old / behaviour)."""
    labels, d = batch.gather(labels), batch.gather(old - behaviour).double()
    found = {}
    for label in labels.unique().tolist():
        part = d[labels == label]
        found[label] = {
            "tokens": float(len(part)),
            "kl_k3": float((part.expm1() - part).mean()),
            "mean_abs": float(part.abs().mean()),
            "max_abs": float(part.abs().max()),
        }
    return found


def histogram(*, old: Tensor, behaviour: Tensor, batch: Jagged) -> list[int]:
    """Trained tokens by |log(old / behaviour)|: below the first of ``EDGES``, between each two, above the last."""
    size = batch.gather(old - behaviour).abs().double()
    places = torch.bucketize(size, torch.tensor(EDGES, dtype=torch.float64))
    return torch.bincount(places, minlength=len(EDGES) + 1).tolist()


def fork_gaps(groups: Tensor, response_ids: Tensor, batch: Jagged) -> tuple[Tensor, Tensor]:
    """Pairs of tokens that were drawn from one distribution: int64 [P] and [P], places in the flat response tokens.

    Two samples of a group have the same context up to the first token in which they differ; those two tokens are a
    pair. groups: int64 [S].
    """
    offsets, ids = batch.offsets.tolist(), response_ids.tolist()
    trained = batch.mask.tolist()
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(sample)
    left: list[int] = []
    right: list[int] = []
    for samples in members.values():
        seen: set[tuple[int, ...]] = set()
        for i, first in enumerate(samples):
            for second in samples[i + 1 :]:
                a, b = ids[offsets[first] : offsets[first + 1]], ids[offsets[second] : offsets[second + 1]]
                at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
                if at is None or not (trained[offsets[first] + at] and trained[offsets[second] + at]):
                    continue
                if (pair := (*a[:at], min(a[at], b[at]), max(a[at], b[at]))) not in seen:
                    seen.add(pair)
                    left.append(offsets[first] + at)
                    right.append(offsets[second] + at)
    return torch.tensor(left, dtype=torch.int64), torch.tensor(right, dtype=torch.int64)


def bfloat16_share(logprobs: Tensor, pairs: tuple[Tensor, Tensor], temperature: float) -> float:
    """How many of the pairs (``fork_gaps``) have logits of bfloat16 precision, as a share; NaN of no pair.

    Of two tokens under one distribution, the log-probabilities [T] differ by the difference of their logits /
    temperature. Logits that a bfloat16 head made differ by multiples of ``BFLOAT16_STEP``: a share near 1. Others do
    so by chance: a share near 2 × ``STEP_TOLERANCE``. In between: a bfloat16 head, under contexts that were computed
    twice and rounded differently.
    """
    left, right = pairs
    if not len(left):
        return math.nan
    steps = (logprobs[left].double() - logprobs[right].double()) * (temperature / BFLOAT16_STEP)
    return float(((steps - steps.round()).abs() < STEP_TOLERANCE).double().mean())
