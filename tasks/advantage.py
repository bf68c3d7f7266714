"""Turns the rewards of a whole iteration into advantages; decides which samples are trained."""

from headrace.blocks.manifest import Manifest
from headrace.engines.experience.store import stage_key
from headrace.tasks.campaign import current
from headrace.tasks.stage import run_job, stage

CODE = "1"


@stage("advantage", "advantage[{step}]")
async def advantage(
    step: int, generated: list[Manifest], scored: list[Manifest], old: list[Manifest], reference: list[Manifest]
) -> Manifest:
    """Advantages of all shards, and for each sample whether it is accepted or why it is dropped."""
    c = current()
    algorithm = c.recipe.algorithm.model_dump(mode="json")
    inputs = [m.key for m in (*generated, *scored, *old, *reference)]
    key = stage_key("advantage", CODE, {"algorithm": algorithm, "max_tokens": c.recipe.rollout.max_tokens}, inputs)
    params = {
        "generate": [m.model_dump() for m in generated],
        "score": [m.model_dump() for m in scored],
        "old": [m.model_dump() for m in old],
        "ref": [m.model_dump() for m in reference],
        "algorithm": algorithm,
        "max_tokens": c.recipe.rollout.max_tokens,
        "inputs": inputs,
    }
    return await run_job("actor", 0, "advantage", "advantage", step, 0, key, params)
