"""Estimators of the Kullback–Leibler divergence from sampled tokens, and the controllers of its coefficient.

k1, k2, k3: Schulman, "Approximating KL divergence" (2020). All are of KL(policy ‖ reference), sampled from the policy.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.errors import AlgorithmError
from headrace.algorithms.tokens import LOG_RATIO_LIMIT

K3_LIMIT = 10.0
"""k3 of one token counts as at most 10: one outlier must not be the whole loss."""


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """(value [T] in nats, derivative of the value with respect to ``logprobs`` [T]); both without autograd.

    With d = logprobs − reference: k1 = d; abs = |d|; k2 = d²/2; k3 = exp(−d) + d − 1 (d within ±20, k3 at most 10, flat
    beyond). A trailing '+' keeps the value and takes k2's derivative, d: an unbiased gradient of the divergence.
    """
    d = (logprobs - reference).detach()
    base = estimator.removesuffix("+")
    if base == "k1":
        value, slope = d, torch.ones_like(d)
    elif base == "abs":
        value, slope = d.abs(), d.sign()
    elif base == "k2":
        value, slope = 0.5 * d.square(), d
    elif base == "k3":
        value, slope = _k3(d)
    else:
        raise AlgorithmError(f"there is no KL estimator '{estimator}'; known: k1, abs, k2, k3, and k1+, abs+, k3+")
    return value, d if estimator.endswith("+") else slope


def _k3(d: Tensor) -> tuple[Tensor, Tensor]:
    near = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    inverse = (-near).exp()
    value = inverse + near - 1
    flat = (value > K3_LIMIT) | (near != d)
    return value.clamp(max=K3_LIMIT), torch.where(flat, 0.0, 1 - inverse)


def full_kl(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """KL(policy ‖ reference) over the whole vocabulary, [.., V] → [..], differentiable in ``logits``."""
    policy = logits.log_softmax(-1)
    reference = reference_logits.log_softmax(-1)
    return torch.nn.functional.kl_div(reference, policy, reduction="none", log_target=True).sum(-1)


def adapt_coefficient(config: Any, coefficient: float, measured: float, samples: int) -> float:
    """The next coefficient of a KL term; unchanged without ``adaptive``.

    β ← β (1 + clip(measured / target − 1, ±0.2) × samples / horizon), Ziegler et al. (2019, arXiv 1909.08593).
    """
    if config.adaptive is None:
        return coefficient
    error = min(max(measured / config.adaptive.target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / config.adaptive.horizon)
