"""REINFORCE (Williams, 1992); also the loss of GPG (Chu et al., 2025, arXiv 2504.02546)."""

from typing import Any

from headrace.algorithms.losses.registry import policy_loss
from headrace.algorithms.tokens import LossTerms, Tokens


@policy_loss("reinforce")
def reinforce(config: Any, x: Tokens) -> LossTerms:
    """−A × log-probability."""
    return LossTerms(-x.advantages * x.new, slope=-x.advantages)
