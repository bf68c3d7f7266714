"""The SGLang back end, for real: needs HEADRACE_SGLANG_PYTHON, the interpreter of an environment that has SGLang.

On a machine without a GPU that environment needs SGLang's kernels for CPUs, or a stand-in for them, and a CPU torch.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.blocks.recipe import SGLangRollout
from headrace.blocks.weights import WeightSource
from headrace.engines.guard import descendants
from headrace.engines.rollout.base import START_VERSION
from headrace.engines.rollout.errors import EngineDied
from headrace.engines.rollout.sglang import SGLangEngine
from headrace.engines.rollout.spec import RolloutSpec
from tests.conftest import MakeModel
from tests.engines.rollout.test_vllm import (
    KILLED,
    MORE,
    collect,
    compare,
    compare_spans,
    published,
    requests,
    sampling,
    send,
)

PYTHON = os.environ.get("HEADRACE_SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="HEADRACE_SGLANG_PYTHON is not set"),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def models(make_model: MakeModel) -> tuple[Path, Path]:
    return make_model(head_dim=32), make_model(head_dim=32, seed=3)


def spec(model: Path, **changes: Any) -> RolloutSpec:
    small = {"kind": "sglang", "max_model_len": 512, "max_num_seqs": 16, "gpu_memory_utilization": 0.2}
    backend = SGLangRollout.model_validate(small | changes)
    return RolloutSpec(model=str(model), dtype="float32", gpus=0, threads=1, python=PYTHON, backend=backend)


@pytest.fixture(scope="module")
async def engine(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SGLangEngine]:
    engine = await SGLangEngine.start(spec(models[0]), tmp_path_factory.mktemp("sglang"))
    yield engine
    pid = engine.program.pid
    await engine.close()
    assert not descendants(pid)


async def test_logprobs_are_those_of_transformers(engine: SGLangEngine, models: tuple[Path, Path]):
    for temperature in (1.0, 0.7):
        compare(await collect(engine, requests(temperature)), models[0], temperature, START_VERSION)


async def test_loaded_weights_are_served(engine: SGLangEngine, models: tuple[Path, Path], tmp_path: Path):
    for version, model in ((4, models[1]), (5, models[0])):
        served = await engine.load_weights(published(model, tmp_path, version), deadline_s=20)
        assert served == await engine.served() and served.version == version
        compare(await collect(engine, requests()), model, 1.0, version)
    address = str(tmp_path / "weights.sock")
    sending = asyncio.create_task(asyncio.to_thread(send, models[1], 6, transport="shm", address=address))
    served = await engine.load_weights(WeightSource(version=6, transport="shm", address=address), deadline_s=20)
    assert served.digest == (await sending).digest
    compare(await collect(engine, requests()), models[1], 1.0, 6)


async def test_requests_go_on_under_new_weights(engine: SGLangEngine, models: tuple[Path, Path], tmp_path: Path):
    await engine.load_weights(published(models[0], tmp_path, 10), deadline_s=20)
    new = published(models[1], tmp_path, 11)
    generating = asyncio.create_task(collect(engine, requests(max_tokens=450, n=MORE)))
    await sampling(engine, 200)
    await engine.load_weights(new, deadline_s=20)
    groups = await generating
    assert (10, 11) in {tuple(v for v, _ in c.weight_spans) for cs in groups.values() for c in cs}
    compare_spans(groups, {10: models[0], 11: models[1]})


async def test_a_killed_engine_is_an_error_with_its_tokens(models: tuple[Path, Path], tmp_path: Path):
    engine = await SGLangEngine.start(spec(models[0]), tmp_path)
    try:
        asked = requests(max_tokens=450, n=KILLED)
        generating = asyncio.create_task(collect(engine, asked))
        async with asyncio.timeout(60):
            while not any(request.begun for request in asked):
                await asyncio.sleep(0.005)
        for pid in descendants(engine.program.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="Its last lines"):
            await asyncio.wait_for(generating, 60)
        assert any(c.token_ids for request in asked for c in request.begun.values())
    finally:
        await engine.close()
