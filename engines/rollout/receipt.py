"""Proof that an engine serves what it received: every parameter is hashed again where the engine computes with it."""

from collections.abc import Callable, Iterable

import torch
import xxhash

from headrace.engines.checkpoint.errors import WeightError


class Receipt:
    """A sink for ``pull`` that remembers the hash of every tensor before handing it on; and the places of tensors that
    come where they are used: the hash of what was written there is in the digest."""

    def __init__(
        self, assign: Callable[[str, torch.Tensor], None], place: Callable[[str], torch.Tensor | None]
    ) -> None:
        self._assign, self._place = assign, place
        self._received: dict[str, tuple[torch.dtype, str]] = {}
        self._placed: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        self._received[name] = tensor.dtype, _hash(tensor)
        self._assign(name, tensor)

    def place(self, name: str) -> torch.Tensor | None:
        """See ``pull``."""
        placed = self._place(name)
        if placed is not None:
            self._placed[name] = placed
        return placed

    def verify(self, serving: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Raises WeightError unless ``serving`` has exactly the tensors that came, bit for bit."""
        left, placed = dict(self._received), dict(self._placed)
        for name, tensor in serving:
            if (there := placed.pop(name, None)) is not None:
                same = there.dtype == tensor.dtype and there.data_ptr() == tensor.data_ptr()
            else:
                dtype, expected = left.pop(name, (tensor.dtype, ""))
                same = tensor.dtype == dtype and _hash(tensor) == expected
            if not same:
                raise WeightError(
                    f"{name} as served is not what was received", version=version, advice="starting the engine again"
                )
        if left := left | placed:
            raise WeightError(f"{len(left)} tensors are not served, first {min(left)}", version=version)


def _hash(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
