"""The parity gate's tasks: the same tokens through rollout engine and trainer, and what came of it."""

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import acreate_image_artifact, acreate_table_artifact

from headrace.blocks.manifest import Manifest
from headrace.blocks.parity import bounds_of
from headrace.engines import data
from headrace.engines.experience.store import stage_key
from headrace.engines.report.parity import Rows, ablation_table, parity_png, parity_table
from headrace.tasks.ablation import Knob
from headrace.tasks.campaign import Campaign, current
from headrace.tasks.report import in_ui
from headrace.tasks.stage import stage
from headrace.tasks.verdict import CHANGED, OWN, Round, Trial, excesses

CODE = "1"
PARITY_STEP = -1
"""What the gate makes lies in the store before iteration 0."""
PROBE_VERSION = -2
"""Weight version of the changed weights; no campaign trains it."""


def is_due(c: Campaign) -> bool:
    """Whether the campaign has still to pass the gate; it does so once."""
    return c.recipe.parity.when == "before" and not c.store.manifests(PARITY_STEP, "parity")


@stage("parity-prompts", "parity-prompts")
async def parity_prompts() -> Manifest:
    """The first training prompts; the ledger does not reserve them."""
    c = current()
    recipe = c.recipe
    config = {"data": recipe.data.model_dump(mode="json"), "seed": recipe.seed, "count": recipe.parity.prompts}
    key = stage_key("parity-prompts", CODE, config, [])
    if (done := c.store.lookup("prompts", PARITY_STEP, 0, key)) is not None:
        return done
    drawn, _ = data.draw(data.load_splits(recipe.data).train, 0, recipe.parity.prompts, recipe.seed)
    part = c.store.write_table("parity/prompts.arrow", data.prompts_table(drawn))
    return c.store.commit(Manifest(stage="prompts", step=PARITY_STEP, key=key, part=part))


@stage("parity-weights", "parity-weights[{trial}{weights}]")
async def parity_weights(weights: str, trial: str = "") -> None:
    """Trainer and rollout engines go to the changed weights, or back to the campaign's; served digests are verified."""
    c = current()
    c.progress.update(stage="parity")
    if weights == CHANGED and c.probed is None:
        c.probed = c.version, c.weights_key
        c.move_to(PROBE_VERSION, stage_key("probe", CODE, {}, [c.weights_key]))
    elif weights == OWN and c.probed is not None:
        own, c.probed = c.probed, None
        c.move_to(*own)
    job = f"probe-{c.attempt}-{next(c.sync_numbers)}"
    await c.engines.call("actor", 0, "probe", {"on": weights == CHANGED}, job_id=job)
    await c.engines.sync_all()


@stage("parity-generate", "parity-generate[{trial}{weights}/{engine}]")
async def parity_generate(weights: str, engine: int, prompts: Manifest, trial: str = "") -> Manifest:
    """n samples of each prompt from one rollout engine, as an iteration samples them."""
    c = current()
    recipe = c.recipe
    assert prompts.part is not None
    config = _config(c, weights, engine, trial)
    params = {
        "prompts": prompts.model_dump(),
        "start": 0,
        "stop": prompts.part.rows,
        "n": recipe.rollout.n,
        "temperature": recipe.rollout.temperature,
        "max_tokens": recipe.rollout.max_tokens,
        "campaign_seed": recipe.seed,
        "version": c.version,
        "inputs": [prompts.key],
    }
    key = c.key("parity-generate", CODE, config, [prompts.key])
    return await _job(c, "rollout", engine, "generate", "generate", engine, key, params)


@stage("parity-logprob", "parity-logprob[{trial}{weights}/{engine}]")
async def parity_logprob(weights: str, engine: int, generated: Manifest, trial: str = "") -> Manifest:
    """The trainer's log-probabilities of those tokens under the weights that it has now, compared in detail."""
    c = current()
    key = c.key("parity-logprob", CODE, _config(c, weights, engine, trial), [generated.key])
    params = {
        "which": "old",
        "generate": generated.model_dump(),
        "inputs": [generated.key],
        "compare": c.recipe.algorithm.model_dump(mode="json"),
    }
    return await _job(c, "actor", 0, "logprobs", "old-logprob", engine, key, params)


