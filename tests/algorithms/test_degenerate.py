"""Degenerate batches give a defined result and a counted metric, or a typed error; never NaN."""

import math
from typing import Any

import pytest
import torch

from headrace.algorithms.advantages import advantages
from headrace.algorithms.batch import Jagged
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.errors import AlgorithmError
from headrace.algorithms.objective import finish_metrics, policy_objective
from headrace.blocks.algorithms import Algorithm

LOSSES = {
    "ppo_clip": {},
    "gspo": {},
    "gmpo": {},
    "cispo": {},
    "sapo": {},
    "clip_cov": {},
    "kl_cov": {},
    "reinforce": {},
    "dppo": {"divergence": "kl"},
    "dro": {"beta": 0.1},
}
ESTIMATORS = {
    "grpo": {},
    "rloo": {"std": True},
    "opo": {},
    "gpg": {},
    "grpo_passk": {},
    "gdpo": {},
    "reinforce_pp_baseline": {},
    "optimal_token_baseline": {},
    "reinforce_pp": {"gamma": 0.9},
    "remax": {},
    "gae": {"lam": 0.9},
}


def configure(loss: str, **more) -> Algorithm:
    aggregation = None if loss == "gmpo" else {"kind": "seq-mean-token-mean"}
    correction = {"importance": {"level": "sequence"}}
    kl = {"kind": "loss", "estimator": "k1", "coefficient": 0.1}
    sections = {"loss": {"kind": loss, **LOSSES[loss]}, "aggregation": aggregation, "correction": correction, "kl": kl}
    return Algorithm.model_validate({**sections, "entropy_coefficient": 0.1, **more})


def columns(tokens: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names = ("new", "old", "behaviour", "reference", "advantages", "entropy")
    given = {name: -torch.rand(tokens, dtype=torch.float64) for name in names}
    return given | {"selected": torch.zeros(tokens, dtype=torch.bool)}


def run(config: Algorithm, batch: Jagged, given: dict[str, torch.Tensor]):
    new, entropy = given["new"].clone().requires_grad_(), given["entropy"].clone().requires_grad_()
    live: dict[str, Any] = {**given, "new": new, "entropy": entropy}
    objective = policy_objective(config, batch=batch, denominators=Denominators.of(batch), **live)
    objective.loss.backward()
    assert new.grad is not None and entropy.grad is not None
    metrics = finish_metrics(objective.sums)
    for value in (objective.loss, new.grad, entropy.grad, *map(torch.tensor, metrics.values())):
        assert value.isfinite().all()
    return objective.loss.item(), new.grad, entropy.grad, metrics


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("lengths", [[], [0, 0], [3, 2]])
def test_nothing_to_train_on(loss, lengths):
    """An empty rank, empty responses, all samples rejected."""
    batch = Jagged.from_lengths(lengths, torch.zeros(sum(lengths), dtype=torch.bool))
    value, grad, by_entropy, metrics = run(configure(loss), batch, columns(sum(lengths)))
    assert value == 0 and not grad.any() and not by_entropy.any()
    assert metrics["tokens"] == metrics["samples"] == 0
    assert "ratio/mean" not in metrics


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("column", ["new", "old", "behaviour", "reference", "advantages", "entropy"])
@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_a_token_that_is_not_finite_adds_nothing(loss, column, bad):
    batch, given = Jagged.from_lengths([4, 3]), columns(7)
    given[column][2] = bad
    _, grad, by_entropy, metrics = run(configure(loss), batch, given)
    assert metrics["nonfinite_tokens"] == 1 and metrics["tokens"] == 7
    assert grad[2] == 0 and by_entropy[2] == 0
    assert grad[[0, 1, 3, 4, 5, 6]].ne(0).any()


def test_garbage_at_tokens_that_are_not_trained_on_is_never_read():
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    batch, given = Jagged.from_lengths([4, 3], mask), columns(7)
    clean = run(configure("ppo_clip"), batch, given)
    for x in given.values():
        if x.is_floating_point():
            x[~mask] = math.nan
    dirty = run(configure("ppo_clip"), batch, given)
    assert dirty[0] == clean[0] and torch.equal(dirty[1], clean[1]) and dirty[3] == clean[3]


def estimate(kind, rewards, groups, batch, **more):
    config = Algorithm.model_validate({"advantage": {"kind": kind, **ESTIMATORS[kind]}, **more})
    tokens, samples = len(batch.mask), batch.samples
    result = advantages(
        config,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor(groups, dtype=torch.int64),
        batch=batch,
        old=-torch.rand(tokens, dtype=torch.float64),
        behaviour=-torch.rand(tokens, dtype=torch.float64),
        values=torch.rand(tokens, dtype=torch.float64),
        sum_pi_squared=torch.rand(tokens, dtype=torch.float64),
        greedy_rewards=torch.zeros(samples, dtype=torch.float64),
    )
    assert result.values.shape == batch.mask.shape and result.values.isfinite().all()
    assert not result.values[~result.batch.mask].any()
    assert all(math.isfinite(x) for x in result.metrics.values())
    return result


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_samples_that_cannot_be_trained_on(kind):
    """Failed, empty and infinite: dropped, with a reason, and out of every baseline."""
    torch.manual_seed(0)
    nan, inf = math.nan, math.inf
    result = estimate(kind, [1, nan, 0, 1, inf, 0], [7, 7, 7, 5, 5, 5], Jagged.from_lengths([2, 3, 2, 1, 2, 4]))
    assert result.accepted.tolist() == [True, False, True, True, False, True]
    assert result.drop_reasons == [None, "scoring failed", None, None, "scoring failed", None]
    assert result.metrics["dropped/scoring_failed"] == 2
    if kind == "grpo":
        alone = estimate(kind, [1, 0, 1, 0], [7, 7, 5, 5], Jagged.from_lengths([2, 2, 1, 4]))
        assert torch.equal(result.values[result.batch.mask], alone.values)
    result = estimate(kind, [1, 0, 0], [7, 7, 7], Jagged.from_lengths([2, 0, 3]))
    assert result.drop_reasons[1] == "empty response"


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize(
    ("rewards", "lengths"), [([], []), ([math.nan, math.nan], [2, 2]), ([1.0, 0.0], [0, 0]), ([0.5, 0.5], [2, 3])]
)
def test_batches_without_a_signal(kind, rewards, lengths):
    """No samples, none usable, no tokens, equal rewards."""
    result = estimate(kind, rewards, [1] * len(rewards), Jagged.from_lengths(lengths))
    if kind in ("grpo", "rloo", "opo", "gpg", "grpo_passk", "gdpo", "reinforce_pp_baseline"):
        assert not result.values.any()


@pytest.mark.parametrize("name", ["old", "reference", "values", "greedy_rewards", "reward_parts"])
def test_a_sample_with_an_input_that_is_not_finite_is_dropped(name):
    """A log-probability of −inf under KL in the reward, a greedy answer or a reward part without score."""
    weights = {"kind": "gdpo", "weights": {"style": 1.0}}
    kinds = {"values": {"kind": "gae"}, "greedy_rewards": {"kind": "remax"}, "reward_parts": weights}
    estimator = kinds.get(name, {"kind": "grpo"})
    config = Algorithm.model_validate({"advantage": estimator, "kl": {"kind": "reward", "coefficient": 0.1}})
    by_token: dict[str, Any] = {x: -torch.rand(6, dtype=torch.float64) for x in ("old", "reference", "values")}
    by_sample: dict[str, Any] = {x: torch.rand(3, dtype=torch.float64) for x in ("greedy_rewards", "style")}
    (by_token if name in by_token else by_sample)["style" if name == "reward_parts" else name][2] = -math.inf
    result = advantages(
        config,
        rewards=torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64),
        groups=torch.zeros(3, dtype=torch.int64),
        batch=Jagged.from_lengths([2, 3, 1] if name in by_token else [1, 2, 3]),
        reward_parts={"style": by_sample.pop("style")},
        **by_token,
        **by_sample,
    )
    assert result.metrics["dropped/not_finite"] == 1 and result.values.isfinite().all()
    assert [reason for reason in result.drop_reasons if reason] == [
        f"'{'style' if name == 'reward_parts' else name}' is not finite"
    ]


