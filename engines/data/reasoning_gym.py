"""Problems of the reasoning-gym package, generated in a process of their own.

Two traps of reasoning-gym 0.1.25 are avoided here. Item i of seed s is generated from s + i, so data sets of
neighbouring seeds share nearly all of their items; and five tasks (word_ladder among them) depend on the order of
Python's sets, that is on PYTHONHASHSEED, so a resumed campaign would see other problems. The generator therefore runs
with a fixed hash seed, and the ground truth of a problem carries the whole entry that its verifier needs.
"""

import difflib
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from headrace.blocks.data import ReasoningGym
from headrace.engines.data.base import DataError, Listed, Problem, Splits, without
from headrace.engines.data.packing import pack

SEED_STRIDE = 1 << 20
"""Generator states between two seeds: above the largest number of problems that one seed may use."""
CANDIDATES = 20
"""Problems tried for each one held out, where a task repeats itself."""
DEADLINE_S = 600.0
REFUSED = 3
"""Exit status of the generator for what the user can put right."""


def reasoning_gym(spec: ReasoningGym) -> Splits:
    """Generates both halves; no question of one is in the other. Ground truth: ``{answer, task, config, entry}``."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError(f"reasoning-gym is not installed for {sys.executable}: pip install 'headrace[cpu]'")
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__],
            input=spec.model_dump_json().encode(),
            capture_output=True,
            timeout=DEADLINE_S,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"{spec.task}: generating {spec.size} problems took over {DEADLINE_S:.0f} s; lower size"
        ) from error
    if child.returncode == REFUSED:
        raise DataError(child.stderr.decode(errors="replace").strip())
    if child.returncode:
        tail = child.stderr.decode(errors="replace").strip().splitlines()[-5:]
        raise DataError(f"reasoning-gym could not generate {spec.task}:\n  " + "\n  ".join(tail))
    halves = json.loads(child.stdout)
    name = f"reasoning_gym/{spec.task}"
    held = [problem(spec, entry, f"{name}/{spec.seed}/held-out/{i}") for i, entry in halves["held_out"]]
    train = without((problem(spec, entry, f"{name}/{spec.seed}/{i}") for i, entry in halves["train"]), held)
    if len(held) < spec.held_out or not train:
        raise DataError(
            f"{spec.task} with this config has too few different problems: {len(held)} to hold out "
            f"({spec.held_out} asked for) and {len(train)} left for training; widen config or lower held_out"
        )
    return Splits(Listed(name, train), Listed(f"{name}/held-out", held))


def problem(spec: ReasoningGym, entry: dict[str, Any], prompt_id: str) -> Problem:
    """A generated entry as a problem; its ground truth carries all that the verifier needs."""
    question = entry["question"].strip()
    content = f"{question}\n{spec.instruction}" if spec.instruction else question
    truth = {"answer": entry["answer"], "task": spec.task, "config": spec.config, "entry": entry["packed"]}
    return Problem(prompt_id, [{"role": "user", "content": content}], truth)


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
    # A task that prints must not mix into the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        halves = generate(spec)
    except DataError as error:
        print(error, file=sys.stderr)
        return REFUSED
    with answer:
        json.dump(halves, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
