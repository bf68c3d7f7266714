"""Checked inputs of an objective: trained tokens only, constants, finite."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.algorithms.batch import Jagged, Segments
from headrace.algorithms.errors import AlgorithmError


@dataclass(frozen=True)
class Inputs:
    """Token tensors [N] of trained tokens, without gradient; where one was not finite, all of that token are 0."""

    columns: dict[str, Tensor]
    segments: Segments
    bad: Tensor | None
    """bool [N]: tokens with an input that was not finite; None: there are none."""

    @classmethod
    def of(cls, batch: Jagged, **given: Tensor | None) -> "Inputs":
        """Inputs that are None are left out. Raises ``AlgorithmError`` for a shape other than [T]."""
        columns = {}
        for name, x in given.items():
            if x is None:
                continue
            if x.shape != batch.mask.shape:
                raise AlgorithmError(f"'{name}' has shape {list(x.shape)}, the batch has {len(batch.mask)} tokens")
            columns[name] = batch.gather(x.detach())
        bad = _not_finite(columns)
        if bad is not None:
            columns = {name: torch.where(bad, x.new_zeros(()), x) for name, x in columns.items()}
        return cls(columns, batch.trained[1], bad)

    def get(self, name: str) -> Tensor | None:
        """The input, or None where it was not given."""
        return self.columns.get(name)

    def need(self, name: str, user: str) -> Tensor:
        """The input; ``AlgorithmError`` says who needs it where it was not given."""
        if name not in self.columns:
            raise AlgorithmError(f"{user} needs '{name}', which was not given")
        return self.columns[name]

    def silence(self, weights: Tensor | float, like: Tensor) -> Tensor | float:
        """Weights of tokens, 0 at bad ones."""
        if self.bad is None:
            return weights
        return torch.as_tensor(weights, dtype=like.dtype, device=like.device).where(~self.bad, 0.0)

    def bad_count(self) -> Tensor:
        """float64 scalar."""
        if self.bad is None:
            return torch.zeros((), dtype=torch.float64, device=self.segments.offsets.device)
        return self.bad.sum().double()


def _not_finite(columns: dict[str, Tensor]) -> Tensor | None:
    floats = [x for x in columns.values() if x.is_floating_point()]
    # A sum is finite if and only if all of it is (values near the largest float aside): one cheap pass, no temporary.
    if all(bool(x.sum().isfinite()) for x in floats):
        return None
    bad = torch.stack([~x.isfinite() for x in floats]).any(0)
    return bad if bool(bad.any()) else None
