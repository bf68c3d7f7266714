"""Log-probabilities and entropies of tokens from hidden states, without the [tokens, vocabulary] matrix of logits."""

from typing import Literal, overload

import torch
from torch import Tensor

from headrace.algorithms import fused
from headrace.algorithms.errors import AlgorithmError

CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 320 * 2**20}
"""Default size of the float32 logits that exist at once, by device: a GPU needs larger products to be busy."""

KEEP_BYTES = 192 * 2**20
"""Logits up to this size are kept for the backward pass; those of further tokens are computed again."""


def default_chunk(vocabulary: int, device: torch.device) -> int:
    """Tokens whose float32 logits fit in ``CHUNK_BYTES``; at least 16, so that the matrix products stay efficient."""
    return max(16, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (4 * vocabulary))


@overload
def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = ...,
    bias: Tensor | None = ...,
    chunk: int | None = ...,
    entropy: Literal[False] = ...,
) -> Tensor: ...
@overload
def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = ...,
    bias: Tensor | None = ...,
    chunk: int | None = ...,
    entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    chunk: int | None = None,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability (nats) of each target under softmax((hidden weightᵀ + bias) / temperature), float32 [T].

    ``hidden`` [T, H] and ``weight`` [V, H] of one floating dtype, ``targets`` int64 [T], ``bias`` [V]. With
    ``entropy``, also the entropy (nats) of each distribution, float32 [T]. Both have gradients for hidden, weight and
    bias. Products are in the inputs' dtype, all after them in float32 (float64 for float64 inputs). ``chunk``: tokens
    whose logits exist at once; of the others, at most ``KEEP_BYTES`` are kept for the backward pass. On a Hopper GPU in
    bfloat16, Liger's fused kernel takes over where it is installed (``fused``), and ``chunk`` has no part in it.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
        raise AlgorithmError(f"expected hidden [T, H], weight [V, H], targets [T], not {shapes}")
    if hidden.dtype != weight.dtype:
        raise AlgorithmError(f"hidden is {hidden.dtype} and weight is {weight.dtype}: convert one of them")
    if not temperature > 0:
        raise AlgorithmError(f"temperature must be above 0, not {temperature}")
    if fused.applies(hidden, bias):
        values, spread = fused.token_logprobs(hidden, weight, targets, temperature, entropy)
        return values if spread is None else (values, spread)
    size = default_chunk(len(weight), hidden.device) if chunk is None else chunk
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    logits = _Logits(
        hidden.detach(), weight.detach(), None if bias is None else bias.detach(), temperature, size, trains
    )
    logprobs, entropies = _TokenLogprobs.apply(hidden, weight, bias, targets, logits, entropy)  # type: ignore[misc]
    return (logprobs, entropies) if entropy else logprobs


class _Logits:
    """Logits after bias and temperature, chunk by chunk, in float32 (float64 for float64)."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, size: int, keep: bool
    ) -> None:
        self.hidden, self.weight, self.bias, self.temperature = hidden, weight, bias, temperature
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self.chunks = [slice(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]
        row_bytes = len(weight) * hidden.element_size()
        self.keep_until = KEEP_BYTES // row_bytes if keep else 0
        self.kept: dict[int, Tensor] = {}
        self.buffers: dict[torch.dtype, Tensor] = {}

    def product(self, rows: slice) -> Tensor:
        """hidden weightᵀ of the chunk in the inputs' dtype; the caller may overwrite it."""
        kept = self.kept.pop(rows.start, None)
        return (
            kept
            if kept is not None
            else torch.mm(self.hidden[rows], self.weight.t(), out=self._buffer(rows, self.hidden.dtype))
        )

    def of(self, rows: slice, first: bool) -> Tensor:
        """The chunk's logits; ``first``: in the forward pass, which leaves the product for the backward pass."""
        keep = first and rows.stop <= self.keep_until
        product = torch.mm(self.hidden[rows], self.weight.t()) if keep else self.product(rows)
        if keep:
            self.kept[rows.start] = product
        in_place = product.dtype == self.wide and not (keep and self._changes())
        logits = product if in_place else self._buffer(rows, self.wide).copy_(product)
        if self.bias is not None:
            logits.add_(self.bias)
        return logits.div_(self.temperature) if self.temperature != 1.0 else logits

    def _changes(self) -> bool:
        return self.bias is not None or self.temperature != 1.0

    def _buffer(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """One buffer for each dtype: fresh memory for each chunk would cost more than what is done with it."""
        if dtype not in self.buffers:
            longest = max(chunk.stop - chunk.start for chunk in self.chunks)
            self.buffers[dtype] = torch.empty(longest, len(self.weight), dtype=dtype, device=self.hidden.device)
        return self.buffers[dtype][: rows.stop - rows.start]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, logits_of: _Logits, entropy):
        logprobs = torch.empty(len(hidden), dtype=logits_of.wide, device=hidden.device)
        normalisers = torch.empty_like(logprobs)
        entropies = torch.empty_like(logprobs) if entropy else logprobs.new_empty(0)
        for rows in logits_of.chunks:
            logits = logits_of.of(rows, first=True)
            target = logits.gather(1, targets[rows, None]).squeeze(1)
            normaliser = logits.logsumexp(1)
            normalisers[rows] = normaliser
            logprobs[rows] = target - normaliser
            if entropy:
                entropies[rows] = normaliser - torch.linalg.vecdot((logits - normaliser[:, None]).exp_(), logits)
        logits_of.buffers.clear()
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        ctx.logits_of, ctx.entropy = logits_of, entropy
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        logits_of: _Logits = ctx.logits_of
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=logits_of.wide) if need_bias else None
        for rows in logits_of.chunks:
            grad = logits_of.of(rows, first=False).sub_(normalisers[rows, None])
            scale = grad_logprobs[rows]
            if ctx.entropy:
                # d entropy / d logit = −p (log p + entropy), d logprob / d logit = [target] − p.
                by_entropy = grad_entropies[rows]
                factor = (grad + entropies[rows, None]).mul_(by_entropy[:, None]).add_(scale[:, None])
                grad.exp_().mul_(factor.neg_())
            else:
                grad.exp_().mul_(-scale[:, None])
            grad.scatter_add_(1, targets[rows, None], scale[:, None])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            narrow = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, weight, out=grad_hidden[rows])
            if need_weight:
                grad_weight = _accumulate(grad_weight, narrow.t(), hidden[rows], logits_of)
        logits_of.buffers.clear()
        if need_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        tempered = [
            g if g is None or logits_of.temperature == 1.0 else g / logits_of.temperature
            for g in (grad_hidden, grad_weight, grad_bias)
        ]
        grads = [g if g is None else g.to(x.dtype) for g, x in zip(tempered, (hidden, weight, bias), strict=True)]
        return *grads, None, None, None


def _accumulate(total: Tensor | None, left: Tensor, right: Tensor, logits_of: _Logits) -> Tensor:
    """total + left right; sums of several chunks are in float32."""
    if total is None:
        product = left @ right
        return product if len(logits_of.chunks) == 1 else product.to(logits_of.wide)
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    if total.is_cuda:
        return torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    return total.add_(left @ right)
