"""Which samples are trained on, and why the others are not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.batch import Jagged
from headrace.algorithms.corrections import rejected
from headrace.algorithms.errors import AlgorithmError


@dataclass
class Admission:
    """Samples are refused one reason after another; whoever is refused is in no later baseline."""

    batch: Jagged
    accepted: Tensor
    """bool [S]"""
    reasons: list[str | None]
    counts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Jagged) -> "Admission":
        everyone = torch.ones(batch.samples, dtype=torch.bool, device=batch.offsets.device)
        return cls(batch, everyone, [None] * batch.samples)

    def drop(self, samples: Tensor, name: str, reason: str) -> None:
        """Refuses those of ``samples`` (bool [S]) that are still in, and counts them as ``dropped/<name>``."""
        hit = (samples & self.accepted).nonzero().squeeze(1)
        self.counts[f"dropped/{name}"] = self.counts.get(f"dropped/{name}", 0.0) + len(hit)
        if not len(hit):
            return
        for index in hit.tolist():
            self.reasons[index] = reason
        self.accepted = self.accepted.index_fill(0, hit, False)
        self.batch = self.batch.accept(self.accepted)

    def drop_not_finite(self, of_tokens: Mapping[str, Tensor | None], of_samples: Mapping[str, Tensor | None]) -> None:
        """Refuses samples with an input that is not finite, by token [T] (trained ones only) or by sample [S]."""
        bad = {name: ~x.isfinite() for name, x in of_samples.items() if x is not None}
        for name, x in of_tokens.items():
            own = None if x is None else self.batch.gather(x.detach())
            if own is not None and not bool(own.sum().isfinite()):
                bad[name] = self.batch.trained[1].sum((~own.isfinite()).double()) > 0
        self.counts["dropped/not_finite"] = 0.0
        for name, samples in bad.items():
            self.drop(samples, "not_finite", f"'{name}' is not finite")

    def reject_mismatch(self, tests: Any, old: Tensor | None, behaviour: Tensor | None) -> None:
        """Applies ``Correction.reject``: refuses tokens and samples."""
        if old is None or behaviour is None:
            raise AlgorithmError("correction.reject needs 'old' and 'behaviour' log-probabilities")
        tokens, samples = rejected(tests, old=old, behaviour=behaviour, batch=self.batch)
        self.counts["dropped/tokens_rejected"] = float((tokens & self.batch.mask).sum())
        self.drop(samples, "rejected", "rejected: rollout engine and trainer disagree on the sample")
        self.batch = self.batch.accept(tokens=~tokens)
        emptied = self.batch.lengths() == 0
        self.drop(emptied, "rejected_tokens", "rejected: rollout engine and trainer disagree on every token")

    def drop_lone(self, groups: Tensor, policy: str) -> None:
        """Groups of one accepted sample have no baseline."""
        _, place = groups.unique(return_inverse=True)
        size = torch.zeros(int(place.max()) + 1 if len(place) else 0, dtype=torch.int64, device=place.device)
        size.index_add_(0, place, self.accepted.long())
        alone = (size[place] == 1) & self.accepted
        if policy == "error" and bool(alone.any()):
            names = ", ".join(str(g) for g in groups[alone].tolist()[:5])
            raise AlgorithmError(
                f"{int(alone.sum())} groups have one usable sample (group {names} …), an error by "
                "advantage.lone_group: generate more samples for each prompt, or set it to 'drop'"
            )
        self.drop(alone, "lone_group", "group of one: no baseline")

    def drop_equal(self, groups: Tensor, rewards: Tensor, tolerance: float) -> None:
        """Groups whose accepted rewards are all equal, within ``tolerance``."""
        _, place = groups.unique(return_inverse=True)
        count = int(place.max()) + 1 if len(place) else 0
        kept, where = rewards[self.accepted], place[self.accepted]
        high = rewards.new_full((count,), -torch.inf).scatter_reduce(0, where, kept, "amax")
        low = rewards.new_full((count,), torch.inf).scatter_reduce(0, where, kept, "amin")
        equal = (high - low <= tolerance) & (high > -torch.inf)
        self.counts["dropped/equal_reward_groups"] = float(equal.sum())
        self.drop(equal[place], "equal_rewards", "all rewards of the group are equal")
