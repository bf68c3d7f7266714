"""Rows, micro-batches, ranks; the layout of a packed row and its masks."""

from os.path import commonprefix
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.model.attention import Blocks, Layout
from headrace.engines.model.packing import Row, make_rows, minibatches, plan
from headrace.engines.model.prefix import common_prefix, mask_of, pack
from tests.engines.model.experience import random_samples
from tests.engines.model.test_engine import plain, plain_logprobs

CPU = torch.device("cpu")
Lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(st.integers(1, 5), st.integers(1, 60), st.integers(0, 9))
def test_rows_hold_every_kept_sample_once_under_the_budget(n: int, budget: int, seed: int) -> None:
    samples = random_samples(groups=3, n=n, response=(0, 9), seed=seed)
    keep = torch.rand(len(samples), generator=torch.Generator().manual_seed(seed)) < 0.8
    rows = make_rows(samples, keep, budget)
    lengths = samples.offsets.diff()
    expected = [i for i in range(len(samples)) if keep[i] and lengths[i]]
    assert sorted(i for row in rows for i in row.samples) == expected
    for row in rows:
        assert row.tokens <= budget or len(row.samples) == 1
        assert len({int(samples.groups[i]) for i in row.samples}) == 1
        prompt = int(samples.prompt_offsets.diff()[row.samples[0]])
        assert row.tokens == prompt + sum(int(lengths[i]) - 1 for i in row.samples)


@given(Lengths, st.integers(1, 4), st.integers(1, 80))
def test_every_rank_gets_as_many_micro_batches(sizes: list[int], ranks: int, budget: int) -> None:
    rows = [Row((i,), size) for i, size in enumerate(sizes)]
    shares = plan(rows, ranks, budget)
    assert len(shares) == ranks and len({len(share) for share in shares}) == 1
    assert sorted(row.samples[0] for share in shares for batch in share for row in batch) == list(range(len(rows)))
    for batch in (batch for share in shares for batch in share):
        assert sum(row.tokens for row in batch) <= budget or len(batch) == 1
    loads = [sum(row.tokens for batch in share for row in batch) for share in shares]
    assert max(loads) - min(loads) <= max(sizes), "no rank has more than one row too many"


def test_minibatches_split_whole_groups() -> None:
    samples = random_samples(groups=5, n=2)
    keep = samples.groups != samples.groups[2]
    parts = minibatches(samples, keep, 3)
    assert [int(part.sum()) for part in parts] == [4, 2, 2]
    assert torch.equal(torch.stack(parts).sum(0), keep.long())
    assert len(minibatches(samples, samples.groups == samples.groups[0], 3)) == 1
    assert minibatches(samples, torch.zeros(10, dtype=torch.bool), 3) == []


def test_common_prefix_leaves_every_prompt_a_token() -> None:
    prompts = [torch.tensor(x) for x in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 5])]
    assert common_prefix(prompts) == 2
    assert common_prefix(prompts[:2]) == 2
    assert common_prefix(prompts[:1]) == 0 == common_prefix([])
    assert common_prefix([torch.tensor([7]), torch.tensor([7])]) == 0


def test_one_prompt_in_two_rows_is_shared_between_them() -> None:
    samples = random_samples(groups=1, n=4, prompt=(9, 9), response=(4, 4))
    (batch,) = plan(make_rows(samples, torch.ones(4, dtype=torch.bool), 18), 1, 100)[0]
    assert len(batch) == 2
    assert pack(samples, batch, CPU).input_ids.shape[1] == 12 + 1 + 4 * 3


@pytest.mark.parametrize("common", [0, 3])
@pytest.mark.parametrize("said", [0, 2, 99])
def test_the_flex_mask_gives_the_same_logprobs_in_a_plain_model(tiny_model: Path, common: int, said: int) -> None:
    samples = random_samples(prompt=(2, 6), common=common)
    _say_the_same(samples, said)
    rows = tuple(make_rows(samples, torch.ones(len(samples), dtype=torch.bool), 20))
    packed = pack(samples, rows, CPU)
    assert packed.blocks is not None
    layout = _layout(samples, rows, common)
    length = packed.input_ids.shape[1]
    q, kv = torch.arange(length)[:, None], torch.arange(length)[None]
    visible = mask_of(layout, length, CPU)(torch.tensor(0), torch.tensor(0), q, kv)
    assert packed.blocks.shape == Blocks.of(layout).shape
    bias = torch.zeros(length, length).masked_fill(~visible, -torch.inf)
    model = plain(tiny_model)
    with torch.no_grad():
        out = model(input_ids=packed.input_ids, position_ids=packed.position_ids, attention_mask=bias[None, None])
        logprobs = out.logits[0][packed.source].log_softmax(-1).gather(1, packed.targets[:, None]).squeeze(1)
        logprobs = logprobs[packed.expand]
        expected = plain_logprobs(model, samples)[packed.tokens]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


def _say_the_same(samples, tokens: int) -> None:
    """The first tokens of every response become those of the group's first one."""
    starts, groups = samples.offsets.tolist(), samples.groups.tolist()
    for i, group in enumerate(groups):
        first = groups.index(group)
        count = min(tokens, starts[i + 1] - starts[i], starts[first + 1] - starts[first])
        samples.response_ids[starts[i] : starts[i] + count] = samples.response_ids[starts[first] :][:count]


def _layout(samples, rows, shared: int) -> Layout:
    """The layout, derived from the documented order alone."""
    runs, place = [], shared
    for row in rows:
        answers = [samples.response_ids[samples.offsets[i] : samples.offsets[i + 1]].tolist() for i in row.samples]
        agreed = len(commonprefix(answers)) if len(answers) > 1 else 0  # noqa: RUF071, these are tokens
        said = min(agreed, min(map(len, answers)) - 1)
        size = int(samples.prompt_offsets.diff()[row.samples[0]]) - shared + said
        begin, place, responses = place, place + size, []
        for i in row.samples:
            count = int(samples.offsets.diff()[i]) - 1 - said
            responses.append((place, count))
            place += count
        runs.append((begin, size, responses))
    return Layout(shared, runs)
