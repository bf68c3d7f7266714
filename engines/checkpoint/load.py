"""The receiving half that all transports share: from verified partitions to whole tensors."""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from headrace.blocks.weights import Adapter, Partition, Plan
from headrace.engines.checkpoint.copying import copy_all
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.hashes import begin_hash
from headrace.engines.checkpoint.plan import Cut, metas_of

Sink = Callable[[str, Tensor], None]
"""Called once for every tensor, in the plan's order. The tensor is read-only and only valid until ``settle`` is called,
or, where there is none, during the call."""

Settle = Callable[[], None]
"""Called when the tensors since its last call are about to become invalid: what was queued with them must be done."""

Place = Callable[[str], Tensor | None]
"""The memory of a tensor of that name: contiguous, of the wire dtype and the plan's shape; it is written piece by piece
as partitions come, and the sink is not called. None: the sink gets the tensor, whole."""

Expect = Mapping[str, tuple[str, Sequence[int]]]
"""name → (dtype, shape) of what the receiver will take."""

T = TypeVar("T")

with warnings.catch_warnings():
    # torch warns once in a process about memory that it cannot write; that sinks must not write is our contract.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def check_expected(plan: Plan, expect: Expect | None, adapter: Adapter | None) -> None:
    """Raises WeightError unless the plan is of the expected adapter (None: of a whole model), and has exactly the
    tensors that are expected. Nothing is checked where none are."""
    if expect is None:
        return
    if plan.adapter != adapter:
        raise WeightError(
            f"{_described(plan.adapter)} was published, but this engine serves {_described(adapter)}",
            advice="the same model folder and the same model.lora for trainer and rollout engine",
        )
    offered = metas_of(plan)
    wrong = [f"{name} is missing" for name in expect if name not in offered]
    wrong += [f"{name} is unknown here" for name in offered if name not in expect]
    for name, (dtype, shape) in expect.items():
        if name in offered and offered[name] != (dtype, list(shape)):
            wrong.append(f"{name} is {offered[name][0]} {offered[name][1]}, expected {dtype} {list(shape)}")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise WeightError(
            f"the published tensors are not those of this engine's model: {'; '.join(wrong[:5])}{more}",
            advice="the same model folder, model.dtype and quantization for trainer and rollout engine",
        )


def _described(adapter: Adapter | None) -> str:
    if adapter is None:
        return "a whole model"
    layers = ", ".join(adapter.target_modules)
    return f"a LoRA adapter of rank {adapter.rank}, alpha {adapter.alpha}, on {layers} of base {adapter.base}"


def overlap(
    steps: Iterator[T],
    use: Callable[[T], None],
    stop: Callable[[BaseException], None],
    deadline_s: float | None,
    ahead: int = 1,
) -> None:
    """Uses each item while a thread fetches the ``ahead`` next: that many, and the one in use, are alive at a time.

    deadline_s: for each fetch, beyond which TimeoutError; None where the fetch itself has one.
    stop: called with the error when anything fails; it must end a fetch that is still under way.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="weights-ahead") as pool:
        try:
            coming = deque(pool.submit(next, steps, None) for _ in range(ahead))
            while (item := coming.popleft().result(deadline_s)) is not None:
                coming.append(pool.submit(next, steps, None))
                use(item)
                del item  # else one more would be alive
        except BaseException as error:
            stop(error)
            raise


class Assembler:
    """Turns partitions, in order, into calls of the sink, or into what lies in the places of tensors. Keeps one tensor:
    the one that spans partitions."""

    def __init__(
        self, cuts: list[list[Cut]], sink: Sink, settle: Settle | None = None, place: Place | None = None
    ) -> None:
        """cuts: of the plan's partitions."""
        self._cuts, self._sink, self._settle, self._place = cuts, sink, settle, place
        self._open: Tensor | None = None
        self._name, self._placed = "", torch.empty(0)
        self.nbytes = 0
        """That were handed over."""

    def places(self, partition: Partition) -> list[Tensor | None]:
        """For each slice its bytes where they are used, uint8; None where the sink gets it. To be asked once for every
        partition, in order."""
        return [self._placed_for(cut) for cut in self._cuts[partition.index]]

    def feed(self, partition: Partition, data: Tensor, places: list[Tensor | None]) -> None:
        """data: the partition's bytes, uint8 [nbytes], not used after the call; places: what ``places`` gave."""
        cuts = self._cuts[partition.index]
        into: list[Tensor] = []
        parts: list[Tensor] = []
        views = data.split_with_sizes([cut.nbytes for cut in cuts])
        for cut, view, target in zip(cuts, views, places, strict=True):
            if target is None:
                self._hand_over(cut, view, partition.index)
            else:
                into.append(target)
                parts.append(view)
        copy_all(into, parts)
        self.landed(partition)
        if data.device.type != "cpu":
            torch.cuda.current_stream(data.device).synchronize()  # what was queued still reads the bytes

    def feed_hashed(self, partition: Partition, data: Tensor, places: Sequence[Tensor]) -> str:
        """As ``feed``, of data in a GPU's memory whose slices all have places; returns its hash (``sums``). One wait
        for the GPU, not two."""
        copy_all(places, data.split_with_sizes([cut.nbytes for cut in self._cuts[partition.index]]))
        self.landed(partition)
        hashed = begin_hash(data, "sums")
        torch.cuda.current_stream(data.device).synchronize()  # what was queued still reads the bytes
        return hashed()

    def landed(self, partition: Partition) -> None:
        """All of it is in its places."""
        if self._settle is not None:
            self._settle()
        self.nbytes += partition.nbytes

    def _hand_over(self, cut: Cut, view: Tensor, partition: int) -> None:
        if not cut.total:
            view = torch.empty(0, dtype=torch.uint8, device=view.device)
        elif cut.nbytes < cut.total:
            if cut.start == 0:
                self._open = torch.empty(cut.total, dtype=torch.uint8, device=view.device)
            if self._open is None:
                raise WeightError(f"{cut.name} does not begin at its first byte", partition=partition)
            self._open[cut.start : cut.start + cut.nbytes].copy_(view)
            if cut.start + cut.nbytes < cut.total:
                return
            view, self._open = self._open, None
        self._sink(cut.name, view.view(cut.dtype).view(cut.shape))

    def _placed_for(self, cut: Cut) -> Tensor | None:
        if self._place is None or not cut.total:
            return None
        if cut.start == 0:
            placed = self._place(cut.name)
            self._name = cut.name if placed is not None else ""
            if placed is not None:
                self._placed = placed.detach().view(-1).view(torch.uint8)
        if self._name != cut.name:
            return None
        return self._placed if cut.nbytes == cut.total else self._placed[cut.start : cut.start + cut.nbytes]


def in_host_memory(places: list[Tensor | None]) -> list[Tensor] | None:
    """The places, when they are all of a partition, and all in the host's memory: then it is written there before its
    hash is compared, and the hash is that of what was written. Another than the announced one spoils the model, as a
    partition that is missing does."""
    found = [place for place in places if place is not None and place.device.type == "cpu"]
    return found if len(found) == len(places) else None
