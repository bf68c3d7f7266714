"""Blockwise FP8 in vLLM, for real: started without weights, loaded by version, the bits that vLLM itself would make."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.blocks.fp8 import quantised
from headrace.blocks.recipe import VLLMRollout
from headrace.blocks.weights import Quantization, WeightManifest, WeightSource
from headrace.engines.checkpoint import WeightError, publish
from headrace.engines.checkpoint.fp8 import from_blocks, to_blocks
from headrace.engines.rollout.base import Request, Sampling
from headrace.engines.rollout.errors import NotServing
from headrace.engines.rollout.spec import RolloutSpec
from headrace.engines.rollout.vllm import VLLMEngine
from tests.engines.rollout.vllm_cases import PYTHON, REAL_VLLM

pytestmark = REAL_VLLM
PROMPT = [1, 50, 60, 70]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class PlainVLLM(VLLMEngine):
    """Computes blockwise FP8 layers without AMX."""

    in_place = "0"

    async def open(self) -> None:
        program = (str(Path(__file__).with_name("fp8_vllm.py")),)
        env = {**self.launch.env, "HEADRACE_TEST_SERVED": str(self._log_dir)}
        env["HEADRACE_TEST_IN_PLACE"] = self.in_place
        self.launch = replace(self.launch, program=program, env=env)
        await super().open()


class InPlace(PlainVLLM):
    in_place = "1"


@pytest.fixture(scope="module")
def models(make_model: Callable[..., Path]) -> tuple[Path, Path]:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 64, "attention_bias": True}
    return make_model(seed=1, initializer_range=0.1, **sizes), make_model(seed=2, initializer_range=0.1, **sizes)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module", params=[PlainVLLM, InPlace])
async def engine(request: pytest.FixtureRequest, models: tuple[Path, Path], served: Path) -> AsyncIterator[VLLMEngine]:
    recipe = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 100_000_000, "quantization": "fp8"}
    backend = VLLMRollout.model_validate(recipe | {"openai_port": 0})
    spec = RolloutSpec(model=str(models[0]), dtype="bfloat16", gpus=0, threads=1, python=PYTHON, backend=backend)
    engine = await request.param.start(spec, served, door_key="secret")
    yield engine
    await engine.close()


async def test_nothing_is_sampled_before_the_first_version(engine: VLLMEngine, models: tuple[Path, Path], tmp_path):
    with pytest.raises(NotServing, match="have not come yet"):
        await sample(engine)
    asked = {"model": "policy", "prompt": PROMPT, "max_tokens": 4}
    headers = {"authorization": "Bearer secret"}
    async with httpx.AsyncClient(base_url=engine.door, headers=headers, timeout=30) as door:
        answering = asyncio.create_task(door.post("/v1/completions", json=asked))
        done, _ = await asyncio.wait([answering], timeout=1.0)
        assert not done
        with pytest.raises(WeightError, match=r"down_proj\.weight_scale_inv is missing"):
            await engine.load_weights(published(models[0], tmp_path, 0, None), deadline_s=20)
        done, _ = await asyncio.wait([answering], timeout=1.0)
        assert not done
        await engine.load_weights(published(models[0], tmp_path, 1), deadline_s=20)
        assert (await answering).json()["usage"]["completion_tokens"] == 4


async def test_every_version_is_served_as_it_was_sent(engine: VLLMEngine, models: tuple[Path, Path], served, tmp_path):
    for version, model in ((2, models[1]), (3, models[0])):
        for file in served.glob("*.pt"):
            file.unlink()
        told = await engine.load_weights(published(model, tmp_path, version), deadline_s=20)
        assert told == await engine.served() and told.version == version
        tokens, logprobs = await sample(engine)
        apart = mean_apart(model, tokens, logprobs)
        assert apart < 0.02 and 3 * apart < mean_apart(model, tokens, logprobs, dequantised=False)
        check_bits(model, served)


async def test_weights_come_through_shared_memory(engine: VLLMEngine, models: tuple[Path, Path], tmp_path: Path):
    address = str(tmp_path / "weights.sock")
    source = WeightSource(version=4, transport="shm", address=address)
    sending = asyncio.create_task(asyncio.to_thread(send, models[1], 4, transport="shm", address=address))
    served = await engine.load_weights(source, deadline_s=20)
    manifest = await sending
    assert served.digest == manifest.digest
    whole = sum(2 * tensor.numel() for tensor in load_file(models[1] / "model.safetensors").values())
    assert manifest.plan.nbytes < 0.65 * whole
    tokens, logprobs = await sample(engine)
    assert mean_apart(models[1], tokens, logprobs) < 0.02


CAST = """
import sys, torch
from vllm.utils.deep_gemm import per_block_cast_to_fp8
weights = torch.load(sys.argv[1])
made = [per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False) for weight in weights]
torch.save([(values.view(torch.uint8), scales) for values, scales in made], sys.argv[2])
"""


def test_the_bits_are_those_of_vllms_own_conversion(tmp_path: Path):
    draw = torch.Generator().manual_seed(7)
    weights = []
    for rows, columns in ((128, 128), (256, 384), (130, 257), (1, 1), (576, 200)):
        sizes = torch.randint(-12, 6, (rows, 1), generator=draw).float().exp2()
        weights.append((torch.randn(rows, columns, generator=draw) * sizes).bfloat16())
    weights[1][:128, 128:256] = 0
    torch.save(weights, tmp_path / "weights.pt")
    command = [PYTHON, "-c", CAST, str(tmp_path / "weights.pt"), str(tmp_path / "made.pt")]
    subprocess.run(command, check=True, capture_output=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for weight, (values, scales) in zip(weights, torch.load(tmp_path / "made.pt"), strict=True):
        ours, our_scales = to_blocks(weight)
        assert torch.equal(ours.view(torch.uint8), values) and torch.equal(our_scales, scales)


def bits(model: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """(values, scales) of each quantised weight of a folder."""
    tensors = load_file(model / "model.safetensors")
    return {name: to_blocks(tensor) for name, tensor in tensors.items() if quantised(name, tensor.shape)}


def check_bits(model: Path, served: Path) -> None:
    """What the layers computed with is what ours makes of the folder, joined as vLLM joins it."""
    made = bits(model)
    files = list(served.glob("*.pt"))
    for file in files:
        path, _, layer = file.stem.rpartition(".")
        parts = [made.pop(f"{path}.{part}.weight") for part in FUSED.get(layer, (layer,))]
        for held, wanted in zip(torch.load(file), map(torch.cat, zip(*parts, strict=True)), strict=True):
            assert torch.equal(held.view(torch.uint8), wanted.view(torch.uint8))
    assert files and not made


async def sample(engine: VLLMEngine) -> tuple[list[int], list[float]]:
    request = Request(0, PROMPT, [9], Sampling(1.0, 32, ()))
    [group] = [group async for group in engine.generate([request])]
    [made] = group.completions
    return made.token_ids, made.logprobs


def mean_apart(model: Path, tokens: list[int], logprobs: list[float], dequantised: bool = True) -> float:
    """Between these log-probabilities and those of transformers in float32, which leave only bfloat16's rounding."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if dequantised:
        parameters = dict(reference.named_parameters())
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.copy_(parameter.bfloat16())
            for name, pair in bits(model).items():
                parameters[name].copy_(from_blocks(*pair))
    with torch.inference_mode():
        logits = reference(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((torch.tensor(logprobs) - wanted).abs().mean())


def published(model: Path, store: Path, version: int, quantization: Quantization | None = "fp8") -> WeightSource:
    where = {"transport": "store", "address": f"weights/{version}", "store": str(store)}
    send(model, version, quantization, **where)
    return WeightSource(version=version, transport="store", address=f"weights/{version}", store=str(store))


def send(model: Path, version: int, quantization: Quantization | None = "fp8", **where) -> WeightManifest:
    tensors = load_file(model / "model.safetensors")
    return publish(
        iter(tensors.items()),
        [(name, "float32", list(tensor.shape)) for name, tensor in tensors.items()],
        version=version,
        train_step=version,
        partition_bytes=1 << 16,
        quantization=quantization,
        deadline_s=20,
        **where,
    )
