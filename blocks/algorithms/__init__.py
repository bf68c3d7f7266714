"""The algorithm of a campaign, as configuration: torch-free, strict, by preset with overrides."""

from typing import Any

from pydantic import Field, model_validator

from headrace.blocks.algorithms.advantages import GRPO, AnyEstimator
from headrace.blocks.algorithms.losses import (
    SAMPLE_LOSSES,
    AnyAggregation,
    AnyLoss,
    PPOClip,
    SeqMeanTokenMean,
    ValueLoss,
)
from headrace.blocks.algorithms.presets import Preset, with_preset
from headrace.blocks.algorithms.terms import AnyKL, Correction, EqualRewards, Overlong
from headrace.blocks.base import Strict

NO_BASELINE = ("reinforce_pp", "remax", "gae")
"""Estimators that compare no samples of one group."""


def _kind(section: Any) -> str | None:
    return section.get("kind") if isinstance(section, dict) else getattr(section, "kind", None)


class Algorithm(Strict):
    """Which advantage, loss, KL and corrections a campaign trains with.

    A preset fills every section; settings given beside it override it, section by section and setting by setting. A
    section of another ``kind`` replaces the preset's. A setting without effect is an error.
    """

    preset: Preset = "grpo"
    """The named algorithm to start from."""
    advantage: AnyEstimator | None = Field(default_factory=GRPO)
    """How rewards become advantages; null only where the loss needs none (DPO)."""
    loss: AnyLoss = Field(default_factory=PPOClip)
    """How advantages move the policy."""
    aggregation: AnyAggregation | None = Field(default_factory=SeqMeanTokenMean)
    """How token losses become one number; null only where the loss is a mean over samples or pairs by definition."""
    kl: AnyKL | None = None
    """Keeps the policy near a reference model, which then has to be loaded; null = no reference."""
    correction: Correction | None = None
    """Correction of the mismatch between rollout engine and trainer; null = measured, not corrected."""
    filter: EqualRewards | None = None
    """Groups that are not worth training on; null = all are trained."""
    overlong: Overlong | None = None
    """Soft penalty of answers near the longest allowed length; null = none."""
    value: ValueLoss | None = None
    """The critic's loss; only with advantage 'gae'."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, subtracted from the loss with the same aggregation."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        merged = with_preset(data)
        loss, estimator = _kind(merged.get("loss")), _kind(merged.get("advantage"))
        inherited = [name for name in merged if name not in data]
        if loss in SAMPLE_LOSSES and "aggregation" in inherited:
            merged["aggregation"] = None
        if loss == "dpo":
            merged |= {name: None for name in ("advantage", "kl", "filter") if name in inherited}
        if "value" not in data:
            merged["value"] = (merged.get("value") or {}) if estimator == "gae" else None
        return merged

    @model_validator(mode="after")
    def _refuse_useless_settings(self) -> "Algorithm":
        loss, estimator = self.loss, self.advantage
        wrong: list[str] = []
        if loss.kind in SAMPLE_LOSSES and self.aggregation is not None:
            wrong.append(f"'aggregation' has no effect with loss '{loss.kind}', which is a mean over samples or pairs")
        if loss.kind not in SAMPLE_LOSSES and self.aggregation is None:
            wrong.append(f"loss '{loss.kind}' needs an 'aggregation', for example {{kind: token-mean}}")
        if loss.kind == "dpo":
            wrong += self._useless_for_dpo()
        elif estimator is None:
            wrong.append(f"loss '{loss.kind}' needs an 'advantage', for example {{kind: grpo}}")
        if self.value is not None and (estimator is None or estimator.kind != "gae"):
            wrong.append("'value' has no effect without a critic: it belongs to advantage 'gae'")
        if self.value is None and estimator is not None and estimator.kind == "gae":
            wrong.append("advantage 'gae' trains a critic and needs 'value', for example {clip: 0.5}")
        if self.filter is not None and estimator is not None and estimator.kind in NO_BASELINE:
            wrong.append(f"'filter' drops groups of equal rewards, which advantage '{estimator.kind}' can learn from")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _useless_for_dpo(self) -> list[str]:
        assert self.loss.kind == "dpo"
        useless = {
            "advantage": self.advantage,
            "kl": self.kl,
            "correction": self.correction,
            "filter": self.filter,
            "entropy_coefficient": self.entropy_coefficient or None,
            "overlong": self.overlong if self.loss.pairs == "given" else None,
        }
        return [f"'{name}' has no effect with loss 'dpo'" for name, value in useless.items() if value is not None]

    @property
    def needs_reference(self) -> bool:
        """Whether the reference model's log-probabilities are needed."""
        return self.kl is not None or (self.loss.kind == "dpo" and not self.loss.reference_free)

    @property
    def needs_critic(self) -> bool:
        """Whether a critic's values are needed."""
        return self.value is not None

    @property
    def needs_greedy_reward(self) -> bool:
        """Whether the reward of a greedy answer to each prompt is needed (ReMax)."""
        return self.advantage is not None and self.advantage.kind == "remax"
