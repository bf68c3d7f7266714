"""Metrics as sums and maxima: they add up exactly over micro-batches and ranks, and the mean is taken once."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Sums:
    """Unfinished metrics: scalar float64 tensors by name.

    ``per_token`` and ``per_sample`` become means over ``totals['tokens']`` and ``totals['samples']``; ``totals`` stay
    sums. ``maxima`` merge by the larger. The names depend on the configuration and on which inputs were given, never on
    the data, so that every rank has the same and one all-reduce for each of two tensors merges them.
    """

    per_token: dict[str, Tensor] = field(default_factory=dict)
    per_sample: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: "Sums") -> None:
        """Takes in metrics of other names about the same tokens."""
        for mine, theirs in zip(self._groups(), other._groups(), strict=True):
            mine.update(theirs)

    def _groups(self) -> tuple[dict[str, Tensor], ...]:
        return self.per_token, self.per_sample, self.totals, self.maxima

    def merge(self, other: "Sums") -> "Sums":
        """Both parts as one."""
        return Sums(
            _join(self.per_token, other.per_token, torch.add),
            _join(self.per_sample, other.per_sample, torch.add),
            _join(self.totals, other.totals, torch.add),
            _join(self.maxima, other.maxima, torch.maximum),
        )

    @staticmethod
    def merged(parts: Iterable["Sums"]) -> "Sums":
        """All parts as one; empty for no parts."""
        result = Sums()
        for part in parts:
            result = result.merge(part)
        return result

    def to_tensors(self) -> tuple[Tensor, Tensor]:
        """(float64 [n] to all-reduce with SUM, float64 [m] to all-reduce with MAX), in the order of sorted names."""
        added = [group[name] for group in (self.per_token, self.per_sample, self.totals) for name in sorted(group)]
        largest = [self.maxima[name] for name in sorted(self.maxima)]
        return _stack(added), _stack(largest)

    def from_tensors(self, added: Tensor, largest: Tensor) -> "Sums":
        """These names with the values of ``to_tensors`` after the all-reduce."""
        values, peaks = iter(added.unbind()), iter(largest.unbind())
        groups = [{name: next(values) for name in sorted(g)} for g in (self.per_token, self.per_sample, self.totals)]
        return Sums(*groups, maxima={name: next(peaks) for name in sorted(self.maxima)})


def finish_metrics(sums: Sums) -> dict[str, float]:
    """The means, once. A mean over no token (or no sample) does not exist and is left out, as are figures made of it.

    Derived here: effective sample sizes, χ², perplexities, standard deviations; docs/algorithms.md lists every name.
    """
    added, largest = sums.to_tensors()
    done = sums.from_tensors(added.cpu(), largest.cpu())
    result = {name: float(value) for name, value in done.totals.items()}
    tokens, samples = result.get("tokens", 0.0), result.get("samples", 0.0)
    if tokens:
        result |= {name: float(value) / tokens for name, value in done.per_token.items()}
    if samples:
        result |= {name: float(value) / samples for name, value in done.per_sample.items()}
    result |= {name: float(value) for name, value in done.maxima.items() if value > -torch.inf}
    for weights in WEIGHTS:
        _moments(result, weights)
    _explained_variance(result)
    _pair_means(result)
    return result


WEIGHTS = ("ratio", "mismatch", "correction")
"""Groups of metrics about weights w: their 'mean' and 'second_moment' give the rest."""


def _moments(metrics: dict[str, float], group: str) -> None:
    """ess = (Σw)² / (n Σw²) in (0, 1], 0 where all weights are 0; chi2 = mean w² − 1."""
    mean, square = metrics.get(f"{group}/mean"), metrics.pop(f"{group}/second_moment", None)
    if mean is None or square is None:
        return
    metrics[f"{group}/ess"] = mean * mean / square if square > 0 else 0.0
    metrics[f"{group}/chi2"] = square - 1.0


def _explained_variance(metrics: dict[str, float]) -> None:
    """1 − mean squared error of the critic / variance of the returns; left out where the returns do not vary."""
    square = metrics.pop("value/return_square", None)
    if square is not None:
        variance = square - metrics["value/return_mean"] ** 2
        if variance > 0:
            metrics["value/explained_variance"] = 1 - metrics["value/squared_error"] / variance


def _pair_means(metrics: dict[str, float]) -> None:
    """Mean implicit rewards of preference pairs, and the share of pairs in the right order."""
    pairs = metrics.get("dpo/pairs", 0.0)
    for name in ("dpo/accuracy", "dpo/chosen_reward", "dpo/rejected_reward"):
        value = metrics.pop(name, None)
        if value is not None and pairs:
            metrics[name] = value / pairs


def total(values: Tensor) -> Tensor:
    """Sum as a float64 scalar."""
    return values.sum().double()


def count(values: Tensor) -> Tensor:
    """How many are True, as a float64 scalar."""
    return values.count_nonzero().double()


def squares(values: Tensor) -> Tensor:
    """Sum of squares as a float64 scalar."""
    return torch.dot(values, values).double()


def largest(values: Tensor) -> Tensor:
    """Maximum as a float64 scalar; −inf of nothing."""
    return values.max().double() if len(values) else torch.tensor(-torch.inf, dtype=torch.float64, device=values.device)


def _join(a: dict[str, Tensor], b: dict[str, Tensor], pick: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    both = {name: pick(a[name], b[name]) for name in a if name in b}
    return {**a, **b, **both}


def _stack(values: list[Tensor]) -> Tensor:
    return torch.stack([v.double() for v in values]) if values else torch.zeros(0, dtype=torch.float64)
