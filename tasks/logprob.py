"""Log-probabilities of the sampled tokens under the trainer before the step (old) and under the reference model."""

from headrace.blocks.manifest import Manifest
from headrace.engines.experience.store import stage_key
from headrace.tasks.campaign import current
from headrace.tasks.stage import run_job, stage

CODE = "1"


@stage("old-logprob", "old-logprob[{step}/{shard}]")
async def old_logprob(step: int, shard: int, generated: Manifest) -> Manifest:
    """The trainer's own recompute; needed where an iteration takes more than one optimizer step."""
    c = current()
    key = c.key("old-logprob", CODE, _config(), [generated.key])
    params = {"which": "old", "generate": generated.model_dump(), "inputs": [generated.key]}
    return await run_job("actor", 0, "logprobs", "old-logprob", step, shard, key, params)


@stage("ref-logprob", "ref-logprob[{step}/{shard}]")
async def ref_logprob(step: int, shard: int, generated: Manifest) -> Manifest:
    """The frozen start model's, on an engine of its own or on the actor's frozen copy."""
    c = current()
    key = stage_key("ref-logprob", CODE, _config(), [generated.key], c.model_id)
    params = {"which": "ref", "generate": generated.model_dump(), "inputs": [generated.key]}
    reference = c.recipe.roles.reference
    role, index = ("reference", shard % reference.engines) if reference else ("actor", 0)
    return await run_job(role, index, "logprobs", "ref-logprob", step, shard, key, params)


def _config() -> dict[str, object]:
    recipe = current().recipe
    return {"model": recipe.model.model_dump(mode="json"), "temperature": recipe.rollout.temperature}
