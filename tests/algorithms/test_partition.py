"""Any micro-batches, any order, any number of ranks, padded or packed: the same loss, gradient and metrics."""

import itertools
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.batch import Jagged
from headrace.algorithms.corrections import importance_weights
from headrace.algorithms.denominators import Denominators
from headrace.algorithms.losses.covariance import select
from headrace.algorithms.objective import finish_metrics, policy_objective
from headrace.algorithms.sums import Sums
from headrace.algorithms.value import value_objective
from headrace.blocks.algorithms import Algorithm

AGGREGATIONS = [
    {"kind": "token-mean"},
    {"kind": "token-sum"},
    {"kind": "seq-mean-token-sum"},
    {"kind": "seq-mean-token-mean"},
    {"kind": "seq-mean-token-sum-norm", "constant": 7.0},
]
LOSSES = [
    {"kind": "ppo_clip", "dual_clip": 1.5},
    {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.08},
    {"kind": "gmpo", "clip_low": 0.1, "clip_high": 0.2},
    {"kind": "cispo"},
    {"kind": "sapo"},
    {"kind": "clip_cov", "fraction": 0.1, "covariance_low": 0.0},
    {"kind": "kl_cov", "fraction": 0.1},
    {"kind": "reinforce"},
    {"kind": "dppo", "divergence": "tv", "low": 0.02, "high": 0.02},
    {"kind": "dppo", "divergence": "kl", "low": 0.01, "high": 0.01},
    {"kind": "dro", "beta": 0.3},
]
BOUNDS = [{"kind": "truncate", "high": 1.1}, {"kind": "mask", "low": 0.8, "high": 1.2}]
CORRECTIONS = [None] + [
    {"importance": {"level": level, "bound": bound, "normalise": normalise}}
    for level, bound, normalise in itertools.product(("token", "sequence", "geometric"), BOUNDS, (False, True))
]


@cache
def of_loss(index: int) -> list[Algorithm]:
    """Every aggregation × correction of a loss, with KL and entropy beside it."""
    loss = LOSSES[index]
    aggregations = [None] if loss["kind"] == "gmpo" else AGGREGATIONS
    beside = {"kl": {"kind": "loss", "estimator": "k3", "coefficient": 0.1}, "entropy_coefficient": 0.01}
    return [
        Algorithm.model_validate({"loss": loss, "aggregation": aggregation, "correction": correction, **beside})
        for aggregation, correction in itertools.product(aggregations, CORRECTIONS)
    ]


