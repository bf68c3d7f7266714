"""Soft adaptive policy optimisation (Gao et al., 2025, arXiv 2511.20347)."""

from typing import Any

import torch

from headrace.algorithms.losses.registry import policy_loss
from headrace.algorithms.tokens import LossTerms, Tokens


@policy_loss("sapo")
def sapo(config: Any, x: Tokens) -> LossTerms:
    """−A × σ(τ (r − 1)) × 4 / τ, with τ by the sign of A."""
    tau = torch.full_like(x.ratio, config.tau_negative).masked_fill_(x.advantages > 0, config.tau_positive)
    gate = torch.sigmoid(tau * (x.ratio - 1))
    scale = -4 * x.advantages * gate
    return LossTerms(scale / tau, slope=scale * (1 - gate) * x.ratio)
