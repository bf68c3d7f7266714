"""The score stage's work: from generated answers to rewards."""

import json
from concurrent.futures import Future
from typing import TYPE_CHECKING

from headrace.blocks.manifest import Manifest
from headrace.engines.experience.store import Store
from headrace.engines.reward.pool import RewardPool, Sample, Score

if TYPE_CHECKING:  # loaded where a table is made: the flows import this file
    import pyarrow as pa

ANSWER = ["uid", "group_id", "text", "ground_truth"]
"""Columns of GENERATE that scoring reads."""


Begun = dict[tuple[str, str], Future[Score]]
"""Scores that were begun before the shard was complete, by uid and answer."""


def score_table(
    store: Store, generate: Manifest, pool: RewardPool, prompts: Manifest | None = None, begun: Begun | None = None
) -> "pa.Table":
    """Scores every sample of a generate manifest: a table in the SCORE schema, in the same order.

    With ``prompts`` (the manifest that was generated from), reward functions get the chat before the answer.

    Raises:
        StoreError: the tables cannot be read.
        ValueError: a manifest without a table, or a sample whose group is not in ``prompts``.
    """
    import pyarrow as pa

    from headrace.engines.experience.schema import SCORE

    if generate.part is None:
        raise ValueError(f"the {generate.stage} manifest of step {generate.step} names no table to score")
    begun = begun or {}
    answers = store.read_table(generate.part).select(ANSWER)
    wanted = zip(answers["uid"].to_pylist(), samples_of(store, answers, prompts), strict=True)
    scores = pool.results([begun.get((uid, sample.text)) or pool.submit(sample) for uid, sample in wanted])
    return pa.table(
        {
            "uid": answers["uid"].to_pylist(),
            "reward": [score.reward for score in scores],
            "reward_parts": [list(score.parts.items()) for score in scores],
            "score_error": [score.error for score in scores],
        },
        schema=SCORE,
    )


def samples_of(store: Store, answers: "pa.Table", prompts: Manifest | None) -> list[Sample]:
    """Rows of a GENERATE table as what a reward function gets. Raises as ``score_table``."""
    columns = answers.to_pydict()
    chats: dict[int, list[dict[str, str]]] = {}
    if prompts is not None and prompts.part is not None:
        asked = store.read_table(prompts.part).select(["group_id", "messages"]).to_pydict()
        chats = {group: json.loads(text) for group, text in zip(asked["group_id"], asked["messages"], strict=True)}
        if missing := set(columns["group_id"]) - set(chats):
            raise ValueError(f"groups {sorted(missing)[:5]} of step {prompts.step} are not in its prompts")
    return [
        Sample(text, json.loads(truth), chats.get(group))
        for text, truth, group in zip(columns["text"], columns["ground_truth"], columns["group_id"], strict=True)
    ]


def score_metrics(scored: "pa.Table", tolerance: float = 0.0) -> dict[str, float]:
    """Figures of a SCORE table: mean and standard deviation of the reward, mean of each part, samples, failed ones, and
    the groups in which rewards differ by more than ``tolerance``.

    Means are over the samples that could be scored, and are left out where none could.
    """
    rewards = scored["reward"].drop_null().to_numpy()
    metrics = {"samples": float(scored.num_rows), "score_failed": float(scored.num_rows - len(rewards))}
    groups: dict[str, list[float]] = {}
    for uid, reward in zip(scored["uid"].to_pylist(), scored["reward"].to_pylist(), strict=True):
        if reward is not None:
            groups.setdefault(uid.split("-")[0], []).append(reward)
    metrics["differing_groups"] = float(sum(max(r) - min(r) > tolerance for r in groups.values()))
    if len(rewards):
        metrics |= {"reward": float(rewards.mean(dtype="float64")), "reward_std": float(rewards.std(dtype="float64"))}
    named: dict[str, list[float]] = {}
    for parts in scored["reward_parts"].to_pylist():
        for name, value in parts:
            named.setdefault(name, []).append(value)
    return metrics | {f"reward/{name}": sum(values) / len(values) for name, values in named.items()}
