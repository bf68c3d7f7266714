"""The engine around the decode path: weights, pausing, cancelling, refusing."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace.blocks.recipe import TransformersRollout
from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint import WeightError, publish
from headrace.engines.rollout.base import START_VERSION, Completion, Request, Sampling
from headrace.engines.rollout.counter import sample_seed
from headrace.engines.rollout.errors import NotServing, RequestTooLong
from headrace.engines.rollout.hf import TransformersEngine
from headrace.engines.rollout.spec import RolloutSpec

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def other_model(make_model: Callable[..., Path]) -> Path:
    return make_model(seed=3)


def engine(model: Path, dtype: str = "float32") -> TransformersEngine:
    return TransformersEngine(
        RolloutSpec(model=str(model), dtype=dtype, backend=TransformersRollout(max_batch=6))  # pyright: ignore
    )


def requests(max_tokens: int = 16, n: int = 4) -> list[Request]:
    sampling = Sampling(1.0, max_tokens, ())
    seeds = [sample_seed(0, 0, sample) for sample in range(n)]
    return [Request(group, [1, 50 + group, 60], seeds, sampling) for group in range(3)]


async def collect(engine: TransformersEngine, wanted: Sequence[Request]) -> dict[int, list[Completion]]:
    return {group.group: group.completions async for group in engine.generate(wanted)}


async def under_way(engine: TransformersEngine) -> None:
    """Returns when the engine has sampled some tokens."""
    async with asyncio.timeout(10):
        while engine._batch is None or engine._batch.tokens < 30:
            await asyncio.sleep(0.001)


def publish_folder(folder: Path, store: Path, version: int, dtype: str = "float32") -> WeightSource:
    tensors = load_file(folder / "model.safetensors")
    metas = [(name, "float32", list(tensor.shape)) for name, tensor in tensors.items()]
    publish(
        iter(tensors.items()),
        metas,
        version=version,
        train_step=version,
        transport="store",
        address=f"weights/{version}",
        store=str(store),
        partition_bytes=1 << 16,
        wire_dtype=dtype,
    )
    return WeightSource(version=version, transport="store", address=f"weights/{version}", store=str(store))


async def test_loaded_weights_are_those_of_the_publisher(tiny_model: Path, other_model: Path, tmp_path: Path):
    changed, fresh = engine(tiny_model), engine(other_model)
    assert await changed.served() is None
    before = await collect(changed, requests())
    assert before[0][0].weight_spans == [(START_VERSION, 16)]
    served = await changed.load_weights(publish_folder(other_model, tmp_path, 7), deadline_s=10)
    assert served == await changed.served()
    assert served.version == 7 and served.nbytes == 4 * sum(
        t.numel() for _, t in fresh.decoder.parameters.named_tensors()
    )
    after, expected = await collect(changed, requests()), await collect(fresh, requests())
    for group, completions in after.items():
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected[group]]
        assert [c.logprobs for c in completions] == [c.logprobs for c in expected[group]]
        assert [c.weight_spans for c in completions] == [[(7, 16)]] * 4
        assert [c.token_ids for c in completions] != [c.token_ids for c in before[group]]
    await changed.close()
    await fresh.close()


async def test_weights_come_through_shared_memory(tiny_model: Path, other_model: Path, tmp_path: Path):
    shared, address = engine(tiny_model), str(tmp_path / "weights.sock")
    tensors = load_file(other_model / "model.safetensors")
    metas = [(name, "float32", list(tensor.shape)) for name, tensor in tensors.items()]
    sending = asyncio.create_task(
        asyncio.to_thread(
            publish,
            iter(tensors.items()),
            metas,
            version=2,
            train_step=2,
            transport="shm",
            address=address,
            partition_bytes=1 << 16,
            wire_dtype="float32",
            deadline_s=10,
        )
    )
    source = WeightSource(version=2, transport="shm", address=address)
    served = await shared.load_weights(source, deadline_s=10)
    assert served.digest == (await sending).digest
    for name, tensor in shared.decoder.parameters.named_tensors():
        assert torch.equal(tensor, tensors[name])
    await shared.close()


async def test_weights_of_another_dtype_or_model_are_refused_and_nothing_is_served(
    tiny_model: Path, make_model: Callable[..., Path], tmp_path: Path
):
    served = engine(tiny_model)
    narrow = publish_folder(make_model(intermediate_size=96), tmp_path, 1)
    with pytest.raises(WeightError, match=r"gate_proj.*expected float32 \[128, 64\]"):
        await served.load_weights(narrow, deadline_s=10)
    assert await served.served() is None
    with pytest.raises(NotServing, match="version 1"):
        await collect(served, requests())
    with pytest.raises(WeightError, match="expected float32"):
        await served.load_weights(publish_folder(tiny_model, tmp_path, 2, "bfloat16"), deadline_s=10)
    await served.load_weights(publish_folder(tiny_model, tmp_path, 3), deadline_s=10)
    assert len(await collect(served, requests())) == 3
    await served.close()


@pytest.mark.parametrize("placed", [False, True])
async def test_a_parameter_that_differs_from_what_came_is_found(placed: bool, tiny_model: Path, tmp_path: Path):
    served = engine(tiny_model)
    parameters = served.decoder.parameters
    assign, place = parameters.assign, parameters.place

    def spoil(name: str, tensor: torch.Tensor) -> None:
        assign(name, tensor)
        if name == "model.layers.1.mlp.up_proj.weight":
            dict(parameters.named_tensors())[name][3, 5] += 1

    def elsewhere(name: str) -> torch.Tensor | None:
        found = place(name)
        return found.clone() if name == "model.layers.1.mlp.up_proj.weight" and found is not None else found

    parameters.assign, parameters.place = spoil, elsewhere if placed else lambda name: None
    with pytest.raises(WeightError, match=r"model\.layers\.1\.mlp\.up_proj\.weight as served"):
        await served.load_weights(publish_folder(tiny_model, tmp_path, 1), deadline_s=10)
    await served.close()


async def test_weights_arrive_while_samples_run(tiny_model: Path, other_model: Path, tmp_path: Path):
    """Running requests go on with the new weights; their tokens carry both versions."""
    running = engine(tiny_model)
    await running.load_weights(publish_folder(tiny_model, tmp_path, 1), deadline_s=10)
    source = publish_folder(other_model, tmp_path, 2)
    generating = asyncio.create_task(collect(running, requests(max_tokens=300)))
    await under_way(running)
    served = await running.load_weights(source, deadline_s=10)
    assert served.pause_seconds > 0
    spans = {tuple(v for v, _ in c.weight_spans) for cs in (await generating).values() for c in cs}
    assert (1, 2) in spans
    await running.close()


async def test_pause_keep_and_resume_change_no_token(tiny_model: Path):
    paused = engine(tiny_model)
    expected = await collect(paused, requests())
    generating = asyncio.create_task(collect(paused, requests()))
    await under_way(paused)
    await paused.pause("keep")
    batch = paused._batch
    assert batch is not None
    tokens = batch.tokens
    await asyncio.sleep(0.05)
    assert batch.tokens == tokens and not generating.done()
    await paused.resume()
    assert await generating == expected
    await paused.close()


async def test_pause_abort_gives_back_what_there_is(tiny_model: Path):
    aborted = engine(tiny_model)
    generating = asyncio.create_task(collect(aborted, requests(max_tokens=400)))
    await under_way(aborted)
    await aborted.pause("keep")
    await aborted.pause("abort")
    groups = await asyncio.wait_for(generating, 10)
    assert {c.finish_reason for completions in groups.values() for c in completions} == {"abort"}
    await aborted.resume()
    assert len(await collect(aborted, requests())) == 3
    await aborted.close()


async def test_pause_wait_drains_first(tiny_model: Path):
    drained = engine(tiny_model)
    generating = asyncio.create_task(collect(drained, requests()))
    await asyncio.sleep(0)
    await drained.pause("wait")
    assert {c.finish_reason for cs in (await generating).values() for c in cs} == {"length"}
    later = asyncio.create_task(collect(drained, requests()))
    await asyncio.sleep(0.05)
    assert not later.done()
    await drained.resume()
    assert len(await later) == 3
    await drained.close()


async def test_cancelled_generation_leaves_a_clean_engine(tiny_model: Path):
    cancelled = engine(tiny_model)
    expected = await collect(cancelled, requests())
    generating = asyncio.create_task(collect(cancelled, requests(max_tokens=400)))
    await under_way(cancelled)
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    assert await collect(cancelled, requests()) == expected
    await cancelled.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("decode")]


async def test_the_event_loop_stays_alive(tiny_model: Path):
    alive = engine(tiny_model)
    generating = asyncio.create_task(collect(alive, requests(max_tokens=100)))
    beats = 0
    while not generating.done():
        await asyncio.sleep(0.001)
        beats += 1
    assert beats > 20
    await alive.close()


async def test_requests_that_do_not_fit_are_refused(tiny_model: Path):
    refusing = engine(tiny_model)
    with pytest.raises(RequestTooLong, match=r"group 0.*3 tokens.*510.*context is 512"):
        await collect(refusing, requests(max_tokens=510))
    with pytest.raises(ValueError, match="needs a prompt"):
        await collect(refusing, [Request(0, [], [1], Sampling(1.0, 4, ()))])
    assert await collect(refusing, []) == {}
    await refusing.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_two_engines_agree_bit_for_bit(dtype: str, tiny_model: Path):
    one, two = engine(tiny_model, dtype), engine(tiny_model, dtype)
    assert await collect(one, requests()) == await collect(two, requests())
    assert one.fingerprint() == two.fingerprint()
    assert one.fingerprint()["dtype"] == dtype
    await one.close()
    await two.close()
