"""Attention over shared prefixes on the CPU, as a function of transformers' attention interface.

What all prompts share, each prompt's rest, and each response are blocks; a block attends to itself and to those that it
follows, whose keys are read once for all their followers. Against one dense masked product this leaves out all that the
mask would throw away, and its backward pass is several times faster than PyTorch's CPU flash kernel at these sizes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

NAME = "headrace_prefix"
"""``attn_implementation`` of models that call it."""
RECOMPUTE_SCORES = 1 << 22
"""Attention scores of one layer above which they are computed again in the backward pass rather than kept."""

Run = tuple[int, int, list[tuple[int, int]]]
"""A prompt without what is shared (start, tokens), and (start, tokens) of each of its responses."""


@dataclass(frozen=True)
class Layout:
    """Where things lie in a packed row."""

    shared: int
    """Tokens at the row's beginning that all prompts share."""
    runs: list[Run]


@dataclass(frozen=True)
class Blocks:
    """The tokens of a packed row in padded blocks: shared prefix [S], prompts [G, P], responses [G, N, C]."""

    shape: tuple[int, int, int, int, int]
    """S shared tokens, G prompts, P longest prompt without them, N most samples of a prompt, C longest response."""
    spread: Tensor
    """int64 [S + G·P + G·N·C]: token of the row at each place of the blocks; padding repeats a token of its prompt."""
    gather: Tensor
    """int64 [L]: place in the blocks of each token of the row."""
    real: Tensor
    """bool [S + G·P + G·N·C, 1]: False at padding."""
    hidden: tuple[Tensor, Tensor, Tensor]
    """Keys that a token of each block does not see: bool [S, S], [P, S + P], [G, 1, 1, C, S + P + C]."""

    @classmethod
    def of(cls, layout: Layout) -> "Blocks":
        runs, s = layout.runs, layout.shared
        g, n = len(runs), max(len(responses) for _, _, responses in runs)
        p = max(size for _, size, _ in runs)
        c = max((count for _, _, responses in runs for _, count in responses), default=0)
        begins = torch.tensor([begin for begin, _, _ in runs])[:, None]
        sizes = torch.tensor([size for _, size, _ in runs])[:, None]
        starts, counts = begins.repeat(1, n), torch.zeros(g, n, dtype=torch.int64)
        for index, (_, _, responses) in enumerate(runs):
            for place, (start, count) in enumerate(responses):
                starts[index, place], counts[index, place] = start, count
        in_prompt, in_response = torch.arange(p) < sizes, torch.arange(c) < counts[..., None]
        of_prompt = torch.where(in_prompt, begins + torch.arange(p), begins)
        of_response = torch.where(in_response, starts[..., None] + torch.arange(c), begins[..., None])
        real = torch.cat([torch.ones(s, dtype=torch.bool), in_prompt.flatten(), in_response.flatten()])
        spread = torch.cat([torch.arange(s), of_prompt.flatten(), of_response.flatten()])
        places = real.nonzero().squeeze(1)
        gather = torch.empty(len(places), dtype=torch.int64)
        gather[spread[places]] = places
        seen = torch.zeros(1, dtype=torch.bool)
        from_response = [
            seen.expand(g, 1, 1, c, s),
            (~in_prompt)[:, None, None, None].expand(g, 1, 1, c, p),
            _future(c).expand(g, 1, 1, c, c),
        ]
        hidden = (_future(s), torch.cat([seen.expand(p, s), _future(p)], -1), torch.cat(from_response, -1))
        return cls((s, g, p, n, c), spread, gather, real[:, None], hidden)

    def scores(self, heads: int) -> int:
        """Attention scores of one layer."""
        s, g, p, n, c = self.shape
        return heads * (s * s + g * p * (s + p) + g * n * c * (s + p + c))


