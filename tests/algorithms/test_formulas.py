"""Formulas that no peer gives, derived again in numpy, float64, one sample at a time."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from headrace.algorithms import kl
from headrace.algorithms.advantages import advantages
from headrace.algorithms.advantages.discount import BLOCK, discounted_sum
from headrace.algorithms.advantages.shaping import overlong_penalty
from headrace.algorithms.batch import Jagged, Segments
from headrace.algorithms.corrections import importance_weights
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.diagnostics import lag_sums
from headrace.algorithms.losses.covariance import select
from headrace.algorithms.objective import finish_metrics, policy_objective
from headrace.algorithms.preference import best_worst_pairs
from headrace.blocks.algorithms import Algorithm
from headrace.blocks.algorithms.terms import Overlong

LENGTHS = [3, 0, 5, 2]


@pytest.fixture
def batch() -> Jagged:
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 1, 0, 1, 1], dtype=torch.bool)
    return Jagged.from_lengths(LENGTHS, mask)


@pytest.fixture
def tokens() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: -2 * torch.rand(10, dtype=torch.float64) for name in ("new", "old", "behaviour", "reference", "a")}


def samples_of(batch: Jagged, x: torch.Tensor) -> list[np.ndarray]:
    """The trained tokens of each sample."""
    bounds = batch.offsets.tolist()
    return [x[a:b][batch.mask[a:b]].numpy() for a, b in pairwise(bounds)]


@pytest.mark.parametrize("normalise", [False, True])
def test_geometric_importance(batch, tokens, normalise):
    importance = {"level": "geometric", "bound": {"kind": "truncate", "high": 1.1}, "normalise": normalise}
    config = Algorithm.model_validate(
        {
            "loss": {"kind": "reinforce"},
            "aggregation": {"kind": "token-mean"},
            "correction": {"importance": importance},
        }
    )
    assert config.correction is not None and config.correction.importance is not None
    weights = importance_weights(
        config.correction.importance, old=tokens["old"], behaviour=tokens["behaviour"], batch=batch
    )
    loss = policy_objective(
        config,
        new=tokens["new"].requires_grad_(),
        old=tokens["old"],
        behaviour=tokens["behaviour"],
        advantages=tokens["a"],
        batch=batch,
        denominators=Denominators.of(batch, weights=weights),
    ).loss
    per_sample = [
        min(math.exp(d.mean()), 1.1) if len(d) else None for d in samples_of(batch, tokens["old"] - tokens["behaviour"])
    ]
    used = [w for w in per_sample if w is not None]
    scale = np.mean(used) if normalise else 1.0
    surrogate = samples_of(batch, -tokens["a"] * tokens["new"].detach())
    wanted = sum((s * w / scale).sum() for s, w in zip(surrogate, per_sample, strict=True) if w is not None)
    assert loss.item() == pytest.approx(wanted / int(batch.mask.sum()), rel=1e-12)


def test_gmpo_importance_is_the_geometric_mean_of_the_sample(batch, tokens):
    config = Algorithm.model_validate(
        {"preset": "gmpo", "loss": {"clip_low": 0.3, "clip_high": 0.5}, "correction": {"importance": {}}}
    )
    loss = policy_objective(
        config,
        new=tokens["new"].requires_grad_(),
        old=tokens["old"],
        behaviour=tokens["behaviour"],
        advantages=tokens["a"],
        batch=batch,
        denominators=Denominators.of(batch),
    ).loss
    parts = [samples_of(batch, tokens[name].detach()) for name in ("new", "old", "behaviour", "a")]
    total = 0.0
    for new, old, behaviour, a in zip(*parts, strict=True):
        if not len(new):
            continue
        d = new - old
        held = np.where(a > 0, np.minimum(d, np.clip(d, -0.3, 0.5)), np.maximum(d, np.clip(d, -0.3, 0.5)))
        weight = np.exp(np.log(np.minimum(np.exp(old - behaviour), 2.0)).mean())
        total -= a.mean() * np.exp(held.mean()) * weight
    assert loss.item() == pytest.approx(total / 3, rel=1e-12)


@pytest.mark.parametrize("length", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0])
def test_discounted_sum(length, discount):
    torch.manual_seed(0)
    lengths = torch.tensor([length, 0, 1, length // 2])
    segments = Segments(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    values = torch.randn(int(lengths.sum()), dtype=torch.float64)
    wanted, carry = [], 0.0
    ends = set((segments.offsets[1:] - 1).tolist())
    for t in reversed(range(len(values))):
        carry = float(values[t]) + (0.0 if t in ends else discount * carry)
        wanted.append(carry)
    result = discounted_sum(values, segments, discount)
    torch.testing.assert_close(result, torch.tensor(wanted[::-1], dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_rloo_with_standard_deviation():
    """PipelineRL's advantage: leave one out, divided by the sample standard deviation + 1e-4."""
    rewards = np.array([1.0, 0.0, 0.5, 2.0, 1.0])
    groups = np.array([4, 4, 4, 9, 9])
    config = Algorithm.model_validate({"advantage": {"kind": "rloo", "std": True}})
    batch = Jagged.from_lengths([1] * 5)
    result = advantages(config, rewards=torch.tensor(rewards), groups=torch.tensor(groups), batch=batch)
    wanted = []
    for r, g in zip(rewards, groups, strict=True):
        group = rewards[groups == g]
        wanted.append((r - (group.sum() - r) / (len(group) - 1)) / (group.std(ddof=1) + 1e-4))
    np.testing.assert_allclose(result.values.numpy(), wanted, rtol=1e-12)


