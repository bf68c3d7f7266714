"""The figures of one iteration, from what its stages committed."""

import time
from collections.abc import Iterable

from headrace.blocks.manifest import Manifest
from headrace.tasks.campaign import Campaign

SUMMED = {"generate": ("tokens", "prompt_tokens"), "score": ("samples", "score_failed")}
"""Figures that are added up over the shards of a stage."""


def chain(c: Campaign, step: int) -> dict[str, list[Manifest]]:
    """The manifests that led to the train manifest of ``step``, by stage and in shard order."""
    made = c.store.manifests(step)
    by_key = {m.key: m for m in made}
    train = next(m for m in made if m.stage == "train")
    found: dict[str, list[Manifest]] = {}
    queue, seen = [train.key], set()
    while queue:
        m = by_key.get(queue.pop())
        if m is not None and m.key not in seen:
            seen.add(m.key)
            found.setdefault(m.stage, []).append(m)
            queue += m.inputs
    return {stage: sorted(ms, key=lambda m: m.shard) for stage, ms in found.items()}


def covered(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds of [begin, end] that lie in any of the spans."""
    total, at = 0.0, begin
    for first, last in sorted(spans):
        first, last = max(first, at), min(last, end)
        if last > first:
            total += last - first
            at = last
    return total


def iteration_row(c: Campaign, stages: dict[str, list[Manifest]]) -> dict[str, float]:
    """One row of the campaign's history: what was trained, how well, and how long each stage took.

    A stage's seconds are those in which an engine worked on any of its shards.
    """
    train, advantage = stages["train"][0], stages["advantage"][0]
    row: dict[str, float] = {"step": float(train.step), "at": time.time()}
    row |= {name: value for name, value in advantage.metrics.items() if name != "seconds"}
    row |= {name: value for name, value in train.metrics.items() if name != "seconds"}
    for stage, made in stages.items():
        row[f"seconds/{stage}"] = _seconds([m.metrics for m in made])
    for stage, names in SUMMED.items():
        row |= {name: sum(m.metrics.get(name, 0.0) for m in stages[stage]) for name in names}
    asked = sum(m.part.rows for m in stages["prompts"] if m.part)
    row["replacement_groups"] = float(asked - c.recipe.prompts)
    if "reward/mean" in row:
        row["reward"] = row["reward/mean"]
    row["truncated"] = sum(m.metrics.get("truncated", 0.0) * m.part.rows for m in stages["generate"] if m.part)
    generate = row["seconds/generate"]
    row["tokens_per_second"] = row["tokens"] / generate if generate else 0.0
    samples = row["samples"] or 1.0
    row["response_length"] = row["tokens"] / samples
    return row


def _seconds(shards: list[dict[str, float]]) -> float:
    """Shards that say when they began may have run at the same time; others ran one after another."""
    if all("began" in shard for shard in shards):
        spans = [(shard["began"], shard["began"] + shard["seconds"]) for shard in shards]
        return covered(spans, min(spans)[0], max(end for _, end in spans))
    return sum(shard.get("seconds", 0.0) for shard in shards)
