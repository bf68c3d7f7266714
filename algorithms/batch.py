"""Ragged batches: flat token tensors over samples, and sums over each sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headrace.algorithms.errors import AlgorithmError


class _SegmentSum(torch.autograd.Function):
    """Sum over contiguous segments; the backward pass copies each segment's gradient to its tokens."""

    @staticmethod
    def forward(ctx, values: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return torch.segment_reduce(values, "sum", offsets=offsets, axis=0, unsafe=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (offsets,) = ctx.saved_tensors
        return grad.contiguous().repeat_interleave(offsets.diff()), None


@dataclass(frozen=True)
class Segments:
    """Contiguous runs of tokens, one for each sample, without any token that is not trained on.

    ``offsets``: int64 [S + 1], ``offsets[0] == 0``. Runs may be empty.
    """

    offsets: Tensor

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sample, int64 [S]."""
        return self.offsets.diff()

    def only(self, samples: Tensor) -> "Segments":
        """The segments of some samples (bool [S]); the others must be empty."""
        return Segments(torch.cat([self.offsets[:1], self.offsets[1:][samples]]))

    def sum(self, values: Tensor) -> Tensor:
        """[N] → [S]; 0 for a sample without tokens."""
        return _SegmentSum.apply(values.contiguous(), self.offsets)  # type: ignore[return-value]

    def mean(self, values: Tensor) -> Tensor:
        """[N] → [S]; 0 for a sample without tokens."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def max(self, values: Tensor) -> Tensor:
        """[N] → [S]; −inf for a sample without tokens."""
        return torch.segment_reduce(values.contiguous(), "max", offsets=self.offsets, axis=0, unsafe=True)

    def expand(self, values: Tensor) -> Tensor:
        """[S] → [N]: each sample's value for each of its tokens."""
        return values.repeat_interleave(self.lengths)


@dataclass(frozen=True)
class Jagged:
    """Where the samples lie in flat token tensors, and which tokens are trained on.

    ``offsets``: int64 [S + 1]; sample ``i`` owns the tokens ``offsets[i]:offsets[i + 1]``; empty samples are allowed.
    ``mask``: bool [T]; True where the policy wrote the token and its sample is accepted. What lies at other tokens is
    never read, so it may be padding, and may be NaN.
    """

    offsets: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        if self.offsets.dtype != torch.int64 or self.offsets.ndim != 1 or not len(self.offsets):
            raise AlgorithmError(f"offsets must be int64 [samples + 1], not {_shape(self.offsets)}")
        if self.mask.dtype != torch.bool or self.mask.ndim != 1:
            raise AlgorithmError(f"mask must be bool [tokens], not {_shape(self.mask)}")
        if int(self.offsets[-1]) != len(self.mask) or int(self.offsets[0]) != 0:
            raise AlgorithmError(
                f"offsets span {self.offsets[0]}:{self.offsets[-1]}, the mask has {len(self.mask)} tokens"
            )

    @classmethod
    def from_lengths(cls, lengths: Tensor | Sequence[int], mask: Tensor | None = None) -> "Jagged":
        """``lengths``: tokens of each sample; ``mask``: anything that turns into bool [T], all True by default."""
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        if mask is None:
            mask = torch.ones(int(offsets[-1]), dtype=torch.bool, device=lengths.device)
        return cls(offsets, mask.bool())

    @classmethod
    def from_padded(cls, mask: Tensor) -> "Jagged":
        """``mask``: [S, L], nonzero where trained on. Token tensors [S, L] go in as ``x.reshape(-1)``, uncopied."""
        samples, width = mask.shape
        offsets = torch.arange(samples + 1, dtype=torch.int64, device=mask.device) * width
        return cls(offsets, mask.reshape(-1).bool())

    @property
    def samples(self) -> int:
        """S."""
        return len(self.offsets) - 1

    def sample_index(self) -> Tensor:
        """The sample of each token, int64 [T]."""
        return torch.arange(self.samples, device=self.offsets.device).repeat_interleave(self.offsets.diff())

    def lengths(self) -> Tensor:
        """Trained tokens of each sample, int64 [S]."""
        return self.trained[1].lengths

    @cached_property
    def trained(self) -> tuple[Tensor | None, Segments]:
        """Positions of the trained tokens, int64 [N] (None: all of them), and how they lie in samples."""
        if not len(self.mask) or bool(self.mask.view(torch.uint8).min()):
            return None, Segments(self.offsets)
        running = torch.zeros(len(self.mask) + 1, dtype=torch.int64, device=self.mask.device)
        torch.cumsum(self.mask, 0, out=running[1:])
        return _positions(self.mask), Segments(running[self.offsets])

    def gather(self, values: Tensor) -> Tensor:
        """[T] → [N]: the trained tokens."""
        positions, _ = self.trained
        return values if positions is None else values.index_select(0, positions)

    def scatter(self, values: Tensor) -> Tensor:
        """[N] → [T]: trained tokens in their places, 0 elsewhere."""
        positions, _ = self.trained
        if positions is None:
            return values
        return torch.zeros(len(self.mask), dtype=values.dtype, device=values.device).scatter_(0, positions, values)

    def accept(self, samples: Tensor | None = None, tokens: Tensor | None = None) -> "Jagged":
        """The batch without refused samples (bool [S], True = stays) and refused tokens (bool [T])."""
        mask = self.mask
        if samples is not None:
            mask = mask & samples.repeat_interleave(self.offsets.diff())
        if tokens is not None:
            mask = mask & tokens
        return Jagged(self.offsets, mask)

    def select(self, samples: Tensor) -> tuple[Tensor, "Jagged"]:
        """A micro-batch of the given samples (int64 [M], in this order): token positions int64 [T'], and its Jagged."""
        lengths = self.offsets.diff()[samples]
        part = Jagged.from_lengths(lengths, torch.ones(int(lengths.sum()), dtype=torch.bool, device=lengths.device))
        shift = self.offsets[:-1][samples] - part.offsets[:-1]
        tokens = torch.arange(len(part.mask), device=lengths.device) + shift.repeat_interleave(lengths)
        return tokens, Jagged(part.offsets, self.mask[tokens])


def _positions(mask: Tensor) -> Tensor:
    """Where the mask is True; through numpy on the CPU, which is ten times as fast at it."""
    if mask.device.type == "cpu":
        return torch.from_numpy(mask.numpy().nonzero()[0])
    return mask.nonzero().squeeze(1)


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
