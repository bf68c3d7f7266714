"""The vLLM back end, for real: needs HEADRACE_VLLM_PYTHON, the interpreter of an environment that has vLLM."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint import WeightError
from headrace.engines.guard import descendants
from headrace.engines.model.folder import beside
from headrace.engines.rollout.base import START_VERSION, Completion, Request
from headrace.engines.rollout.errors import EngineDied, ModelDoesNotFit, NotServing, RequestTooLong
from headrace.engines.rollout.vllm import VLLMEngine
from tests.engines.rollout.vllm_cases import (
    KILLED,
    MORE,
    REAL_VLLM,
    collect,
    compare,
    compare_spans,
    kept_adapter,
    published,
    requests,
    sampling,
    send,
    spec,
)

pytestmark = REAL_VLLM
STOPS = (100, 101, 102, 103, 104, 105)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def models(make_model: Callable[..., Path]) -> tuple[Path, Path]:
    """vLLM's CPU attention needs heads of at least 32."""
    return make_model(head_dim=32), make_model(head_dim=32, seed=3)


@pytest.fixture(scope="module")
async def engine(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VLLMEngine]:
    log_dir = tmp_path_factory.mktemp("vllm")
    engine = await VLLMEngine.start(spec(models[0], openai_port=0), log_dir, door_key="secret")
    yield engine
    pid = engine.program.pid
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


@pytest.mark.parametrize("tied", [True, False])
async def test_a_kept_version_is_a_model_folder(make_model, tmp_path: Path, monkeypatch, tied: bool):
    """vLLM started on a version of several files answers with its weights."""
    start, trained = (make_model(head_dim=32, seed=seed, tie_word_embeddings=tied) for seed in (0, 7))
    monkeypatch.setattr("headrace.engines.checkpoint.kept.FILE_BYTES", 1 << 17)
    where = {"transport": "store", "address": "weights/v000001", "store": str(tmp_path)}
    manifest = send(trained, 1, beside=beside(start, "float32"), **where)
    assert len(manifest.files) > 3
    engine = await VLLMEngine.start(spec(tmp_path / "weights/v000001"), tmp_path)
    try:
        compare(await collect(engine, requests()), trained, 1.0, START_VERSION)
    finally:
        await engine.close()


async def test_the_door_wants_the_key(engine: VLLMEngine):
    assert engine.door.startswith("http://127.0.0.1:")
    async with httpx.AsyncClient(base_url=engine.door, timeout=30) as anyone:
        assert (await anyone.get("/health")).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/tokenize", "/pause", "/collective_rpc", "/is_paused"):
            assert (await anyone.get(path)).status_code == 401
        assert (await anyone.post("/inference/v1/generate", json={"token_ids": [1]})).status_code == 401
        wrong = {"authorization": "Bearer secret2"}
        assert (await anyone.get("/v1/models", headers=wrong)).status_code == 401
        knows = {"authorization": "Bearer secret"}
        assert (await anyone.get("/v1/models", headers=knows)).json()["data"][0]["id"] == "policy"
        for path in ("/pause", "/resume", "/collective_rpc", "/update_weights"):  # there are none, whoever asks
            assert (await anyone.post(path, headers=knows, json={})).status_code == 404
        chat = {"model": "policy", "messages": [{"role": "user", "content": "1 + 1?"}], "max_tokens": 4}
        answer = await anyone.post("/v1/chat/completions", headers=knows, json=chat)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


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
    new = published(models[1], tmp_path, 11)
    generating = asyncio.create_task(collect(engine, requests(max_tokens=450, n=MORE)))
    await sampling(engine, 200)
    await engine.load_weights(new, deadline_s=20)
    groups = await generating
    versions = {tuple(v for v, _ in c.weight_spans) for cs in groups.values() for c in cs}
    assert (10, 11) in versions and versions <= {(10,), (10, 11), (11,)}
    assert all(sum(n for _, n in c.weight_spans) == 450 for cs in groups.values() for c in cs)
    # Every token's log-probability is that of the weights which its span names, over all that came before it.
    compare_spans(groups, {10: models[0], 11: models[1]})


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
    generating = asyncio.create_task(collect(engine, requests(max_tokens=450, n=MORE)))
    await sampling(engine, 50)
    await engine.pause("keep")
    done, _ = await asyncio.wait([generating], timeout=0.5)
    assert not done
    await engine.pause("abort")
    groups = await asyncio.wait_for(generating, 20)
    assert "abort" in {c.finish_reason for cs in groups.values() for c in cs}
    await engine.resume()
    assert len(await collect(engine, requests())) == 3


