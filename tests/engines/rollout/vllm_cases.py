"""What the tests of real vLLM share: engines of small models, requests, and answers compared with transformers."""

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headrace.blocks.recipe import Lora, VLLMRollout
from headrace.blocks.weights import Adapter, WeightManifest, WeightSource
from headrace.engines.checkpoint import publish
from headrace.engines.folder import parameter_shapes
from headrace.engines.lora import adapter_of, adapter_shapes
from headrace.engines.rollout.base import Completion, Request, Sampling
from headrace.engines.rollout.counter import sample_seed
from headrace.engines.rollout.hosted import HostedEngine
from headrace.engines.rollout.spec import RolloutSpec

PYTHON = os.environ.get("HEADRACE_VLLM_PYTHON", "")
MORE = 16
"""Samples of each of three groups: more than the engine gets at once, so that some are left however fast it is."""
KILLED = 256
"""The same where the engine is killed on the way: half a minute of work. The first news may come seconds late."""


def spec(model: Path, max_model_len: int = 512, **changes: Any) -> RolloutSpec:
    small = {"kind": "vllm", "max_model_len": max_model_len, "max_num_seqs": 16, "kv_cache_memory_bytes": 100_000_000}
    backend = VLLMRollout.model_validate(small | changes)
    return RolloutSpec(model=str(model), dtype="float32", gpus=0, threads=1, python=PYTHON, backend=backend)


REAL_VLLM = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="HEADRACE_VLLM_PYTHON is not set"),
]

LORA = Lora(rank=4, alpha=8, target_modules=["q_proj", "down_proj"])


def kept_adapter(
    model: Path, folder: Path, version: int, lora: Lora = LORA, **changes: Any
) -> tuple[WeightSource, WeightManifest, Path]:
    """A random LoRA adapter of ``model``, published into the store ``folder``; and the model with it merged in.

    changes: what its manifest says of it beside the truth.
    """
    draw = torch.Generator().manual_seed(version)
    about = adapter_of(model, lora).model_copy(update=changes)
    weights = load_file(model / "model.safetensors")
    shapes = adapter_shapes(parameter_shapes(model), lora.rank, about.target_modules)
    adapter = {name: torch.randn(shape, generator=draw) / 8 for name, shape in shapes.items()}
    for name, a in adapter.items():
        if ".lora_A." in name:
            layer = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            weights[layer] = weights[layer] + lora.alpha / lora.rank * adapter[name.replace(".lora_A.", ".lora_B.")] @ a
    merged = folder / f"merged-{version}"
    shutil.copytree(model, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return *keep(adapter, folder, version, adapter=about), merged


def requests(temperature: float = 1.0, max_tokens: int = 16, n: int = 4, stop: tuple[int, ...] = ()) -> list[Request]:
    sampling = Sampling(temperature, max_tokens, stop)
    return [Request(g, [1, 50 + g, 60], [sample_seed(0, g, s) for s in range(n)], sampling) for g in range(3)]


async def sampling(engine: HostedEngine, tokens: int) -> None:
    """Returns when the engine has sampled so many tokens from now on."""
    before = (await engine.metrics())["tokens"]
    async with asyncio.timeout(20):
        while (await engine.metrics())["tokens"] < before + tokens:
            await asyncio.sleep(0.005)


async def collect(engine: HostedEngine, wanted: Sequence[Request]) -> dict[int, list[Completion]]:
    return {group.group: group.completions async for group in engine.generate(wanted)}


def compare(
    groups: dict[int, list[Completion]], model: Path, temperature: float, version: int, before: Sequence[int] = ()
) -> None:
    """Every log-probability against a forward of transformers. before: what the prompts begin with."""
    assert all(c.weight_spans == [(version, len(c.token_ids))] for cs in groups.values() for c in cs)
    compare_spans(groups, {version: model}, before, temperature)


def compare_spans(
    groups: dict[int, list[Completion]], models: dict[int, Path], before: Sequence[int] = (), temperature: float = 1.0
) -> None:
    """Every log-probability against a forward of the model of its weight version."""
    references = {v: AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32) for v, m in models.items()}
    for group, completions in groups.items():
        prompt = [*before, 1, 50 + group, 60]
        for c in completions:
            ids = torch.tensor([[*prompt, *c.token_ids]])
            at = 0
            for version, count in c.weight_spans:
                with torch.inference_mode():
                    expected = torch.log_softmax(
                        references[version](ids).logits[0, len(prompt) - 1 : -1] / temperature, -1
                    )
                expected = expected.gather(1, torch.tensor(c.token_ids)[:, None])[at : at + count, 0]
                said = torch.tensor(c.logprobs[at : at + count])
                torch.testing.assert_close(said, expected, atol=1e-4, rtol=0)
                at += count
            assert at == len(c.token_ids)


def published(model: Path, store: Path, version: int) -> WeightSource:
    return keep(load_file(model / "model.safetensors"), store, version)[0]


def send(model: Path, version: int, **where: Any) -> WeightManifest:
    return send_tensors(load_file(model / "model.safetensors"), version, **where)


def keep(
    tensors: dict[str, torch.Tensor], store: Path, version: int, adapter: Adapter | None = None
) -> tuple[WeightSource, WeightManifest]:
    """Publishes into a store."""
    source = WeightSource(version=version, transport="store", address=f"weights/{version}", store=str(store))
    where = source.model_dump(include={"transport", "address", "store"})
    return source, send_tensors(tensors, version, adapter=adapter, **where)


def send_tensors(tensors: dict[str, torch.Tensor], version: int, **where: Any) -> WeightManifest:
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