def test_gdpo_of_several_parts():
    parts = {"format": np.array([1.0, 0.0, 1.0, 1.0]), "correct": np.array([0.0, 1.0, 0.0, 1.0])}
    lengths, groups = np.array([1, 2, 3, 4]), np.array([0, 0, 1, 1])
    weights = {"format": 0.5, "correct": 2.0}
    config = Algorithm.model_validate({"advantage": {"kind": "gdpo", "weights": weights}})
    given = {name: torch.tensor(part) for name, part in parts.items()}
    common = {"groups": torch.tensor(groups), "batch": Jagged.from_lengths(lengths.tolist())}
    result = advantages(config, rewards=torch.tensor(parts["correct"]), reward_parts=given, **common)
    total = np.zeros(4)
    for name, weight in weights.items():
        for g in (0, 1):
            group = parts[name][groups == g]
            total[groups == g] += weight * (group - group.mean()) / (group.std(ddof=1) + 1e-6)
    tokens = np.repeat(total, lengths)
    wanted = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(result.values.numpy(), wanted, rtol=1e-10)
    with pytest.raises(ValueError, match="weighs reward parts that were not given: format"):
        advantages(config, rewards=torch.tensor(parts["correct"]), reward_parts={"correct": given["correct"]}, **common)


def test_kl_in_the_reward(batch, tokens):
    """REINFORCE++ with γ: each token's reward is −β k1, and the last one has the sample's reward."""
    config = Algorithm.model_validate(
        {"preset": "reinforce_pp", "advantage": {"gamma": 0.9}, "kl": {"coefficient": 0.3}}
    )
    rewards = torch.tensor([1.0, 5.0, 0.0, 0.5], dtype=torch.float64)
    result = advantages(
        config,
        rewards=rewards,
        groups=torch.zeros(4, dtype=torch.int64),
        batch=batch,
        old=tokens["old"],
        reference=tokens["reference"],
    )
    assert result.returns is not None
    wanted = []
    for penalties, reward in zip(samples_of(batch, -0.3 * (tokens["old"] - tokens["reference"])), rewards, strict=True):
        returns, carry = [], 0.0
        for t in reversed(range(len(penalties))):
            carry = penalties[t] + (float(reward) if t == len(penalties) - 1 else 0.9 * carry)
            returns.append(carry)
        wanted += returns[::-1]
    np.testing.assert_allclose(result.returns[batch.mask].numpy(), wanted, rtol=1e-12)
    doubled = advantages(
        config,
        rewards=rewards,
        groups=torch.zeros(4, dtype=torch.int64),
        batch=batch,
        old=tokens["old"],
        reference=tokens["reference"],
        kl_coefficient=0.6,
    )
    assert not torch.equal(doubled.values, result.values)


