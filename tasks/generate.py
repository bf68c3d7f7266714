"""Samples the groups of one shard on a rollout engine, which writes them as Arrow itself."""

from headrace.blocks.manifest import Manifest
from headrace.blocks.recipe import Recipe
from headrace.engines.experience import early
from headrace.tasks.campaign import current
from headrace.tasks.early import scored_early
from headrace.tasks.stage import run_rollout_job, stage

CODE = "2"


def shards_of(recipe: Recipe, rows: int) -> int:
    """Into how many shards a round of ``rows`` prompts is cut. Shard s of round r has number r × rollout.shards + s."""
    return min(recipe.rollout.shards, rows)


@stage("generate", "generate[{step}/{shard}]")
async def generate(step: int, shard: int, prompts: Manifest) -> Manifest:
    """Finished groups of shard ``shard``: tokens, behaviour log-probabilities and the version that made each token."""
    c = current()
    recipe = c.recipe
    assert prompts.part is not None
    rows = prompts.part.rows
    shards, engines = shards_of(recipe, rows), recipe.roles.rollout.engines
    parts = [[rows * one // shards, rows * (one + 1) // shards] for one in range(shards)]
    place = shard % recipe.rollout.shards
    index = place % engines
    start, stop = parts[place]
    # The shards of one engine; what a deterministic engine samples in one batch decides how it rounds.
    cohort = parts[index::engines] if recipe.rollout.deterministic else [[start, stop]]
    # Where and how fast it runs is not part of what is made, apart from the back end itself.
    config = {
        "rollout": recipe.rollout.model_dump(mode="json", exclude={"shards"}),
        "model": recipe.model.model_dump(mode="json"),
        "seed": recipe.seed,
        "rows": [start, stop],
        "cohort": cohort,
    }
    key = c.key("generate", CODE, config, [prompts.key])
    params = {
        "prompts": prompts.model_dump(),
        "start": start,
        "stop": stop,
        "cohort": cohort,
        "n": recipe.rollout.n,
        "temperature": recipe.rollout.temperature,
        "max_tokens": recipe.rollout.max_tokens,
        "campaign_seed": recipe.seed,
        "version": c.version,
        "inputs": [prompts.key],
    }
    c.start_deferred()
    samples = (stop - start) * recipe.rollout.n
    if recipe.rollout.deterministic:
        made = await run_rollout_job("generate", step, shard, key, params, index=index, samples=samples)
    else:
        params["early"] = folder = early.folder_of("generate", step, shard, key)
        async with scored_early(c, folder, prompts) as (look, begun):
            made = await run_rollout_job(
                "generate", step, shard, key, params, index=index, samples=samples, on_progress=look
            )
        c.scoring[made.key] = begun
    first = prompts.info["first"]
    c.ledger.committed(step, shard, list(range(first + start, first + stop)), made.key)
    return made
