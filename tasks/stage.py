"""What all stage tasks have in common: names, retries, deadlines, the content key, the cache."""

from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import task_run

from headrace.blocks.manifest import Manifest
from headrace.engines.rpc.errors import EngineLost
from headrace.tasks.campaign import current

P = ParamSpec("P")
R = TypeVar("R")


def _engine_was_lost(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.data, EngineLost)


def stage(name: str, run_name: str) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Task[P, Coroutine[Any, Any, R]]]:
    """Makes a stage's coroutine a Prefect task.

    A task run is retried when its engine was lost; the next try finds a new engine. Results stay in memory: what a
    stage made is in the store under its content key, and that is what a restarted campaign finds.
    """
    return lambda fn: task(
        fn,
        name=name,
        task_run_name=run_name,
        retries=4,
        retry_delay_seconds=0.2,
        retry_condition_fn=_engine_was_lost,
        cache_policy=NO_CACHE,
        persist_result=False,
    )


async def run_rollout_job(
    stage: str,
    step: int,
    shard: int,
    key: str,
    params: dict[str, Any],
    *,
    index: int,
    samples: int,
    on_progress: Callable[[dict[str, float]], None] | None = None,
) -> Manifest:
    """Job ``stage`` on a rollout engine: number ``index`` of a deterministic back end, else the least loaded one.

    Raises EngineStartFailed, NoRoom, and what ``run_job`` raises. A shard whose engine died goes on elsewhere at the
    task's next try, from the tokens that it has in the store.
    """
    c = current()
    if c.recipe.rollout.deterministic:
        return await run_job("rollout", index, stage, stage, step, shard, key, params)
    if (done := c.store.lookup(stage, step, shard, key)) is not None:
        return done
    async with c.router.place(samples) as index:
        return await run_job("rollout", index, stage, stage, step, shard, key, params, on_progress)


async def run_job(
    role: str,
    index: int,
    method: str,
    stage: str,
    step: int,
    shard: int,
    key: str,
    params: dict[str, Any],
    on_progress: Callable[[dict[str, float]], None] | None = None,
) -> Manifest:
    """One stage on one engine, unless the store already holds its manifest under ``key``.

    Raises:
        EngineLost: the engine died; the task's next try starts another.
        JobFailed, JobDeadline, Fenced: see ``headrace.engines.rpc.errors``.
    """
    c = current()
    name = f"{stage}[{shard}]"
    c.attempts[name] = max(c.attempts.get(name, 1), int(task_run.run_count or 1))
    if (done := c.store.lookup(stage, step, shard, key)) is not None:
        return done
    c.progress.update(stage=stage)
    params = {"store": c.url, "key": key, "step": step, "shard": shard, **params}
    job_id = f"{method}-{step}-{shard}-{key}"
    result = await c.engines.call(role, index, method, params, job_id=job_id, on_progress=on_progress)
    return Manifest.model_validate(result)
