"""A real stack (Prefect server, workers, deployments) in a home of its own, shared by the tests of this folder."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.deployments.api import ask
from headrace.engines.experience.store import Store
from headrace.engines.process import alive


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Stack:
    """What a test needs of the running stack."""

    guard_s = 480.0
    """Ends what hangs; no test is about it. On a slow machine a campaign takes minutes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {**os.environ, "HEADRACE_HOME": str(home), "COLUMNS": "200"}
        for name in [name for name in self.env if name.startswith(("PREFECT_API", "AWS_"))]:
            del self.env[name]

    @property
    def state(self) -> dict:
        return json.loads((self.home / "stack.json").read_text())

    def headrace(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "headrace.deployments.cli", *words]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=self.guard_s, check=False)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "headrace.deployments.cli", *words]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def end_of(self, started: subprocess.Popen[str]) -> str:
        """What it printed, when it has ended."""
        return started.communicate(timeout=self.guard_s)[0]

    def ask(self, verb: str, path: str, body: Any = None) -> Any:
        """The Prefect server's answer."""
        return ask(self.state["api"], verb, path, body)

    def store(self, campaign: str) -> Store:
        return Store(str(self.home / "store" / campaign))

    def progress(self, campaign: str) -> dict:
        path = self.home / "store" / campaign / "progress.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait_for(self, campaign: str, reached: Callable[[dict], bool]) -> dict:
        end = time.monotonic() + self.guard_s
        while time.monotonic() < end:
            if reached(p := self.progress(campaign)):
                return p
            time.sleep(0.002)  # some stages take a few milliseconds
        raise AssertionError(f"campaign {campaign} did not get there; it is at {self.progress(campaign)}")


@pytest.fixture(scope="session")
def stack(tmp_path_factory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("home"))
    up = running.headrace("up", "--port", str(free_port()))
    assert up.returncode == 0, up.stdout + up.stderr
    yield running
    pids = list(running.state["processes"].values())
    down = running.headrace("down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert [pid for pid in pids if alive(pid)] == []


@pytest.fixture(scope="session")
def tiny_recipe(tiny_model, tmp_path_factory) -> Path:
    """A recipe file: six iterations of the tiny model, a few seconds on a CPU."""
    recipe = {
        "name": "tiny",
        "iterations": 6,
        "prompts": 4,
        "model": {"path": str(tiny_model), "dtype": "float32"},
        "roles": {"actor": {"pool": "actor", "threads": 1}, "rollout": {"pool": "rollout", "threads": 1}},
        "data": {"kind": "sums", "low": 1, "high": 9, "held_out": 8},
        "reward": {"function": "matches", "options": {"pattern": "[a-m]"}, "workers": 1},
        "algorithm": {"preset": "grpo"},
        "rollout": {"n": 4, "max_tokens": 8, "shards": 2, "temperature": 1.0},
        "train": {"optim": {"lr": 1e-3}},
        "evaluate": {"problems": 8},
        "checkpoint": {"every": 2},
    }
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path
