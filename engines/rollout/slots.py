"""The static key-value cache: one slot for each live sample, live samples first."""

from dataclasses import dataclass

import torch

from headrace.engines.rollout.architecture import Architecture


@dataclass
class PromptCache:
    """Keys and values of one prompt, computed once for all samples of its group."""

    keys: torch.Tensor
    """[layers, kv_heads, head_dim, length]: as the cache has them, transposed so that q·K reads along the length."""
    values: torch.Tensor
    """[layers, kv_heads, length, head_dim]."""

    @property
    def length(self) -> int:
        return self.values.shape[2]


class Storage:
    """Memory for the keys and values of ``max_batch`` slots, kept between calls; it grows when a call needs more."""

    def __init__(self, arch: Architecture, *, max_batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.arch, self.max_batch, self.device = arch, max_batch, device
        self._flat = [torch.zeros(0, dtype=dtype, device=device) for _ in range(2)]

    def slots(self, length: int) -> "Slots":
        """All slots with room for ``length`` tokens each, packed tightly: short ones share pages and cache lines."""
        a, batch = self.arch, self.max_batch
        size = a.layers * batch * a.kv_heads * a.head_dim * length
        if size > len(self._flat[0]):
            # Zeros, not empty: masked positions have probability 0, and 0 x NaN would be NaN.
            self._flat = [torch.zeros(size, dtype=flat.dtype, device=flat.device) for flat in self._flat]
        keys, values = (flat[:size] for flat in self._flat)
        return Slots(
            keys.view(a.layers, batch, a.kv_heads, a.head_dim, length),
            values.view(a.layers, batch, a.kv_heads, length, a.head_dim),
            torch.full((batch, 1, 1, length), -torch.inf, device=self.device),
        )

    def free(self) -> None:
        """Gives the memory back; the next call takes it again."""
        self._flat = [torch.zeros(0, dtype=flat.dtype, device=flat.device) for flat in self._flat]


@dataclass
class Slots:
    """The cache as one batch uses it; row n of the batch has slot n."""

    keys: torch.Tensor
    """[layers, slots, kv_heads, head_dim, length]."""
    values: torch.Tensor
    """[layers, slots, kv_heads, length, head_dim]."""
    bias: torch.Tensor
    """float32 [slots, 1, 1, length]: 0 where a slot holds a token, -inf elsewhere; added to the attention scores."""

    def fill(self, slot: int, cache: PromptCache) -> None:
        """Starts a slot with a copy of a prompt."""
        self.keys[:, slot, :, :, : cache.length] = cache.keys
        self.values[:, slot, :, : cache.length] = cache.values
        self.bias[slot, ..., : cache.length] = 0
        self.bias[slot, ..., cache.length :] = -torch.inf

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of a slot to another, which takes its place."""
        self.keys[:, target, :, :, :length] = self.keys[:, source, :, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        self.bias[target] = self.bias[source]
