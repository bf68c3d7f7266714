"""Sums about distributions: the policy ratio, the back-end mismatch, lag. Names and formulas: docs/algorithms.md."""

import math

import torch
from torch import Tensor

from headrace.algorithms.batch import Jagged, Segments
from headrace.algorithms.sums import Sums, count, largest, squares, total
from headrace.algorithms.tokens import LOG_RATIO_LIMIT, LossTerms, Tokens

TAIL = math.log(2)
"""Ratios beyond 2 or below 1/2 are tails."""


def counts(segments: Segments) -> dict[str, Tensor]:
    """Totals that every mean is taken over: trained tokens, and samples that have any."""
    lengths = segments.lengths
    return {"tokens": lengths.sum().double(), "samples": (lengths > 0).sum().double()}


def ratio_sums(x: Tokens) -> Sums:
    """new/old: moments (→ ess as PipelineRL's ``rl/ess``, chi2), KL(old ‖ new) by k1 and k3, tails."""
    log_ratio, ratio = x.log_ratio, x.ratio
    mean, k1, size = total(ratio), -total(log_ratio), log_ratio.abs()
    tokens = len(ratio)
    return Sums(
        per_token={
            "ratio/mean": mean,
            "ratio/second_moment": squares(ratio),
            "ratio/mean_abs_log": total(size),
            "ratio/tail_fraction": count(size > TAIL),
            "policy/kl_k1": k1,
            "policy/kl_k3": mean - tokens + k1,
        },
        maxima={"ratio/max": largest(ratio), "ratio/max_inverse": largest(-log_ratio).exp()},
    )


def mismatch_sums(*, old: Tensor, behaviour: Tensor, batch: Jagged) -> Sums:
    """old/behaviour over the trained tokens of ``batch``; needs no loss, so the parity check uses it as well."""
    sums = mismatch(batch.gather(old.detach()), batch.gather(behaviour.detach()), batch.trained[1])
    sums.totals = counts(batch.trained[1])
    return sums


def mismatch(old: Tensor, behaviour: Tensor, segments: Segments) -> Sums:
    """Of trained tokens [N], without counts.

    KL is of KL(behaviour ‖ old); perplexities are means over samples of each sample's perplexity.
    """
    d = (old - behaviour).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = d.exp()
    mean, k1, size = total(ratio), -total(d), d.abs()
    gap = (old.exp() - behaviour.exp()).abs_()
    of_sample = segments.sum(d)
    trained = segments.lengths > 0
    lengths = segments.lengths.clamp(min=1)
    log_ppl_old, log_ppl_behaviour = -segments.sum(old) / lengths, -segments.sum(behaviour) / lengths
    sample_ratio = of_sample.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    def samples(values: Tensor) -> Tensor:
        return values.masked_fill(~trained, 0.0).sum().double()

    return Sums(
        per_token={
            "mismatch/mean": mean,
            "mismatch/second_moment": squares(ratio),
            "mismatch/kl_k1": k1,
            "mismatch/tail_fraction": count(size > TAIL),
            "mismatch/kl_k3": mean - len(ratio) + k1,
            "mismatch/mean_abs_probability_difference": total(gap),
        },
        per_sample={
            "mismatch/chi2_sample": samples(sample_ratio.square() - 1),
            "mismatch/perplexity_old": samples(log_ppl_old.exp()),
            "mismatch/perplexity_behaviour": samples(log_ppl_behaviour.exp()),
            "mismatch/log_perplexity_old": samples(log_ppl_old),
            "mismatch/log_perplexity_behaviour": samples(log_ppl_behaviour),
            "mismatch/abs_log_perplexity_difference": samples((log_ppl_old - log_ppl_behaviour).abs()),
            "mismatch/perplexity_ratio": samples((log_ppl_old - log_ppl_behaviour).exp()),
        },
        maxima={
            "mismatch/max": largest(ratio),
            "mismatch/max_abs_log_ratio": largest(size),
            "mismatch/max_abs_probability_difference": largest(gap),
            "mismatch/max_log_perplexity_difference": largest((log_ppl_old - log_ppl_behaviour)[trained]),
        },
    )


def weight_sums(weights: Tensor, ratios: Tensor) -> Sums:
    """Importance weights as applied (→ ess as verl's ``rollout_is_eff_sample_size``), and how many a bound changed."""
    return Sums(
        per_token={
            "correction/mean": total(weights),
            "correction/second_moment": squares(weights),
            "correction/bounded_fraction": count(weights != ratios),
        },
        maxima={"correction/max": largest(weights)},
    )


def lag_sums(lag: Tensor, batch: Jagged) -> Sums:
    """Policy lag (weight versions) of each token, int64 [T]: mean, share of tokens that are not current, maximum."""
    lag = batch.gather(lag).to(torch.float64)
    return Sums(
        per_token={"lag/mean": total(lag), "lag/stale_fraction": count(lag > 0)},
        totals=counts(batch.trained[1]),
        maxima={"lag/max": largest(lag)},
    )


def clip_sums(terms: LossTerms, segments: Segments) -> Sums:
    """Clips that changed the loss (verl's ``pg_clipfrac``), and all ratios out of range on either side.

    ``policy/out_of_range_sample_mean`` is the mean over samples of each sample's share, as PipelineRL averages its
    ``clamp_log_ratio_new_old_indicator``. Losses without bounds have neither.
    """
    sums = Sums()
    if terms.clipped is not None:
        sums.per_token["policy/clip_fraction"] = count(terms.clipped)
    if terms.out_of_range is not None:
        of_sample = segments.sum(terms.out_of_range.to(terms.values.dtype)).double()
        sums.per_token["policy/out_of_range_fraction"] = of_sample.sum()
        sums.per_sample["policy/out_of_range_sample_mean"] = (of_sample / segments.lengths.clamp(min=1)).sum()
    return sums
