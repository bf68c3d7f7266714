"""Who is trained on: the order of refusals, dynamic sampling, and what rejected samples leave."""

import math

import pytest
import torch

from headrace.algorithms.advantages import advantages
from headrace.algorithms.batch import Jagged
from headrace.algorithms.denominators import Denominators
from headrace.blocks.algorithms import Algorithm


def run(config: dict, rewards, groups, batch, **inputs):
    return advantages(
        Algorithm.model_validate(config),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor(groups),
        batch=batch,
        **inputs,
    )


def test_groups_of_equal_rewards_are_dropped_and_counted():
    result = run(
        {"preset": "dapo"}, [1, 1, 0, 1, 0, 0, 2, 2.05], [3, 3, 5, 5, 4, 4, 9, 9], Jagged.from_lengths([2] * 8)
    )
    assert result.accepted.tolist() == [False, False, True, True, False, False, True, True]
    assert result.metrics["dropped/equal_reward_groups"] == 2 and result.metrics["dropped/equal_rewards"] == 4
    assert result.drop_reasons[0] == "all rewards of the group are equal"
    assert result.metrics["accepted/groups"] == 2 and result.metrics["accepted/tokens"] == 8
    tolerant = {"preset": "dapo", "filter": {"tolerance": 0.1}}
    result = run(tolerant, [1, 0, 2, 2.05], [5, 5, 9, 9], Jagged.from_lengths([2] * 4))
    assert result.accepted.tolist() == [True, True, False, False]


def test_without_a_filter_equal_groups_stay_with_advantage_zero():
    result = run({"preset": "grpo"}, [1, 1], [3, 3], Jagged.from_lengths([2, 2]))
    assert result.accepted.all() and not result.values.any()


def test_equality_is_of_scores_not_of_shaped_rewards():
    overlong = {"preset": "dapo", "overlong": {"max_length": 10, "buffer": 8}}
    result = run(overlong, [1, 1, 1, 0], [0, 0, 1, 1], Jagged.from_lengths([2, 9, 2, 9]))
    assert result.accepted.tolist() == [False, False, True, True]
    assert result.metrics["reward/min"] == pytest.approx(-7 / 8)


def test_rejected_samples_are_in_no_baseline_and_no_denominator():
    batch = Jagged.from_lengths([2, 2, 2])
    old = torch.zeros(6, dtype=torch.float64)
    behaviour = torch.tensor([0, 0, 0, -3.0, 0, 0], dtype=torch.float64)
    reject = {"reject": [{"kind": "divergence", "level": "sequence-max", "high": 0.5}]}
    config = {"advantage": {"kind": "grpo", "std": False}, "correction": reject}
    result = run(config, [1, 10, 0], [0, 0, 0], batch, old=old, behaviour=behaviour)
    assert result.values.tolist() == [0.5, 0.5, 0, 0, -0.5, -0.5]
    assert "rollout engine and trainer disagree" in str(result.drop_reasons[1])
    assert Denominators.of(result.batch) == Denominators(tokens=4, samples=2)
    with pytest.raises(ValueError, match="correction\\.reject needs 'old' and 'behaviour'"):
        run(config, [1, 10, 0], [0, 0, 0], batch)


def test_a_rejected_token_leaves_its_sample_in():
    batch = Jagged.from_lengths([2, 2])
    behaviour = torch.tensor([0, 0, 0, -3.0], dtype=torch.float64)
    config = {"correction": {"reject": [{"kind": "ratio", "level": "token", "low": 0.5, "high": 2.0}]}}
    result = run(config, [1, 0], [0, 0], batch, old=torch.zeros(4, dtype=torch.float64), behaviour=behaviour)
    assert result.accepted.all() and result.batch.mask.tolist() == [True, True, True, False]
    assert result.values[3] == 0 and result.metrics["dropped/tokens_rejected"] == 1


def test_a_failed_sample_can_leave_a_group_of_one():
    result = run({"preset": "grpo"}, [1, math.nan, 0, 1], [0, 0, 1, 1], Jagged.from_lengths([1] * 4))
    assert result.drop_reasons[:2] == ["group of one: no baseline", "scoring failed"]
    assert result.accepted.tolist() == [False, False, True, True]


def test_estimators_without_groups_keep_single_samples():
    result = run({"preset": "reinforce_pp", "kl": None}, [1, 0], [0, 1], Jagged.from_lengths([1, 1]))
    assert result.accepted.all()


def test_online_dpo_has_no_advantages():
    result = run({"preset": "online_dpo"}, [1, 0, 1], [0, 0, 1], Jagged.from_lengths([1] * 3))
    assert not result.values.any() and result.accepted.tolist() == [True, True, False]


def test_select_and_padding():
    batch = Jagged.from_lengths([2, 0, 3], torch.tensor([1, 0, 1, 1, 0]))
    tokens, part = batch.select(torch.tensor([2, 0]))
    assert tokens.tolist() == [2, 3, 4, 0, 1] and part.offsets.tolist() == [0, 3, 5]
    assert part.mask.tolist() == [True, True, False, True, False]
    assert batch.sample_index().tolist() == [0, 0, 2, 2, 2] and batch.lengths().tolist() == [1, 0, 2]
    padded = Jagged.from_padded(torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 0]]))
    assert padded.lengths().tolist() == batch.lengths().tolist()
