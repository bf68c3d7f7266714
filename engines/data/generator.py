"""The process that generates reasoning-gym's problems; see ``headrace.engines.data.reasoning_gym``."""

import difflib
import json
import os
import sys
from typing import Any

from headrace.blocks.data import ReasoningGym
from headrace.engines.data.base import DataError
from headrace.engines.data.packing import pack
from headrace.engines.data.reasoning_gym import REFUSED

SEED_STRIDE = 1 << 20
"""Generator states between two seeds: above the largest number of problems that one seed may use."""
CANDIDATES = 20
"""Problems tried for each one held out, where a task repeats itself."""


def generate(spec: ReasoningGym) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """(index, {question, answer, packed}) of both halves; runs in the generator's process."""
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    if spec.task not in DATASETS:
        near = difflib.get_close_matches(spec.task, DATASETS, n=3) or sorted(DATASETS)[:5]
        raise DataError(f"reasoning-gym has no task {spec.task!r}; near: {', '.join(near)}")
    start = spec.seed * SEED_STRIDE
    try:
        train = create_dataset(spec.task, seed=start, size=spec.size, **spec.config)
        tries = min(spec.held_out * CANDIDATES, SEED_STRIDE - spec.size)
        held_out = create_dataset(spec.task, seed=start + spec.size, size=tries, **spec.config)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"reasoning-gym refuses this config of {spec.task}: {error}") from error

    def item(dataset: Any, index: int) -> tuple[int, dict[str, Any]]:
        entry = dataset[index]
        return index, {"question": entry["question"], "answer": entry["answer"], "packed": pack(entry)}

    held: dict[str, tuple[int, dict[str, Any]]] = {}
    for index in range(tries):
        if len(held) == spec.held_out:
            break
        found = item(held_out, index)
        held.setdefault(found[1]["question"].strip(), found)
    return {"held_out": list(held.values()), "train": [item(train, i) for i in range(spec.size)]}


def main() -> int:
    spec = ReasoningGym.model_validate_json(sys.stdin.buffer.read())
    # A task that prints, and Python's warnings, must not mix into the answer.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        halves = generate(spec)
    except DataError as error:
        with answer:
            answer.write(str(error))
        return REFUSED
    with answer:
        json.dump(halves, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
