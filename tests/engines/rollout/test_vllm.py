"""vLLM in server mode, for real: needs HEADRACE_VLLM_PYTHON, the interpreter of an environment that has vLLM."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.blocks.recipe import VLLMRollout
from headrace.blocks.weights import WeightManifest, WeightSource
from headrace.engines.checkpoint import WeightError, publish
from headrace.engines.guard import descendants
from headrace.engines.rollout.base import START_VERSION, Completion, Request, Sampling
from headrace.engines.rollout.counter import sample_seed
from headrace.engines.rollout.errors import EngineDied, NotServing, RequestTooLong
from headrace.engines.rollout.spec import RolloutSpec
from headrace.engines.rollout.vllm import VLLMEngine

PYTHON = os.environ.get("HEADRACE_VLLM_PYTHON", "")
STOPS = (100, 101, 102, 103, 104, 105)


def spec(model: Path, max_model_len: int = 512) -> RolloutSpec:
    small = {"kind": "vllm", "max_model_len": max_model_len, "max_num_seqs": 16, "kv_cache_memory_bytes": 100_000_000}
    backend = VLLMRollout.model_validate(small)
    return RolloutSpec(model=str(model), dtype="float32", gpus=0, threads=1, python=PYTHON, backend=backend)


pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="HEADRACE_VLLM_PYTHON is not set"),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def models(make_model: Callable[..., Path]) -> tuple[Path, Path]:
    """vLLM's CPU attention needs heads of at least 32."""
    return make_model(head_dim=32), make_model(head_dim=32, seed=3)


@pytest.fixture(scope="module")
async def engine(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VLLMEngine]:
    engine = await VLLMEngine.start(spec(models[0]), tmp_path_factory.mktemp("vllm"))
    yield engine
    pid = engine._server._child.pid
    await engine.close()
    assert not descendants(pid)


async def test_logprobs_are_those_of_transformers(engine: VLLMEngine, models: tuple[Path, Path]):
    for temperature in (1.0, 0.7, 0.0):
        groups = await collect(engine, requests(temperature=temperature, stop=STOPS))
        compare(groups, models[0], temperature or 1.0, START_VERSION)
        reasons = {c.finish_reason for cs in groups.values() for c in cs}
        assert reasons <= {"stop", "length"}
        for completions in groups.values():
            for c in completions:
                assert (c.token_ids[-1] in STOPS) == (c.finish_reason == "stop")
                assert not set(c.token_ids[:-1]) & set(STOPS)
            distinct = {tuple(c.token_ids) for c in completions}
            assert len(distinct) == (len(completions) if temperature else 1)


async def test_loaded_weights_are_served(engine: VLLMEngine, models: tuple[Path, Path], tmp_path: Path):
    for version, model in ((4, models[1]), (5, models[0])):
        served = await engine.load_weights(published(model, tmp_path, version), deadline_s=20)
        assert served == await engine.served() and served.version == version
        compare(await collect(engine, requests()), model, 1.0, version)


async def test_weights_come_through_shared_memory(engine: VLLMEngine, models: tuple[Path, Path], tmp_path: Path):
    address = str(tmp_path / "weights.sock")
    source = WeightSource(version=6, transport="shm", address=address)
    sending = asyncio.create_task(asyncio.to_thread(send, models[1], 6, transport="shm", address=address))
    served = await engine.load_weights(source, deadline_s=20)
    assert served.digest == (await sending).digest
    compare(await collect(engine, requests()), models[1], 1.0, 6)


async def test_requests_go_on_under_new_weights(engine: VLLMEngine, models: tuple[Path, Path], tmp_path: Path):
    await engine.load_weights(published(models[0], tmp_path, 10), deadline_s=20)
    generating = asyncio.create_task(collect(engine, requests(max_tokens=450)))
    await asyncio.sleep(0.5)
    await engine.load_weights(published(models[1], tmp_path, 11), deadline_s=20)
    groups = await generating
    versions = {tuple(v for v, _ in c.weight_spans) for cs in groups.values() for c in cs}
    assert versions & {(10, 11), (11,)}
    assert all(sum(n for _, n in c.weight_spans) == 450 for cs in groups.values() for c in cs)


