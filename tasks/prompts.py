"""Draws the prompts of a round of generation and reserves their groups in the ledger."""

from headrace.blocks.manifest import Manifest
from headrace.engines import data
from headrace.engines.experience.store import stage_key
from headrace.tasks.campaign import current
from headrace.tasks.stage import stage

CODE = "2"
HELD_OUT_STEP = 0
"""Held-out prompts are drawn once; their manifest lies with iteration 0 under a stage of its own."""


@stage("prompts", "prompts[{step}/{round}]")
async def prompts(step: int, round: int, cursor: int, count: int) -> Manifest:
    """``count`` new groups for iteration ``step``, from the data cursor on: any attempt draws the same."""
    c = current()
    recipe = c.recipe
    config = {"data": recipe.data.model_dump(mode="json"), "seed": recipe.seed, "count": count}
    key = stage_key("prompts", CODE, config, [str(step), str(cursor)])
    if (done := c.store.lookup("prompts", step, round, key)) is not None:
        return done
    drawn, after = data.draw(data.load_splits(recipe.data).train, cursor, count, recipe.seed)
    part = c.store.write_table(f"experience/{step:06d}/prompts-{round}.arrow", data.prompts_table(drawn))
    c.ledger.reserve(step, [group for group, _ in drawn], after, round)
    info = {"first": cursor, "cursor": after}
    return c.store.commit(Manifest(stage="prompts", step=step, shard=round, key=key, part=part, info=info))


@stage("held-out", "held-out")
async def held_out() -> Manifest:
    """The problems that every evaluation asks, in a fixed order."""
    c = current()
    count = c.recipe.evaluate.problems
    config = {"data": c.recipe.data.model_dump(mode="json"), "count": count}
    key = stage_key("held-out", CODE, config, [])
    if (done := c.store.lookup("held-out", HELD_OUT_STEP, 0, key)) is not None:
        return done
    table = data.prompts_table(data.first(data.load_splits(c.recipe.data).held_out, count))
    part = c.store.write_table("experience/held-out.arrow", table)
    return c.store.commit(Manifest(stage="held-out", step=HELD_OUT_STEP, key=key, part=part))
