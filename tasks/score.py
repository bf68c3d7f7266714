"""Scores the samples of one shard in processes that can be killed."""

import asyncio
import time

from headrace.blocks.manifest import Manifest
from headrace.engines.experience.store import stage_key
from headrace.engines.reward.stage import score_metrics, score_table
from headrace.tasks.campaign import Campaign, current
from headrace.tasks.stage import stage

CODE = "2"


@stage("score", "score[{step}/{shard}]")
async def score(step: int, shard: int, generated: Manifest, prompts: Manifest) -> Manifest:
    """Rewards of the shard's samples; a sample whose scoring failed has none, and says why."""
    c = current()
    config = {"reward": c.recipe.reward.model_dump(mode="json", exclude={"workers"}), "tolerance": _tolerance(c)}
    key = stage_key("score", CODE, config, [generated.key])
    if (done := c.store.lookup("score", step, shard, key)) is not None:
        c.scoring.pop(generated.key, None)
        return done
    c.progress.update(stage="score")
    return await asyncio.to_thread(score_now, c, "score", step, shard, key, generated, prompts)


def score_now(
    c: Campaign, stage: str, step: int, shard: int, key: str, generated: Manifest, prompts: Manifest
) -> Manifest:
    """Scores and commits under ``stage``."""
    began = time.time()
    table = score_table(c.store, generated, c.rewards, prompts, c.scoring.pop(generated.key, None))
    part = c.store.write_table(f"experience/{step:06d}/{stage}-{shard}.arrow", table)
    ended = time.time()
    c.spans.append((began, ended))
    metrics = {"seconds": ended - began, **score_metrics(table, _tolerance(c))}
    return c.store.commit(
        Manifest(stage=stage, step=step, shard=shard, key=key, part=part, inputs=[generated.key], metrics=metrics)
    )


def _tolerance(c: Campaign) -> float:
    """Rewards of a group that differ by no more than this teach nothing."""
    return c.recipe.algorithm.filter.tolerance if c.recipe.algorithm.filter else 0.0
