"""The on-policy pipeline: every token is trained by the weights that sampled it."""

import asyncio

from prefect import flow

from headrace.blocks.manifest import Manifest
from headrace.blocks.recipe import Recipe
from headrace.flows.campaign import leave_engines, open_campaign, shut_down
from headrace.flows.gate import parity_gate
from headrace.tasks.advantage import advantage
from headrace.tasks.campaign import current
from headrace.tasks.evaluate import evaluate
from headrace.tasks.export import export
from headrace.tasks.generate import generate, shards_of
from headrace.tasks.logprob import old_logprob, ref_logprob
from headrace.tasks.parity import is_due
from headrace.tasks.prompts import held_out, prompts
from headrace.tasks.report import finish, report
from headrace.tasks.score import score
from headrace.tasks.sync_weights import sync_weights
from headrace.tasks.train import checkpoint, train


@flow(
    name="on-policy",
    flow_run_name="{campaign}",
    on_cancellation=[shut_down],
    on_failure=[leave_engines],
    validate_parameters=True,
)
async def on_policy(recipe: Recipe, campaign: str = "") -> dict[str, object]:
    """Trains a model with reinforcement learning, strictly on-policy; started again, the same campaign continues.

    Args:
        recipe: the whole configuration; `base` names a recipe to inherit from, what is left empty comes from there.
        campaign: id of the campaign; empty = the recipe's name. A campaign that exists is continued.
    """
    async with open_campaign(recipe, campaign) as c:
        problems = await held_out() if recipe.evaluate.problems else None
        if is_due(c):
            await parity_gate(campaign=c.id)
        await sync_weights(c.version)
        for step in range(c.version, recipe.iterations):
            await _evaluate_if_due(step, problems)
            await iteration(campaign=c.id, step=step)
        await _evaluate_if_due(recipe.iterations, problems)
        return await finish(await export())


@flow(name="iteration", flow_run_name="iteration-{step}", persist_result=False, validate_parameters=False)
async def iteration(campaign: str, step: int) -> None:
    """One pass of the RL loop under the weights of version ``step``."""
    c = current()
    c.start_clock()
    shards = await _sample(step)
    generated, scored, old, reference = ([made for made in column if made] for column in zip(*shards, strict=True))
    advantages = await advantage(step, generated, scored, old, reference)
    trained = await train(step, generated, old, reference, advantages)
    c.move_to(step + 1, trained.key)
    served = await sync_weights(c.version, trained)
    if c.version % c.recipe.checkpoint.every == 0:
        await checkpoint(c.version)
    await report(step, served)


async def _sample(step: int) -> list[tuple[Manifest | None, ...]]:
    """The shards of an iteration; in further rounds, new prompts replace those whose groups teach nothing."""
    c = current()
    shards: list[tuple[Manifest | None, ...]] = []
    missing = c.recipe.prompts
    for round in range(c.recipe.rounds):
        drawn = await prompts(step, round, c.cursor, missing)
        c.cursor = drawn.info["cursor"]
        first = round * c.recipe.rollout.shards
        numbers = range(first, first + shards_of(c.recipe, missing))
        made = await asyncio.gather(*(_shard(step, shard, drawn) for shard in numbers))
        shards += made
        missing -= sum(int(scored.metrics["differing_groups"]) for _, scored, *_ in made if scored)
        if missing <= 0:
            break
    return shards


async def _shard(step: int, shard: int, drawn: Manifest) -> tuple[Manifest | None, ...]:
    """A shard's way from prompts to what training needs of it; it does not wait for other shards."""
    c = current()
    made = await generate(step, shard, drawn)
    scored = await score(step, shard, made, drawn)
    old = await old_logprob(step, shard, made) if c.needs_old_logprob else None
    reference = await ref_logprob(step, shard, made) if c.recipe.needs_reference else None
    return made, scored, old, reference


async def _evaluate_if_due(version: int, problems: Manifest | None) -> None:
    if problems is not None and current().evaluation_is_due(version):
        await evaluate(version, problems)
