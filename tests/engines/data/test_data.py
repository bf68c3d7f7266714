"""Splits are disjoint, draws are deterministic, and bad data says which line is bad."""

import gzip
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from headrace.blocks.data import DataSpec, Jsonl, Plugin, ReasoningGym, Sums
from headrace.engines.data import DataError, draw, first, load_splits, prompts_table
from headrace.engines.data.base import Listed, Problem, permutation
from headrace.engines.data.packing import pack, unpack
from headrace.engines.experience.schema import PROMPTS


def _listed(n: int) -> Listed:
    return Listed("n", [Problem(str(i), [{"role": "user", "content": str(i)}], i) for i in range(n)])


def test_sums_hold_out_both_orders():
    train, held_out = load_splits(Sums())
    assert len(held_out) == 256 and len(train) in (1600 - 256, 1600 - 257)
    pairs = [{tuple(sorted(p.prompt_id[5:].split("+"))) for _, p in first(half)} for half in (train, held_out)]
    assert not pairs[0] & pairs[1]
    problem = train.problem(0)
    a, b = map(int, problem.prompt_id[5:].split("+"))
    assert 10 <= a <= 49 and 10 <= b <= 49 and problem.ground_truth == a + b
    assert problem.messages == [{"role": "user", "content": f"What is {a} + {b}? Answer with only the number."}]


def test_sums_depend_on_their_seed_alone():
    assert load_splits(Sums()).held_out.problem(0).prompt_id == "sums/25+41"  # the same on every machine and version
    assert first(load_splits(Sums(seed=1)).held_out) != first(load_splits(Sums()).held_out)


@given(size=st.integers(1, 40), cursor=st.integers(0, 200), count=st.integers(0, 90), seed=st.integers(0, 2**63))
def test_draws_are_shuffled_epochs_that_any_cursor_can_enter(size, cursor, count, seed):
    data = _listed(size)
    drawn, after = draw(data, cursor, count, seed)
    assert after == cursor + count and [g for g, _ in drawn] == list(range(cursor, after))
    assert drawn == draw(data, 0, after, seed)[0][cursor:]
    epoch, _ = draw(data, size * 3, size, seed)
    assert sorted(p.ground_truth for _, p in epoch) == list(range(size))


def test_epochs_and_seeds_differ():
    orders = {tuple(permutation(100, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    with pytest.raises(DataError, match="empty"):
        draw(_listed(0), 0, 1, 0)


def test_prompts_table_has_the_schema():
    drawn, _ = draw(load_splits(Sums()).train, 7, 3, 5)
    table = prompts_table(drawn)
    assert table.schema.equals(PROMPTS, check_metadata=True) and table["group_id"].to_pylist() == [7, 8, 9]
    assert json.loads(table["messages"][0].as_py()) == drawn[0][1].messages
    assert json.loads(table["ground_truth"][0].as_py()) == drawn[0][1].ground_truth


def test_jsonl_reads_prompts_and_chats_and_leaves_doubles_out(tmp_path):
    path = tmp_path / "task.jsonl.gz"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two?"}]
    rows = [{"prompt": f"q{i}", "ground_truth": i} for i in range(8)]
    rows += [{"messages": chat, "ground_truth": {"answer": "2"}, "id": "chat", "extra": 1}, rows[0]]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    splits = load_splits(Jsonl(kind="jsonl", path=str(path), held_out=3))
    problems = [p for half in splits for _, p in first(half)]
    assert len(splits.held_out) == 3 and len(problems) == 9
    assert {p.prompt_id for p in problems} == {*(f"task:{i}" for i in range(1, 9)), "chat"}
    assert next(p for p in problems if p.prompt_id == "chat").messages == chat


def test_jsonl_with_a_file_held_out(tmp_path):
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text("".join(json.dumps({"prompt": f"q{i}", "ground_truth": i}) + "\n" for i in range(5)))
    test.write_text(json.dumps({"prompt": "q3", "ground_truth": 3}))
    splits = load_splits(Jsonl(kind="jsonl", path=train.as_uri(), held_out=str(test)))
    assert [p.messages[0]["content"] for _, p in first(splits.train)] == ["q0", "q1", "q2", "q4"]


def test_jsonl_names_every_bad_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(
        '{"prompt": "ok", "ground_truth": 1, "id": "x"}\n'
        "not json\n\n"
        '{"prompt": "no truth"}\n'
        '{"ground_truth": 1}\n'
        '{"prompt": "p", "ground_truth": null, "id": "x"}\n'
        '{"messages": [{"role": "assistant", "content": "a"}], "ground_truth": 1}\n'
    )
    with pytest.raises(DataError) as caught:
        load_splits(Jsonl(kind="jsonl", path=str(path), held_out=1))
    message = str(caught.value)
    assert "line 2: Invalid JSON" in message and "line 4: ground_truth: Field required" in message
    assert "line 5: needs either `prompt`" in message and "line 6: id 'x' is also that of line 1" in message
    assert "line 7: the last message is of role 'assistant'" in message


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/no/such.jsonl", "/no/such.jsonl: it does not exist"),
        ("nosuchprotocol://x/y.jsonl", "no URL that fsspec knows"),
        ("{folder}/plain.jsonl.gz", "not the compressed file that its name says"),
        ("{folder}/latin.jsonl", "not UTF-8"),
    ],
)
def test_jsonl_that_cannot_be_read(tmp_path, path, words):
    (tmp_path / "plain.jsonl.gz").write_text("{}")
    (tmp_path / "latin.jsonl").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=words):
        load_splits(Jsonl(kind="jsonl", path=path.format(folder=tmp_path), held_out=1))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "sums", "low": 5, "high": 4}, "above high"),
        ({"kind": "sums", "low": 0, "high": 9, "held_out": 99}, "only 100 sums"),
        ({"kind": "reasoning_gym", "task": "gcd", "config": {"seed": 1}}, "no effect"),
        ({"kind": "jsonl", "path": "a", "held_out": "b", "seed": 1}, "no effect"),
        ({"kind": "plugin", "name": "x", "option": 1}, "Extra inputs"),
        ({"kind": "csv"}, "sums"),
    ],
)
def test_useless_settings_are_refused(spec, words):
    with pytest.raises(ValueError, match=words):
        TypeAdapter(DataSpec).validate_python(spec)


