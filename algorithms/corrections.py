"""The mismatch between the rollout engine and the trainer: old/behaviour, never mixed with the policy ratio new/old."""

import math
from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.batch import Jagged, Segments
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.errors import AlgorithmError
from headrace.algorithms.tokens import LOG_RATIO_LIMIT


def log_importance(level: str, old: Tensor, behaviour: Tensor, segments: Segments) -> Tensor:
    """log(old / behaviour) of trained tokens [N]: of the token, of its sample's product, or of the product's root."""
    log_ratio = old - behaviour
    if level == "sequence":
        log_ratio = segments.expand(segments.sum(log_ratio))
    elif level == "geometric":
        log_ratio = segments.expand(segments.mean(log_ratio))
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def bounded(config: Any, ratios: Tensor) -> Tensor:
    """Weights after truncation or masking (``Importance.bound``)."""
    if config.bound.kind == "truncate":
        return ratios.clamp(max=config.bound.high)
    outside = (ratios < config.bound.low) | (ratios > config.bound.high)
    return torch.where(outside, 0.0, ratios)


def importance_weights(config: Any, *, old: Tensor, behaviour: Tensor, batch: Jagged) -> Tensor:
    """Weights of ``Importance`` for all tokens [T], bounded, not normalised; 0 at tokens that are not trained on.

    For ``Denominators.of(batch, weights=…)``; the objective computes its own for a micro-batch.
    """
    log_ratio = log_importance(config.level, batch.gather(old), batch.gather(behaviour), batch.trained[1])
    return batch.scatter(bounded(config, log_ratio.exp()))


def normaliser(config: Any, denominators: Denominators) -> float:
    """The mean weight of the global batch: over tokens for level token, else over samples; 1 if there is none."""
    if not config.normalise:
        return 1.0
    if denominators.weighted != denominators.tokens:
        raise AlgorithmError(
            "importance weights are to be normalised, but the denominators hold no weights: "
            "Denominators.of(batch, weights=corrections.importance_weights(…)) over the global batch"
        )
    if config.level == "token":
        total, count = denominators.weight_tokens, denominators.tokens
    else:
        total, count = denominators.weight_samples, denominators.samples
    return total / count if total > 0 and count > 0 else 1.0


def rejected(tests: Any, *, old: Tensor, behaviour: Tensor, batch: Jagged) -> tuple[Tensor, Tensor]:
    """(tokens bool [T], samples bool [S]) that fail one of ``Correction.reject``; a failed sample is refused whole.

    With d = log(old / behaviour): a ratio test bounds exp(−d), of the token, of the sum or of the mean of d; a
    divergence test bounds k2 = d²/2 or k3 = exp(d) − 1 − d of the token, or their sum, mean or maximum over the sample.
    """
    _, segments = batch.trained
    d = (batch.gather(old) - batch.gather(behaviour)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    tokens = torch.zeros(len(d), dtype=torch.bool, device=d.device)
    samples = torch.zeros(batch.samples, dtype=torch.bool, device=d.device)
    for test in tests:
        measure, low, high = _measure(test, d)
        if test.level == "token":
            tokens |= ~((measure >= low) & (measure <= high))
            continue
        reduce = {"sequence-sum": segments.sum, "sequence-mean": segments.mean, "sequence-max": segments.max}[
            test.level
        ]
        of_sample = reduce(measure)
        samples |= ~((of_sample >= low) & (of_sample <= high)) & (segments.lengths > 0)
    return batch.scatter(tokens), samples


def _measure(test: Any, d: Tensor) -> tuple[Tensor, float, float]:
    if test.kind == "ratio":
        return -d, math.log(test.low), math.log(test.high)
    return (0.5 * d.square() if test.estimator == "k2" else d.exp() - 1 - d), -math.inf, test.high
