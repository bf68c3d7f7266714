"""What engines in other environments have in common, and the ways in which one may fail: with a scripted engine."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from headrace.blocks.recipe import Lora
from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint import publish
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.folder import parameter_shapes
from headrace.engines.lora import adapter_of, adapter_shapes
from headrace.engines.rollout import errors, hosted
from headrace.engines.rollout.base import START_VERSION, Completion, Request, Sampling
from headrace.engines.rollout.counter import sample_seed
from headrace.engines.rollout.hosted import HostedEngine
from headrace.engines.rollout.trtllm import start as start_trtllm
from headrace.engines.rollout.vllm import VLLMEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def requests(groups: int = 2, n: int = 2, max_tokens: int = 8) -> list[Request]:
    sampling = Sampling(1.0, max_tokens, ())
    return [Request(g, [1, 2, 3], [sample_seed(0, g, s) for s in range(n)], sampling) for g in range(groups)]


async def collect(engine: HostedEngine, wanted: Sequence[Request]) -> dict[int, list[Completion]]:
    return {group.group: group.completions async for group in engine.generate(wanted)}


def source(version: int) -> WeightSource:
    return WeightSource(version=version, transport="shm", address="/nowhere")


async def test_groups_come_as_they_finish(engines):
    engine = await engines()
    short, long = requests(1, max_tokens=3), requests(2, max_tokens=60)[1:]
    order = [group.group async for group in engine.generate([*long, *short])]
    assert order == [0, 1]
    assert long[0].begun[0].weight_spans == [(START_VERSION, 60)]
    seeds = [c.token_ids[1] for c in (long[0].begun[0], long[0].begun[1])]
    assert seeds == [seed % 1000 for seed in long[0].seeds]


async def test_a_weight_update_continues_every_request_from_its_tokens(engines):
    engine = await engines()
    asked = requests(max_tokens=60)
    running = asyncio.create_task(collect(engine, asked))
    await asyncio.sleep(0.3)
    served = await engine.load_weights(source(7), deadline_s=5)
    assert served.version == 7 and 0 < served.pause_seconds < 2
    for group, completions in (await running).items():
        for c in completions:
            (old, before), (new, after) = c.weight_spans
            assert (old, new) == (START_VERSION, 7) and before > 0 and before + after == 60 == len(c.logprobs)
            # The second request had the prompt and all tokens, and random numbers of its own.
            assert c.token_ids[before] == 3 + before
            assert c.token_ids[before + 1] == sample_seed(asked[group].seeds[c.sample], before, 0) % 1000


async def test_begun_samples_go_on_and_finished_ones_stay(engines):
    engine = await engines()
    request = requests(1, n=3)[0]
    request.begun[0] = Completion(0, [5, 6], [-1.0, -2.0], "", [(4, 2)])
    request.begun[2] = Completion(2, [9], [-3.0], "stop", [(4, 1)])
    [completions] = (await collect(engine, [request])).values()
    assert completions[0].token_ids[:3] == [5, 6, 5] and len(completions[0].token_ids) == 8
    assert completions[0].logprobs[:2] == [-1.0, -2.0] and completions[0].weight_spans == [(4, 2), (START_VERSION, 6)]
    assert completions[2].token_ids == [9] and completions[1].token_ids[0] == 3


async def test_what_is_under_way_is_bounded(engines):
    engine = await engines(places=3)
    running = asyncio.create_task(collect(engine, requests(4, n=2, max_tokens=40)))
    await asyncio.sleep(0.2)
    assert await engine.metrics() == {"running": 3, "waiting": 5, "tokens": pytest.approx(45, abs=30)}
    assert len(await running) == 4


async def test_pause_modes(engines):
    engine = await engines()
    running = asyncio.create_task(collect(engine, requests(max_tokens=30)))
    await asyncio.sleep(0.1)
    await engine.pause("keep")
    assert (await engine.metrics())["running"] == 0 and not running.done()
    await engine.resume()
    assert all(len(c.token_ids) == 30 for cs in (await running).values() for c in cs)
    running = asyncio.create_task(collect(engine, requests(max_tokens=30)))
    await asyncio.sleep(0.1)
    await engine.pause("wait")
    await asyncio.wait_for(running, 1)
    queued = asyncio.create_task(collect(engine, requests(max_tokens=30)))
    await asyncio.sleep(0.1)
    await engine.pause("abort")
    assert {c.finish_reason for cs in (await asyncio.wait_for(queued, 1)).values() for c in cs} == {"abort"}
    await engine.sleep()
    await engine.wake()
    assert len(await collect(engine, requests())) == 2


async def test_a_load_that_fails_ends_what_is_under_way(engines):
    engine = await engines()
    running = asyncio.create_task(collect(engine, requests(max_tokens=100)))
    await asyncio.sleep(0.1)
    with pytest.raises(WeightError, match="no such weights"):
        await engine.load_weights(source(666), deadline_s=5)
    assert {c.finish_reason for cs in (await running).values() for c in cs} == {"abort"}
    with pytest.raises(errors.NotServing, match="version 666"):
        await collect(engine, requests())


async def test_an_adapter_is_pulled_by_the_host_and_one_that_the_engine_refuses_is_not_served(
    engines, tiny_model: Path, tmp_path: Path
):
    lora = Lora.model_validate({"rank": 2, "target_modules": ["v_proj"]})
    engines.spec = engines.spec.model_copy(update={"lora": lora})
    engine = await engines()
    adapter = adapter_of(tiny_model, lora)
    shapes = adapter_shapes(parameter_shapes(tiny_model), lora.rank, adapter.target_modules)

    async def load(version: int) -> str:
        """Publishes it, has the engine load it, and returns its digest."""
        kept = WeightSource(version=version, transport="store", address=f"v{version}", store=str(tmp_path))
        manifest = publish(
            ((name, torch.full(shape, float(version))) for name, shape in shapes.items()),
            [(name, "bfloat16", shape) for name, shape in shapes.items()],
            train_step=version,
            adapter=adapter,
            **kept.model_dump(exclude={"delta"}),
        )
        served = await engine.load_weights(kept, deadline_s=5)
        assert (served.version, served.digest) == (version, manifest.digest) and served == await engine.served()
        assert served.nbytes == 2 * 2 * 2 * (64 + 32)
        return served.digest

    running = asyncio.create_task(collect(engine, requests(max_tokens=60)))
    await asyncio.sleep(0.1)
    digest = await load(7)
    assert {v for cs in (await running).values() for c in cs for v, _ in c.weight_spans} == {START_VERSION, 7}
    running = asyncio.create_task(collect(engine, requests(max_tokens=60)))
    await asyncio.sleep(0.1)
    with pytest.raises(WeightError, match="Scripted refused it: ValueError: no such adapter"):
        await load(666)
    assert await engine.served() is None
    with pytest.raises(errors.NotServing, match="version 666"):
        await collect(engine, requests())
    # What was under way goes on as it was.
    assert {tuple(c.weight_spans) for cs in (await running).values() for c in cs} == {((7, 60),)}
    assert await load(8) != digest
    with pytest.raises(ValueError, match="sleep with level 1"):
        await engine.sleep(level=2)
    assert len(await collect(engine, requests())) == 2
    [folder] = engine.program.folder.glob("adapter-*")
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


async def test_a_wrong_number_of_logprobs(engines):
    engine = await engines("logprobs")
    with pytest.raises(errors.WrongLogprobs, match="2 log-probabilities for 1 tokens"):
        await asyncio.wait_for(collect(engine, requests()), 20)


async def test_an_engine_that_stops_in_the_middle(engines):
    engine = await engines("stops")
    with pytest.raises(errors.EngineDied, match="which nobody dropped"):
        await asyncio.wait_for(collect(engine, requests()), 20)


async def test_an_engine_that_dies_in_the_middle_leaves_its_tokens(engines):
    engine = await engines("dies")
    asked = requests()
    with pytest.raises(errors.EngineDied, match="exit status 3"):
        await asyncio.wait_for(collect(engine, asked), 20)
    assert all(c.token_ids[0] == 3 and not c.finish_reason for r in asked for c in r.begun.values())
    with pytest.raises(errors.EngineDied):
        await asyncio.wait_for(engine.watch(), 20)


async def test_an_engine_that_falls_silent(engines, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosted, "STATUS_EVERY_S", 0.1)
    monkeypatch.setattr(hosted, "SILENT_S", 0.3)
    engine = await engines("silent")
    with pytest.raises(errors.EngineDied, match="has not answered status"):
        await asyncio.wait_for(engine.watch(), 20)


async def test_an_engine_that_dies_while_it_loads_says_its_last_50_lines(engines):
    with pytest.raises(errors.EngineDied, match=r"exit status 7") as raised:
        await engines("loading")
    lines = str(raised.value).splitlines()
    assert lines[-50:] == [f"line {n}" for n in range(50, 100)] and "line 49" not in lines


async def test_a_model_that_does_not_fit(engines):
    with pytest.raises(errors.ModelDoesNotFit, match="lower max_model_len"):
        await engines("memory")


async def test_an_engine_that_lacks_something(engines):
    with pytest.raises(errors.UnsupportedEngine, match=r"lacks AsyncLLM\.abort"):
        await engines("lacks")


async def test_a_version_that_was_not_tested_is_named(engines, capsys: pytest.CaptureFixture[str]):
    await engines()
    assert "warning" not in capsys.readouterr().out
    await engines(tested=("9.8", "9.90"))
    assert "Scripted 9.9.1 was not tested" in (said := capsys.readouterr().out) and "9.8, 9.90" in said


async def test_a_package_that_is_not_there(engines, tmp_path: Path):
    with pytest.raises(errors.MissingPackage, match="cannot import vllm"):
        await VLLMEngine.start(engines.spec, tmp_path)
    with pytest.raises(errors.MissingPackage, match="no tensorrt_llm"):
        await start_trtllm(engines.spec)


async def test_a_port_that_is_taken(engines):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.PortTaken, match=f"port {port}.*another openai_port"):
            await engines(door=(port, "key"))


async def test_a_prompt_that_is_too_long(engines):
    engine = await engines()
    with pytest.raises(errors.RequestTooLong, match="max_model_len is 256"):
        await collect(engine, requests(max_tokens=254))
