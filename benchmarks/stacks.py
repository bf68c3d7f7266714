"""A stack of a benchmark's own: server, workers and deployments in a home that is thrown away."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def stack(home: Path) -> Iterator[Callable[..., None]]:
    """Brings a stack up on a free port; gives ``headrace(*words)``, which runs one console command against it."""
    env = {**os.environ, "HEADRACE_HOME": str(home)}
    env.pop("PREFECT_API_URL", None)

    def headrace(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "headrace.deployments.cli", *words], env=env, check=True, timeout=3000)

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    try:
        headrace("up", "--port", str(port))
        yield headrace
    finally:
        headrace("down")
