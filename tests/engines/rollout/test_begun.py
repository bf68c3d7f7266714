"""A job whose engine dies goes on elsewhere, from the tokens that it has; with a scripted engine."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.blocks.manifest import Manifest
from headrace.blocks.weights import WeightSource
from headrace.engines.experience.schema import PROMPTS
from headrace.engines.experience.store import Store
from headrace.engines.guard import descendants
from headrace.engines.rollout import begun, jobs
from headrace.engines.rollout.base import Completion, Request, Sampling
from headrace.engines.rollout.cohort import Cohorts
from headrace.engines.rollout.errors import EngineDied
from headrace.engines.rollout.hosted import HostedEngine
from headrace.engines.rollout.render import Renderer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def job(store: Store, **changes) -> jobs.GenerateParams:
    rows = [
        {"group_id": 7 + i, "prompt_id": f"p{i}", "messages": json.dumps([{"role": "user", "content": "?"}])}
        | {"ground_truth": "0"}
        for i in range(3)
    ]
    part = store.write_table("prompts.arrow", pa.Table.from_pylist(rows, schema=PROMPTS))
    prompts = store.commit(Manifest(stage="prompts", step=0, key="prompts", part=part))
    given = {"store": store.url, "key": "k", "step": 2, "shard": 1, "prompts": prompts, "start": 0, "stop": 3, "n": 2}
    more = {"temperature": 1.0, "max_tokens": 90, "campaign_seed": 0, "version": 4, "inputs": []}
    return jobs.GenerateParams(**given | more | changes)


async def bench(engine: HostedEngine, model: Path, save_s: float) -> jobs.Bench:
    await engine.load_weights(WeightSource(version=4, transport="shm", address="/nowhere"), deadline_s=5)
    return jobs.Bench(engine, Renderer(model), Cohorts(engine), save_s=save_s)


@pytest.mark.parametrize("how", ["engine", "host"])
async def test_another_engine_goes_on(engines, tiny_model: Path, tmp_path: Path, how: str):
    store = Store(str(tmp_path / "store"))
    first = await engines()
    work = asyncio.create_task(jobs.generate(await bench(first, tiny_model, 0.1), job(store), lambda **_: None))
    await asyncio.sleep(0.5)
    if how == "engine":
        os.kill(descendants(first.program.pid)[0], signal.SIGKILL)
        with pytest.raises(EngineDied):
            await work
    else:  # what a killed host leaves is what it saved last
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    path = begun.path_of("generate", 2, 1, "k")
    before = {(row["group_id"], row["sample"]): row for row in pa.ipc.open_file(store.get(path)).read_all().to_pylist()}
    assert len(before) == 6 and all(0 < len(row["response_ids"]) < 90 for row in before.values())
    second = await bench(await engines(), tiny_model, 60)
    made = await jobs.generate(second, job(store), lambda **_: None)
    assert made.part is not None
    rows = store.read_table(made.part).to_pylist()
    assert [row["uid"] for row in rows] == [f"{7 + g}-{s}" for g in range(3) for s in range(2)]
    for row in rows:
        old = before[row["group_id"], row["sample"]]["response_ids"]
        assert row["response_ids"][: len(old)] == old and len(row["response_ids"]) == 90
        # the scripted engine's first token is the length of what it was given: prompt and all that was sampled
        assert row["response_ids"][len(old)] == len(row["prompt_ids"]) + len(old)
        assert row["weight_spans"] == [{"version": 4, "tokens": 90}] and len(row["behaviour_logprobs"]) == 90
    assert made.metrics["resumed_tokens"] == sum(len(row["response_ids"]) for row in before.values())
    assert not store.exists(path)
    assert await jobs.generate(second, job(store), lambda **_: None) == made


async def test_other_work_does_not_go_on_from_it(engines, tiny_model: Path, tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    requests = [Request(7, [1], [5, 6], Sampling(1.0, 9, ()), {1: Completion(1, [3], [-1.0], "abort", [(4, 1)])})]
    begun.save(store, begun.path_of("generate", 2, 1, "k"), requests)
    fresh = [Request(7, [1], [5, 6], Sampling(1.0, 9, ()))]
    assert begun.restore(store, begun.path_of("generate", 2, 1, "other"), fresh) == 0 and not fresh[0].begun
    assert begun.restore(store, begun.path_of("generate", 2, 1, "k"), fresh) == 1
    assert fresh[0].begun == {1: Completion(1, [3], [-1.0], "", [(4, 1)])}  # what was aborted is not finished
