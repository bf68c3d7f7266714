"""What an estimator sees, and what the stage returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from headrace.algorithms.advantages.discount import discounted_sum
from headrace.algorithms.batch import Jagged, Segments
from headrace.algorithms.errors import AlgorithmError


@dataclass(frozen=True)
class Advantages:
    """The advantage of every token, and which samples are trained on; samples and tokens in the order of the input."""

    values: Tensor
    """float [T]; 0 at tokens that are not trained on."""
    accepted: Tensor
    """bool [S]."""
    drop_reasons: list[str | None]
    """For each sample, why it is not accepted; None where it is."""
    batch: Jagged
    """The input's batch, its mask without refused samples and tokens: what denominators and loss are made with."""
    returns: Tensor | None = None
    """float [T]: what the critic learns (advantage 'gae')."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Samples:
    """The accepted samples of the whole global batch, numbered 0 … M−1, and their trained tokens [N]."""

    rewards: Tensor
    """float [M], with shaping, and with what the tokens add (KL in the reward)."""
    group: Tensor
    """int64 [M], 0 … G−1."""
    segments: Segments
    batch: Jagged
    """Of all samples; the trained tokens of the refused ones are none."""
    accepted: Tensor
    """bool [S]"""
    own_rewards: Tensor
    """float [M]: the part of ``rewards`` that comes at the last token."""
    tokens: Mapping[str, Tensor | None] = field(default_factory=dict)
    """Further inputs by token [T]; ``need`` gives those of the trained tokens."""
    greedy_rewards: Tensor | None = None
    """[M]"""
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """[M] each; 'reward' is the whole."""

    @cached_property
    def token_rewards(self) -> Tensor:
        """float [N]: what each token adds, plus the reward at each sample's last token."""
        added = self.tokens.get("token_rewards")
        values = self.own_rewards.new_zeros(self.count) if added is None else self.batch.gather(added)
        return values.index_add(0, self.segments.offsets[1:] - 1, self.own_rewards)

    def reward_to_go(self) -> Tensor:
        """float [N]: what a token and those after it add, undiscounted."""
        if self.tokens.get("token_rewards") is None:
            return self.segments.expand(self.own_rewards)
        return discounted_sum(self.token_rewards, self.segments, 1.0)

    @property
    def count(self) -> int:
        """N."""
        return int(self.segments.offsets[-1])

    @property
    def groups(self) -> int:
        """G."""
        return int(self.group.max()) + 1 if len(self.group) else 0

    @cached_property
    def group_sizes(self) -> Tensor:
        """float [G]"""
        return self.group_sum(torch.ones_like(self.rewards))

    def group_sum(self, values: Tensor) -> Tensor:
        """[M] → [G]"""
        return values.new_zeros(self.groups).index_add(0, self.group, values)

    def group_mean(self, values: Tensor) -> Tensor:
        """[M] → [M]: the mean of each sample's group."""
        return (self.group_sum(values) / self.group_sizes)[self.group]

    def group_std(self, values: Tensor) -> Tensor:
        """[M] → [M]: the standard deviation (unbiased) of each sample's group."""
        squares = self.group_sum((values - self.group_mean(values)).square())
        return (squares / (self.group_sizes - 1).clamp(min=1)).sqrt()[self.group]

    def need(self, name: str, kind: str) -> Tensor:
        """A further input of the trained tokens [N]; ``AlgorithmError`` where it was not given."""
        values = self.tokens.get(name)
        if values is None:
            raise AlgorithmError(f"advantage '{kind}' needs '{name}', which was not given")
        return self.batch.gather(values.detach())


def whiten(values: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Mean 0 and variance 1 (unbiased) over all trained tokens [N]; fewer than two tokens are only centred."""
    if not len(values):
        return values
    centred = values - values.mean()
    if len(values) < 2:
        return centred
    return centred * (centred.square().sum() / (len(values) - 1) + epsilon).rsqrt()
