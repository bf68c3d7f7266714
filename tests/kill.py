"""For child processes of tests: to be killed at every step that they do on a disk, one step after another."""

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

CHANGES = ("mkdir", "fsync", "link", "rename", "replace", "unlink", "rmdir")


def before_change(number: int) -> None:
    """SIGKILL to this process before its change of that number, from 0, of what lies on the disk."""
    counter = itertools.count()

    def deadly(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if next(counter) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args, **options)

        return call

    for name in CHANGES:
        setattr(os, name, deadly(getattr(os, name)))
