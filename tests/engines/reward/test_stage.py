"""From a generate manifest to a SCORE table."""

import pyarrow as pa
import pytest

from headrace.blocks.manifest import Manifest
from headrace.blocks.reward import RewardSpec
from headrace.engines.data.base import Problem, prompts_table
from headrace.engines.experience.schema import GENERATE, SCORE
from headrace.engines.experience.store import Store
from headrace.engines.reward.pool import RewardPool
from headrace.engines.reward.stage import score_metrics, score_table

TEXTS = ["It is 4", "It is 5", "many", "4"]


def _generated() -> pa.Table:
    rows = [
        {"uid": f"{i // 2}-{i % 2}", "group_id": i // 2, "prompt_id": "p", "sample": i % 2, "prompt_ids": [1],
         "response_ids": [2], "response_mask": [1], "behaviour_logprobs": [-0.5], "weight_spans": [],
         "finish_reason": "stop", "turns": 1, "seed": i, "prompt_text": "?", "text": text,
         "ground_truth": "4" if i < 3 else '"four"'}
        for i, text in enumerate(TEXTS)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=GENERATE)


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(str(tmp_path / "store"))


def _manifest(store: Store, stage: str, table: pa.Table) -> Manifest:
    part = store.write_table(f"{stage}.arrow", table)
    return store.commit(Manifest(stage=stage, step=0, key="k", part=part))


def test_scores_are_a_table_and_failures_are_null(store):
    generate = _manifest(store, "generate", _generated())
    with RewardPool(RewardSpec(function="last_number")) as pool:
        scored = score_table(store, generate, pool)
    assert scored.schema.equals(SCORE, check_metadata=True)
    assert scored["uid"].to_pylist() == ["0-0", "0-1", "1-0", "1-1"]
    assert scored["reward"].to_pylist() == [1.0, 0.0, 0.0, None]
    assert scored["reward_parts"].to_pylist() == [[("last_number", r)] for r in (1.0, 0.0, 0.0)] + [[]]
    assert scored["score_error"].to_pylist()[:3] == [None] * 3
    assert "'four' is not one number" in scored["score_error"][3].as_py()
    metrics = score_metrics(scored)
    assert metrics["samples"] == 4 and metrics["score_failed"] == 1
    assert metrics["differing_groups"] == 1 and score_metrics(scored, tolerance=1.0)["differing_groups"] == 0
    assert metrics["reward"] == metrics["reward/last_number"] == pytest.approx(1 / 3)


def test_reward_functions_get_the_chat_when_prompts_are_given(store, misbehaving):
    generate = _manifest(store, "generate", _generated())
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompts = _manifest(store, "prompts", prompts_table([(0, Problem("a", chat, 4)), (1, Problem("b", chat[1:], 4))]))
    with RewardPool(RewardSpec(function="roles")) as pool:
        assert score_table(store, generate, pool, prompts)["reward"].to_pylist() == [2.0, 2.0, 1.0, 1.0]
        alien = _manifest(store, "other", prompts_table([(0, Problem("a", chat, 4))]))
        with pytest.raises(ValueError, match=r"groups \[1\]"):
            score_table(store, generate, pool, alien)


def test_nothing_scored_has_no_mean():
    assert score_metrics(SCORE.empty_table()) == {
        "samples": 0.0,
        "score_failed": 0.0,
        "differing_groups": 0.0,
    }
