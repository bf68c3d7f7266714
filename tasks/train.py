"""One training step of the actor on an iteration's batch. Asked twice for a step, the optimizer steps once."""

import asyncio
import json

from headrace.blocks.manifest import Manifest
from headrace.tasks.campaign import current
from headrace.tasks.recovery import record_groups, train_job_path
from headrace.tasks.stage import run_job, stage

CODE = "1"


@stage("train", "train[{step}]")
async def train(
    step: int, generated: list[Manifest], old: list[Manifest], reference: list[Manifest], advantages: Manifest
) -> Manifest:
    """Steps the optimizer; the manifest's key names the weights that came of it."""
    c = current()
    recipe = c.recipe
    config = {
        "algorithm": recipe.algorithm.model_dump(mode="json"),
        "train": recipe.train.model_dump(mode="json"),
        "model": recipe.model.model_dump(mode="json"),
        "temperature": recipe.rollout.temperature,
        "iterations": recipe.iterations if recipe.train.optim.schedule != "constant" else 0,
        "world_size": recipe.roles.actor.world_size,
    }
    inputs = [m.key for m in (*generated, *old, *reference, advantages)]
    key = c.key("train", CODE, config, inputs)
    params = {
        "generate": [m.model_dump() for m in generated],
        "old": [m.model_dump() for m in old],
        "ref": [m.model_dump() for m in reference],
        "advantage": advantages.model_dump(),
        "algorithm": config["algorithm"],
        "optim": config["train"]["optim"],
        "minibatches": recipe.train.minibatches,
        "total_steps": recipe.iterations,
        "inputs": inputs,
    }
    # Kept before the step: a later trainer repeats the step from it.
    c.store.put(
        train_job_path(step), json.dumps({"store": c.url, "key": key, "step": step, "shard": 0, **params}).encode()
    )
    made = await run_job("actor", 0, "train", "train", step, 0, key, params)
    c.defer(asyncio.to_thread(record_groups, c, step, advantages, made.key))
    return made


@stage("checkpoint", "checkpoint[{step}]")
async def checkpoint(step: int) -> None:
    """Saves the trainer's durable state after ``step`` iterations, then deletes what is no longer kept."""
    c = current()
    if step not in c.states.complete():
        params = {"path": str(c.folder / c.states.path(step)), "step": step, "cursor": c.cursor}
        await c.engines.call("actor", 0, "save", params, job_id=f"save-{step}-{c.attempt}")
    await asyncio.to_thread(c.states.tidy, c.recipe.checkpoint.keep, step)
