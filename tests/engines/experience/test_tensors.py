"""Columns become tensors without copies, and stages' tables join by uid."""

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.experience import schema
from headrace.engines.experience.store import Store
from headrace.engines.experience.tensors import ColumnError, column_to_jagged, join_columns, to_tensordict

ANSWERS = [[5, 6, 7], [8], [], [9, 9]]


def generate() -> pa.Table:
    rows = range(len(ANSWERS))
    return pa.table(
        {
            "uid": [f"{i}-0" for i in rows],
            "group_id": list(rows),
            "prompt_id": ["p"] * 4,
            "sample": [0] * 4,
            "prompt_ids": [[1, 2], [3], [4], [1]],
            "response_ids": ANSWERS,
            "response_mask": [[1] * len(a) for a in ANSWERS],
            "behaviour_logprobs": [[-0.5 * t for t in a] for a in ANSWERS],
            "weight_spans": [[{"version": 1, "tokens": len(a)}] for a in ANSWERS],
            "finish_reason": ["stop"] * 4,
            "turns": [1] * 4,
            "seed": [2**63 + i for i in rows],
            "prompt_text": ["?"] * 4,
            "text": ["!"] * 4,
            "ground_truth": ["1"] * 4,
        },
        schema=schema.GENERATE,
    )


def score(order: list[int]) -> pa.Table:
    return pa.table(
        {
            "uid": [f"{i}-0" for i in order],
            "reward": [None if i == 2 else float(i) for i in order],
            "reward_parts": [[("a", 1.0)]] * len(order),
            "score_error": [None] * len(order),
        },
        schema=schema.SCORE,
    )


def old(answers: list[list[int]] = ANSWERS) -> pa.Table:
    columns = {"uid": [f"{i}-0" for i in range(4)], "old_logprobs": [[-0.25 * t for t in a] for a in answers]}
    return pa.table(columns, schema=schema.OLD_LOGPROB)


def test_values_alias_the_memory_map(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    table = store.read_table(store.write_table("a.arrow", generate()))
    for name, dtype in (
        ("response_ids", torch.int32),
        ("response_mask", torch.uint8),
        ("behaviour_logprobs", torch.float32),
    ):
        values, offsets = column_to_jagged(table, name)
        assert values.data_ptr() == table.column(name).chunk(0).values.buffers()[1].address
        assert values.dtype == dtype
        assert offsets.dtype == torch.int64
        assert offsets.tolist() == [0, 3, 4, 4, 6]
    assert column_to_jagged(table, "response_ids")[0].tolist() == [5, 6, 7, 8, 9, 9]


def test_a_slice_is_a_view_of_its_rows() -> None:
    table = generate()
    values, offsets = column_to_jagged(table.slice(1, 3), "response_ids")
    assert values.tolist() == [8, 9, 9]
    assert offsets.tolist() == [0, 1, 1, 3]
    whole = table.column("response_ids").chunk(0).values.buffers()[1].address
    assert values.data_ptr() == whole + 3 * 4


def test_tensordict_shares_offsets_and_memory(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    tables = [store.read_table(store.write_table("a.arrow", t)) for t in (generate(), score([0, 1, 2, 3]), old())]
    out = to_tensordict(*tables)
    assert out.batch_size == torch.Size([4])
    ratio = torch.exp(out["old_logprobs"] - out["behaviour_logprobs"])  # needs one shared ragged dimension
    assert torch.allclose(ratio.values(), torch.exp(0.25 * torch.tensor([5.0, 6, 7, 8, 9, 9])))
    assert out["old_logprobs"].offsets() is out["response_ids"].offsets()
    assert (
        out["response_ids"].values().data_ptr() == tables[0].column("response_ids").chunk(0).values.buffers()[1].address
    )
    assert out["seed"].data_ptr() == tables[0].column("seed").chunk(0).buffers()[1].address
    assert out["seed"].dtype == torch.uint64
    assert out["prompt_ids"].offsets().tolist() == [0, 2, 3, 4, 5]
    assert torch.isnan(out["reward"]).tolist() == [False, False, True, False]
    assert not {"text", "weight_spans", "reward_parts"} & set(out.keys())


def test_booleans_are_unpacked_and_empty_tables_work() -> None:
    columns = {"uid": ["a", "b", "c"], "advantages": [[1.0], [], [2.0]], "accepted": [True, False, True]}
    table = pa.table({**columns, "drop_reason": [None, "failed", None]}, schema=schema.ADVANTAGE)
    assert to_tensordict(table)["accepted"].tolist() == [True, False, True]
    empty = to_tensordict(table.slice(0, 0))
    assert empty.batch_size == torch.Size([0])
    assert empty["advantages"].values().shape == (0,)


def test_join_follows_the_first_table() -> None:
    joined = join_columns(generate(), score([3, 1, 0, 2]), old())
    assert joined.column("uid").to_pylist() == ["0-0", "1-0", "2-0", "3-0"]
    assert joined.column("reward").to_pylist() == [0.0, 1.0, None, 3.0]
    assert joined.schema.field("reward").metadata == schema.SCORE.field("reward").metadata


def test_join_in_order_copies_nothing() -> None:
    first, second = generate(), old()
    joined = join_columns(first, second)
    for table, name in ((first, "response_ids"), (second, "old_logprobs")):
        assert (
            joined.column(name).chunk(0).values.buffers()[1].address
            == table.column(name).chunk(0).values.buffers()[1].address
        )


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (score([0, 1, 3]), "table 2 misses 1 samples, the first is 2-0"),
        (score([0, 1, 2, 3, 7]), "table 2 has, unknown to the first table, 1 samples, the first is 7-0"),
        (score([0, 1, 2, 2, 3]), "table 2 has 1 samples more than once, the first is 2-0"),
        (generate(), "column group_id is in table 2 and in one before it"),
        (pa.table({"x": [1]}), "table 2 has no uid column"),
    ],
)
def test_rows_that_do_not_fit_are_refused(other: pa.Table, why: str) -> None:
    with pytest.raises(ColumnError, match=why):
        join_columns(generate(), other)


def test_columns_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ColumnError, match="column text is string"):
        column_to_jagged(generate(), "text")
    with pytest.raises(ColumnError, match="there is no column rewards; there are uid"):
        column_to_jagged(generate(), "rewards")
    with pytest.raises(ColumnError, match="column x has nulls"):
        column_to_jagged(pa.table({"x": pa.array([[1, None]])}), "x")
    with pytest.raises(ColumnError, match="column n has 1 nulls"):
        to_tensordict(pa.table({"n": pa.array([1, None])}))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_jagged_equals_python_lists(rows: list[list[int]], start: int, count: int) -> None:
    column = pa.array(rows, pa.list_(pa.int32()))
    table = pa.table({"x": pa.chunked_array([column, column])}).slice(start, count)
    values, offsets = column_to_jagged(table, "x")
    split = [values[a:b].tolist() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    assert split == (rows + rows)[start : start + count]
