"""Forward passes of the served model: prompts, and one token of every live sample."""

from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path

import torch
import torch.nn.functional as F

from headrace.engines.rollout.architecture import Architecture
from headrace.engines.rollout.matrix import Matrix
from headrace.engines.rollout.parameters import Layer, Parameters
from headrace.engines.rollout.slots import PromptCache, Slots


class Decoder:
    """A loaded model. Every sum is computed as transformers computes it, so that logits agree up to rounding."""

    def __init__(
        self,
        arch: Architecture,
        *,
        dtype: torch.dtype,
        head_dtype: torch.dtype,
        device: torch.device,
        folder: Path,
    ) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self.parameters = Parameters(arch, dtype=dtype, device=device)
        angles = torch.outer(torch.arange(arch.context).float(), arch.inverse_frequencies).to(device)
        cos, sin = angles.cos() * arch.rope_scale, angles.sin() * arch.rope_scale
        self._cos = torch.cat([cos, cos], -1).to(dtype)
        self._sin = torch.cat([-sin, sin], -1).to(dtype)  # the sign of rotate-half is in the table
        self._head_dtype = head_dtype
        self._head = Matrix(self.parameters.head)
        self.parameters.read_folder(folder)
        self.refresh()

    def refresh(self) -> None:
        """Drops what was derived from older weights."""
        self._head = Matrix(self.parameters.head.to(self._head_dtype))
        self._head.weights_changed()
        for layer in self.parameters.layers:
            layer.weights_changed()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocabulary] from the last hidden states [n, hidden]."""
        normed = self._norm(hidden, self.parameters.norm)
        return self._head(normed.to(self._head_dtype)).float()

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, list[PromptCache]]:
        """Runs several sequences at once, without padding in the matrix products; what all begin with is run once.

        Returns:
            Hidden states of the last token of each prompt, [prompts, hidden], and the caches of all.
        """
        common = len(commonprefix(prompts)) if len(prompts) > 1 else 0  # noqa: RUF071, these are tokens
        shared = min(common, min(map(len, prompts)) - 1)
        lengths = [len(p) - shared for p in prompts]
        batch, longest, a = len(prompts), max(lengths), self.arch
        # Places of the tokens that follow the shared ones in a table [batch, longest], padded on the right.
        rows = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(lengths)]).to(self.device)
        positions = torch.cat([torch.arange(shared, device=self.device), shared + rows % longest])
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        tokens = [*prompts[0][:shared], *(token for prompt in prompts for token in prompt[shared:])]
        ids = torch.tensor(tokens, device=self.device)
        padded = torch.zeros(
            batch * longest, a.heads + 2 * a.kv_heads, a.head_dim, dtype=self.dtype, device=self.device
        )
        length = shared + longest
        keys = torch.empty(a.layers, batch, a.kv_heads, a.head_dim, length, dtype=self.dtype, device=self.device)
        values = torch.empty(a.layers, batch, a.kv_heads, length, a.head_dim, dtype=self.dtype, device=self.device)
        seen = torch.ones(longest, length, dtype=torch.bool, device=self.device).tril(shared)
        split = [a.heads, a.kv_heads, a.kv_heads]
        x = F.embedding(ids, self.parameters.embedding)
        for index, layer in enumerate(self.parameters.layers):
            heads = self._heads(layer, x, cos, sin)
            padded[rows] = heads[shared:]
            # [batch, heads, longest, head_dim]; what is padded lies in the future of every token
            q, k, v = padded.view(batch, longest, -1, a.head_dim).transpose(1, 2).split(split, 1)
            attended = []
            if shared:
                q0, k0, v0 = heads[:shared].transpose(0, 1)[None].split(split, 1)
                attended.append(self._attend(q0, k0, v0, None)[0].transpose(0, 1).reshape(shared, -1))
                k = torch.cat([k0.expand(batch, -1, -1, -1), k], 2)
                v = torch.cat([v0.expand(batch, -1, -1, -1), v], 2)
            keys[index], values[index] = k.transpose(2, 3), v
            rest = self._attend(q, k, v, seen if shared else None)
            attended.append(rest.transpose(1, 2).reshape(batch * longest, -1)[rows])
            x = self._mlp(layer, x + layer.output(torch.cat(attended)))
        last = shared + torch.tensor(lengths, device=self.device).cumsum(0) - 1
        caches = [
            PromptCache(keys[:, i, ..., : shared + n], values[:, i, :, : shared + n]) for i, n in enumerate(lengths)
        ]
        return x[last], caches

    @torch.inference_mode()
    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, slots: Slots, end: int) -> torch.Tensor:
        """Appends one token to each of the first n slots.

        Args:
            tokens: int64 [n].
            positions: int64 [n], where in its slot each token goes.
            end: how much of each slot to read; more than the greatest position.

        Returns:
            float32 logits [n, vocabulary] of the next tokens.
        """
        a, n = self.arch, len(tokens)
        rows = torch.arange(n, device=self.device)
        slots.bias[rows, 0, 0, positions] = 0
        bias = slots.bias[:n, ..., :end]
        scale = a.head_dim**-0.5
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        x = F.embedding(tokens, self.parameters.embedding)
        for index, layer in enumerate(self.parameters.layers):
            keys, values = slots.keys[index], slots.values[index]
            q, k, v = self._heads(layer, x, cos, sin).split([a.heads, a.kv_heads, a.kv_heads], 1)
            keys[rows, :, :, positions] = k
            values[rows, :, positions] = v
            scores = torch.matmul(q.reshape(n, a.kv_heads, a.group, a.head_dim), keys[:n, ..., :end])
            weights = torch.softmax(torch.add(bias, scores, alpha=scale), -1).to(self.dtype)
            attended = torch.matmul(weights, values[:n, :, :end]).view(n, -1)
            x = self._mlp(layer, x + layer.output(attended))
        return self.logits(x)

    def _heads(self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries, keys (both rotated) and values: [n, heads + 2 kv_heads, head_dim]."""
        a = self.arch
        heads = layer.qkv(self._norm(x, layer.input_norm))
        heads = heads.view(len(x), -1, a.head_dim)
        q, k, v = heads.split([a.heads, a.kv_heads, a.kv_heads], 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = self._norm(q, layer.query_norm), self._norm(k, layer.key_norm)
            heads = torch.cat([q, k, v], 1)
        rotated = heads[:, : a.heads + a.kv_heads]
        low, high = rotated.chunk(2, -1)
        heads[:, : a.heads + a.kv_heads] = rotated * cos + torch.cat([high, low], -1) * sin
        return heads

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
        return x + layer.down(F.silu(gate) * up)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.arch.norm_eps)
        return weight * wide.to(x.dtype)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """[batch, heads, n, d] over keys and values [batch, kv_heads, m, d]; seen: bool [n, m], None = causal."""
        return F.scaled_dot_product_attention(
            q, self._repeat(k), self._repeat(v), attn_mask=seen, is_causal=seen is None
        )

    def _repeat(self, x: torch.Tensor) -> torch.Tensor:
        """Key or value heads repeated for their queries: [batch, kv_heads, n, d] → [batch, heads, n, d]."""
        return x.repeat_interleave(self.arch.group, 1)
