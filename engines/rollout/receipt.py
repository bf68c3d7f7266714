"""Proof that an engine serves what it received: every parameter is hashed again where the engine computes with it."""

from collections.abc import Callable, Iterable

import torch
import xxhash

from headrace.engines.checkpoint.errors import WeightError


class Receipt:
    """A sink for ``pull`` that remembers the hash of every tensor before handing it on."""

    def __init__(self, assign: Callable[[str, torch.Tensor], None]) -> None:
        self._assign = assign
        self._received: dict[str, tuple[torch.dtype, str]] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        self._received[name] = tensor.dtype, _hash(tensor)
        self._assign(name, tensor)

    def verify(self, serving: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Raises WeightError unless ``serving`` has exactly the tensors that came, bit for bit."""
        left = dict(self._received)
        for name, tensor in serving:
            dtype, expected = left.pop(name, (tensor.dtype, ""))
            if tensor.dtype != dtype or _hash(tensor) != expected:
                raise WeightError(
                    f"{name} as served is not what was received", version=version, advice="starting the engine again"
                )
        if left:
            raise WeightError(f"{len(left)} tensors are not served, first {min(left)}", version=version)


def _hash(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