async def test_cancelling_drops_the_requests(engine: VLLMEngine):
    generating = asyncio.create_task(collect(engine, requests(max_tokens=450, n=MORE)))
    await sampling(engine, 50)
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    async with asyncio.timeout(20):
        while (now := await engine.metrics())["running"] or now["waiting"]:
            await asyncio.sleep(0.05)


async def test_too_long_requests_are_refused(engine: VLLMEngine):
    with pytest.raises(RequestTooLong, match="max_model_len is 512"):
        await collect(engine, requests(max_tokens=510))


async def test_a_paused_engine_drains_in_mode_wait(engine: VLLMEngine):
    generating = asyncio.create_task(collect(engine, requests(max_tokens=450, n=8)))
    await sampling(engine, 50)
    await engine.pause("wait")
    assert (await engine.metrics())["running"] == 0
    later = asyncio.create_task(collect(engine, requests(n=1)))
    done, _ = await asyncio.wait([generating, later], timeout=0.5)
    assert done == {generating}
    await engine.resume()
    assert len(await asyncio.wait_for(later, 20)) == 3


async def test_samples_go_on_from_the_tokens_that_they_have(
    engine: VLLMEngine, models: tuple[Path, Path], tmp_path: Path
):
    await engine.load_weights(published(models[0], tmp_path, 30), deadline_s=20)
    asked = requests(max_tokens=60)
    whole = await collect(engine, asked)
    again = requests(max_tokens=60)
    for request, kept in zip(again, (0, 7, 60), strict=True):
        for sample, c in enumerate(whole[request.group][:2]):
            ended = c.finish_reason if kept == 60 else ""
            request.begun[sample] = Completion(sample, c.token_ids[:kept], c.logprobs[:kept], ended, [(30, kept)])
    continued = await collect(engine, again)
    assert all(len(c.token_ids) == 60 for completions in continued.values() for c in completions)
    assert continued[1][0].token_ids[:7] == whole[1][0].token_ids[:7]
    assert continued[1][0].token_ids != whole[1][0].token_ids  # the random numbers go on, they do not begin again
    assert continued[2][:2] == whole[2][:2]
    compare(continued, models[0], 1.0, 30)


async def test_an_engine_of_whole_models_refuses_an_adapter(engine: VLLMEngine, models, tmp_path: Path):
    source, _, _ = kept_adapter(models[0], tmp_path, 40)
    with pytest.raises(WeightError, match="but this engine serves a whole model"):
        await engine.load_weights(source, deadline_s=20)
    await engine.load_weights(published(models[0], tmp_path, 41), deadline_s=20)


async def test_a_killed_engine_is_an_error_with_its_log_and_its_tokens(models: tuple[Path, Path], tmp_path: Path):
    engine = await VLLMEngine.start(spec(models[0]), tmp_path)
    try:
        asked = requests(max_tokens=450, n=KILLED)
        generating = asyncio.create_task(collect(engine, asked))
        async with asyncio.timeout(20):
            while not any(request.begun for request in asked):
                await asyncio.sleep(0.005)
        began = time.monotonic()
        for pid in descendants(engine.program.pid):
            with contextlib.suppress(ProcessLookupError):  # the first one's end may end the others
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="Its last lines"):
            await asyncio.wait_for(generating, 60)
        assert time.monotonic() - began < 10
        begun = [c for request in asked for c in request.begun.values()]
        assert begun and all(len(c.token_ids) == len(c.logprobs) > 0 for c in begun)
        with pytest.raises(EngineDied):
            await asyncio.wait_for(engine.watch(), 5)
    finally:
        await engine.close()


