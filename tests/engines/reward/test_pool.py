"""Whatever a reward function does, only its own sample is lost, and no process stays."""

import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from headrace.blocks.reward import RewardPart, RewardSpec
from headrace.engines.guard import descendants
from headrace.engines.reward.errors import RewardError
from headrace.engines.reward.pool import RewardPool, Sample

SUMS = [Sample(f"The sum is {i}.", i if i % 2 else -1) for i in range(64)]


def _gone(pid: int, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.01)
    return False


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def test_as_fast_as_a_pool_that_cannot_be_killed():
    """The peer is the standard library's pool, on the same machine in turns: both suffer from what runs beside them."""
    spec = RewardSpec(function="last_number")
    spawn = multiprocessing.get_context("spawn")
    with RewardPool(spec) as pool, ProcessPoolExecutor(spec.workers, mp_context=spawn) as peer:
        pool.score(SUMS)
        list(peer.map(asdict, SUMS))
        rounds = [
            (_seconds(lambda: pool.score(SUMS)), _seconds(lambda: list(peer.map(asdict, SUMS)))) for _ in range(20)
        ]
    ours, theirs = (statistics.median(side) for side in zip(*rounds, strict=True))
    assert ours < 1.5 * theirs, (
        f"64 samples took {ours * 1e3:.1f} ms, the standard library's pool {theirs * 1e3:.1f} ms"
    )


def test_scores_in_order_and_leaves_no_process():
    before = set(descendants(os.getpid()))
    with RewardPool(RewardSpec(function="last_number")) as pool:
        pool.score(SUMS)
        scores = pool.score(SUMS)
        assert [s.reward for s in scores] == [float(i % 2) for i in range(64)]
        assert scores[1].parts == {"last_number": 1.0} and scores[1].error is None
        assert pool.score([]) == []
    assert set(descendants(os.getpid())) <= before
    with pytest.raises(RewardError, match="closed"):
        pool.score(SUMS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise", ["by_text: KeyError", "no such thing", "misbehaving.py:6"]),
        ("hang", ["no reward within 0.4 s", "killed"]),
        ("exit", ["died of this sample", "exit status 5", "my last words"]),
        ("sys.exit", ["died of this sample", "exit status 1", "leaving"]),
        ("segfault", ["died of this sample", "SIGSEGV"]),
        ("nan", ["what it returned is nan"]),
        ("inf", ["is inf"]),
        ("huge", ["1e+300", "finite"]),
        ("none", ["type NoneType"]),
        ("text", ["type str"]),
        ("list", ["type list"]),
        ("bad part", ["'b' of what it returned", "type str"]),
    ],
)
def test_one_bad_sample_is_lost_alone_and_says_why(misbehaving, text, words):
    with RewardPool(RewardSpec(function="by_text", deadline_s=0.4)) as pool:
        scores = pool.score([Sample("fine", None)] * 5 + [Sample(text, None)] + [Sample("fine", None)] * 5)
        assert [s.reward for s in scores] == [1.0] * 5 + [None] + [1.0] * 5
        assert scores[5].error is not None and all(word in scores[5].error for word in words), scores[5].error
        assert scores[5].parts == {}
        assert [s.reward for s in pool.score([Sample("fine", None)] * 3)] == [1.0] * 3


def test_bool_and_named_parts_are_rewards(misbehaving):
    parts = {"check": RewardPart(function="by_text", weight=2.0), "form": RewardPart(function="contains", weight=-0.5)}
    with RewardPool(RewardSpec(parts=parts)) as pool:
        true, named = pool.score([Sample("true", "u"), Sample("parts", "zzz")])
    assert true.reward == 2.0 - 0.5 and true.parts == {"check": 1.0, "form": 1.0}
    assert named.reward == 1.5 and named.parts == {"check/a": 0.25, "check/b": 0.5, "form": 0.0}


