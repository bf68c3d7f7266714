"""Gangs for the model engine's tests: one of one rank in this process, others as real processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.model.gang import Gang, join

REPOSITORY = Path(__file__).parents[3]
RunGang = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def gang() -> Gang:
    """A gang of one."""
    return join("cpu", 1, 60)


@pytest.fixture
def run_gang(tmp_path: Path) -> RunGang:
    """``run_gang(actions, ranks=1, **spec) -> results``: real processes that run ``gang_program.py``."""
    count = 0

    def run(actions: list[tuple[str, Any]], ranks: int = 1, **spec: Any) -> list[Any]:
        nonlocal count
        count += 1
        job, out = tmp_path / f"job-{count}.json", tmp_path / f"out-{count}.json"
        job.write_text(json.dumps({"spec": spec, "actions": actions}))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *torchrun, str(Path(__file__).with_name("gang_program.py")), str(job), str(out)]
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(out.read_text())

    return run