async def test_wrong_weights_are_refused_before_the_model_is_touched(
    engine: VLLMEngine, models: tuple[Path, Path], make_model: Callable[..., Path], tmp_path: Path
):
    wrong = published(make_model(head_dim=32, intermediate_size=96), tmp_path, 20)
    with pytest.raises(WeightError, match=r"gate_proj.*expected float32 \[128, 64\]"):
        await engine.load_weights(wrong, deadline_s=20)
    assert await engine.served() is None
    with pytest.raises(NotServing, match="version 20"):
        await collect(engine, requests())
    await engine.load_weights(published(models[0], tmp_path, 21), deadline_s=20)
    compare(await collect(engine, requests()), models[0], 1.0, 21)


async def test_pause_keep_and_abort(engine: VLLMEngine):
    generating = asyncio.create_task(collect(engine, requests(max_tokens=450)))
    await asyncio.sleep(0.3)
    await engine.pause("keep")
    done, _ = await asyncio.wait([generating], timeout=0.5)
    assert not done
    await engine.pause("abort")
    groups = await asyncio.wait_for(generating, 20)
    assert "abort" in {c.finish_reason for cs in groups.values() for c in cs}
    await engine.resume()
    assert len(await collect(engine, requests())) == 3


async def test_cancelling_drops_the_requests(engine: VLLMEngine):
    generating = asyncio.create_task(collect(engine, requests(max_tokens=450)))
    await asyncio.sleep(0.3)
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    async with asyncio.timeout(20):
        while (await engine._server.http.get("/load")).json()["server_load"]:
            await asyncio.sleep(0.05)


async def test_too_long_requests_are_refused(engine: VLLMEngine):
    with pytest.raises(RequestTooLong, match="max_model_len is 512"):
        await collect(engine, requests(max_tokens=510))


async def test_a_killed_server_is_an_error_with_its_log(models: tuple[Path, Path], tmp_path: Path):
    engine = await VLLMEngine.start(spec(models[0]), tmp_path)
    try:
        generating = asyncio.create_task(collect(engine, requests(max_tokens=450)))
        await asyncio.sleep(0.3)
        for pid in descendants(engine._server._child.pid):
            with contextlib.suppress(ProcessLookupError):  # the first one's end may end the others
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="Its last lines"):
            await asyncio.wait_for(generating, 60)
    finally:
        await engine.close()


async def test_a_server_that_cannot_start_says_why(models: tuple[Path, Path], tmp_path: Path):
    with pytest.raises(EngineDied, match="max_model_len"):
        await VLLMEngine.start(spec(models[0], max_model_len=100_000), tmp_path)


def requests(temperature: float = 1.0, max_tokens: int = 16, n: int = 4, stop: tuple[int, ...] = ()) -> list[Request]:
    sampling = Sampling(temperature, max_tokens, stop)
    return [Request(g, [1, 50 + g, 60], [sample_seed(0, g, s) for s in range(n)], sampling) for g in range(3)]


async def collect(engine: VLLMEngine, wanted: Sequence[Request]) -> dict[int, list[Completion]]:
    return {group.group: group.completions async for group in engine.generate(wanted)}


def compare(groups: dict[int, list[Completion]], model: Path, temperature: float, version: int) -> None:
    """Every log-probability against a forward of transformers."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for group, completions in groups.items():
        for c in completions:
            assert c.weight_spans == [(version, len(c.token_ids))]
            ids = torch.tensor([[1, 50 + group, 60, *c.token_ids]])
            with torch.inference_mode():
                expected = torch.log_softmax(reference(ids).logits[0, 2:-1] / temperature, -1)
            expected = expected.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)


def published(model: Path, store: Path, version: int) -> WeightSource:
    send(model, version, transport="store", address=f"weights/{version}", store=str(store))
    return WeightSource(version=version, transport="store", address=f"weights/{version}", store=str(store))


def send(model: Path, version: int, **where: Any) -> WeightManifest:
    tensors = load_file(model / "model.safetensors")
    return publish(
        iter(tensors.items()),
        [(name, "float32", list(tensor.shape)) for name, tensor in tensors.items()],
        version=version,
        train_step=version,
        partition_bytes=1 << 16,
        wire_dtype="float32",
        deadline_s=20,
        **where,
    )
