"""The engine on GPUs (flex attention, NCCL) against the engine on a CPU."""

from pathlib import Path

import pytest
import torch

from tests.engines.model.conftest import RunGang

ACTIONS = [("logprobs", 9), *(("train", i) for i in range(3)), ("logprobs", 9), ("logprobs", 8)]


def runs(run_gang: RunGang, model: Path, dtype: str, ranks: int, **more: object) -> tuple[list, list]:
    """Results on the CPU and on ``ranks`` GPUs."""
    spec = {"model": str(model), "dtype": dtype, "tokens_per_microbatch": 100, **more}
    return run_gang(ACTIONS, **spec), run_gang(ACTIONS, ranks=ranks, device="cuda", **spec)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_float32_on_gpus_equals_the_cpu(run_gang: RunGang, tiny_model: Path, ranks: int, lora: object) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    cpu, gpu = runs(run_gang, tiny_model, "float32", ranks, lora=lora)
    for place in (0, 4, 5):
        assert gpu[place] == pytest.approx(cpu[place], abs=2e-3), f"result {place}"
    for one, two in zip(cpu[1:4], gpu[1:4], strict=True):
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=5e-3)
        assert two["policy/loss"] == pytest.approx(one["policy/loss"], abs=1e-3)
        assert two["updates/done"] == 1


@pytest.mark.parametrize("heads", [4, 6])
def test_bfloat16_on_a_gpu_is_near_the_cpu(run_gang: RunGang, make_model, heads: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model = make_model(hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=2)
    cpu, gpu = runs(run_gang, model, "bfloat16", 1)
    gap = torch.tensor(cpu[0]) - torch.tensor(gpu[0])
    assert gap.abs().mean() < 0.05
    assert gpu[1]["grad_norm"] == pytest.approx(cpu[1]["grad_norm"], rel=0.1)
