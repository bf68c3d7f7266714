"""The jobs of a rollout host: manifests in, manifests out; tokens stay on this side."""

import asyncio
import functools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from headrace.blocks.manifest import Manifest
from headrace.engines.experience import early
from headrace.engines.experience.schema import GENERATE
from headrace.engines.experience.store import Store
from headrace.engines.rollout import begun
from headrace.engines.rollout.base import Group, Request, RolloutEngine, Sampling
from headrace.engines.rollout.cohort import Cohorts
from headrace.engines.rollout.counter import sample_seed
from headrace.engines.rollout.errors import EngineDied, RolloutError, WrongVersion
from headrace.engines.rollout.render import Renderer

Progress = Callable[..., None]
"""Called with named figures."""
SAVE_S = 5.0
"""How often a job keeps what it has sampled so far; an engine that dies costs at most that."""


class _Sample(BaseModel):
    """Parameters that sampling jobs share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str
    key: str
    step: int
    shard: int = 0
    prompts: Manifest
    start: int
    """First row of the prompts table."""
    stop: int
    """One after its last row."""
    cohort: list[tuple[int, int]] = []
    """Rows (start, stop) of all jobs that a deterministic engine samples in one batch, in order, this one's among them.
    Empty = this job alone."""
    max_tokens: int
    campaign_seed: int
    version: int
    """The weight version that must make the tokens."""
    inputs: list[str]


class GenerateParams(_Sample):
    """Job ``generate``: n samples of each prompt."""

    n: int
    temperature: float
    early: str = ""
    """Folder below the store for groups that are finished before the others; empty = none."""


class EvaluateParams(_Sample):
    """Job ``evaluate``: one greedy answer to each prompt."""


@dataclass(frozen=True)
class Bench:
    """What the jobs of one host work with."""

    engine: RolloutEngine
    renderer: Renderer
    cohorts: Cohorts
    scribe: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "scribe"))
    """Renders prompts, decodes answers and writes, so that the engine's loop goes on; tokenizers want one thread."""
    save_s: float = SAVE_S


async def generate(bench: Bench, params: GenerateParams, progress: Progress) -> Manifest:
    """Samples groups and commits them under stage ``generate``; see ``_sample``."""
    return await _sample(bench, "generate", params, params.n, params.temperature, progress)


async def evaluate(bench: Bench, params: EvaluateParams, progress: Progress) -> Manifest:
    """Answers greedily and commits under stage ``evaluate``; see ``_sample``."""
    return await _sample(bench, "evaluate", params, 1, 0.0, progress)


async def _sample(
    bench: Bench,
    stage: str,
    params: _Sample,
    n: int,
    temperature: float,
    progress: Progress,
) -> Manifest:
    """Makes the GENERATE columns of rows start … stop, unless the store has them under the same key.

    Raises:
        WrongVersion: the engine serves other weights than asked for.
        RolloutError: samples were aborted; nothing is committed.
    """
    engine, renderer, store = bench.engine, bench.renderer, Store(params.store)
    if (done := store.lookup(stage, params.step, params.shard, params.key)) is not None:
        return done
    served = await engine.served()
    if served is None or served.version != params.version:
        raise WrongVersion(
            f"{stage} of step {params.step} needs weight version {params.version}, but this engine serves "
            f"{f'version {served.version}' if served else 'none yet'}: sync the weights first"
        )
    scribe = asyncio.get_running_loop().run_in_executor
    sampling = Sampling(temperature, params.max_tokens, renderer.stop_token_ids)
    work = await scribe(bench.scribe, lambda: _prepare(bench, store, params, n, sampling))
    began, clock = time.time(), time.monotonic()
    kept = begun.path_of(stage, params.step, params.shard, params.key)
    resumed = 0
    if not engine.deterministic:
        resumed = await scribe(bench.scribe, begun.restore, store, kept, work.requests)
    saving = asyncio.create_task(_keep_saving(bench, store, kept, work.requests))
    early_folder = params.early if isinstance(params, GenerateParams) else ""
    tables: dict[int, asyncio.Future[pa.Table]] = {}
    aborted: list[str] = []
    tokens = truncated = 0

    def finish(group: Group, **figures: float) -> pa.Table:
        rows = _table(work, group, renderer)
        if early_folder:
            early.put(store, early_folder, group.group, rows)
        progress(**figures)
        return rows

    try:
        async for group in bench.cohorts.groups(work.everyone, set(work.rows), served.version):
            tokens += sum(len(completion.token_ids) for completion in group.completions)
            truncated += sum(completion.finish_reason == "length" for completion in group.completions)
            aborted += [f"{group.group}-{c.sample}" for c in group.completions if c.finish_reason == "abort"]
            figures = {"groups": len(tables) + 1, "of": len(work.requests), "tokens": tokens}
            tables[group.group] = scribe(bench.scribe, functools.partial(finish, group, **figures))
    except EngineDied:
        await _save(bench, store, kept, work.requests)
        raise
    finally:
        saving.cancel()
    seconds = time.monotonic() - clock
    if aborted:
        raise RolloutError(
            f"{len(aborted)} samples were aborted, first {aborted[0]}; nothing of this shard was committed"
        )
    fingerprint = engine.fingerprint()
    semantics = {"temperature": temperature, "max_tokens": params.max_tokens, "stop": list(renderer.stop_token_ids)}
    about = {"sampling": json.dumps(semantics), "engine": json.dumps(fingerprint)}
    ordered = [await tables[request.group] for request in work.requests]

    def write() -> Manifest:
        table = pa.concat_tables(ordered).replace_schema_metadata(about)
        part = store.write_table(f"experience/{params.step:06d}/{stage}-{params.shard}.arrow", table)
        made = store.commit(
            Manifest(
                stage=stage,
                step=params.step,
                shard=params.shard,
                key=params.key,
                part=part,
                inputs=params.inputs,
                metrics={
                    "samples": table.num_rows,
                    "tokens": tokens,
                    "resumed_tokens": resumed,
                    "prompt_tokens": sum(len(request.prompt_ids) for request in work.requests),
                    "began": began,
                    "seconds": seconds,
                    "tokens_per_second": (tokens - resumed) / seconds,
                    "mean_length": tokens / table.num_rows,
                    "truncated": truncated / table.num_rows,
                },
                info={"version": served.version, "digest": served.digest, "fingerprint": fingerprint},
            )
        )
        store.remove(kept)
        if early_folder:
            early.remove(store, early_folder)
        return made

    return await scribe(bench.scribe, write)


