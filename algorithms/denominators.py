"""What losses are divided by: counted once over the whole global batch, before it is split."""

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from headrace.algorithms.batch import Jagged


@dataclass(frozen=True)
class Denominators:
    """Counts over the accepted tokens of the global batch. Those of parts add up to those of the whole."""

    tokens: float = 0.0
    """Tokens trained on."""
    samples: float = 0.0
    """Samples with at least one such token."""
    pairs: float = 0.0
    """Preference pairs (DPO)."""
    weighted: float = 0.0
    """Tokens whose importance weights are in the next two; 0 or ``tokens``."""
    weight_tokens: float = 0.0
    """Sum of the importance weights over tokens; only for a correction with ``normalise``."""
    weight_samples: float = 0.0
    """Sum over samples of the sample's mean importance weight; likewise."""

    @classmethod
    def of(cls, batch: Jagged, *, pairs: Tensor | None = None, weights: Tensor | None = None) -> "Denominators":
        """``pairs``: int64 [P, 2]; ``weights``: [T] from ``corrections.importance_weights`` (before normalisation)."""
        _, segments = batch.trained
        lengths = segments.lengths
        weight_tokens = weight_samples = 0.0
        if weights is not None:
            trained = batch.gather(weights).double()
            weight_tokens, weight_samples = float(trained.sum()), float(segments.mean(trained).sum())
        return cls(
            tokens=float(lengths.sum()),
            samples=float((lengths > 0).sum()),
            pairs=0.0 if pairs is None else float(len(pairs)),
            weighted=0.0 if weights is None else float(lengths.sum()),
            weight_tokens=weight_tokens,
            weight_samples=weight_samples,
        )

    def __add__(self, other: "Denominators") -> "Denominators":
        return Denominators(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def to_tensor(self, device: torch.device | str | None = None) -> Tensor:
        """float64 [6]: sum it over ranks."""
        return torch.tensor(astuple(self), dtype=torch.float64, device=device)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "Denominators":
        return cls(*tensor.tolist())
