"""What people see is right, readable, and survives a crash of the writer."""

import os
import struct
import subprocess
import sys
import threading
from io import BytesIO
from pathlib import Path

import matplotlib.image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.engines.experience.schema import GENERATE, SCORE
from headrace.engines.experience.store import Store, StoreError
from headrace.engines.report import History, curves_png, samples_markdown, stage_table, tensorboard, write_tensorboard
from headrace.engines.report.curves import moving_mean, series
from headrace.engines.report.parity import ablation_table, parity_png, parity_table
from headrace.engines.report.samples import fenced, inline
from headrace.engines.report.stages import readable_bytes


def _row(step: int, **fields: float) -> dict[str, float]:
    row = {
        "step": float(step),
        "at": 1000.0 + step,
        "reward": 0.1 * step,
        "tokens": 100.0,
        "prompt_tokens": 300.0,
        "samples": 10.0,
        "truncated": 2.0,
        "response_length": 10.0,
        "tokens_per_second": 50.0,
        "seconds/generate": 2.0,
        "seconds/score": 0.1,
        "seconds/train": 4.0,
        "seconds/sync-weights": 0.5,
        "mismatch/kl_k3": 1e-3,
        "weight_bytes": 269_030_016.0,
        "policy_lag": 0.0,
        "overhead_seconds": 0.4,
        "iteration_seconds": 8.0,
    }
    return row | fields


def test_history_is_one_parquet_file_that_an_attempt_continues(tmp_path):
    store = Store(str(tmp_path))
    history = History(store)
    assert history.rows() == []
    history.add(_row(0))
    history.add({"step": 1.0, "reward": 0.5, "new/metric": 3.0})
    again = History(store)
    assert again.rows() == [_row(0), {"step": 1, "reward": 0.5, "new/metric": 3.0}]
    again.add(_row(2))
    again.add(_row(1))  # one step back
    assert [row["step"] for row in again.rows()] == [0, 1]
    table = pq.read_table(tmp_path / "history.parquet")
    assert table["step"].to_pylist() == [0, 1] and table.schema.field("step").type == pa.int64()
    assert [p.name for p in tmp_path.iterdir()] == ["history.parquet"]


def test_a_reader_never_sees_half_a_history(tmp_path):
    store, stop, seen = Store(str(tmp_path)), threading.Event(), [0]

    def read() -> None:
        while not stop.is_set():
            seen.append(len(History(store).rows()))

    reader = threading.Thread(target=read)
    reader.start()
    history = History(store)
    for step in range(60):
        history.add(_row(step))
    stop.set()
    reader.join(10)
    assert seen == sorted(seen)


