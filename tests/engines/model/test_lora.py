"""A LoRA policy: nothing but the adapter is trained, and the packed forward is that of PEFT's own model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from headrace.blocks.manifest import Manifest
from headrace.blocks.recipe import Lora
from headrace.engines.experience.store import Store
from headrace.engines.folder import parameter_shapes
from headrace.engines.lora import adapter_of, adapter_shapes
from headrace.engines.model.errors import BadState
from headrace.engines.model.fsdp2 import FSDP2Engine
from headrace.engines.model.gang import Gang
from headrace.engines.model.jobs import Jobs
from headrace.engines.model.step import backward
from headrace.tasks.recovery import SyncMismatch, record_version
from tests.engines.model.conftest import RunGang
from tests.engines.model.experience import random_experience, random_samples
from tests.engines.model.test_engine import config, engine_of, plain, plain_logprobs

LORA = {"rank": 4, "alpha": 8}


def adapted(folder: Path, gang: Gang, **spec: object) -> FSDP2Engine:
    return engine_of(folder, gang, **({"lora": LORA} | spec))


def peft_of(folder: Path, adapter: Path, trainable: bool = False) -> PeftModel:
    return PeftModel.from_pretrained(plain(folder), adapter, is_trainable=trainable)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_adapter_changes_no_bit(tiny_model: Path, gang: Gang, dtype: str) -> None:
    samples = random_samples()
    base, engine = engine_of(tiny_model, gang, dtype=dtype), adapted(tiny_model, gang, dtype=dtype)
    assert torch.equal(engine.logprobs(samples, "policy"), base.logprobs(samples, "policy"))
    values = dict(engine.named_tensors())
    assert all(not tensor.any() if "lora_B" in name else tensor.any() for name, tensor in values.items())
    again = adapted(tiny_model, gang, dtype=dtype)
    assert all(torch.equal(tensor, values[name]) for name, tensor in again.named_tensors())
    other = adapted(tiny_model, gang, dtype=dtype, seed=1)
    assert any(not torch.equal(tensor, values[name]) for name, tensor in other.named_tensors())


def export(engine: FSDP2Engine, folder: Path) -> None:
    where = {"transport": "store", "store": str(folder.parent), "address": folder.name, "deadline_s": 20}
    Jobs(engine).run("publish", where | {"version": 1, "step": engine.train_step})


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_after_steps_it_is_the_model_with_the_adapter_merged_in(
    make_model: Any, gang: Gang, tmp_path: Path, family: str
) -> None:
    folder = make_model(family, **({"sliding_window": None} if family == "mistral" else {}))
    engine = adapted(folder, gang, temperature=0.7)
    for seed in range(3):
        engine.train(random_experience(random_samples(seed=seed), seed=seed), config())
    export(engine, tmp_path / "adapter")
    merged = peft_of(folder, tmp_path / "adapter").merge_and_unload()  # pyright: ignore[reportCallIssue]
    samples = random_samples(seed=9)
    with torch.no_grad():
        expected, before = (plain_logprobs(m, samples, temperature=0.7) for m in (merged, plain(folder)))
    assert (expected - before).abs().mean() > 0.01
    torch.testing.assert_close(engine.logprobs(samples, "policy"), expected, rtol=1e-4, atol=1e-4)
    state = tmp_path / "state"
    engine.save(state, cursor=0)
    engine.settle()
    for budget in (1, 24, 4096):
        other = adapted(folder, gang, temperature=0.7, tokens_per_microbatch=budget)
        other.load(state)
        torch.testing.assert_close(other.logprobs(samples, "policy"), expected, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_pefts_model_sample_by_sample(tiny_model: Path, gang: Gang, tmp_path: Path) -> None:
    engine = adapted(tiny_model, gang, tokens_per_microbatch=24)
    engine.train(random_experience(random_samples(seed=1), seed=1), config())  # so that B is not zero
    export(engine, tmp_path / "adapter")
    model = peft_of(tiny_model, tmp_path / "adapter", trainable=True)
    experience = random_experience(random_samples())
    new = plain_logprobs(model, experience.samples)  # pyright: ignore[reportArgumentType]
    sample = torch.arange(len(experience.samples)).repeat_interleave(experience.samples.offsets.diff())
    lengths = torch.zeros(len(experience.samples)).index_add(0, sample, experience.mask.float())
    weights = torch.where(experience.mask, 1 / (lengths[sample].clamp(min=1) * (lengths > 0).sum()), 0.0)
    (-(new - new.detach()).exp() * experience.advantages * weights).sum().backward()
    backward(engine, experience, config(), experience.jagged, experience.jagged.lengths() > 0, check=False)
    expected = {name.replace(".default.", "."): p.grad for name, p in model.named_parameters() if p.requires_grad}
    found = {name: p.grad for name, p in engine.trained().weights.parameters.items()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_only_the_adapter_has_masters_and_moments(tiny_model: Path, gang: Gang) -> None:
    engine = adapted(tiny_model, gang, dtype="bfloat16")
    policy = engine.trained()
    frozen = {name: p.detach().clone() for name, p in policy.weights.module.named_parameters() if not p.requires_grad}
    engine.train(random_experience(random_samples()), config())
    assert engine.adapter is not None
    shapes = adapter_shapes(parameter_shapes(tiny_model), 4, engine.adapter.target_modules)
    assert {name: shape for name, _, shape in engine.metas()} == shapes
    assert {name: list(p.shape) for name, p in policy.weights.parameters.items()} == shapes
    assert all(p.dtype == torch.float32 for p in policy.weights.parameters.values())
    assert len(policy.optimizer.state) == len(shapes)
    now = {name: p for name, p in policy.weights.module.named_parameters() if not p.requires_grad}
    assert len(frozen) == 20 and all(p.dtype == torch.bfloat16 and p.grad is None for p in now.values())
    assert all(torch.equal(p, frozen[name]) for name, p in now.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_base(tiny_model: Path, gang: Gang, dtype: str) -> None:
    engine, samples = adapted(tiny_model, gang, dtype=dtype, reference=True), random_samples()
    assert engine.reference is None, "no second copy"
    before = engine_of(tiny_model, gang, dtype=dtype).logprobs(samples, "policy")
    assert torch.equal(engine.logprobs(samples, "reference"), before)
    engine.train(random_experience(samples), config())
    after = engine.logprobs(samples, "policy")
    assert not torch.equal(after, before)
    assert torch.equal(engine.logprobs(samples, "reference"), before)
    assert torch.equal(engine.logprobs(samples, "policy"), after)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_probe_shows_although_the_adapter_is_new(tiny_model: Path, gang: Gang, dtype: str) -> None:
    engine, samples = adapted(tiny_model, gang, dtype=dtype), random_samples()
    masters = {name: p.detach().clone() for name, p in engine.trained().weights.parameters.items()}
    own = engine.logprobs(samples, "policy")
    engine.probe(True)
    assert (engine.logprobs(samples, "policy") - own).abs().mean() > 0.05
    engine.probe(False)
    assert all(torch.equal(p.detach(), masters[name]) for name, p in engine.trained().weights.parameters.items())
    assert torch.equal(engine.logprobs(samples, "policy"), own)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_two_ranks_train_as_one(run_gang: RunGang, tiny_model: Path, tmp_path: Path) -> None:
    results = []
    for ranks in (1, 2):
        out = str(tmp_path / f"ranks-{ranks}")
        actions = [("reference", 9), ("train", 0), ("train", 1), ("logprobs", 9), ("reference", 9), ("train", 2)]
        spec = {"model": str(tiny_model), "dtype": "float32", "tokens_per_microbatch": 48, "lora": LORA}
        results.append(run_gang([*actions, ("export", out)], ranks=ranks, reference=True, **spec))
    one, two = results
    for place in (1, 2, 5):
        assert two[place] == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in one[place].items()}
    assert two[3] == pytest.approx(one[3], abs=1e-4)
    assert two[0] == two[4] == pytest.approx(one[0], abs=1e-4)
    others = weights(tmp_path / "ranks-2")
    for name, tensor in weights(tmp_path / "ranks-1").items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_process_continues_bit_for_bit(run_gang: RunGang, tiny_model: Path, tmp_path: Path, ranks: int) -> None:
    spec = {"model": str(tiny_model), "dtype": "bfloat16", "tokens_per_microbatch": 48, "lora": LORA, "ranks": ranks}
    state = str(tmp_path / "state")
    whole = [("train", 0), ("save", state), ("train", 1), ("train", 2), ("export", str(tmp_path / "whole"))]
    first = run_gang(whole, **spec)
    rest = [("load", state), ("train", 1), ("train", 2), ("export", str(tmp_path / "resumed"))]
    cursor, *second = run_gang(rest, **spec)
    assert cursor == 11
    assert second == first[1:]
    resumed = weights(tmp_path / "resumed")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights(tmp_path / "whole").items())
    kept = FileSystemReader(state).read_metadata().state_dict_metadata
    adapter = {f"model.{name}" for name in resumed}
    assert {name for name in kept if name.startswith("model.")} == adapter, "the base is in the state"


def test_state_of_another_adapter_or_base_is_refused(make_model: Any, tiny_model: Path, tmp_path: Path, gang) -> None:
    state = tmp_path / "state"
    engine = adapted(tiny_model, gang)
    engine.save(state, 3)
    engine.settle()
    for other in (
        adapted(tiny_model, gang, lora={"rank": 2}),
        adapted(tiny_model, gang, lora=LORA | {"alpha": 16}),
        adapted(make_model(seed=8), gang),
        engine_of(tiny_model, gang),
    ):
        with pytest.raises(BadState, match="another"):
            other.load(state)
        assert other.train_step == 0
    assert adapted(tiny_model, gang).load(state) == 3


def test_the_export_loads_into_transformers(tiny_model: Path, tmp_path: Path, gang: Gang) -> None:
    engine = adapted(tiny_model, gang, lora=LORA | {"target_modules": ["v_proj", "up_proj"]})
    engine.train(random_experience(random_samples()), config())
    export(engine, tmp_path / "adapter")
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["target_modules"]) == (4, 8, ["up_proj", "v_proj"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="eager")
    samples = random_samples(seed=9)
    with torch.no_grad():
        found = plain_logprobs(loaded, samples)
    torch.testing.assert_close(engine.logprobs(samples, "policy"), found, rtol=1e-4, atol=1e-4)


def test_an_adapter_that_stayed_although_the_optimizer_stepped_is_seen(
    tiny_model: Path, tmp_path: Path, gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the trainer goes on sending what it computed with before the step."""
    store, folder = Store(str(tmp_path)), tmp_path

    def keep(engine: FSDP2Engine, version: int) -> dict[str, Any]:
        where = {"transport": "store", "store": str(folder), "address": f"weights/v{version}", "deadline_s": 20}
        return Jobs(engine).run("publish", where | {"version": version})

    def versions(engine: FSDP2Engine) -> None:
        record_version(store, 0, keep(engine, 0), None)
        metrics = engine.train(random_experience(random_samples()), config())
        trained = Manifest(stage="train", step=0, key="k", metrics=metrics)
        record_version(store, 1, keep(engine, 1), trained)

    forgetful = adapted(tiny_model, gang, dtype="bfloat16")
    monkeypatch.setattr(forgetful.trained().weights, "masters_changed", lambda: None)
    with pytest.raises(SyncMismatch, match="version 1 has the same bits as version 0"):
        versions(forgetful)
    store, folder = Store(str(tmp_path / "healthy")), tmp_path / "healthy"
    versions(adapted(tiny_model, gang, dtype="bfloat16"))


def test_what_both_sides_derive_from_the_folder(tiny_model: Path) -> None:
    adapter = adapter_of(tiny_model, Lora.model_validate({"rank": 2, "target_modules": ["q_proj"]}))
    assert (adapter.rank, adapter.alpha, adapter.target_modules) == (2, 32, ("q_proj",))
    assert adapter_shapes(parameter_shapes(tiny_model), 2, ["q_proj"]) == {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{matrix}.weight": shape
        for layer in (0, 1)
        for matrix, shape in (("A", [2, 64]), ("B", [64, 2]))
    }
    for name in ("lm_head", "embed_tokens", "norm", "query"):
        with pytest.raises(ValueError, match=f"no linear layer is called {name}; this model has down_proj, gate_proj"):
            adapter_of(tiny_model, Lora.model_validate({"rank": 2, "target_modules": ["q_proj", name]}))