def test_all_rejected():
    reject = {"reject": [{"kind": "ratio", "level": "token", "low": 0.999999, "high": 1.000001}]}
    result = estimate("grpo", [1, 0], [1, 1], Jagged.from_lengths([2, 3]), correction=reject)
    assert not result.accepted.any() and not result.batch.mask.any()
    assert result.metrics["dropped/tokens_rejected"] == 5 and result.metrics["dropped/rejected_tokens"] == 2
    assert "disagree on every token" in str(result.drop_reasons[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": None}, "loss 'ppo_clip' needs 'old'"),
        ({"advantages": None}, "needs 'advantages'"),
        ({"behaviour": None}, "correction.importance needs 'behaviour'"),
        ({"reference": None}, "kl of kind 'loss' needs 'reference'"),
        ({"entropy": None}, "no 'entropy' was given"),
        ({"old": torch.zeros(3)}, "'old' has shape"),
    ],
)
def test_missing_and_misshapen_inputs(change, message):
    batch = Jagged.from_lengths([4, 3])
    given: dict[str, Any] = {**columns(7), **change}
    with pytest.raises(AlgorithmError, match=message):
        policy_objective(configure("ppo_clip"), batch=batch, denominators=Denominators.of(batch), **given)


@pytest.mark.parametrize(
    ("offsets", "mask", "message"),
    [
        (torch.tensor([0, 2], dtype=torch.int32), torch.ones(2, dtype=torch.bool), "offsets must be int64"),
        (torch.tensor([0, 2]), torch.ones(2), "mask must be bool"),
        (torch.tensor([0, 3]), torch.ones(2, dtype=torch.bool), "the mask has 2 tokens"),
    ],
)
def test_wrong_batches(offsets, mask, message):
    with pytest.raises(AlgorithmError, match=message):
        Jagged(offsets, mask)