def test_optimal_token_baseline_with_importance_and_tools():
    torch.manual_seed(1)
    lengths, samples = [4, 3, 5], 3
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1], dtype=torch.bool)
    batch = Jagged.from_lengths(lengths, mask)
    old, behaviour = (-torch.rand(12, dtype=torch.float64) for _ in range(2))
    sum_pi_squared, rewards = torch.rand(12, dtype=torch.float64), torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    for tool_integrated in (False, True):
        config = Algorithm.model_validate(
            {
                "advantage": {"kind": "optimal_token_baseline", "tool_integrated": tool_integrated},
                "correction": {"importance": {"bound": {"kind": "truncate", "high": 1.2}}},
            }
        )
        groups = torch.zeros(samples, dtype=torch.int64)
        result = advantages(
            config,
            rewards=rewards,
            groups=groups,
            batch=batch,
            old=old,
            behaviour=behaviour,
            sum_pi_squared=sum_pi_squared,
        )
        rho = np.minimum(np.exp((old - behaviour).numpy()), 1.2)
        energy = (1 - 2 * old.exp() + sum_pi_squared).numpy() * rho**2
        cells: dict[int, list[tuple[int, float, float]]] = {}
        start = 0
        for i, length in enumerate(lengths):
            weight, place = 0.0, 0
            for t in range(start, start + length):
                if mask[t]:
                    weight += energy[t]
                    position = place if tool_integrated else t - start
                    cells.setdefault(position, []).append((t, float(rewards[i]), weight))
                    place += 1
            start += length
        wanted = np.zeros(12)
        for members in cells.values():
            baseline = 0.0
            if len(members) > 1:
                baseline = sum(g * w for _, g, w in members) / (sum(w for *_, w in members) + 1e-8)
            for t, g, _ in members:
                wanted[t] = g - baseline
        np.testing.assert_allclose(result.values.numpy(), wanted, rtol=1e-10)


def test_overlong_penalty():
    config = Overlong(max_length=20, buffer=4, penalty=2.0)
    penalty = overlong_penalty(config, torch.tensor([0, 15, 16, 17, 18, 20, 25]))
    assert penalty.tolist() == [0, 0, 0, -0.5, -1.0, -2.0, -2.0]


def test_full_kl_is_what_the_estimators_estimate():
    torch.manual_seed(0)
    logits, reference = torch.randn(2, 6, dtype=torch.float64).requires_grad_(), torch.randn(2, 6, dtype=torch.float64)
    p, q = logits.softmax(-1), reference.softmax(-1)
    exact = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(kl.full_kl(logits, reference), exact)
    for estimator in ("k1", "k3"):
        value, _ = kl.kl_estimate(p.log().reshape(-1), q.log().reshape(-1), estimator)
        torch.testing.assert_close((p * value.reshape(2, 6)).sum(-1), exact)
    _, slope = kl.kl_estimate(p.log().reshape(-1), q.log().reshape(-1), "k3+")
    (exact_gradient,) = torch.autograd.grad(exact.sum(), logits, retain_graph=True)
    score = (slope.reshape(2, 6) * p).detach()
    (estimated,) = torch.autograd.grad((score * p.log()).sum(), logits)
    torch.testing.assert_close(estimated, exact_gradient)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_kl_slopes_are_derivatives(estimator):
    new = torch.tensor([-0.1, -2.0, -30.0, -1.0], dtype=torch.float64).requires_grad_()
    reference = torch.tensor([-0.3, -0.5, -0.1, -40.0], dtype=torch.float64)
    d = new - reference
    near = d.clamp(-20, 20)
    formula = {"k1": d, "abs": d.abs(), "k2": d**2 / 2, "k3": ((-near).exp() + near - 1).clamp(max=10)}[estimator]
    value, slope = kl.kl_estimate(new, reference, estimator)
    torch.testing.assert_close(value, formula.detach())
    torch.testing.assert_close(slope, torch.autograd.grad(formula.sum(), new)[0])


