"""Policy, preference and value losses. The formulas are in docs/algorithms.md; ``headrace.algorithms`` has the code."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from headrace.blocks.algorithms.choice import Choice
from headrace.blocks.base import Strict


class PolicyLoss(Choice):
    """How advantages move the policy."""

    family: ClassVar[str] = "loss"


class PPOClip(PolicyLoss):
    """PPO's clipped surrogate, with bounds of its own on each side and an optional dual clip."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio new/old is clipped below 1 − clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio new/old is clipped above 1 + clip_high; larger than clip_low is DAPO's clip-higher."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of negative advantages at −A × dual_clip; null = no bound."""


class GSPO(PolicyLoss):
    """One ratio for the whole sequence: the geometric mean of the token ratios, clipped."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, lt=1)
    """The sequence ratio is clipped below 1 − clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """The sequence ratio is clipped above 1 + clip_high."""


class GMPO(PolicyLoss):
    """Geometric mean of clipped token ratios times the sample's mean advantage; one value for each sample."""

    kind: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, ge=0)
    """The logarithm of the ratio is clipped below −clip_low."""
    clip_high: float = Field(default=0.4, ge=0)
    """The logarithm of the ratio is clipped above clip_high."""


class CISPO(PolicyLoss):
    """REINFORCE whose weight is the clipped ratio, with no gradient through the ratio: no token is silenced."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(default=None, ge=0, lt=1)
    """The weight is at least 1 − clip_low; null = no lower bound."""
    clip_high: float = Field(default=0.2, ge=0)
    """The weight is at most 1 + clip_high."""


class SAPO(PolicyLoss):
    """A sigmoid gate on the ratio in place of the clip, steeper for negative advantages."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0)
    """Temperature of the gate for positive advantages."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Temperature of the gate for negative advantages."""


class ClipCov(PolicyLoss):
    """PPO-clip that also silences a few tokens of high covariance between log-probability and advantage."""

    kind: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio new/old is clipped below 1 − clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio new/old is clipped above 1 + clip_high."""
    fraction: float = Field(default=2e-4, gt=0, le=1)
    """Share of the batch's tokens that is silenced (at least one)."""
    covariance_low: float = 1.0
    """Only tokens whose covariance is above this are candidates."""
    covariance_high: float = 5.0
    """Only tokens whose covariance is below this are candidates."""


class KLCov(PolicyLoss):
    """Policy gradient with a |log ratio| penalty on the tokens of highest covariance."""

    kind: Literal["kl_cov"] = "kl_cov"
    fraction: float = Field(default=2e-4, gt=0, le=1)
    """Share of the batch's tokens that is penalised (at least one)."""
    penalty: float = Field(default=1.0, gt=0)
    """Weight of |log ratio| on those tokens."""


class Reinforce(PolicyLoss):
    """−log-probability × advantage (also GPG's loss); no ratio, so for on-policy steps or with a correction."""

    kind: Literal["reinforce"] = "reinforce"


class DPPO(PolicyLoss):
    """REINFORCE with a truncated ratio; tokens that A pushed out of a divergence ball are silenced."""

    kind: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Total variation |p − q|, or Bernoulli KL(q ‖ p), of the sampled token's probability."""
    low: float = Field(default=0.2, gt=0)
    """Radius of the ball for negative advantages."""
    high: float = Field(default=0.2, gt=0)
    """Radius of the ball for positive advantages."""
    truncate: float = Field(default=20.0, ge=1)
    """The ratio's upper bound, as a weight without gradient."""


class DRO(PolicyLoss):
    """−(log-probability × advantage − β/2 × log-ratio²): a quadratic trust region for off-policy data."""

    kind: Literal["dro"] = "dro"
    beta: float = Field(gt=0)
    """Strength of the quadratic penalty."""


class DPO(PolicyLoss):
    """Direct preference optimisation on pairs; online, the best against the worst sample of each group."""

    kind: Literal["dpo"] = "dpo"
    form: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO; ipo: squared distance to 1/(2β) of the mean log-ratio per token."""
    beta: float = Field(default=0.1, gt=0)
    """Inverse temperature of the implicit reward."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a preference is wrong (form sigmoid)."""
    reference_free: bool = False
    """Take the reference as uniform: no reference log-probabilities are needed."""
    pairs: Literal["given", "best_worst"] = "given"
    """given: the data has chosen and rejected answers; best_worst: made from each group's rewards (online)."""

    @model_validator(mode="after")
    def _smoothing_needs_sigmoid(self) -> "DPO":
        if self.form == "ipo" and self.label_smoothing:
            raise ValueError("'label_smoothing' has no effect with form 'ipo': remove it, or use form 'sigmoid'")
        return self


class CustomLoss(PolicyLoss):
    """A policy loss from another package, found through the entry point group ``headrace.losses``."""

    kind: Literal["plugin"] = "plugin"
    name: str
    """Name of the entry point."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Given to the loss as they are."""


AnyLoss = Annotated[
    PPOClip | GSPO | GMPO | CISPO | SAPO | ClipCov | KLCov | Reinforce | DPPO | DRO | DPO | CustomLoss,
    Field(discriminator="kind"),
]

SAMPLE_LOSSES = ("gmpo", "dpo")
"""Losses that are one value for each sample or pair: their aggregation is a mean, by definition."""


class ValueLoss(Strict):
    """The critic's loss: half the squared error to the returns, clipped around the old values."""

    clip: float | None = Field(default=0.5, gt=0)
    """New values count as at most this far from the old ones where that makes the loss larger; null = no clip."""


class Aggregation(Choice):
    """How token losses become one number, with denominators of the whole global batch."""

    family: ClassVar[str] = "aggregation"


class TokenMean(Aggregation):
    """Every accepted token of the batch weighs the same (DAPO)."""

    kind: Literal["token-mean"] = "token-mean"


class TokenSum(Aggregation):
    """The plain sum over accepted tokens."""

    kind: Literal["token-sum"] = "token-sum"


class SeqMeanTokenSum(Aggregation):
    """Sum over the sample's tokens, mean over samples."""

    kind: Literal["seq-mean-token-sum"] = "seq-mean-token-sum"


class SeqMeanTokenMean(Aggregation):
    """Mean over the sample's tokens, mean over samples (GRPO as published)."""

    kind: Literal["seq-mean-token-mean"] = "seq-mean-token-mean"


class SeqMeanTokenSumNorm(Aggregation):
    """Sum over the sample's tokens divided by a constant, mean over samples (Dr.GRPO)."""

    kind: Literal["seq-mean-token-sum-norm"] = "seq-mean-token-sum-norm"
    constant: float = Field(gt=0)
    """The divisor in tokens, usually the longest allowed response; it has no default, because it sets the step size."""


AnyAggregation = Annotated[
    TokenMean | TokenSum | SeqMeanTokenSum | SeqMeanTokenMean | SeqMeanTokenSumNorm, Field(discriminator="kind")
]