def test_a_spec_survives_its_json(tmp_path):
    adapter = TypeAdapter(DataSpec)
    for spec in (Sums(), Jsonl(kind="jsonl", path="a", held_out="b"), ReasoningGym(kind="reasoning_gym", task="gcd")):
        assert adapter.validate_json(adapter.dump_json(spec)) == spec


def test_an_installed_package_offers_a_data_set(tmp_path, monkeypatch):
    (tmp_path / "mydata.py").write_text(
        "from headrace.engines.data import Problem, Splits\n"
        "from headrace.engines.data.base import Listed\n"
        "def letters(count):\n"
        "    made = [Problem(c, [{'role': 'user', 'content': c}], c) for c in 'abcdef'[:count]]\n"
        "    return Splits(Listed('letters', made[1:]), Listed('held', made[:1]))\n"
        "def wrong():\n"
        "    return []\n"
    )
    info = tmp_path / "mydata-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mydata\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace.datasets]\nletters = mydata:letters\nwrong = mydata:wrong\n")
    monkeypatch.syspath_prepend(tmp_path)
    splits = load_splits(Plugin(kind="plugin", name="letters", options={"count": 3}))
    assert [p.prompt_id for _, p in first(splits.train)] == ["b", "c"] and len(splits.held_out) == 1
    with pytest.raises(DataError, match="the train half is empty"):
        load_splits(Plugin(kind="plugin", name="letters", options={"count": 1}))
    with pytest.raises(DataError, match="does not take these options"):
        load_splits(Plugin(kind="plugin", name="letters", options={"n": 1}))
    with pytest.raises(DataError, match="returned list; it must return Splits"):
        load_splits(Plugin(kind="plugin", name="wrong"))
    with pytest.raises(DataError, match=r"no installed package offers the data set 'x' .*found: letters, wrong"):
        load_splits(Plugin(kind="plugin", name="x"))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.integers() | st.text(), inner)
            | st.sets(st.integers())
        ),
        max_leaves=10,
    )
)
def test_packing_gives_back_what_it_got(value):
    assert unpack(json.loads(json.dumps(pack(value)))) == value


def test_importing_needs_neither_torch_nor_reasoning_gym():
    code = "import sys, headrace.engines.data; print(sorted({'torch', 'reasoning_gym'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
