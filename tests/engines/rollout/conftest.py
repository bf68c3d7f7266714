"""Engines behind the real host and the real program, with a scripted engine in the middle."""

import sys
from pathlib import Path

import pytest

from headrace.engines.rollout.hosted import HostedEngine
from headrace.engines.rollout.program import Launch
from headrace.engines.rollout.spec import RolloutSpec

PROGRAM = (str(Path(__file__).with_name("scripted_engine.py")),)


class Engines:
    """Starts engines and closes them."""

    def __init__(self, model: Path, logs: Path) -> None:
        self.spec = RolloutSpec.model_validate(
            {"model": str(model), "python": sys.executable, "backend": {"kind": "vllm"}}
        )
        self._logs = logs
        self.started: list[HostedEngine] = []

    async def __call__(self, fault: str = "", **changes) -> HostedEngine:
        fields = {"places": 8, "max_len": 256, "salted": False, "tested": ("9.9",), "program": PROGRAM, "flags": ()}
        launch = Launch(**{"name": "Scripted", "env": {"HEADRACE_TEST_FAULT": fault}, **fields, **changes})
        engine = HostedEngine(self.spec, launch, self._logs)
        self.started.append(engine)
        await engine.open()
        return engine


@pytest.fixture
async def engines(tiny_model: Path, tmp_path: Path):
    made = Engines(tiny_model, tmp_path)
    yield made
    for engine in made.started:
        await engine.close()