def _config(c: Campaign, weights: str, engine: int, trial: str) -> dict[str, Any]:
    """The attempt is in it: a campaign that failed here measures again."""
    sections = {name: getattr(c.recipe, name).model_dump(mode="json") for name in ("rollout", "model", "algorithm")}
    return sections | {
        "seed": c.recipe.seed,
        "attempt": c.attempt,
        "weights": weights,
        "engine": engine,
        "trial": trial,
    }


async def _job(
    c: Campaign, role: str, index: int, method: str, stage: str, shard: int, key: str, params: dict[str, Any]
) -> Manifest:
    if (done := c.store.lookup(stage, PARITY_STEP, shard, key)) is not None:
        return done
    params = {"store": c.url, "key": key, "step": PARITY_STEP, "shard": shard, **params}
    return Manifest.model_validate(await c.engines.call(role, index, method, params, job_id=f"parity-{method}-{key}"))


async def try_knob(knob: Knob) -> None:
    """Has the engines of the knob's roles started with it, all others with the campaign's recipe."""
    c = current()
    path = f"parity/{knob.slug}.json"
    c.store.put(path, knob.applied(c.recipe).model_dump_json(indent=2).encode())
    _end_trial(c)
    c.weights_folder = f"parity/{knob.slug}/weights"  # of another dtype, perhaps
    for role, index in c.engines.everyone():
        if role in ("actor", "rollout"):
            await c.engines.replace(role, index, *([path] if role in knob.roles else []))


async def end_trials() -> None:
    """No engine with a changed setting stays for the next attempt."""
    c = current()
    _end_trial(c)
    for role, index in c.engines.everyone():
        await c.engines.replace(role, index)


def _end_trial(c: Campaign) -> None:
    """The versions that a trial kept go."""
    if c.weights_folder != "weights":
        c.store.remove_folder(c.weights_folder)
    c.weights_folder = "weights"


@stage("parity-report", "parity-report")
async def parity_report(rounds: Sequence[Round], trials: Sequence[Trial] = ()) -> None:
    """All figures into the store; tables and a picture into the UI, where nothing is wrong beside what follows."""
    c = current()
    shown = [
        {"weights": r.weights, "engine": r.engine, "metrics": r.metrics, "tables": r.tables, "ok": not excesses(c, r)}
        for r in rounds
    ]
    tried = [
        {
            "setting": t.knob.name,
            "now": t.knob.now,
            "tried": t.knob.value,
            "note": t.note,
            "rounds": [{"weights": r.weights, "metrics": r.metrics, "ok": not excesses(c, r)} for r in t.rounds],
        }
        for t in trials
    ]
    bounds = bounds_of(c.recipe.parity.bounds, c.recipe.model.dtype)
    report = {"bounds": bounds, "rounds": shown, "ablation": tried}
    c.store.put(f"parity/attempt-{c.attempt:04d}.json", json.dumps(report, indent=1).encode())
    c.defer(_show(c, shown, bounds, tried))
    if not all(row["ok"] for row in shown):
        await c.settle()


async def _show(c: Campaign, shown: Rows, bounds: Mapping[str, float], tried: Rows) -> None:
    png = await asyncio.to_thread(parity_png, shown, bounds, tried)
    (c.folder / "parity.png").write_bytes(png)
    word = f"Parity gate of {c.id}: {'good' if all(row['ok'] for row in shown) else 'fails'}"
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    await in_ui(acreate_image_artifact(url, key=f"{c.id}-parity-picture", description=word))
    await in_ui(acreate_table_artifact(parity_table(shown, bounds), key=f"{c.id}-parity", description=word))
    if tried:
        word = "Engines started again with one setting changed, on the same prompts"
        table = ablation_table(shown, tried)
        await in_ui(acreate_table_artifact(table, key=f"{c.id}-parity-ablation", description=word))


def accept(rounds: Sequence[Round]) -> dict[str, float]:
    """Commits that the campaign has passed the gate; returns the metrics of its own weights' first round."""
    c = current()
    c.attempts.clear()
    inputs = [r.compared.key for r in rounds]
    own = next(r.metrics for r in rounds if r.weights == OWN)
    c.store.commit(
        Manifest(
            stage="parity",
            step=PARITY_STEP,
            key=stage_key("parity", CODE, {}, inputs),
            inputs=inputs,
            metrics=own,
            info={"fingerprint": rounds[0].generated.info.get("fingerprint", {})},
        )
    )
    return own