@st.composite
def partitions(draw):
    """Lengths with empty samples, a mask, and the samples of each micro-batch of each rank, in any order."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    order = draw(st.permutations(range(len(lengths))))
    ranks = draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, len(lengths)), min_size=3 * ranks - 1, max_size=3 * ranks - 1)))
    parts = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(lengths)], strict=True)]
    return lengths, [parts[3 * r : 3 * r + 3] for r in range(ranks)], draw(st.integers(0, 2**16))


def make_batch(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    batch = Jagged.from_lengths(lengths, torch.rand(tokens, generator=generator) < 0.8)
    new = -2 * torch.rand(tokens, generator=generator, dtype=torch.float64)

    def near(scale):
        return (new + scale * torch.randn(tokens, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)

    columns = {"new": new, "old": near(0.3), "behaviour": near(0.3), "reference": near(0.3)}
    columns["advantages"] = torch.randn(tokens, generator=generator, dtype=torch.float64)
    columns["entropy"] = torch.rand(tokens, generator=generator, dtype=torch.float64)
    return batch, columns


def whole_batch_extras(config, batch, columns):
    """What is decided once for the global batch: selected tokens and denominators."""
    if config.loss.kind in ("clip_cov", "kl_cov"):
        columns["selected"] = select(
            config.loss, logprobs=columns["old"], advantages=columns["advantages"], batch=batch
        )
    weights = None
    if config.correction is not None and config.correction.importance.normalise:
        old, behaviour = columns["old"], columns["behaviour"]
        weights = importance_weights(config.correction.importance, old=old, behaviour=behaviour, batch=batch)
    return weights


def evaluate(config, batch, columns, denominators):
    """(loss, gradient by new, gradient by entropy, sums) of one micro-batch."""
    new, entropy = columns["new"].clone().requires_grad_(), columns["entropy"].clone().requires_grad_()
    given = {**columns, "new": new, "entropy": entropy}
    objective = policy_objective(config, batch=batch, denominators=denominators, **given)
    objective.loss.backward()
    assert new.grad is not None and entropy.grad is not None
    return objective.loss.detach(), new.grad, entropy.grad, objective.sums


def pad(batch: Jagged, columns):
    """The same samples as [S, L] with NaN in the padding."""
    lengths = batch.offsets.diff()
    width = int(lengths.max()) + 2
    inside = torch.arange(width)[None] < lengths[:, None]
    mask = torch.zeros_like(inside)
    mask[inside] = batch.mask
    padded = {}
    for name, x in columns.items():
        wide = torch.full(inside.shape, torch.nan, dtype=x.dtype) if x.is_floating_point() else torch.zeros_like(inside)
        wide[inside] = x
        padded[name] = wide.reshape(-1)
    return Jagged.from_padded(mask), padded, inside.reshape(-1)


@pytest.mark.parametrize("loss", range(len(LOSSES)))
@settings(max_examples=40, deadline=None)
@given(partition=partitions(), data=st.data())
def test_any_partition_is_the_whole(loss, partition, data):
    check_partition(data.draw(st.sampled_from(of_loss(loss))), *partition)


@pytest.mark.parametrize("loss", range(len(LOSSES)))
def test_every_aggregation_and_correction(loss):
    """All of them with this loss, on one fixed partition over two ranks with empty micro-batches."""
    for index, config in enumerate(of_loss(loss)):
        check_partition(config, [4, 0, 6, 3, 5, 1], [[[2, 0], [], [5]], [[4], [1, 3], []]], seed=index)


def check_partition(config, lengths, ranks, seed):
    batch, columns = make_batch(lengths, seed)
    weights = whole_batch_extras(config, batch, columns)
    whole = Denominators.of(batch, weights=weights)
    loss, by_new, by_entropy, sums = evaluate(config, batch, columns, whole)

    reduced = torch.zeros(6, dtype=torch.float64)
    for micro_batches in ranks:
        own = Denominators()
        for samples in micro_batches:
            tokens, part = batch.select(torch.tensor(samples, dtype=torch.int64))
            own = own + Denominators.of(part, weights=None if weights is None else weights[tokens])
        reduced += own.to_tensor()
    denominators = Denominators.from_tensor(reduced)

    total, grads, rank_sums = (
        torch.zeros((), dtype=torch.float64),
        torch.zeros(2, sum(lengths), dtype=torch.float64),
        [],
    )
    for micro_batches in ranks:
        pieces = []
        for samples in micro_batches:
            tokens, part = batch.select(torch.tensor(samples, dtype=torch.int64))
            share = evaluate(config, part, {name: x[tokens] for name, x in columns.items()}, denominators)
            total += share[0]
            grads[:, tokens] = torch.stack(share[1:3])
            pieces.append(share[3])
        rank_sums.append(Sums.merged(pieces))
    added, peaks = zip(*(s.to_tensors() for s in rank_sums), strict=True)
    merged = rank_sums[0].from_tensors(torch.stack(added).sum(0), torch.stack(peaks).amax(0))
    compare((total, *grads), (loss, by_new, by_entropy), merged, sums)

    padded, wide, inside = pad(batch, columns)
    p_loss, p_new, p_entropy, p_sums = evaluate(config, padded, wide, denominators)
    assert not p_new[~inside].any()
    compare((p_loss, p_new[inside], p_entropy[inside]), (loss, by_new, by_entropy), p_sums, sums)


def compare(values, wanted, sums, wanted_sums):
    for value, want in zip(values, wanted, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-12)
        assert value.isfinite().all()
    metrics, theirs = finish_metrics(sums), finish_metrics(wanted_sums)
    assert metrics.keys() == theirs.keys()
    assert metrics == pytest.approx(theirs, rel=1e-9, abs=1e-10)


@settings(max_examples=20, deadline=None)
@given(partition=partitions())
def test_value_loss(partition):
    lengths, ranks, seed = partition
    config = Algorithm.model_validate({"preset": "ppo", "aggregation": {"kind": "seq-mean-token-mean"}})
    batch, columns = make_batch(lengths, seed)
    denominators = Denominators.of(batch)

    def share(samples):
        tokens, part = batch.select(torch.tensor(samples, dtype=torch.int64))
        new = columns["new"][tokens].requires_grad_()
        old, returns = columns["old"][tokens], columns["advantages"][tokens]
        objective = value_objective(config, new=new, old=old, returns=returns, batch=part, denominators=denominators)
        return objective.loss.detach(), objective.sums

    loss, sums = share(range(len(lengths)))
    parts = [share(samples) for micro_batches in ranks for samples in micro_batches]
    compare((sum(p[0] for p in parts),), (loss,), Sums.merged(p[1] for p in parts), sums)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=12),
    st.sampled_from(["sigmoid", "ipo"]),
    st.integers(0, 2**16),
    st.integers(1, 3),
)
def test_dpo(lengths, form, seed, ranks):
    config = Algorithm.model_validate({"preset": "dpo", "loss": {"form": form}})
    batch, columns = make_batch(lengths, seed)
    pairs = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))[: len(lengths) // 2 * 2]
    pairs = pairs.reshape(-1, 2)
    denominators = Denominators.of(batch, pairs=pairs)

    def share(own):
        tokens, part = batch.select(own.reshape(-1))
        new = columns["new"][tokens].requires_grad_()
        objective = policy_objective(
            config,
            new=new,
            reference=columns["reference"][tokens],
            batch=part,
            pairs=torch.arange(own.numel()).reshape(-1, 2),
            denominators=denominators,
        )
        objective.loss.backward()
        grad = torch.zeros(sum(lengths), dtype=torch.float64)
        assert new.grad is not None
        grad[tokens] = new.grad
        return objective.loss.detach(), grad, objective.sums

    loss, grad, sums = share(pairs)
    parts = [share(pairs[r::ranks]) for r in range(ranks)]
    compare((sum(p[0] for p in parts), sum(p[1] for p in parts)), (loss, grad), Sums.merged(p[2] for p in parts), sums)