def test_best_against_worst():
    rewards = torch.tensor([0.2, 0.9, 0.9, math.nan, 0.5, 0.5, 1.0, 0.0, 3.0])
    groups = torch.tensor([4, 4, 4, 4, 2, 2, 8, 8, 1])
    accepted = torch.tensor([True] * 6 + [False] + [True] * 2)
    assert best_worst_pairs(rewards, groups, accepted).tolist() == [[1, 0]]
    assert best_worst_pairs(rewards, groups, torch.ones(9, dtype=torch.bool)).tolist() == [[1, 0], [6, 7]]
    assert best_worst_pairs(rewards, groups, torch.zeros(9, dtype=torch.bool)).shape == (0, 2)


def test_covariance_selection():
    torch.manual_seed(0)
    batch = Jagged.from_lengths([100])
    a, logp = torch.randn(100, dtype=torch.float64), torch.randn(100, dtype=torch.float64)
    covariance = ((a - a.mean()) * (logp - logp.mean())).numpy()

    def chosen(loss, **options):
        return select(
            Algorithm.model_validate({"loss": loss}).loss, logprobs=logp, advantages=a, batch=batch, **options
        )

    top = chosen({"kind": "kl_cov", "fraction": 0.05}).nonzero().squeeze(1).tolist()
    assert sorted(top) == sorted(np.argsort(-covariance)[:5].tolist())
    bounds = {"kind": "clip_cov", "fraction": 0.05, "covariance_low": 0.1, "covariance_high": 2.0}
    drawn = chosen(bounds, seed=3)
    assert drawn.sum() == 5 and all(0.1 < c < 2.0 for c in covariance[drawn.numpy()])
    assert torch.equal(drawn, chosen(bounds, seed=3)) and not torch.equal(drawn, chosen(bounds, seed=4))


def test_lag(batch):
    lag = torch.tensor([0, 1, 2, 0, 99, 3, 0, 99, 0, 0])
    metrics = finish_metrics(lag_sums(lag, batch))
    assert metrics["lag/mean"] == pytest.approx(6 / 8) and metrics["lag/max"] == 3
    assert metrics["lag/stale_fraction"] == pytest.approx(3 / 8)


def test_ratio_metrics_are_pipelinerls(batch, tokens):
    """``rl/ess`` = (Σr)²/Σr²/N, and the indicator of any ratio out of range as a mean of sample means."""
    config = Algorithm.model_validate({"loss": {"kind": "ppo_clip"}, "aggregation": {"kind": "token-mean"}})
    sums = policy_objective(
        config,
        new=tokens["new"].requires_grad_(),
        old=tokens["old"],
        advantages=tokens["a"],
        batch=batch,
        denominators=Denominators.of(batch),
    ).sums
    metrics = finish_metrics(sums)
    ratios = samples_of(batch, (tokens["new"].detach() - tokens["old"]).exp())
    r = np.concatenate(ratios)
    assert metrics["ratio/ess"] == pytest.approx(r.sum() ** 2 / (r**2).sum() / len(r))
    indicator = [np.mean((x < 0.8) | (x > 1.2)) for x in ratios if len(x)]
    assert metrics["policy/out_of_range_sample_mean"] == pytest.approx(np.mean(indicator))
    assert metrics["ratio/tail_fraction"] == pytest.approx(np.mean((r > 2) | (r < 0.5)))
    assert metrics["policy/kl_k3"] == pytest.approx(np.mean(r - 1 - np.log(r)))
