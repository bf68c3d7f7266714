"""The gate against real vLLM that is broken on purpose, one fault at a time: each is found, and told from the others.

The trainer and vLLM compute in float32 here, where healthy engines differ by rounding alone; the head's fault is one of
bfloat16.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.blocks.recipe import VLLMRollout
from headrace.engines.model.spec import EngineSpec
from headrace.engines.rollout.spec import RolloutSpec
from tests.conftest import MakeModel
from tests.engines.parity.engines import Engines, Found, broken

PYTHON = os.environ.get("HEADRACE_VLLM_PYTHON", "")
TEMPERATURE = 0.7
# One block of vLLM's prefix cache on CPUs is 128 tokens; the tiny model's tokens are bytes.
LONG = "Here is a sentence that all the prompts have in common, so that more than one block of its cache is full. " * 2
PROMPTS = [LONG + f"What is {a} plus {a + 3}?" for a in range(4)]

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="HEADRACE_VLLM_PYTHON is not set"),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> Path:
    """vLLM's CPU attention needs heads of at least 32."""
    return make_model(head_dim=32, tie_word_embeddings=True)


async def measured(
    folder: Path, model: Path, *, fault: str = "", dtype: str = "float32", heads: str = "model", **backend: Any
) -> tuple[Found, Found, Found]:
    """(changed, own, before). ``heads``: the trainer's; vLLM keeps the model's dtype unless it is named."""
    python = broken(PYTHON, fault, folder) if fault else PYTHON
    rollout_head, lora = backend.pop("rollout_head", "model"), backend.pop("lora", None)
    vllm = {"kind": "vllm", "max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 100_000_000, **backend}
    common = {"model": str(model), "dtype": dtype, "lora": lora}
    actor = EngineSpec.model_validate(common | {"head_dtype": heads, "temperature": TEMPERATURE})
    rollout = RolloutSpec.model_validate(
        common | {"head_dtype": rollout_head, "python": python, "backend": VLLMRollout.model_validate(vllm)}
    )
    async with Engines(folder, PROMPTS, n=4, temperature=TEMPERATURE, max_tokens=16) as engines:
        await engines.start(actor, rollout)
        changed, own, before = await engines.rounds()
    return changed, own, before


async def test_healthy_with_a_prefix_cache(model: Path, tmp_path: Path):
    """Without one: see the last test, with float32 heads on both sides."""
    changed, own, before = await measured(tmp_path, model, enable_prefix_caching=True)
    assert not changed.excesses("float32") and not own.excesses("float32")
    assert max(changed["mismatch/max_abs_log_ratio"], own["mismatch/max_abs_log_ratio"]) < 1e-3
    assert before["mismatch/kl_k3"] > 0.1, "the probe must move the distributions far beyond every bound"


async def test_a_raw_log_probabilities(model: Path, tmp_path: Path):
    changed, own, _ = await measured(tmp_path, model, logprobs_mode="raw_logprobs")
    assert {"kl_k1", "kl_k3", "ess"} <= {e.name for e in changed.excesses("bfloat16")}
    assert own["mismatch/kl_k3"] > 0.05


async def test_b_a_prefix_cache_that_survives_a_weight_update(model: Path, tmp_path: Path):
    changed, own, _ = await measured(tmp_path, model, fault="lasting prefix cache", enable_prefix_caching=True)
    assert not changed.excesses("float32"), "nothing was cached before the first update"
    assert {"kl_k3", "max_abs_log_ratio"} <= {e.name for e in own.excesses("bfloat16")}


async def test_c_an_update_that_loads_nothing(model: Path, tmp_path: Path):
    changed, own, before = await measured(tmp_path, model, fault="silent load")
    assert "kl_k3" in {e.name for e in changed.excesses("bfloat16")}
    assert not own.excesses("float32"), "the weights of the folder are the campaign's: the second round sees nothing"
    assert not before.excesses("float32"), "the tokens fit the weights before the update"


async def test_c_an_update_that_misses_the_tied_head(model: Path, tmp_path: Path):
    changed, _, before = await measured(tmp_path, model, fault="stale head")
    assert changed.excesses("bfloat16") and before.excesses("bfloat16")


async def test_d_a_bfloat16_head_against_a_float32_one(model: Path, tmp_path: Path):
    (tmp_path / "one").mkdir()
    changed, own, _ = await measured(tmp_path / "one", model, dtype="bfloat16", heads="float32")
    for found in (changed, own):
        assert [str(e).partition(":")[0] for e in found.excesses("bfloat16", "float32")] == ["rollout head"]
    (tmp_path / "both").mkdir()
    given = {"dtype": "bfloat16", "heads": "float32", "rollout_head": "float32"}
    changed, own, _ = await measured(tmp_path / "both", model, **given)
    assert not changed.excesses("bfloat16", "float32") and not own.excesses("bfloat16", "float32")
    assert max(changed["behaviour/bfloat16_share"], own["behaviour/bfloat16_share"]) < 0.3


async def test_e_the_base_instead_of_the_adapter(model: Path, tmp_path: Path):
    """A new adapter changes nothing, so only the round with changed weights can see it, and by far."""
    (tmp_path / "healthy").mkdir()
    lora = {"lora": {"rank": 4, "alpha": 8}, "dtype": "bfloat16"}
    changed, own, before = await measured(tmp_path / "healthy", model, **lora)
    assert not changed.excesses("bfloat16") and not own.excesses("bfloat16")
    assert before["mismatch/kl_k3"] > 0.1
    (tmp_path / "broken").mkdir()
    changed, own, before = await measured(tmp_path / "broken", model, fault="base instead of the adapter", **lora)
    assert "kl_k3" in {e.name for e in changed.excesses("bfloat16")}
    assert not own.excesses("bfloat16") and not before.excesses("bfloat16")
