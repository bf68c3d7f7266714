"""Problems, data sets of them, and the order in which a campaign sees them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # loaded where they are used: the flows import this file
    import numpy as np
    import pyarrow as pa


class DataError(ValueError):
    """A data set that cannot be used as it is; the message says what to change."""


@dataclass(frozen=True)
class Problem:
    """One prompt and what its answers are compared with."""

    prompt_id: str
    """Stable name: the same problem has the same id in every run."""
    messages: list[dict[str, str]]
    """Chat messages, ``{"role", "content"}`` each, up to and with the user's question."""
    ground_truth: Any
    """Anything that JSON can hold; the reward function knows what to do with it."""


class Dataset(Protocol):
    """A finite list of problems. The same index is the same problem in every process."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def problem(self, index: int) -> Problem: ...


@dataclass(frozen=True)
class Listed:
    """A data set in memory."""

    name: str
    problems: Sequence[Problem]

    def __len__(self) -> int:
        return len(self.problems)

    def problem(self, index: int) -> Problem:
        return self.problems[index]


class Splits(NamedTuple):
    """The two halves of a data set; no problem is in both."""

    train: Dataset
    held_out: Dataset


@lru_cache(maxsize=8)
def permutation(n: int, seed: int, epoch: int = 0) -> "np.ndarray":
    """A shuffled ``arange(n)``: int64 [n], a function of its arguments alone.

    Sorts by SplitMix64 (Steele et al. 2014), because neither ``random`` nor numpy promises that a shuffle stays the
    same in later versions, and a resumed campaign must see the same order.
    """

    import numpy as np

    def mix(x: np.ndarray) -> np.ndarray:
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    key = mix(mix(np.array([seed], dtype=np.uint64)) ^ np.array([epoch], dtype=np.uint64))
    order = np.argsort(mix(key ^ mix(np.arange(n, dtype=np.uint64))), kind="stable")
    order.setflags(write=False)
    return order


def draw(dataset: Dataset, cursor: int, count: int, seed: int) -> tuple[list[tuple[int, Problem]], int]:
    """The next ``count`` problems of a campaign, each with its group id, and the cursor after them.

    The data order is one shuffled epoch after another, without repetition inside an epoch. A group's id is its place in
    that order, so ids grow from ``cursor`` and any cursor can be drawn again.
    """
    size = len(dataset)
    if not size:
        raise DataError(f"data set {dataset.name} is empty")
    if cursor < 0 or count < 0:
        raise DataError(f"cannot draw {count} problems from cursor {cursor}")
    drawn = []
    for group_id in range(cursor, cursor + count):
        epoch, place = divmod(group_id, size)
        drawn.append((group_id, dataset.problem(int(permutation(size, seed, epoch)[place]))))
    return drawn, cursor + count


def first(dataset: Dataset, count: int | None = None) -> list[tuple[int, Problem]]:
    """The first ``count`` problems (None: all) in their own order, numbered from 0: what an evaluation asks."""
    return [(i, dataset.problem(i)) for i in range(len(dataset) if count is None else min(count, len(dataset)))]


def prompts_table(drawn: Iterable[tuple[int, Problem]]) -> "pa.Table":
    """Problems as a table in the PROMPTS schema; one row each, in the order given."""
    import pyarrow as pa

    from headrace.engines.experience.schema import PROMPTS

    rows = [
        {
            "group_id": group_id,
            "prompt_id": problem.prompt_id,
            "messages": json.dumps(problem.messages, ensure_ascii=False),
            "ground_truth": json.dumps(problem.ground_truth, ensure_ascii=False, allow_nan=False),
        }
        for group_id, problem in drawn
    ]
    return pa.Table.from_pylist(rows, schema=PROMPTS)


def without(problems: Iterable[Problem], held_out: Iterable[Problem]) -> list[Problem]:
    """``problems`` without doubles and without those whose messages are in ``held_out``."""
    seen = {json.dumps(p.messages) for p in held_out}
    kept = []
    for problem in problems:
        text = json.dumps(problem.messages)
        if text not in seen:
            seen.add(text)
            kept.append(problem)
    return kept
