"""Where a model's own loader puts each tensor: watched during one load, repeated without the loader in the next ones.

The loaders of vLLM look up every tensor's parameter by name, in Python: for some hundred tensors that takes
ten times as long as moving their bytes. With weights that are used as they are loaded, all they do is copy parts of
tensors into parts of parameters, the same parts for every version. Anything else that a loader does is noticed, and
then it is called each time. Runs in vLLM's workers.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.engines.checkpoint.copying import copy_all

Batch = Sequence[tuple[str, Tensor]]
"""Contiguous tensors by their Hugging Face names."""


class _Copy(NamedTuple):
    offset: int
    """Elements from the tensor's first one."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    into: Tensor
    whole: bool
    """The source is the whole tensor as it is, and of the dtype that it is copied into."""


class Copies:
    """Loads of one model. ``load`` everything, then ``finish``. Use it again while it ``fits``, and not after a load
    that failed."""

    def __init__(self, model: Any, loader: Callable[[Batch], Any]) -> None:
        """loader: the model's ``load_weights``; may return the names of the parameters that it loaded."""
        self._model, self._loader = model, loader
        self._copies: dict[str, list[_Copy]] = {}
        self._only_copies = True
        self._places: tuple[int, ...] = ()
        self.known = False
        """Whether the next load goes without the loader."""
        self.loaded: set[str] = set()
        """Names that the loader returned."""

    def fits(self) -> bool:
        """Whether the next load can go without the loader: all copies are known, and parameters are where they were."""
        return self.known and self._places == _places(self._model)

    def load(self, batch: Batch) -> None:
        """Tensors are read before it returns, or on the current stream of their device."""
        if not self.known:
            with _Watch(self, batch):
                self.loaded |= set(self._loader(batch) or ())
            return
        into: list[Tensor] = []
        parts: list[Tensor] = []
        for name, tensor in batch:
            for copy in self._copies.get(name, ()):  # one without elements has none
                into.append(copy.into)
                parts.append(tensor.as_strided(copy.size, copy.stride, tensor.storage_offset() + copy.offset))
        copy_all(into, parts)

    def place(self, name: str) -> Tensor | None:
        """The memory of a tensor that is copied whole into one place, with its shape; None when it is not so."""
        if not self.known or len(self._copies.get(name, ())) != 1:
            return None
        [copy] = self._copies[name]
        whole = copy.whole and copy.size == tuple(copy.into.shape) and copy.into.is_contiguous()
        return copy.into if whole else None

    def finish(self) -> None:
        """The whole version was loaded."""
        if not self.known:
            held = {p.untyped_storage().data_ptr() for p in _tensors(self._model)}
            written = {c.into.untyped_storage().data_ptr() for copies in self._copies.values() for c in copies}
            # What was copied elsewhere first, or not at all, went some way that a copy does not repeat.
            self.known = self._only_copies and written <= held and all(self._copies.values())
            self._places = _places(self._model)


class _Watch(TorchDispatchMode):
    """Notes what is copied out of a batch, and whether anything else is done with it."""

    def __init__(self, copies: Copies, batch: Batch) -> None:
        super().__init__()
        self._copies = copies
        self._tensors = sorted(((t.data_ptr(), name, t) for name, t in batch if t.numel()), key=lambda one: one[0])
        self._begins = [begin for begin, _, _ in self._tensors]
        for _, name, _ in self._tensors:
            copies._copies[name] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            into, source = args[:2]
            if (found := self._of(source)) is not None:
                name, tensor = found
                offset = (source.data_ptr() - tensor.data_ptr()) // tensor.element_size()
                whole = source.shape == tensor.shape and source.is_contiguous() and source.dtype == into.dtype
                if source.dtype == tensor.dtype:
                    self._copies._copies[name].append(
                        _Copy(offset, tuple(source.shape), tuple(source.stride()), into, whole)
                    )
                else:
                    self._copies._only_copies = False
            if self._of(into) is not None:
                self._copies._only_copies = False
        elif self._of(made) is None and any(self._of(one) is not None for one in tree_leaves((args, kwargs))):
            self._copies._only_copies = False  # neither a copy nor a view
        return made

    def _of(self, value: Any) -> tuple[str, Tensor] | None:
        """The tensor of the batch that ``value`` is a part of."""
        if not isinstance(value, Tensor) or not value.numel() or not self._begins:
            return None
        begin, name, tensor = self._tensors[max(bisect_right(self._begins, value.data_ptr()) - 1, 0)]
        return (name, tensor) if begin <= value.data_ptr() < begin + tensor.nbytes else None


def _tensors(model: Any) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _places(model: Any) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in _tensors(model))