def test_a_damaged_history_says_what_to_do(tmp_path):
    (tmp_path / "history.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(StoreError, match=r"history.parquet is damaged: .* Delete it"):
        History(Store(str(tmp_path))).rows()


def test_stage_table_tells_where_the_time_went():
    table = stage_table(_row(3), {"generate[0]": 1, "generate[1]": 3, "train[0]": 2})
    lines = {line["stage"]: line for line in table}
    assert list(lines) == ["generate", "score", "train", "sync-weights", "outside engines", "iteration"]
    assert lines["generate"] == {
        "stage": "generate", "seconds": 2.0, "share": "25 %", "attempts": 3, "tokens/s": "50", "bytes": "", "lag": "0",
    }  # fmt: skip
    assert lines["train"]["tokens/s"] == "100" and lines["train"]["attempts"] == 2
    assert lines["sync-weights"]["bytes"] == "269.0 MB" and lines["score"]["tokens/s"] == ""
    assert lines["outside engines"]["share"] == "5 %" and lines["iteration"]["seconds"] == 8.0
    assert len({tuple(line) for line in table}) == 1  # a table needs equal columns


def test_a_table_of_little_is_a_table():
    assert stage_table({"step": 0.0}, {}) == []
    assert stage_table({"step": 0.0, "seconds/train": 1.0}, {})[0]["share"] == ""
    assert [readable_bytes(n) for n in (0, 999, 1000, 5e15)] == ["0 B", "999 B", "1.0 kB", "5000.0 TB"]


def _tables(texts: list[str], rewards: list[float | None]) -> tuple[pa.Table, pa.Table]:
    rows = [
        {"uid": f"{i}-0", "group_id": i, "prompt_id": f"p{i}", "sample": 0, "prompt_ids": [1], "response_ids": [2, 3],
         "response_mask": [1, 1], "behaviour_logprobs": [-0.5, -0.5], "weight_spans": [], "finish_reason": "stop",
         "turns": 1, "seed": i, "prompt_text": "What?", "text": text, "ground_truth": '{"answer": "7"}'}
        for i, text in enumerate(texts)
    ]  # fmt: skip
    scores = [
        {"uid": f"{i}-0", "reward": reward, "reward_parts": {}, "score_error": None if reward is not None else "boom"}
        for i, reward in enumerate(rewards)
    ]
    return pa.Table.from_pylist(rows, schema=GENERATE), pa.Table.from_pylist(scores[::-1], schema=SCORE)


def test_samples_go_from_failed_to_best_and_cannot_break_out():
    evil = "```\n# heading <script>alert(1)</script> `````"
    text = samples_markdown(*_tables([evil, "b", "c", "d"], [1.0, None, 0.25, 0.0]), 4)
    heads = [line for line in text.splitlines() if line.startswith("### ")]
    assert heads == [
        "### not scored · sample 1-0", "### reward 0 · sample 3-0", "### reward 0.25 · sample 2-0",
        "### reward 1 · sample 0-0",
    ]  # fmt: skip
    assert f"``````text\n{evil}\n``````" in text and "Scoring failed:\n```text\nboom\n```" in text
    assert "`p0`: 2 tokens, finished by stop; right answer `7`" in text
    assert samples_markdown(*_tables(["a", "b", "c"], [0.0, 0.5, 1.0]), 2).count("### ") == 2
    assert samples_markdown(*_tables(["a"], [0.0]), 1).count("### ") == 1
    assert samples_markdown(*_tables([], []), 4) == ""


def test_long_texts_are_cut():
    assert fenced("x" * 2000).endswith("… (500 more characters)\n```")
    assert inline("a`b") == "`` a`b ``" and inline("") == "`  `" and inline("a\nb") == "`a b`"


@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_curves_are_a_picture_of_any_history(count):
    rows = [_row(step) for step in range(count)]
    if count > 2:
        rows[1] = {"step": 1.0}
        rows[2]["reward"] = float("nan")
    evaluations = {0: {"reward": 0.3, "samples": 256.0, "reward_std": 0.46}, count: {"samples": 1.0}}
    image = matplotlib.image.imread(BytesIO(curves_png(rows, evaluations, "Campaign")), format="png")
    assert image.shape[:2] == (806, 1560) and image.std() > 0.01


def test_curves_can_be_drawn_by_many_threads_at_once():
    pictures: list[bytes] = []
    threads = [threading.Thread(target=lambda: pictures.append(curves_png([_row(0)], {}))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(pictures) == 3 and len(set(pictures)) == 1


def test_means_and_series():
    assert moving_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert series([{"step": 0.0, "a": 1.0}, {"step": 1.0}, {"step": 2.0, "a": float("inf")}], "a") == ([0.0], [1.0])


def _scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(e.step, round(e.value, 4)) for e in events.Scalars(tag)]


def test_tensorboard_reads_what_several_attempts_wrote_without_doubles(tmp_path):
    for step in range(3):
        write_tensorboard(tmp_path / "tb", [_row(step)])
    write_tensorboard(tmp_path / "tb", [_row(1, reward=0.9), _row(2, reward=0.8), _row(3)])
    assert _scalars(tmp_path / "tb", "iteration/reward") == [(0, 0.0), (1, 0.9), (2, 0.8), (3, 0.3)]
    assert _scalars(tmp_path / "tb", "mismatch/kl_k3") == [(step, 0.001) for step in range(4)]
    assert [p.name for p in (tmp_path / "tb").iterdir()] == [tensorboard.NAME]


@pytest.mark.parametrize("kept", [1, 11, 13, 40])
def test_a_record_that_a_kill_left_half_written_is_cut_off(tmp_path, kept):
    write_tensorboard(tmp_path, [_row(0)])
    file = tmp_path / tensorboard.NAME
    whole = file.read_bytes()
    file.write_bytes(whole + (struct.pack("<QI", 500, 0) + b"x" * 60)[:kept])
    write_tensorboard(tmp_path, [_row(1)])
    assert file.read_bytes()[: len(whole)] == whole
    assert _scalars(tmp_path, "iteration/reward") == [(0, 0.0), (1, 0.1)]


def test_without_tensorboard_it_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    tensorboard._installed.cache_clear()
    write_tensorboard(tmp_path / "tb", [_row(0)])
    write_tensorboard(tmp_path / "tb", [_row(1)])
    tensorboard._installed.cache_clear()
    assert not (tmp_path / "tb").exists() and [r.message for r in caplog.records].count(caplog.records[0].message) == 1
    assert "pip install tensorboard" in caplog.records[0].message


def test_importing_needs_neither_torch_nor_matplotlib_nor_tensorboard():
    code = "import sys, headrace.engines.report; print({'torch', 'matplotlib', 'tensorboard'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert ran.stdout.strip() == "set()", ran.stderr


def _round(weights: str, kl: float, ok: bool) -> dict:
    rows = [{"tokens": 10.0, "kl_k3": kl, "mean_abs": kl, "max_abs": kl}]
    tables = {
        "positions": [{"from": 0, **rows[0]}, {"from": 4, **rows[0]}],
        "classes": [{"class": "digit", **rows[0]}],
        "histogram": [0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0],
    }
    metrics = {"mismatch/kl_k3": kl, "mismatch/mean": 1.5, "mismatch/max_abs_log_ratio": 2 * kl, "tokens": 10.0}
    return {"weights": weights, "engine": 0, "metrics": metrics, "tables": tables, "ok": ok}


def test_the_parity_gate_is_drawn_and_tabulated():
    bounds = {"mean_ratio": 0.03, "kl_k3": 0.015, "ess": 0.95}
    rounds = [_round("changed", 0.4, False), _round("own", 1e-3, True)]
    lines = {line["figure"]: line for line in parity_table(rounds, bounds)}
    assert lines["mean ratio old/behaviour"] == {
        "figure": "mean ratio old/behaviour",
        "bound": "1 ± 0.03",
        "changed weights": "1.5",
        "the campaign's weights": "1.5",
    }
    assert (
        lines["effective sample size"]["bound"] == "≥ 0.95" and lines["effective sample size"]["changed weights"] == ""
    )
    trials = [
        {"setting": "dtype", "now": "bfloat16", "tried": "float32", "note": "", "rounds": [_round("own", 1e-7, True)]},
        {"setting": "enforce_eager", "now": True, "tried": True, "note": "already so", "rounds": []},
    ]
    table = ablation_table(rounds, trials)
    assert [line["result"] for line in table] == ["beyond a bound", "within all bounds", "already so"]
    assert table[0]["KL, changed weights"] == "0.4" and table[2]["KL, changed weights"] == ""
    heights = []
    for tried in ([], trials):
        image = matplotlib.image.imread(BytesIO(parity_png(rounds, bounds, tried)))
        assert image.shape[1] > 1000 and image.std() > 0.05
        heights.append(image.shape[0])
    assert heights[1] > 1.5 * heights[0]