async def test_an_engine_process_that_dies_alone_is_noticed(models: tuple[Path, Path], tmp_path: Path):
    engine = await VLLMEngine.start(spec(models[0]), tmp_path)
    try:
        generating = asyncio.create_task(collect(engine, requests(max_tokens=450, n=KILLED)))
        await sampling(engine, 50)
        program = descendants(engine.program.pid)[0]
        os.kill(descendants(program)[-1], signal.SIGKILL)  # vLLM's worker, below its engine process
        with pytest.raises(EngineDied):
            await asyncio.wait_for(generating, 60)
    finally:
        await engine.close()


async def test_an_engine_that_cannot_start_says_why(models: tuple[Path, Path], tmp_path: Path):
    with pytest.raises(EngineDied, match="max_model_len"):
        await VLLMEngine.start(spec(models[0], max_model_len=100_000), tmp_path)


async def test_a_model_that_does_not_fit_is_told_as_such(models: tuple[Path, Path], tmp_path: Path):
    with pytest.raises(ModelDoesNotFit, match="lower max_model_len"):
        await VLLMEngine.start(spec(models[0], kv_cache_memory_bytes=100_000), tmp_path)


async def test_no_key_or_value_of_an_old_version_is_used_again(models: tuple[Path, Path], tmp_path: Path):
    engine = await VLLMEngine.start(spec(models[0], enable_prefix_caching=True), tmp_path)
    try:
        await old_then_new(engine, models, tmp_path)
        # A request that is under way when the weights change.
        asked = long_requests(max_tokens=150)
        new = published(models[0], tmp_path, 3)
        generating = asyncio.create_task(collect(engine, asked))
        await sampling(engine, 100)
        await engine.load_weights(new, deadline_s=20)
        compare_spans(await generating, {2: models[1], 3: models[0]}, LONG)
    finally:
        await engine.close()


class Forgetful(VLLMEngine):
    """Its cache survives weight updates."""

    salt = "1"

    async def open(self) -> None:
        program = (str(Path(__file__).with_name("forgetful_vllm.py")),)
        self.launch = replace(self.launch, program=program, env={**self.launch.env, "HEADRACE_TEST_SALT": self.salt})
        await super().open()


class Unsalted(Forgetful):
    salt = "0"


@pytest.mark.parametrize("kind", [Forgetful, Unsalted])
async def test_it_is_the_salt_that_protects(kind: type[Forgetful], models: tuple[Path, Path], tmp_path: Path):
    engine = await kind.start(spec(models[0], enable_prefix_caching=True), tmp_path)
    try:
        if kind is Forgetful:
            await old_then_new(engine, models, tmp_path)
        else:
            with pytest.raises(AssertionError, match="not close"):
                await old_then_new(engine, models, tmp_path)
    finally:
        await engine.close()


async def old_then_new(engine: VLLMEngine, models: tuple[Path, Path], store: Path) -> None:
    """The same long prompts under version 1, again under version 1, and under version 2."""
    await engine.load_weights(published(models[0], store, 1), deadline_s=20)
    compare(await collect(engine, long_requests()), models[0], 1.0, 1, LONG)
    compare(await collect(engine, long_requests()), models[0], 1.0, 1, LONG)
    await engine.load_weights(published(models[1], store, 2), deadline_s=20)
    compare(await collect(engine, long_requests()), models[1], 1.0, 2, LONG)


LONG = [5 + n * 7 % 250 for n in range(300)]
"""More than two blocks of vLLM's cache on CPUs."""


def long_requests(max_tokens: int = 16) -> list[Request]:
    return [replace(request, prompt_ids=[*LONG, *request.prompt_ids]) for request in requests(max_tokens=max_tokens)]
