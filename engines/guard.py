"""Runs one command and takes every descendant down with it. Standard library only: run by path, in any interpreter.

``python guard.py FD GRACE -- command …`` starts the command and leaves when it ends, when FD (the read end of a pipe
whose write end the owner holds) closes, or on SIGTERM / SIGINT. Before it leaves it ends all descendants: SIGTERM, then
SIGKILL after GRACE seconds. As a child subreaper (Linux) it also finds processes that changed session or lost their
parent, so a torchrun gang or an inference server leaves nothing behind even when its owner was killed with SIGKILL.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36


def descendants(root: int) -> list[int]:
    """Process ids below ``root``, from /proc; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat") as f:
                    state, parent = f.read().rsplit(")", 1)[1].split()[:2]
                    if state != "Z":
                        children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap_orphans(child: int) -> None:
    """Collects what ended after it lost its parent; ``child`` is left to its owner, ``subprocess``.

    Left alone an orphan would stay a zombie for as long as the guard runs, and whoever asks whether that process is
    still there would be told yes.
    """
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == child:
                break
            os.waitpid(ended.si_pid, 0)


def end_descendants(child: int, grace: float) -> None:
    """Ends every descendant of this process and the group of ``child``."""
    deadline = time.monotonic() + grace
    number = signal.SIGTERM
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        pids = descendants(os.getpid())
        if not pids:
            break
        _signal_all(pids, number)
        number = signal.SIGKILL if time.monotonic() > deadline else 0
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def main() -> int:
    owner, grace, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[4:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: stop.append(n))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    # A shell that starts jobs with & leaves SIGINT ignored, and children inherit that; the worker needs it.
    os.set_inheritable(owner, False)
    child = subprocess.Popen(
        command,
        close_fds=False,  # what the owner passed goes on to the command; nothing else is inheritable
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while child.poll() is None and not stop:
        readable, _, _ = select.select([owner, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            reap_orphans(child.pid)
        if owner in readable and not os.read(owner, 1):
            break
    code = child.poll()
    end_descendants(child.pid, grace)
    if code is None:
        return 0
    if code < 0:  # die of the same signal, so that the owner sees why
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
