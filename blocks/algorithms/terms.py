"""KL terms, corrections of the back-end mismatch, filters and reward shaping."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from headrace.blocks.algorithms.choice import Choice
from headrace.blocks.base import Strict

KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]


class AdaptiveKL(Strict):
    """Moves the coefficient so that the measured KL approaches a target (Ziegler et al., 2019)."""

    target: float = Field(gt=0)
    """KL per token, in nats, that the controller aims at."""
    horizon: float = Field(default=10_000, gt=0)
    """Samples over which the controller reacts; larger is slower."""


class KLTerm(Choice):
    """Keeps the policy near the reference model."""

    family: ClassVar[str] = "kl"


class KLLoss(KLTerm):
    """coefficient × KL(new ‖ reference), added to the loss with the same aggregation."""

    kind: Literal["loss"] = "loss"
    estimator: KLEstimator = "k3"
    """k1, abs, k2, k3 by Schulman; with '+' the value is the estimator's and the gradient that of k2."""
    coefficient: float = Field(gt=0)
    """Weight of the term (nats × coefficient)."""
    adaptive: AdaptiveKL | None = None
    """Adapt the coefficient after each step; null = fixed."""


class KLReward(KLTerm):
    """coefficient × KL(old ‖ reference), subtracted from the reward of each token before the advantage."""

    kind: Literal["reward"] = "reward"
    estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """k1, abs, k2, k3 by Schulman."""
    coefficient: float = Field(gt=0)
    """Weight of the term (reward per nat)."""
    adaptive: AdaptiveKL | None = None
    """Adapt the coefficient after each step; null = fixed."""


AnyKL = Annotated[KLLoss | KLReward, Field(discriminator="kind")]


class Bound(Choice):
    """What happens to importance weights old/behaviour that are too large or too small."""

    family: ClassVar[str] = "bound"


class Truncate(Bound):
    """Truncated importance sampling (TIS): weights above the bound count as the bound."""

    kind: Literal["truncate"] = "truncate"
    high: float = Field(default=2.0, gt=0)
    """Largest weight."""


class Mask(Bound):
    """Masked importance sampling (IcePop, MIS): weights outside the bounds count as zero."""

    kind: Literal["mask"] = "mask"
    low: float = Field(default=0.5, ge=0)
    """Smallest weight that counts."""
    high: float = Field(default=5.0, gt=0)
    """Largest weight that counts."""

    @model_validator(mode="after")
    def _ordered(self) -> "Mask":
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high}): no weight would be left")
        return self


class Importance(Strict):
    """Importance weights old/behaviour that multiply the loss; no gradient passes through them."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """token: each token's ratio; sequence: the product over the sample; geometric: the product's root per token."""
    bound: Annotated[Truncate | Mask, Field(discriminator="kind")] = Field(default_factory=Truncate)
    """How large weights are tamed."""
    normalise: bool = False
    """Divide by the batch's mean weight, so that the correction does not change the step size."""


class Rejection(Choice):
    """Refuses tokens or samples whose back ends disagree; they leave baseline, loss and denominators."""

    family: ClassVar[str] = "rejection"


class RejectRatio(Rejection):
    """Bounds on the ratio behaviour/old (k1): of a token, of a sample (product) or its geometric mean."""

    kind: Literal["ratio"] = "ratio"
    level: Literal["token", "sequence-sum", "sequence-mean"]
    """token; sequence-sum: product over the sample; sequence-mean: geometric mean over the sample's tokens."""
    low: float = Field(gt=0, lt=1)
    """Ratios below are refused."""
    high: float = Field(gt=1)
    """Ratios above are refused."""


class RejectDivergence(Rejection):
    """An upper bound on the divergence k2 or k3 between old and behaviour: of a token, or of a sample."""

    kind: Literal["divergence"] = "divergence"
    level: Literal["token", "sequence-sum", "sequence-mean", "sequence-max"]
    """token, or the sum, mean or largest value over the sample's tokens."""
    estimator: Literal["k2", "k3"] = "k3"
    """k2 = log-ratio² / 2; k3 = ratio − 1 − log-ratio."""
    high: float = Field(gt=0)
    """Divergences above (nats) are refused."""


class Correction(Strict):
    """Correction of the mismatch between rollout engine and trainer; order: reject, baseline, denominators, loss."""

    importance: Importance | None = None
    """Weights on the loss; null = none."""
    reject: tuple[Annotated[RejectRatio | RejectDivergence, Field(discriminator="kind")], ...] = ()
    """Every test must pass."""

    @model_validator(mode="after")
    def _does_something(self) -> "Correction":
        if self.importance is None and not self.reject:
            raise ValueError(
                "a correction without 'importance' and 'reject' has no effect: set one, or correction: null"
            )
        return self


def _empty_in_forms(field: dict[str, Any]) -> None:
    """A form fills in constants; this one would switch the filter on where nobody touched it."""
    field.pop("const", None)
    field.pop("default", None)


class EqualRewards(Strict):
    """Dynamic sampling (DAPO): groups whose rewards are all equal teach nothing: dropped, replaced and counted."""

    kind: Literal["equal_rewards"] = Field(default="equal_rewards", json_schema_extra=_empty_in_forms)
    tolerance: float = Field(default=0.0, ge=0)
    """Rewards that differ by at most this count as equal."""
    rounds: int = Field(default=3, ge=1)
    """Rounds of generation in one iteration: each asks one new prompt for every group that taught nothing so far.
    1 = such groups are dropped and not replaced."""


class Overlong(Strict):
    """DAPO's soft punishment of overlong answers, added to the reward."""

    max_length: int = Field(gt=0)
    """Tokens of the longest allowed answer."""
    buffer: int = Field(gt=0)
    """The penalty grows linearly over the last ``buffer`` tokens before ``max_length``."""
    penalty: float = Field(default=1.0, gt=0)
    """Reward taken away at ``max_length``."""

    @model_validator(mode="after")
    def _fits(self) -> "Overlong":
        if self.buffer > self.max_length:
            raise ValueError(f"buffer ({self.buffer}) is longer than max_length ({self.max_length})")
        return self
