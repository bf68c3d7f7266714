"""Advantage estimators. The formulas are in docs/algorithms.md; ``headrace.algorithms.advantages`` computes them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from headrace.blocks.algorithms.choice import Choice

LoneGroup = Literal["drop", "error"]


class Estimator(Choice):
    """How rewards become advantages."""

    family: ClassVar[str] = "advantage"

    @model_validator(mode="after")
    def _epsilon_needs_std(self) -> "Estimator":
        field = type(self).model_fields.get("epsilon")
        changed = field is not None and getattr(self, "epsilon", None) != field.default
        if changed and not getattr(self, "std", True):
            raise ValueError("'epsilon' has no effect with std: false: remove it, or set std: true")
        return self


class GRPO(Estimator):
    """Reward minus the group's mean, by default divided by the group's standard deviation."""

    kind: Literal["grpo"] = "grpo"
    std: bool = True
    """Divide by the group's standard deviation (unbiased); Dr.GRPO leaves it out."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""
    lone_group: LoneGroup = "drop"
    """A group of one has no baseline: its sample is dropped, or the step fails."""


class RLOO(Estimator):
    """Reward minus the mean of the other samples of the group (leave one out)."""

    kind: Literal["rloo"] = "rloo"
    std: bool = False
    """Divide by the group's standard deviation (unbiased), as PipelineRL can."""
    epsilon: float = Field(default=1e-4, gt=0)
    """Added to the standard deviation."""
    lone_group: LoneGroup = "drop"
    """A group of one has no baseline: its sample is dropped, or the step fails."""


class OPO(Estimator):
    """Reward minus the group's length-weighted mean: the variance-optimal baseline of on-policy training."""

    kind: Literal["opo"] = "opo"
    lone_group: LoneGroup = "drop"
    """A group of one has no baseline: its sample is dropped, or the step fails."""


class GPG(Estimator):
    """Reward minus the group's mean, scaled by samples / samples with a reward other than zero."""

    kind: Literal["gpg"] = "gpg"
    norm: float = Field(default=1.0, gt=0)
    """Divisor of the advantage (F_norm of the paper)."""
    lone_group: LoneGroup = "drop"
    """A group of one has no baseline: its sample is dropped, or the step fails."""


class PassK(Estimator):
    """Only the best sample of a group has an advantage: its lead over the second best."""

    kind: Literal["grpo_passk"] = "grpo_passk"
    std: bool = True
    """Divide by the group's standard deviation (unbiased)."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""
    lone_group: LoneGroup = "drop"
    """A group of one has no baseline: its sample is dropped, or the step fails."""


class GDPO(Estimator):
    """GRPO for each named part of the reward on its own, weighted sum, then whitened over the batch's tokens."""

    kind: Literal["gdpo"] = "gdpo"
    weights: dict[str, float] = Field(default_factory=lambda: {"reward": 1.0})
    """Weight of each reward part; the part 'reward' is the sample's whole reward."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to each group's standard deviation."""
    lone_group: LoneGroup = "drop"
    """A group of one has no baseline: its sample is dropped, or the step fails."""


class ReinforcePPBaseline(Estimator):
    """REINFORCE++ with the group's mean as baseline, whitened over the batch's tokens."""

    kind: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    lone_group: LoneGroup = "drop"
    """A group of one has no baseline: its sample is dropped, or the step fails."""


class OptimalTokenBaseline(Estimator):
    """A baseline for each token position: returns weighted by the energy of the score function so far."""

    kind: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    tool_integrated: bool = False
    """Align positions on the policy's own tokens, so that tool output does not shift them."""
    lone_group: LoneGroup = "drop"
    """A group of one has no baseline: its sample is dropped, or the step fails."""


class ReinforcePP(Estimator):
    """REINFORCE++: discounted return of each token, whitened over the batch's tokens; no groups."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""


class ReMax(Estimator):
    """Reward minus the reward of the greedy answer to the same prompt, which the caller supplies."""

    kind: Literal["remax"] = "remax"


class GAE(Estimator):
    """Generalised advantage estimation with a critic; tokens that the policy did not write are skipped."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ: 1 is Monte Carlo, 0 is one-step temporal difference."""
    whiten: bool = True
    """Shift and scale the batch's advantages to mean 0 and variance 1 over tokens."""


class CustomEstimator(Estimator):
    """An estimator from another package, found through the entry point group ``headrace.advantages``."""

    kind: Literal["plugin"] = "plugin"
    name: str
    """Name of the entry point."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Given to the estimator as they are."""


AnyEstimator = Annotated[
    GRPO
    | RLOO
    | OPO
    | GPG
    | PassK
    | GDPO
    | ReinforcePPBaseline
    | OptimalTokenBaseline
    | ReinforcePP
    | ReMax
    | GAE
    | CustomEstimator,
    Field(discriminator="kind"),
]
