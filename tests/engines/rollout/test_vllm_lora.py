"""LoRA adapters in vLLM, for real: by version, in flight, and only those of this engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headrace.engines.checkpoint import WeightError
from headrace.engines.lora import adapter_of
from headrace.engines.rollout.base import START_VERSION
from headrace.engines.rollout.errors import NotServing
from headrace.engines.rollout.vllm import VLLMEngine
from tests.engines.rollout.vllm_cases import (
    LORA,
    MORE,
    REAL_VLLM,
    collect,
    compare,
    compare_spans,
    keep,
    kept_adapter,
    published,
    requests,
    sampling,
    spec,
)

pytestmark = REAL_VLLM


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def models(make_model: Callable[..., Path]) -> tuple[Path, Path]:
    """vLLM's CPU attention needs heads of at least 32."""
    return make_model(head_dim=32), make_model(head_dim=32, seed=3)


@pytest.fixture
async def adapted(models: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[VLLMEngine]:
    engine = await VLLMEngine.start(spec(models[0]).model_copy(update={"lora": LORA}), tmp_path)
    yield engine
    await engine.close()


async def test_adapters_are_served_by_version(adapted: VLLMEngine, models: tuple[Path, Path], tmp_path: Path):
    """Each against transformers with the adapter's product added to the weights."""
    merged: dict[int, Path] = {}
    compare(await collect(adapted, requests()), models[0], 1.0, START_VERSION)
    for version in (1, 2):
        source, manifest, merged[version] = kept_adapter(models[0], tmp_path, version)
        served = await adapted.load_weights(source, deadline_s=20)
        assert (served.version, served.digest) == (version, manifest.digest) and served == await adapted.served()
        assert served.wire_nbytes == served.nbytes == manifest.plan.nbytes == 2 * 4 * 4 * (64 + 128 + 128 + 64)
        compare(await collect(adapted, requests()), merged[version], 1.0, version)
    # One that comes while samples are under way.
    source, _, merged[3] = kept_adapter(models[0], tmp_path, 3)
    generating = asyncio.create_task(collect(adapted, requests(max_tokens=450, n=MORE)))
    await sampling(adapted, 200)
    await adapted.load_weights(source, deadline_s=20)
    groups = await generating
    assert (2, 3) in {tuple(v for v, _ in c.weight_spans) for cs in groups.values() for c in cs}
    compare_spans(groups, merged)
    folder = adapted.program.folder
    assert len(list(folder.glob("adapter-*"))) == 1, "those that were replaced are deleted"


async def test_what_is_not_this_engines_adapter_is_refused_before_the_first_byte(
    adapted: VLLMEngine, models: tuple[Path, Path], tmp_path: Path
):
    """Planted: the base's weights, another rank, another base; and then tensors that vLLM cannot take."""
    rank, _, _ = kept_adapter(models[0], tmp_path, 2, LORA.model_copy(update={"rank": 8}))
    base, _, _ = kept_adapter(models[1], tmp_path, 3)
    bare = load_file(models[0] / "model.safetensors")
    disguised, _ = keep(bare, tmp_path, 4, adapter=adapter_of(models[0], LORA))
    for wrong, why in (
        (published(models[0], tmp_path, 1), "a whole model was published, but this engine serves a LoRA adapter"),
        (rank, "a LoRA adapter of rank 8.*but this engine serves a LoRA adapter of rank 4"),
        (base, "of base .* but this engine serves"),
        (disguised, "lora_A.weight is missing"),
    ):
        with pytest.raises(WeightError, match=why):
            await adapted.load_weights(wrong, deadline_s=20)
        assert await adapted.served() is None
        with pytest.raises(NotServing, match=f"version {wrong.version}"):
            await collect(adapted, requests())
    good, _, merged = kept_adapter(models[0], tmp_path, 5)
    await adapted.load_weights(good, deadline_s=20)
    compare(await collect(adapted, requests()), merged, 1.0, 5)
