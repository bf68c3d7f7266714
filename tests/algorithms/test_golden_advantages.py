"""Advantages against verl 0.9.1, and where we differ on purpose."""

import pytest
import torch

from headrace.algorithms.advantages import advantages
from headrace.blocks.algorithms import Algorithm

GROUPED = {
    "grpo:std=True": {"kind": "grpo"},
    "grpo:std=False": {"kind": "grpo", "std": False},
    "grpo_vectorized:std=True": {"kind": "grpo"},
    "grpo_vectorized:std=False": {"kind": "grpo", "std": False},
    "rloo": {"kind": "rloo"},
    "rloo_vectorized": {"kind": "rloo"},
    "opo": {"kind": "opo"},
    "gpg": {"kind": "gpg"},
    "grpo_passk": {"kind": "grpo_passk"},
    "gdpo": {"kind": "gdpo"},
    "reinforce_plus_plus_baseline": {"kind": "reinforce_pp_baseline"},
    "optimal_token_baseline": {"kind": "optimal_token_baseline"},
    "tir_optimal_token_baseline": {"kind": "optimal_token_baseline", "tool_integrated": True},
}
LONE = 3
"""The sample that is alone in its group in the 'singleton' cases."""


def estimate(golden, estimator: dict, batch=None, groups=None, rewards=None, **inputs):
    config = Algorithm.model_validate({"advantage": estimator})
    return advantages(
        config,
        rewards=golden.rewards if rewards is None else rewards,
        groups=golden.groups if groups is None else groups,
        batch=batch or golden.batch,
        **inputs,
    )


def check(golden, name: str, values, batch, key: str = "adv") -> None:
    wanted = torch.tensor(golden.cases["adv/" + name][key], dtype=torch.float64).reshape(-1)
    torch.testing.assert_close(values[batch.mask], wanted[batch.mask], rtol=1e-6, atol=1e-9)
    assert not values[~batch.mask].any()


@pytest.mark.parametrize("name", GROUPED)
def test_of_groups(golden, name):
    inputs = {"old": golden.flat("old"), "sum_pi_squared": golden.flat("sum_pi2")} if "token" in name else {}
    result = estimate(golden, GROUPED[name], **inputs)
    check(golden, name, result.values, golden.batch)
    assert result.accepted.all() and not any(result.drop_reasons)


@pytest.mark.parametrize("tag", ["", "+obsmask"])
def test_gae(golden, tag):
    """A reward on a tool token is lost in verl; here it is an error, so the golden ones are left out."""
    batch = golden.tool_batch if tag else golden.batch
    rewards = golden.flat("rew_proc") * batch.mask
    inputs = {"values": golden.flat("values"), "token_rewards": rewards, "rewards": torch.zeros_like(golden.rewards)}
    result = estimate(golden, {"kind": "gae", "gamma": 0.99, "lam": 0.95}, batch, **inputs)
    check(golden, "gae:" + tag, result.values, batch)
    check(golden, "gae:" + tag, result.returns, batch, "ret")
    if tag:
        with pytest.raises(ValueError, match="they would be lost"):
            estimate(golden, {"kind": "gae"}, batch, **{**inputs, "token_rewards": golden.flat("rew_proc")})


@pytest.mark.parametrize("tag", ["", "+obsmask"])
def test_reinforce_pp(golden, tag):
    batch = golden.tool_batch if tag else golden.batch
    result = estimate(golden, {"kind": "reinforce_pp", "gamma": 0.9}, batch)
    check(golden, "reinforce_plus_plus:" + tag, result.values, batch)
    check(golden, "reinforce_plus_plus:" + tag, result.returns, batch, "ret")


def test_remax(golden):
    greedy = torch.linspace(0, 0.7, golden.batch.samples, dtype=torch.float64)
    result = estimate(golden, {"kind": "remax"}, greedy_rewards=greedy)
    check(golden, "remax", result.values, golden.batch)


@pytest.mark.parametrize("name", ["grpo:singleton", "grpo_vectorized:singleton"])
def test_a_group_of_one_is_dropped(golden, name):
    """verl passes its raw reward off as an advantage."""
    groups = torch.tensor([ord(u) for u in golden.inputs["uid_single"]])
    rewards = golden.rewards
    result = estimate(golden, {"kind": "grpo"}, groups=groups)
    wanted = torch.tensor(golden.cases["adv/" + name]["adv"], dtype=torch.float64)
    assert wanted[LONE, 0] == pytest.approx(float(rewards[LONE]), rel=1e-5)
    others = [i for i in range(len(rewards)) if i != LONE]
    torch.testing.assert_close(result.values.reshape(wanted.shape)[others], wanted[others], rtol=1e-6, atol=1e-9)
    assert result.accepted.tolist() == [i != LONE for i in range(len(rewards))]
    assert result.drop_reasons[LONE] == "group of one: no baseline"
    assert result.metrics["dropped/lone_group"] == 1
    with pytest.raises(ValueError, match="one usable sample"):
        estimate(golden, {"kind": "grpo", "lone_group": "error"}, groups=groups)


def test_every_golden_case_has_a_test(golden):
    """The advantages here, the losses and corrections in the other golden tests."""
    named = {*GROUPED, "gae:", "gae:+obsmask", "reinforce_plus_plus:", "reinforce_plus_plus:+obsmask", "remax"}
    singletons = {"grpo:singleton", "grpo_vectorized:singleton"}
    assert {c.removeprefix("adv/") for c in golden.cases if c.startswith("adv/")} == named | singletons
