"""Attention over shared prefixes on the CPU, as a function of transformers' attention interface.

Prompts attend to themselves; responses attend to their prompt's keys, which are read once for all samples, and to
their own. Against one dense masked product over [prompt | c1 | … | cn] this leaves out all that the mask would throw
away, and its backward pass is several times faster than that of PyTorch's CPU flash kernel at these sizes.
"""

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
"""A row's prompt (start, tokens), and (start, tokens) of each of its responses."""


@dataclass(frozen=True)
class Blocks:
    """Where the tokens of a packed row lie in padded blocks: prompts [G, P], then responses [G, N, C]."""

    shape: tuple[int, int, int, int]
    """G rows, P longest prompt, N most samples of a row, C longest response (inputs)."""
    spread: Tensor
    """int64 [G·P + G·N·C]: token of the row at each place of the blocks; padding repeats a token of its row."""
    gather: Tensor
    """int64 [L]: place in the blocks of each token of the row."""
    real: Tensor
    """bool [G·P + G·N·C, 1]: False at padding."""
    hidden: Tensor
    """bool [G, 1, 1, C, P + C]: keys (prompt, own) that a response token does not see."""
    future: Tensor
    """bool [P, P]: keys that a prompt token does not see."""

    @classmethod
    def of(cls, runs: list[Run]) -> "Blocks":
        """Raises ValueError for no rows."""
        g, n = len(runs), max(len(responses) for _, _, responses in runs)
        p = max(size for _, size, _ in runs)
        c = max((count for _, _, responses in runs for _, count in responses), default=0)
        starts = torch.zeros(g, n, dtype=torch.int64)
        counts = torch.zeros(g, n, dtype=torch.int64)
        for index, (begin, _, responses) in enumerate(runs):
            starts[index] = begin
            for place, (start, count) in enumerate(responses):
                starts[index, place], counts[index, place] = start, count
        begins = torch.tensor([begin for begin, _, _ in runs])[:, None]
        sizes = torch.tensor([size for _, size, _ in runs])[:, None]
        in_prompt, in_response = torch.arange(p) < sizes, torch.arange(c) < counts[..., None]
        real = torch.cat([in_prompt.flatten(), in_response.flatten()])
        spread = torch.cat(
            [
                torch.where(in_prompt, begins + torch.arange(p), begins).flatten(),
                torch.where(in_response, starts[..., None] + torch.arange(c), begins[..., None]).flatten(),
            ]
        )
        places = real.nonzero().squeeze(1)
        gather = torch.empty(len(places), dtype=torch.int64)
        gather[spread[places]] = places
        prompt_hidden = (~in_prompt)[:, None, None, None].expand(g, 1, 1, c, p)
        own_hidden = _future(c).expand(g, 1, 1, c, c)
        return cls((g, p, n, c), spread, gather, real[:, None], torch.cat([prompt_hidden, own_hidden], -1), _future(p))


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
    g, p, n, c = blocks.shape
    scores = heads * (g * p * p + g * n * c * (p + c))
    if scores > RECOMPUTE_SCORES and torch.is_grad_enabled():
        out = checkpoint(_attend, padded, blocks, kv_heads, dim, use_reentrant=False)
    else:
        out = _attend(padded, blocks, kv_heads, dim)
    out = _reorder(out, blocks.gather, blocks.spread, blocks.real)
    return out.view(1, -1, heads, dim), None


def _attend(padded: list[Tensor], blocks: Blocks, kv_heads: int, dim: int) -> Tensor:
    """Padded q [·, H·D] (scaled), k and v [·, K·D] → [·, H·D]. R: query heads of one key head."""
    q, k, v = padded
    g, p, n, c = blocks.shape
    r = q.shape[1] // (kv_heads * dim)
    q_prompt = q[: g * p].view(g, p, kv_heads, r, dim).permute(0, 2, 3, 1, 4).reshape(g, kv_heads, r * p, dim)
    k_prompt, v_prompt = (x[: g * p].view(g, p, kv_heads, dim).transpose(1, 2) for x in (k, v))
    scores = (q_prompt @ k_prompt.transpose(2, 3)).view(g, kv_heads, r, p, p)
    weights = _softmax(scores.masked_fill(blocks.future, -torch.inf)).view(g, kv_heads, r * p, p)
    prompt = (weights @ v_prompt).view(g, kv_heads, r, p, dim).permute(0, 3, 1, 2, 4).reshape(g * p, -1)
    if not n * c:
        return prompt
    q_own = q[g * p :].view(g, n, c, kv_heads, r, dim).permute(0, 3, 1, 4, 2, 5).reshape(g, kv_heads, n, r * c, dim)
    k_own, v_own = (x[g * p :].view(g, n, c, kv_heads, dim).permute(0, 3, 1, 2, 4) for x in (k, v))
    flat = (g, kv_heads, n * r * c)
    to_prompt = (q_own.reshape(*flat, dim) @ k_prompt.transpose(2, 3)).view(g, kv_heads, n, r * c, p)
    to_own = q_own @ k_own.transpose(3, 4)
    scores = torch.cat([to_prompt, to_own], -1).view(g, kv_heads, n * r, c, p + c)
    weights = _softmax(scores.masked_fill(blocks.hidden, -torch.inf)).view(g, kv_heads, n, r * c, p + c)
    own = (weights[..., :p].reshape(*flat, p) @ v_prompt).view(g, kv_heads, n, r * c, dim) + weights[..., p:] @ v_own
    own = own.view(g, kv_heads, n, r, c, dim).permute(0, 2, 4, 1, 3, 5).reshape(g * n * c, -1)
    return torch.cat([prompt, own])


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)


AttentionInterface.register(NAME, prefix_attention)