def _future(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


class _Reorder(torch.autograd.Function):
    """Rows by index, between packed and padded order. Both passes gather, so that sums have no order to depend on."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Tensor, back: Tensor, real: Tensor | None) -> Tensor:
        ctx.back, ctx.real = back, real
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad.index_select(0, ctx.back)
        if ctx.real is not None:
            grad *= ctx.real
        return grad, None, None, None


def _reorder(x: Tensor, there: Tensor, back: Tensor, real: Tensor | None) -> Tensor:
    return _Reorder.apply(x, there, back, real)  # pyright: ignore[reportReturnType]


def prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    blocks: Blocks,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, L, D], key and value [1, K, L, D] of a packed row → [1, L, H, D]. No dropout."""
    heads, dim, kv_heads = query.shape[1], query.shape[3], key.shape[1]
    q, k, v = ((x[0].transpose(0, 1).flatten(1)) for x in (query * scaling, key, value))
    padded = [_reorder(x, blocks.spread, blocks.gather, None) for x in (q, k, v)]
    if torch.is_grad_enabled() and blocks.scores(heads) > RECOMPUTE_SCORES:
        out = checkpoint(_attend, padded, blocks, kv_heads, dim, use_reentrant=False)
    else:
        out = _attend(padded, blocks, kv_heads, dim)
    out = _reorder(out, blocks.gather, blocks.spread, blocks.real)
    return out.view(1, -1, heads, dim), None


def _attend(padded: list[Tensor], blocks: Blocks, kv_heads: int, dim: int) -> Tensor:
    """Padded q [·, H·D] (scaled), k and v [·, K·D] → [·, H·D]. K: key heads; R: query heads of one key head."""
    s, g, p, n, c = blocks.shape
    r = padded[0].shape[1] // (kv_heads * dim)
    shared, prompts, responses = zip(*(x.split([s, g * p, g * n * c]) for x in padded), strict=True)
    keys: list[tuple[Tensor, Tensor]] = []
    outs: list[Tensor] = []
    if s:
        keys.append(_pair(x.view(s, kv_heads, dim).transpose(0, 1) for x in shared[1:]))
        q = shared[0].view(s, kv_heads, r, dim).permute(1, 2, 0, 3)
        outs.append(_attention(q, keys, blocks.hidden[0]).permute(2, 0, 1, 3).reshape(s, -1))
    keys.append(_pair(x.view(g, p, kv_heads, dim).permute(2, 0, 1, 3) for x in prompts[1:]))
    q = prompts[0].view(g, p, kv_heads, r, dim).permute(2, 0, 3, 1, 4)
    outs.append(_attention(q, keys, blocks.hidden[1]).permute(1, 3, 0, 2, 4).reshape(g * p, -1))
    if n * c:
        keys.append(_pair(x.view(g, n, c, kv_heads, dim).permute(3, 0, 1, 2, 4) for x in responses[1:]))
        q = responses[0].view(g, n, c, kv_heads, r, dim).permute(3, 0, 1, 4, 2, 5)
        outs.append(_attention(q, keys, blocks.hidden[2]).permute(1, 2, 4, 0, 3, 5).reshape(g * n * c, -1))
    return torch.cat(outs)


def _pair(tensors: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    key, value = tensors
    return key, value


def _attention(q: Tensor, keys: list[tuple[Tensor, Tensor]], hidden: Tensor) -> Tensor:
    """q [K, …, D] over several sets of keys and values [K, …, S, D], each shared by the axes of q that it lacks."""
    scores = torch.cat([_product(q, k.transpose(-1, -2)) for k, _ in keys], -1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1, dtype=torch.float32).to(q.dtype)
    parts = zip(weights.split([k.shape[-2] for k, _ in keys], -1), keys, strict=True)
    first, *others = (_product(weight, v) for weight, (_, v) in parts)
    return sum(others, first)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x [A…, B…, D] times y [A…, D, E] → [A…, B…, E]: one matrix product for all of B."""
    rows = x.reshape(*x.shape[: y.ndim - 2], -1, x.shape[-1])
    return (rows @ y).view(*x.shape[:-1], y.shape[-1])


AttentionInterface.register(NAME, prefix_attention)