def test_functions_that_print_and_read_do_no_harm(misbehaving):
    with RewardPool(RewardSpec(function="by_text", workers=1)) as pool:
        assert [s.reward for s in pool.score([Sample("print", None)] * 3)] == [1.0] * 3
        folder = Path(pool._folder.name)
        assert sum(log.stat().st_size for log in folder.iterdir()) < 5_000_000
    assert not folder.exists()


def test_the_deadline_also_ends_what_the_function_started(misbehaving, tmp_path):
    note = tmp_path / "pid"
    with RewardPool(RewardSpec(function="by_text", deadline_s=1.0, workers=1)) as pool:
        assert pool.score([Sample("sleep with a child", str(note))])[0].reward is None
        assert _gone(int(note.read_text()))


def test_a_worker_killed_while_idle_costs_no_sample(misbehaving):
    with RewardPool(RewardSpec(function="by_text", workers=1)) as pool:
        for _ in range(3):
            pid = int(pool.score([Sample("pid", None)])[0].reward or 0)
            os.kill(pid, signal.SIGKILL)
            assert [s.reward for s in pool.score([Sample("fine", None)] * 2)] == [1.0, 1.0]


def test_many_threads_share_a_pool():
    results: dict[int, list[float | None]] = {}
    with RewardPool(RewardSpec(function="last_number")) as pool:
        threads = [
            threading.Thread(target=lambda i=i: results.__setitem__(i, [s.reward for s in pool.score(SUMS)]))
            for i in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert list(results.values()) == [[float(i % 2) for i in range(64)]] * 6


def test_closing_ends_what_hangs(misbehaving):
    pool = RewardPool(RewardSpec(function="by_text", deadline_s=600))
    outcome: list[object] = []

    def score() -> None:
        try:
            outcome.append([s.reward for s in pool.score([Sample("hang", None)] * 8)])
        except RewardError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=score)
    thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    pool.close()
    thread.join(10)
    assert time.monotonic() - start < 5 and not thread.is_alive()
    assert outcome == ["the reward pool was closed while it scored"]


def test_kill_9_of_the_owner_leaves_no_process(misbehaving, tmp_path):
    code = (
        "from headrace.blocks.reward import RewardSpec\n"
        "from headrace.engines.reward.pool import RewardPool, Sample\n"
        "pool = RewardPool(RewardSpec(function='by_text', deadline_s=600, workers=2))\n"
        f"pool.score([Sample('sleep with a child', {str(tmp_path / 'pid')!r})])\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code])
    try:
        end = time.monotonic() + 20
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < end and owner.poll() is None
            time.sleep(0.02)
        below = [*descendants(owner.pid), int((tmp_path / "pid").read_text())]
        assert len(below) >= 5  # two guards, two workers, the child of a reward function
        owner.kill()
        assert all(_gone(pid) for pid in below)
    finally:
        owner.kill()
        owner.wait()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"function": "last_numbr"}, "did you mean 'last_number'"),
        ({"function": "matches"}, "pattern"),
        ({"function": "exact", "options": {"ignorecase": True}}, "ignorecase"),
        ({"function": "no_messages"}, "messages"),
        ({"function": "broken"}, "not_there"),
    ],
)
def test_a_wrong_reward_is_refused_at_once(misbehaving, spec, words):
    before = set(descendants(os.getpid()))
    with pytest.raises(RewardError, match=words):
        RewardPool(RewardSpec(**spec))
    assert set(descendants(os.getpid())) <= before


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "no reward"),
        ({"function": "exact", "parts": {"a": {"function": "exact"}}}, "not both"),
        ({"options": {"x": 1}, "parts": {"a": {"function": "exact"}}}, "no effect"),
        ({"parts": {"a": {"function": "exact", "weight": 0}}}, "no use"),
        ({"function": "exact", "deadline_s": 0}, "greater than 0"),
    ],
)
def test_a_useless_setting_is_refused(spec, words):
    with pytest.raises(ValueError, match=words):
        RewardSpec.model_validate(spec)
