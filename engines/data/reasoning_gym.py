"""Problems of the reasoning-gym package, generated in a process of their own.

Two traps of reasoning-gym 0.1.25 are avoided here. Item i of seed s is generated from s + i, so data sets of
neighbouring seeds share nearly all of their items; and five tasks (word_ladder among them) depend on the order of
Python's sets, that is on PYTHONHASHSEED, so a resumed campaign would see other problems. The generator therefore runs
with a fixed hash seed, and the ground truth of a problem carries the whole entry that its verifier needs.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from headrace.blocks.data import ReasoningGym
from headrace.engines.data.base import DataError, Listed, Problem, Splits, without

GENERATOR = "headrace.engines.data.generator"
DEADLINE_S = 600.0
REFUSED = 3
"""Exit status of the generator for what the user can put right; the message is on its stdout."""


def reasoning_gym(spec: ReasoningGym) -> Splits:
    """Generates both halves; no question of one is in the other. Ground truth: ``{answer, task, config, entry}``."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError(f"reasoning-gym is not installed for {sys.executable}: pip install 'headrace[cpu]'")
    try:
        child = subprocess.run(
            [sys.executable, "-m", GENERATOR],
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
        raise DataError(child.stdout.decode())
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
