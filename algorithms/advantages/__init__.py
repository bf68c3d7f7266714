"""From rewards to advantages: reject, then baseline; computed once over the whole global batch."""

from headrace.algorithms.advantages import group, returns, token_baseline  # noqa: F401
from headrace.algorithms.advantages.data import Advantages, Samples
from headrace.algorithms.advantages.registry import Estimate, Estimator, estimator
from headrace.algorithms.advantages.stage import advantages

__all__ = ["Advantages", "Estimate", "Estimator", "Samples", "advantages", "estimator"]