@dataclass(frozen=True)
class _Work:
    """A job's prompts, rendered."""

    requests: list[Request]
    """Those of the job, in the order of its prompts."""
    everyone: list[Request]
    """Those of the whole batch that the engine samples."""
    rows: dict[int, dict[str, Any]]
    """What the rows of a group share, by group."""


def _prepare(bench: Bench, store: Store, params: _Sample, n: int, sampling: Sampling) -> _Work:
    assert params.prompts.part is not None
    table = store.read_table(params.prompts.part)
    own = (params.start, params.stop)
    # What the engine's batch holds decides how it rounds: a deterministic engine always gets the whole cohort.
    batch = params.cohort if params.cohort and bench.engine.deterministic else [own]
    work = _Work([], [], {})
    for start, stop in batch:
        for row in table.slice(start, stop - start).to_pylist():
            text, ids = bench.renderer.render(row["messages"])
            seeds = [sample_seed(params.campaign_seed, row["group_id"], sample) for sample in range(n)]
            work.everyone.append(Request(row["group_id"], ids, seeds, sampling))
            if (start, stop) == own:
                work.requests.append(work.everyone[-1])
                work.rows[row["group_id"]] = {
                    "group_id": row["group_id"],
                    "prompt_id": row["prompt_id"],
                    "prompt_ids": list(ids),
                    "prompt_text": text,
                    "ground_truth": row["ground_truth"],
                    "seeds": seeds,
                }
    return work


async def _keep_saving(bench: Bench, store: Store, path: str, requests: list[Request]) -> None:
    """So that another engine can go on from the tokens when this process dies."""
    while not bench.engine.deterministic:
        await asyncio.sleep(bench.save_s)
        await _save(bench, store, path, requests)


async def _save(bench: Bench, store: Store, path: str, requests: list[Request]) -> None:
    if not bench.engine.deterministic:
        now = [replace(r, begun={sample: c.copy() for sample, c in r.begun.items()}) for r in requests]
        await asyncio.get_running_loop().run_in_executor(bench.scribe, begun.save, store, path, now)


def _table(work: _Work, group: Group, renderer: Renderer) -> pa.Table:
    """The rows of a finished group, in the schema GENERATE."""
    shared = work.rows[group.group]
    rows = [
        {
            **shared,
            "uid": f"{group.group}-{completion.sample}",
            "sample": completion.sample,
            "response_ids": completion.token_ids,
            "response_mask": [1] * len(completion.token_ids),
            "behaviour_logprobs": completion.logprobs,
            "weight_spans": [{"version": version, "tokens": tokens} for version, tokens in completion.weight_spans],
            "finish_reason": completion.finish_reason,
            "turns": 1,
            "seed": shared["seeds"][completion.sample],
            "text": renderer.decode(completion.token_ids),
        }
        for completion in group.completions
    ]
    return pa.Table.from_pylist(rows, schema=GENERATE)
