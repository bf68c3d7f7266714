"""Children and grandchildren end with their owner, however it ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from headrace.engines.process import Child, alive, describe_exit

STUBBORN = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
        start_new_session=True,
    )
    print(os.getpid(), grandchild.pid, flush=True)
    time.sleep(600)
    """
)


def _pids(log: Path) -> list[int]:
    for _ in range(200):
        words = log.read_text().split() if log.exists() else []
        if len(words) == 2:
            return [int(w) for w in words]
        time.sleep(0.05)
    raise AssertionError("the child did not start")


def _gone(pids: list[int], within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_stop_ends_child_and_detached_grandchild(tmp_path):
    child = Child([sys.executable, "-c", STUBBORN], log=tmp_path / "log", grace_s=0.3)
    pids = _pids(tmp_path / "log")
    child.stop()
    assert _gone(pids, 1.0)


@pytest.mark.parametrize("victim", ["owner", "child"])
def test_kill_9_leaves_no_descendant(tmp_path, victim):
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from headrace.engines.process import Child\n"
            f"c = Child([sys.executable, '-c', {STUBBORN!r}], log=Path({str(tmp_path / 'log')!r}), grace_s=0.3)\n"
            "c.wait(600)",
        ]
    )
    try:
        pids = _pids(tmp_path / "log")
        os.kill(owner.pid if victim == "owner" else pids[0], signal.SIGKILL)
        assert _gone(pids)
    finally:
        owner.kill()
        owner.wait()


def test_exit_status_and_log_tail_are_the_childs(tmp_path):
    child = Child([sys.executable, "-c", "print('last words'); raise SystemExit(7)"], log=tmp_path / "log")
    assert child.wait(10) == 7 and "last words" in child.tail()
    killed = Child([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], log=tmp_path / "log2")
    code = killed.wait(10)
    assert code is not None and describe_exit(code) == "SIGKILL"


def test_a_process_that_ended_and_was_not_waited_for_is_not_alive():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{process.pid}").exists() and not alive(process.pid) and alive(os.getpid())
    process.wait()
    assert not alive(process.pid)


def test_an_orphan_that_is_killed_leaves_no_zombie_below_its_guard(tmp_path):
    # The middle process dies first: the guard inherits its child, as it does when a worker and its flow run are killed.
    child = Child(
        [sys.executable, "-c", "import subprocess, sys\n"
         f"subprocess.run([sys.executable, '-c', {STUBBORN!r}])\n"
         "import time; time.sleep(600)"],
        log=tmp_path / "log", grace_s=0.3,
    )  # fmt: skip
    try:
        middle, leaf = _pids(tmp_path / "log")
        os.kill(middle, signal.SIGKILL)
        os.kill(leaf, signal.SIGKILL)
        assert _gone([middle, leaf], 5.0) and child.poll() is None
    finally:
        child.stop()
