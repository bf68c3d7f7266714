"""What is asked of SGLang and what is made of its answers, without SGLang."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.blocks.recipe import SGLangRollout
from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint import publish
from headrace.engines.rollout import sglang_worker
from headrace.engines.rollout.child import Refused, Sampling
from headrace.engines.rollout.sglang import arguments
from headrace.engines.rollout.sglang_child import SGLang
from headrace.engines.rollout.spec import RolloutSpec

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_every_setting_that_changes_numbers_is_given():
    recipe = {"kind": "sglang", "max_num_seqs": 128, "enable_prefix_caching": True, "deterministic": True}
    backend = SGLangRollout.model_validate(recipe)
    spec = RolloutSpec(
        model="m", dtype="bfloat16", head_dtype="float32", gpus=2, threads=1, python="p", backend=backend
    )
    given = arguments(spec)
    assert json.loads(json.dumps(given)) == given
    wanted = {"tp_size": 2, "max_running_requests": 128, "disable_radix_cache": False, "enable_fp32_lm_head": True}
    wanted |= {"enable_deterministic_inference": True, "skip_tokenizer_init": True, "dtype": "bfloat16"}
    assert wanted.items() <= given.items()
    assert given["custom_weight_loader"] == [sglang_worker.LOADER]


class Manager:
    """SGLang's tokenizer manager, as far as it is asked: answers with what it is given."""

    def __init__(self, answers: list[dict[str, Any]], last: Exception | None = None) -> None:
        self.answers, self.last = answers, last
        self.asked: list[Any] = []
        self.aborted: list[str] = []
        self.adapters: set[str] = set()

    async def generate_request(self, request: Any, http: None) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(request)
        for answer in self.answers:
            yield answer
        if self.last:
            raise self.last
        await asyncio.sleep(60)

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)

    async def load_lora_adapter(self, asked: Any) -> Any:
        bad = asked.lora_path == "bad"
        self.adapters |= set() if bad else {asked.lora_name}
        return SimpleNamespace(success=not bad, error_message="its rank is 128")

    async def unload_lora_adapter(self, asked: Any) -> None:
        self.adapters.remove(asked.lora_name)


def engine(manager: Manager, deterministic: bool = False) -> SGLang:
    made = SGLang.__new__(SGLang)
    made._manager, made._deterministic, made._dropped = manager, deterministic, ConnectionAbortedError
    kinds = ("GenerateReqInput", "LoadLoRAAdapterReqInput", "UnloadLoRAAdapterReqInput")
    made._io = SimpleNamespace(**dict.fromkeys(kinds, lambda **fields: SimpleNamespace(**fields)))
    made._adapter, made._adapters = None, itertools.count(1)
    return made


def answer(tokens: list[int], reason: str | None, logprobs: list[int] | None = None) -> dict[str, Any]:
    entries = [(-0.1 * token, token, None) for token in (tokens if logprobs is None else logprobs)]
    finish = {"type": reason} if reason else None
    return {"output_ids": tokens, "meta_info": {"output_token_logprobs": entries, "finish_reason": finish}}


SAMPLING = Sampling(0.7, 9, [2], (1 << 63) + 5, "v3")


async def complete(made: SGLang) -> tuple[str, list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []

    def heard(new: list[int], of: list[float]) -> None:
        tokens.extend(new)
        logprobs.extend(of)

    return await made.complete("0-1-0.", [5, 6], SAMPLING, heard), tokens, logprobs


async def test_a_request_and_its_answer():
    manager = Manager([answer([4, 7], None), answer([2], "stop")])
    assert await complete(engine(manager)) == ("stop", [4, 7, 2], pytest.approx([-0.4, -0.7, -0.2]))
    [asked] = manager.asked
    assert (asked.input_ids, asked.rid, asked.extra_key) == ([5, 6], "0-1-0.", "v3")
    assert asked.return_logprob and asked.stream
    sampling = {"max_new_tokens": 9, "temperature": 0.7, "stop_token_ids": [2], "ignore_eos": True}
    assert asked.sampling_params == sampling
    manager = Manager([answer([2], "length")])
    await complete(engine(manager, deterministic=True))
    assert manager.asked[0].sampling_params == sampling | {"sampling_seed": 1 << 30}


async def test_wrong_logprobs_and_dropped_requests():
    with pytest.raises(Refused, match="of 1 tokens for 2 sampled"):
        await complete(engine(Manager([answer([4, 7], None, logprobs=[4])])))
    assert (await complete(engine(Manager([answer([4], None), answer([], "abort")]))))[:2] == ("abort", [4])
    assert (await complete(engine(Manager([], ConnectionAbortedError()))))[0] == "abort"
    manager = Manager([answer([4], None)])
    running = asyncio.create_task(complete(engine(manager)))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert manager.aborted == ["0-1-0."]


def test_the_loader_pulls_into_the_model(tiny_model: Path, tmp_path: Path):
    tensors = load_file(tiny_model / "model.safetensors")
    metas = [(name, "float32", list(tensor.shape)) for name, tensor in tensors.items()]
    where: dict[str, Any] = {"transport": "store", "address": "weights/3", "store": str(tmp_path)}
    sent = publish(iter(tensors.items()), metas, version=3, train_step=3, wire_dtype="float32", **where)
    source = WeightSource(version=3, **where).model_dump_json()
    loaded: dict[str, torch.Tensor] = {}

    class Model:
        def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
            loaded.update({name: tensor.clone() for name, tensor in named})

    expect = {name: [dtype, shape] for name, dtype, shape in metas}
    sglang_worker.load(Model(), sglang_worker.order(source, json.dumps(expect), "10", tmp_path / "said"))
    said = json.loads((tmp_path / "said.0").read_text())
    assert said["served"]["digest"] == sent.digest and loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    wrong = {name: [dtype, [1, *shape]] for name, dtype, shape in metas}
    sglang_worker.load(Model(), sglang_worker.order(source, json.dumps(wrong), "10", tmp_path / "said"))
    said = json.loads((tmp_path / "said.0").read_text())
    assert "error" in said and said["spoiled"] is False


async def test_the_newest_adapter_is_asked_for_and_a_refused_one_changes_nothing():
    manager = Manager([answer([7], "stop")])
    made = engine(manager)
    await complete(made)
    await made.load_adapter("one", 1)
    await made.load_adapter("two", 2)
    with pytest.raises(RuntimeError, match="its rank is 128"):
        await made.load_adapter("bad", 3)
    await complete(made)
    assert [asked.lora_path for asked in manager.asked] == [None, "v2-2"] and manager.adapters == {"v2-2"}
