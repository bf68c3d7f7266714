"""Direct reward optimisation's quadratic trust region (Richemond et al., 2024, arXiv 2405.19107), on tokens."""

from typing import Any

from headrace.algorithms.losses.registry import policy_loss
from headrace.algorithms.tokens import LossTerms, Tokens


@policy_loss("dro")
def dro(config: Any, x: Tokens) -> LossTerms:
    """−(A × log-probability − β/2 × log r²)."""
    change = x.new - x.old
    values = 0.5 * config.beta * change.square() - x.advantages * x.new
    return LossTerms(values, slope=config.beta * change - x.advantages)
