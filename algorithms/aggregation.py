"""How token losses become one number: as a weight for each token, so that parts add up to the whole."""

from typing import Any

from torch import Tensor

from headrace.algorithms.batch import Segments
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.errors import AlgorithmError


def token_weights(aggregation: Any, segments: Segments, denominators: Denominators, like: Tensor) -> Tensor | float:
    """The weight of each trained token in the loss of the global batch: one number for all, or [N].

    token-mean: 1/tokens. token-sum: 1. seq-mean-token-sum: 1/samples. seq-mean-token-mean: 1/(samples × the sample's
    tokens). seq-mean-token-sum-norm: 1/(samples × constant). None (the loss is a mean over samples by definition):
    terms beside that loss, such as KL, are seq-mean-token-mean.
    """
    tokens, samples = max(denominators.tokens, 1.0), max(denominators.samples, 1.0)
    match "seq-mean-token-mean" if aggregation is None else aggregation.kind:
        case "token-mean":
            return 1.0 / tokens
        case "token-sum":
            return 1.0
        case "seq-mean-token-sum":
            return 1.0 / samples
        case "seq-mean-token-sum-norm":
            return 1.0 / (samples * aggregation.constant)  # pyright: ignore[reportOptionalMemberAccess]
        case "seq-mean-token-mean":
            return segments.expand((samples * segments.lengths.clamp(min=1).to(like.dtype)).reciprocal())
    raise AlgorithmError(f"there is no aggregation '{aggregation}'")


def weighted_sum(values: Tensor, weights: Tensor | float) -> Tensor:
    """[N] → scalar."""
    return values.dot(weights) if isinstance(weights, Tensor) else values.sum() * weights
