"""Runs a list of actions on every rank of a gang; rank 0 writes what came of them as JSON. Started by the tests."""

import json
import sys
from pathlib import Path

from headrace.blocks.algorithms import Algorithm
from headrace.blocks.recipe import Optim
from headrace.engines.model.base import StepConfig
from headrace.engines.model.fsdp2 import FSDP2Engine
from headrace.engines.model.gang import join
from headrace.engines.model.jobs import Jobs
from headrace.engines.model.spec import EngineSpec
from tests.engines.model.experience import random_experience, random_samples

OPTIM = {"lr": 1e-3, "warmup_steps": 2, "schedule": "cosine"}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    spec = EngineSpec.model_validate(job["spec"])
    gang = join(spec.device, 1, 120)
    engine = FSDP2Engine(spec, gang)
    config = StepConfig(Algorithm.model_validate({}), Optim.model_validate(OPTIM), total_steps=8)
    jobs = Jobs(engine)
    results: list[object] = []
    for action, argument in job["actions"]:
        if action == "train":
            metrics = engine.train(random_experience(random_samples(seed=argument), seed=argument), config)
            results.append({k: v for k, v in metrics.items() if k != "seconds"})
        elif action in ("logprobs", "reference"):
            which = "policy" if action == "logprobs" else "reference"
            results.append(engine.logprobs(random_samples(seed=argument), which).tolist())
        elif action == "probe":
            engine.probe(argument)
        elif action == "save":
            engine.save(Path(argument), cursor=11)
        elif action == "load":
            results.append(engine.load(Path(argument)))
        else:
            params = {"version": 1, "transport": "store", "store": str(Path(argument).parent), "deadline_s": 60}
            jobs.run("publish", params | {"address": Path(argument).name, "step": engine.train_step})
    engine.settle()
    if gang.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))


main()
