"""Asks the held-out problems greedily and scores the answers."""

import asyncio

from headrace.blocks.manifest import Manifest
from headrace.engines.experience.store import stage_key
from headrace.tasks.campaign import current
from headrace.tasks.score import score_now
from headrace.tasks.stage import run_rollout_job, stage

CODE = "1"


@stage("evaluate", "evaluate[v{version}]")
async def evaluate(version: int, problems: Manifest) -> Manifest:
    """Held-out answers and rewards of weight version ``version``; metrics: reward (mean), samples."""
    c = current()
    recipe = c.recipe
    rows = problems.part.rows
    config = {
        "model": recipe.model.model_dump(mode="json"),
        "backend": recipe.rollout.backend.model_dump(mode="json"),
        "max_tokens": recipe.rollout.max_tokens,
    }
    key = c.key("evaluate", CODE, config, [problems.key])
    params = {
        "prompts": problems.model_dump(),
        "start": 0,
        "stop": rows,
        "max_tokens": recipe.rollout.max_tokens,
        "campaign_seed": recipe.seed,
        "version": version,
        "inputs": [problems.key],
    }
    answers = await run_rollout_job("evaluate", version, 0, key, params, index=0, samples=rows)
    scores = stage_key(
        "evaluate-score", CODE, recipe.reward.model_dump(mode="json", exclude={"workers"}), [answers.key]
    )
    done = c.store.lookup("evaluate-score", version, 0, scores)
    if done is None:
        done = await asyncio.to_thread(score_now, c, "evaluate-score", version, 0, scores, answers, problems)
    c.progress.update(accuracy=done.metrics.get("reward", 0.0))
    return done
