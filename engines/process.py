"""Child processes that never outlive their owner, with their log."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")


def alive(pid: int) -> bool:
    """Whether process ``pid`` of this machine runs. One that ended and was not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self").exists():
            return False
    try:  # a system without /proc
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, and running
        pass
    return True


class Child:
    """A command under a guard process (``engines/guard.py``): it and all its descendants end with this process.

    Args:
        argv: the command.
        log: file that stdout and stderr are appended to.
        env: variables on top of this process's environment.
        grace_s: seconds between SIGTERM and SIGKILL when it is stopped.
        pass_fds: file descriptors that the command gets under their numbers.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        grace_s: float = 5.0,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.log = log
        self.argv = list(argv)
        self._grace = grace_s
        log.parent.mkdir(parents=True, exist_ok=True)
        read, self._lifeline = os.pipe()
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(read), str(grace_s), "--", *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **(env or {})},
                pass_fds=[read, *pass_fds],
                start_new_session=True,
            )
        os.close(read)

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs; -N when signal N ended it."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Waits until it ended; None when it still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> int | None:
        """Ends it and its descendants; returns when none is left."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self.wait(self._grace + 10) is None:
            self._process.kill()
            return self.wait(5)
        return self.poll()

    def tail(self, lines: int = 60) -> str:
        """The last lines of its log; the default has room for the last 50 of a program of its own, and what it says."""
        try:
            with self.log.open("rb") as f:
                f.seek(max(0, f.seek(0, os.SEEK_END) - 64 * 1024))
                return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"


def describe_exit(code: int) -> str:
    """``exit status 1``, ``SIGKILL``: for messages."""
    return f"exit status {code}" if code >= 0 else signal.Signals(-code).name
