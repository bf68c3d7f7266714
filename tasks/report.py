"""What people see: a table, samples and a picture in the Prefect UI, metrics as Parquet and for TensorBoard."""

import asyncio
import base64
import json
import time
from collections.abc import Coroutine
from typing import Any

import httpx
from prefect.artifacts import acreate_image_artifact, acreate_markdown_artifact, acreate_table_artifact
from prefect.events import emit_event
from prefect.logging import get_run_logger

from headrace.blocks.manifest import Manifest
from headrace.blocks.weights import Served
from headrace.engines.report import curves_png, samples_markdown, stage_table, write_tensorboard
from headrace.tasks.campaign import Campaign, current
from headrace.tasks.figures import chain, covered, iteration_row
from headrace.tasks.stage import stage

SAMPLES = 4
"""Answers shown of each iteration."""
MOVING = 5
"""Iterations whose mean is the reward before and after in the summary."""
SHOWN = ("reward", "tokens_per_second", "iteration_seconds", "overhead_seconds")
"""Figures of the live display."""
PICTURE_EVERY = 10
"""Iterations between two pictures; drawing one takes a core for a second."""


@stage("report", "report[{step}]")
async def report(step: int, served: list[Served]) -> None:
    """Adds the iteration to the history and shows it.

    The overhead of Headrace and Prefect is the time since the last report in which no engine and no scoring process
    worked: flow, tasks, artifacts, HTTP, and this report of the iteration before.
    """
    c = current()
    stages = await asyncio.to_thread(chain, c, step)
    row = iteration_row(c, stages)
    now = time.time()
    row["iteration_seconds"] = now - c.reported_at
    row["overhead_seconds"] = row["iteration_seconds"] - covered(c.busy_spans(), c.reported_at, now)
    row["weight_bytes"] = float(sum(s.nbytes for s in served))
    row["seconds/sync-weights"] = max((s.seconds for s in served), default=0.0)
    row["policy_lag"] = 0.0
    c.reported_at = now
    c.progress.update(iteration=step + 1, stage="report", **{name: row[name] for name in SHOWN if name in row})
    table = stage_table(row, c.attempts)
    c.attempts.clear()
    c.defer(_show(c, step, row, table, stages))


def complete_history(c: Campaign) -> None:
    """Adds iterations that an earlier attempt trained and did not report; what they took in whole is not known."""
    known = {row["step"] for row in c.history.rows()}
    for step in range(c.version):
        if step not in known:
            c.history.add(iteration_row(c, chain(c, step)))


async def _show(
    c: Campaign, step: int, row: dict[str, float], table: list[dict[str, object]], stages: dict[str, list[Manifest]]
) -> None:
    """History and artifacts, while the engines work on the next iteration."""
    await asyncio.to_thread(c.history.add, row)
    await in_ui(acreate_table_artifact(table, key=f"{c.id}-iteration", description=f"Iteration {step}"))
    text = await asyncio.to_thread(_samples, c, stages)
    await in_ui(acreate_markdown_artifact(text, key=f"{c.id}-samples", description=f"Samples of iteration {step}"))
    emit_event("headrace.iteration.metrics", resource={"prefect.resource.id": f"headrace.campaign.{c.id}"}, payload=row)
    await asyncio.to_thread(write_tensorboard, c.folder / "tensorboard", [row])
    if (step + 1) % PICTURE_EVERY == 0:
        await show_curves(c)


async def in_ui(artifact: Coroutine[Any, Any, object]) -> None:
    """Creates an artifact. A server that is away costs the picture, not the campaign."""
    try:
        await artifact
    except httpx.HTTPError as error:
        get_run_logger().warning("the Prefect server took no artifact: %s. The figures are in the store", error)


def _samples(c: Campaign, stages: dict[str, list[Manifest]]) -> str:
    generated, scored = stages["generate"][0], stages["score"][0]
    return samples_markdown(c.store.read_table(generated.part), c.store.read_table(scored.part), SAMPLES)


async def show_curves(c: Campaign) -> None:
    """The campaign so far as one picture: a file in its folder and an artifact."""
    png = await asyncio.to_thread(
        lambda: curves_png(c.history.rows(), {v: m.metrics for v, m in c.evaluations().items()})
    )
    (c.folder / "curves.png").write_bytes(png)
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    await in_ui(acreate_image_artifact(url, key=f"{c.id}-curves", description=f"Campaign {c.id}"))


@stage("finish", "finish")
async def finish(model: str) -> dict[str, object]:
    """Writes the summary of the campaign, and its last picture."""
    c = current()
    await c.settle()
    rows = c.history.rows()
    rewards = [row["reward"] for row in rows if "reward" in row]
    summary: dict[str, object] = {
        "campaign": c.id,
        "iterations": c.version,
        "model": model,
        "reward_before": sum(rewards[:MOVING]) / max(1, len(rewards[:MOVING])),
        "reward_after": sum(rewards[-MOVING:]) / max(1, len(rewards[-MOVING:])),
        "samples": [],
    }
    evaluated = c.evaluations()
    if len(evaluated) > 1:
        first, last = evaluated[min(evaluated)], evaluated[max(evaluated)]
        summary |= {
            "accuracy_before": first.metrics.get("reward", 0.0),
            "accuracy_after": last.metrics.get("reward", 0.0),
            "problems": int(last.metrics["samples"]),
            "samples": _before_and_after(c, first, last),
        }
    c.store.put("summary.json", json.dumps(summary, indent=1).encode())
    await show_curves(c)
    c.progress.update(stage="finished")
    return summary


def _before_and_after(c: Campaign, first: Manifest, last: Manifest) -> list[dict[str, str]]:
    """Three held-out problems and the answers to them of the first and the last evaluated version."""

    def answers(scored: Manifest) -> list[str]:
        made = next(m for m in c.store.manifests(scored.step, "evaluate") if m.key in scored.inputs)
        return c.store.read_table(made.part)["text"].slice(0, 3).to_pylist()

    problems = c.store.manifests(0, "held-out")[-1]
    asked = c.store.read_table(problems.part)["messages"].slice(0, 3).to_pylist()
    rows = zip(asked, answers(first), answers(last), strict=True)
    return [{"prompt": json.loads(a)[-1]["content"], "before": b, "after": d} for a, b, d in rows]
