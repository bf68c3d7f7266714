"""What two back ends' log-probabilities of the same tokens are compared by."""

import math

import pytest
import torch

from headrace.algorithms import parity
from headrace.algorithms.batch import Jagged
from headrace.algorithms.diagnostics import mismatch_sums
from headrace.algorithms.sums import finish_metrics
from headrace.blocks.algorithms import Algorithm

LENGTHS = [5, 0, 3, 9, 1]


def given(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Jagged]:
    """(old, behaviour, batch); one token is not the policy's, and what lies there is NaN."""
    draw = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    behaviour = -3 * torch.rand(total, generator=draw)
    old = behaviour + 0.2 * torch.randn(total, generator=draw)
    mask = torch.ones(total, dtype=torch.bool)
    mask[2] = False
    old[2] = math.nan
    return old, behaviour, Jagged.from_lengths(LENGTHS, mask)


def test_it_has_the_names_of_an_iteration_and_two_more():
    old, behaviour, batch = given()
    found = parity.compare(Algorithm.model_validate({}).loss, old=old, behaviour=behaviour, batch=batch)
    iteration = finish_metrics(mismatch_sums(old=old, behaviour=behaviour, batch=batch))
    assert iteration.items() <= found.items()
    assert found.keys() - iteration.keys() == {"mismatch/clip_fraction", "mismatch/p999_abs_log_ratio"}
    d = (old - behaviour)[batch.mask]
    outside = (d.exp() < 0.8) | (d.exp() > 1.2)
    assert found["mismatch/clip_fraction"] == pytest.approx(outside.double().mean().item())
    assert found["mismatch/p999_abs_log_ratio"] == pytest.approx(d.abs().max().item())


def test_the_tail_is_not_the_maximum_of_many_tokens():
    behaviour = torch.zeros(10_000)
    old = torch.linspace(0, 1, 10_000)
    batch = Jagged.from_lengths([10_000])
    found = parity.compare(Algorithm.model_validate({}).loss, old=old, behaviour=behaviour, batch=batch)
    assert found["mismatch/p999_abs_log_ratio"] == pytest.approx(0.999, abs=2e-4)


@pytest.mark.parametrize("loss", [{"kind": "reinforce"}, {"kind": "sapo"}])
def test_a_loss_without_bounds_clips_nothing(loss):
    old, behaviour, batch = given()
    config = Algorithm.model_validate({"loss": loss}).loss
    assert "mismatch/clip_fraction" not in parity.compare(config, old=old, behaviour=behaviour, batch=batch)


def test_labels_split_the_same_tokens():
    old, behaviour, batch = given()
    rows = parity.by_label(parity.positions(batch), old=old, behaviour=behaviour, batch=batch)
    assert {label: row["tokens"] for label, row in rows.items()} == {0: 4, 1: 3, 2: 4, 3: 5, 4: 1}
    whole = parity.compare(Algorithm.model_validate({}).loss, old=old, behaviour=behaviour, batch=batch)
    mean = sum(row["kl_k3"] * row["tokens"] for row in rows.values()) / 17
    assert mean == pytest.approx(whole["mismatch/kl_k3"], rel=1e-5)
    assert max(row["max_abs"] for row in rows.values()) == pytest.approx(whole["mismatch/max_abs_log_ratio"])
    assert sum(parity.histogram(old=old, behaviour=behaviour, batch=batch)) == 17


def test_the_histogram_counts_between_its_edges():
    old = torch.tensor([0.0, 5e-4, 0.2, 9.0])
    found = parity.histogram(old=old, behaviour=torch.zeros(4), batch=Jagged.from_lengths([4]))
    assert found == [1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1] and len(found) == len(parity.EDGES) + 1


def test_forks_are_where_samples_of_a_group_part():
    ids = torch.tensor([7, 8, 9, 7, 5, 7, 5, 1, 7, 8])
    batch = Jagged.from_lengths([3, 2, 3, 2])
    left, right = parity.fork_gaps(torch.tensor([4, 4, 4, 6]), ids, batch)
    # (7 8 …, 7 5 …) once, though two pairs of samples part there; 7 5 is the beginning of 7 5 1: no fork
    assert (left.tolist(), right.tolist()) == ([1], [4])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_precision_of_the_head_shows_in_the_log_probabilities(temperature):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 64, generator=draw, dtype=torch.bfloat16)
    head = torch.randn(300, 64, generator=draw, dtype=torch.bfloat16) * 0.5
    shares = {}
    for dtype in (torch.bfloat16, torch.float32):
        logits = (hidden.to(dtype) @ head.to(dtype).t()).float() / temperature
        logprobs = logits.log_softmax(-1).flatten()
        places = torch.arange(40) * 300
        shares[dtype] = parity.bfloat16_share(logprobs, (places + 3, places + 77), temperature)
    # logits below 1 are finer, as some of these are
    assert shares[torch.bfloat16] > 0.75 and shares[torch.float32] < 0.2, shares
    nothing = torch.zeros(0, dtype=torch.int64)
    assert math.isnan(parity.bfloat16_share(torch.zeros(3), (nothing, nothing), temperature))
