"""A finished group is scored while another of its shard is still sampled."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa

from headrace.blocks.manifest import Manifest
from headrace.blocks.reward import RewardSpec
from headrace.blocks.weights import Served
from headrace.engines.experience import early
from headrace.engines.experience.schema import PROMPTS
from headrace.engines.experience.store import Store
from headrace.engines.reward.pool import RewardPool, Sample
from headrace.engines.reward.stage import score_table
from headrace.engines.rollout import jobs
from headrace.engines.rollout.base import Completion, Group, Request, RolloutEngine
from headrace.engines.rollout.cohort import Cohorts
from headrace.engines.rollout.render import Renderer
from headrace.tasks.campaign import Campaign
from headrace.tasks.early import scored_early


class Slow:
    """An engine whose second group is a long time in coming."""

    deterministic = False

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def served(self) -> Served:
        return Served(version=1, digest="d", nbytes=0, seconds=0.0)

    def fingerprint(self) -> dict[str, str]:
        return {"engine": "slow"}

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Group]:
        for request in requests:
            made = [Completion(i, [5, 6], [-0.5, -0.5], "stop", [(1, 2)]) for i in range(len(request.seeds))]
            yield Group(request.group, made)
            await self.go_on.wait()


def test_scores_of_a_finished_group_do_not_wait_for_the_others(tiny_model: Path, tmp_path: Path):
    store = Store(str(tmp_path))
    message = json.dumps([{"role": "user", "content": "1 + 1?"}])
    rows = [{"group_id": g, "prompt_id": str(g), "messages": message, "ground_truth": "2"} for g in range(2)]
    part = store.write_table("prompts.arrow", pa.Table.from_pylist(rows, schema=PROMPTS))
    prompts = store.commit(Manifest(stage="prompts", step=0, key="p", part=part))
    folder = early.folder_of("generate", 0, 0, "g")

    async def go(pool: RewardPool) -> None:
        engine = cast(RolloutEngine, slow := Slow())
        bench = jobs.Bench(engine, Renderer(tiny_model), Cohorts(engine))
        loop = asyncio.get_running_loop()
        given: dict[str, Any] = {"store": store.url, "key": "g", "step": 0, "prompts": prompts, "start": 0, "stop": 2}
        given |= {"n": 3, "temperature": 1.0, "max_tokens": 4, "campaign_seed": 0, "version": 1, "inputs": []}
        job = jobs.GenerateParams(**given, early=folder)
        campaign = cast(Campaign, SimpleNamespace(store=store, rewards=pool))
        async with scored_early(campaign, folder, prompts) as (look, begun):

            def progress(**figures: float) -> None:
                loop.call_soon_threadsafe(look, figures)

            making = asyncio.create_task(jobs.generate(bench, job, progress))
            async with asyncio.timeout(20):
                while len(begun) < 3:
                    await asyncio.sleep(0.01)
            scores = await asyncio.to_thread(pool.results, list(begun.values()))
            assert {uid for uid, _ in begun} == {"0-0", "0-1", "0-2"} and all(s.error is None for s in scores)
            assert not making.done() and store.lookup("generate", 0, 0, "g") is None
            slow.go_on.set()
            made = await making
        assert not store.paths(folder)
        submitted: list[str] = []
        submit = pool.submit
        pool.submit = lambda sample: submitted.append(sample.text) or submit(sample)  # pyright: ignore
        scored = await asyncio.to_thread(score_table, store, made, pool, prompts, begun)
        assert scored.equals(await asyncio.to_thread(score_table, store, made, pool, prompts))
        assert len(submitted) == (6 - len(begun)) + 6  # first what was not begun, then all again

    with RewardPool(RewardSpec(function="matches", options={"pattern": "."})) as pool:
        asyncio.run(go(pool))


def test_a_score_that_was_begun_for_another_answer_does_not_count(tmp_path: Path):
    """An engine died, and the group was sampled again."""
    store = Store(str(tmp_path))
    texts = {"uid": ["0-0"], "group_id": [0], "text": ["3"], "ground_truth": ["3"]}
    part = store.write_table("g.arrow", pa.table(texts))
    made = store.commit(Manifest(stage="generate", step=0, key="g", part=part))
    with RewardPool(RewardSpec(function="last_number")) as pool:
        wrong = score_table(store, made, pool)["reward"].to_pylist()
        begun = {("0-0", "4"): pool.submit(Sample("4", 3))}
        assert score_table(store, made, pool, None, begun)["reward"].to_pylist() == wrong == [1.0]
