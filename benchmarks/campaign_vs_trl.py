"""A whole iteration against a step of TRL's GRPOTrainer on the same job.

``python -m benchmarks.campaign_vs_trl --trl-python PYTHON [--steps 16]``: same model, prompts in the same order, group
size, answer length, temperature, learning rate, precision (float32 parameters, bfloat16 compute), threads. Ours is
everything: generation, scoring, advantages, training, verified weight sync, artifacts, Prefect. Then both trained
models answer the same held-out problems greedily. PYTHON: an environment with trl (``pip install trl==1.16.0``).
Exits with status 1 when ours is less than six times as fast a step, or ends with the lower held-out reward.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from benchmarks.stacks import stack
from headrace.blocks.home import model_folder
from headrace.blocks.recipe import Recipe
from headrace.engines import data
from headrace.engines.experience.store import Store
from headrace.engines.report import History

SPEEDUP = 6.0
LR = 2e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    settings = {"iterations": given.steps, "train": {"optim": {"lr": LR, "schedule": "constant", "warmup_steps": 0}}}
    recipe = Recipe.model_validate({"base": "quickstart", **settings})
    with tempfile.TemporaryDirectory() as scratch:
        theirs = run_trl(Path(scratch), recipe, given.trl_python, given.threads)
        ours, accuracy = run_ours(Path(scratch), given.steps)
    base, mine, trl = (
        statistics.median(theirs["seconds"][1:]),
        statistics.median(ours["seconds"][1:]),
        theirs["accuracy"],
    )
    print(json.dumps({"headrace": ours, "trl": theirs}))
    print(f"held-out reward after {given.steps} steps: headrace {accuracy:.3f}, TRL {trl:.3f}")
    print(f"seconds a step (median, without the first): headrace {mine:.2f}, TRL {base:.2f}")
    print(f"speed-up: {base / mine:.2f} (bound {SPEEDUP})")
    raise SystemExit(base / mine < SPEEDUP or accuracy < trl)


def run_ours(scratch: Path, steps: int) -> tuple[dict[str, list[float]], float]:
    """Seconds and reward of every iteration, and the held-out reward at the end."""
    settings = [
        f"iterations={steps}",
        f"train.optim.lr={LR}",
        "train.optim.schedule=constant",
        "train.optim.warmup_steps=0",
        f"model.path={model_folder('smollm2-135m-instruct')}",
    ]
    with stack(scratch / "home") as headrace:
        headrace("run", "quickstart", *(word for setting in settings for word in ("--set", setting)))
    store = Store(str(scratch / "home" / "store" / "quickstart"))
    rows = History(store).rows()
    summary = json.loads(store.get("summary.json"))
    return {
        "seconds": [row["iteration_seconds"] for row in rows],
        "rewards": [row["reward"] for row in rows],
    }, summary["accuracy_after"]


def run_trl(scratch: Path, recipe: Recipe, python: str, threads: int) -> dict:
    """The same for TRL; its model answers the held-out problems where ours does."""
    splits = data.load_splits(recipe.data)
    drawn, _ = data.draw(splits.train, 0, recipe.prompts * recipe.iterations, recipe.seed)
    job = {
        "model": str(model_folder(recipe.model.path)),
        "prompts": [[problem.messages, str(problem.ground_truth)] for _, problem in drawn],
        "steps": recipe.iterations,
        "prompts_per_step": recipe.prompts,
        "n": recipe.rollout.n,
        "max_tokens": recipe.rollout.max_tokens,
        "temperature": recipe.rollout.temperature,
        "lr": LR,
        "threads": threads,
        "out": str(scratch / "trl"),
    }
    (scratch / "trl").mkdir()
    (scratch / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("trl_grpo.py")
    subprocess.run([python, str(script), str(scratch / "job.json")], check=True, timeout=3000, cwd=scratch)
    steps = json.loads((scratch / "trl" / "steps.json").read_text())
    return {**steps, "accuracy": held_out_reward(scratch, scratch / "trl" / "model")}


def held_out_reward(scratch: Path, model: Path) -> float:
    """Held-out reward of version 0 of a campaign that starts from this model."""
    with stack(scratch / "judge") as headrace:
        headrace("run", "quickstart", "--set", "iterations=1", "--set", f"model.path={model}")
    return json.loads(Store(str(scratch / "judge" / "store" / "quickstart")).get("summary.json"))["accuracy_before"]


if __name__ == "__main__":
    main()
