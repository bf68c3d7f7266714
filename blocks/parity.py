"""The parity gate: what it runs on, and how far rollout engine and trainer may differ. Formulas: docs/algorithms.md."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from headrace.blocks.base import Strict

FEWEST_ON_GRID = 2.5
"""Pairs on the grid; fewer may be there by chance."""
USUAL: dict[str, dict[str, float]] = {
    "bfloat16": {
        "mean_ratio": 0.03,
        "kl_k1": 0.03,
        "kl_k3": 0.015,
        "p999_abs_log_ratio": 2.0,
        "max_abs_log_ratio": 3.0,
        "ess": 0.95,
    },
    "float32": {
        "mean_ratio": 1e-3,
        "kl_k1": 1e-3,
        "kl_k3": 1e-5,
        "p999_abs_log_ratio": 0.05,
        "max_abs_log_ratio": 0.1,
        "ess": 0.999,
    },
}
"""Bounds of a recipe that gives none, by compute dtype. Healthy back ends stay a few times below them."""
CLIPPING = ("ppo_clip", "clip_cov", "gspo", "gmpo", "dppo", "cispo")
"""Losses that have clip bounds."""
CHANCE = 0.01
"""Share of pairs (``…/bfloat16_share``) that float32 logits have on a bfloat16 grid; others have more, up to 1."""


class ParityBounds(Strict):
    """Over the sampled tokens, of old/behaviour (the trainer's probability over the engine's). Left out: the usual one
    of the compute dtype."""

    mean_ratio: float | None = Field(default=None, gt=0)
    """Largest distance of the mean ratio from 1."""
    kl_k1: float | None = Field(default=None, gt=0)
    """Largest |mean log ratio|, nats per token."""
    kl_k3: float | None = Field(default=None, gt=0)
    """Largest KL(behaviour ‖ old) by the k3 estimator, nats per token."""
    p999_abs_log_ratio: float | None = Field(default=None, gt=0)
    """Largest 99.9th percentile of |log ratio|, nats."""
    max_abs_log_ratio: float | None = Field(default=None, gt=0)
    """Largest |log ratio| of any token, nats."""
    ess: float | None = Field(default=None, gt=0, le=1)
    """Least effective sample size of the ratios, as a share."""
    clip_fraction: float | None = Field(default=None, gt=0, le=1)
    """Largest share of ratios out of the loss's clip bounds; left out: not bounded, as these bounds differ widely."""


class Parity(Strict):
    """The gate before a campaign: the same tokens through rollout engine and trainer."""

    when: Literal["before", "never"] = "before"
    """before: once, before the first iteration of a campaign; never: only as a deployment of its own."""
    prompts: int = Field(default=8, ge=1)
    """Training prompts that are sampled, n answers each, twice: under changed weights and under the campaign's."""
    ablation: bool = True
    """When a bound is passed, start the engines again with one setting changed at a time, to tell which it is."""
    bounds: ParityBounds = ParityBounds()


@dataclass(frozen=True)
class Excess:
    """A bound that was passed."""

    name: str
    """Metric, without its group."""
    value: float
    bound: float

    def __str__(self) -> str:
        what = {
            "mean_ratio": "mean ratio old/behaviour",
            "kl_k1": "KL by k1",
            "kl_k3": "KL(behaviour ‖ old)",
            "p999_abs_log_ratio": "99.9th percentile of |Δ log p|",
            "max_abs_log_ratio": "largest |Δ log p|",
            "ess": "effective sample size",
            "clip_fraction": "share of clipped ratios",
        }
        if self.name.endswith("head"):
            return (
                f"{self.name}: logits have bfloat16 precision, though model.head_dtype is float32 "
                f"({self.value:.0%} of token pairs on its grid; by chance at most {self.bound:.0%})"
            )
        bound = {"mean_ratio": f"1 ± {self.bound:g}", "ess": f"≥ {self.bound:g}"}.get(self.name, f"≤ {self.bound:g}")
        return f"{what[self.name]} is {self.value:.3g} (bound {bound})"


def bounds_of(bounds: ParityBounds, dtype: str) -> dict[str, float]:
    """The bounds in force, by name."""
    given = {name: value for name, value in bounds.model_dump().items() if value is not None}
    return USUAL[dtype] | given


def exceeded(metrics: Mapping[str, float], bounds: Mapping[str, float], head_dtype: str) -> list[Excess]:
    """The bounds that ``mismatch/*`` metrics pass; a metric that is missing or not finite passes its bound.

    ``head_dtype`` float32: also each side whose logits turn out to be of bfloat16 precision.
    """
    found = []
    for name, bound in bounds.items():
        value = metrics.get("mismatch/mean" if name == "mean_ratio" else f"mismatch/{name}", math.nan)
        size = abs(value - 1) if name == "mean_ratio" else abs(value)
        good = size >= bound if name == "ess" else size <= bound
        if not good:
            found.append(Excess(name, value, bound))
    if head_dtype == "float32":
        for side, who in (("behaviour", "rollout"), ("old", "trainer")):
            share, pairs = metrics.get(f"{side}/bfloat16_share", 0.0), metrics.get("fork_pairs", 0.0)
            most = CHANCE + 5 * math.sqrt(CHANCE * (1 - CHANCE) / max(pairs, 1.0))
            if share > most and share * pairs > FEWEST_ON_GRID:
                found.append(Excess(f"{who} head", share, most))
    return found
