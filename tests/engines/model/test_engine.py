"""The engine on one rank against plain transformers, sample by sample."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.algorithms.batch import Jagged
from headrace.blocks.algorithms import Algorithm
from headrace.blocks.recipe import Optim
from headrace.engines.model.base import Samples, StepConfig
from headrace.engines.model.errors import BadBatch, ModelEngineError, OffPolicy, UnsupportedModel
from headrace.engines.model.fsdp2 import FSDP2Engine
from headrace.engines.model.gang import Gang
from headrace.engines.model.spec import EngineSpec
from headrace.engines.model.step import backward
from tests.engines.model.experience import random_experience, random_samples

MakeModel = Callable[..., Path]


def engine_of(folder: Path, gang: Gang, **spec: object) -> FSDP2Engine:
    settings = {"dtype": "float32", "tokens_per_microbatch": 64} | spec
    return FSDP2Engine(EngineSpec(model=str(folder), **settings), gang)  # type: ignore[arg-type]


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def plain_logprobs(model: PreTrainedModel, samples: Samples, temperature: float = 1.0) -> Tensor:
    """Each sample on its own, prompt and all."""
    found = []
    for i in range(len(samples)):
        prompt = samples.prompt_ids[samples.prompt_offsets[i] : samples.prompt_offsets[i + 1]]
        response = samples.response_ids[samples.offsets[i] : samples.offsets[i + 1]]
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0].float() / temperature
        logits = logits[len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1))
    return torch.cat(found)


def config(**changes: object) -> StepConfig:
    return replace(
        StepConfig(Algorithm.model_validate({}), Optim.model_validate({"lr": 1e-3}), total_steps=4), **changes
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logprobs_equal_a_plain_forward_of_each_sample(make_model: MakeModel, gang: Gang, family: str) -> None:
    folder = make_model(family, **({"sliding_window": None} if family == "mistral" else {}))
    samples = random_samples()
    with torch.no_grad():
        expected = plain_logprobs(plain(folder), samples, temperature=0.7)
    for budget in (1, 24, 64, 4096):
        found = engine_of(folder, gang, tokens_per_microbatch=budget, temperature=0.7).logprobs(samples, "policy")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_untied_head_and_float32_head(make_model: MakeModel, gang: Gang) -> None:
    folder = make_model(tie_word_embeddings=False, seed=3)
    samples = random_samples(seed=3)
    with torch.no_grad():
        expected = plain_logprobs(plain(folder), samples)
        torch.testing.assert_close(engine_of(folder, gang).logprobs(samples, "policy"), expected, rtol=1e-5, atol=1e-5)
        low = plain(folder, torch.bfloat16)
        low.lm_head.float()
        hooked = low.lm_head.register_forward_pre_hook(lambda _, given: (given[0].float(),))
        exact_head = plain_logprobs(low, samples)
        hooked.remove()
    found = engine_of(folder, gang, dtype="bfloat16", head_dtype="float32").logprobs(samples, "policy")
    assert (found - exact_head).abs().mean() < 0.02


def test_gradients_equal_those_of_each_sample_on_its_own(tiny_model: Path, gang: Gang) -> None:
    experience = random_experience(random_samples())
    model = plain(tiny_model)
    new = plain_logprobs(model, experience.samples)
    tokens = experience.mask
    sample = torch.arange(len(experience.samples)).repeat_interleave(experience.samples.offsets.diff())
    lengths = torch.zeros(len(experience.samples)).index_add(0, sample, tokens.float())
    weights = torch.where(tokens, 1 / (lengths[sample].clamp(min=1) * (lengths > 0).sum()), 0.0)
    (-(new - new.detach()).exp() * experience.advantages * weights).sum().backward()
    engine = engine_of(tiny_model, gang, tokens_per_microbatch=24)
    useful = experience.jagged.lengths() > 0
    backward(engine, experience, config(), experience.jagged, useful, check=False)
    assert engine.policy is not None
    for name, parameter in model.named_parameters():
        found = engine.policy.weights.parameters[name].grad
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_the_step_does_not_depend_on_the_token_budget(tiny_model: Path, gang: Gang) -> None:
    runs = []
    for budget in (1, 30, 4096):
        engine = engine_of(tiny_model, gang, tokens_per_microbatch=budget)
        metrics = [engine.train(random_experience(random_samples(seed=i), seed=i), config()) for i in range(3)]
        runs.append((metrics, dict(engine.named_tensors())))
    for metrics, weights in runs[1:]:
        for found, expected in zip(metrics, runs[0][0], strict=True):
            for name in expected.keys() - {"seconds"}:
                assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, runs[0][1][name], rtol=1e-4, atol=2e-5)


def test_recomputed_attention_gives_the_same_gradients(
    tiny_model: Path, gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    experience = random_experience(random_samples())
    norms = []
    for limit in (0, 1 << 30):
        monkeypatch.setattr("headrace.engines.model.attention.RECOMPUTE_SCORES", limit)
        norms.append(engine_of(tiny_model, gang).train(experience, config())["grad_norm"])
    assert norms[0] == norms[1]


def test_samples_without_effect_are_not_computed_and_change_nothing(tiny_model: Path, gang: Gang) -> None:
    experience = random_experience(random_samples(), rejected=0.0)
    lengths = experience.samples.offsets.diff()
    dull = torch.arange(len(experience.samples)) < 8
    experience = replace(experience, advantages=experience.advantages.masked_fill(dull.repeat_interleave(lengths), 0.0))
    with_entropy = config(algorithm=Algorithm.model_validate({"entropy_coefficient": 1e-30}))
    lean, full = engine_of(tiny_model, gang), engine_of(tiny_model, gang)
    a, b = lean.train(experience, config()), full.train(experience, with_entropy)
    assert (a["samples_computed"], b["samples_computed"]) == (8, 16)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    nothing = lean.train(replace(experience, advantages=torch.zeros_like(experience.advantages)), config())
    assert nothing["updates/done"] == 0 and nothing["samples_computed"] == 0
    assert lean.train_step == 2


def test_minibatches_step_once_each_and_check_the_ratio_first(tiny_model: Path, gang: Gang) -> None:
    engine = engine_of(tiny_model, gang)
    experience = random_experience(random_samples(), rejected=0.0)
    old = engine.logprobs(experience.samples, "policy")
    assert engine_of(tiny_model, gang).train(experience, config(minibatches=2))["updates/done"] == 2
    metrics = engine.train(replace(experience, old=old), config(minibatches=2, on_policy_bound=1e-4))
    assert metrics["updates/done"] == 2
    assert metrics["ratio/max"] > 1.001, "the second minibatch is off-policy"
    with pytest.raises(OffPolicy, match="first minibatch"):
        engine.train(replace(experience, old=old - 0.5), config(minibatches=2))
    assert engine.train_step is None
    with pytest.raises(ModelEngineError, match="half-way"):
        engine.train(experience, config())
    engine.load(None)
    assert torch.equal(engine.logprobs(experience.samples, "policy"), old)


def test_on_policy_means_ratio_one(tiny_model: Path, gang: Gang) -> None:
    metrics = engine_of(tiny_model, gang).train(random_experience(random_samples()), config())
    assert metrics["ratio/mean"] == 1.0 and metrics["ratio/max"] == 1.0 and metrics["policy/kl_k3"] == 0.0
    assert metrics["mismatch/kl_k3"] > 0


def test_a_gradient_that_is_not_finite_skips_the_update(tiny_model: Path, gang: Gang) -> None:
    engine = engine_of(tiny_model, gang)
    experience = random_experience(random_samples())
    before = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    huge = replace(experience, advantages=torch.full_like(experience.advantages, 3e38))
    metrics = engine.train(huge, config())
    assert (metrics["updates/done"], metrics["updates/skipped"]) == (0, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_tensors())
    after = engine.train(experience, config())
    assert after["updates/done"] == 1 and after["grad_norm"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_stays_what_the_policy_began_as(tiny_model: Path, gang: Gang, dtype: str) -> None:
    engine = engine_of(tiny_model, gang, reference=True, dtype=dtype)
    samples = random_samples()
    before = engine.logprobs(samples, "reference")
    assert torch.equal(before, engine.logprobs(samples, "policy"))
    engine.train(random_experience(samples), config())
    assert torch.equal(before, engine.logprobs(samples, "reference"))
    assert not torch.equal(before, engine.logprobs(samples, "policy"))
    alone = engine_of(tiny_model, gang, reference=True, policy=False, dtype=dtype)
    assert torch.equal(before, alone.logprobs(samples, "reference"))
    with pytest.raises(ModelEngineError, match="reference model only"):
        alone.logprobs(samples, "policy")


def test_other_architectures_are_refused(make_model: MakeModel, gang: Gang, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        engine_of(tmp_path, gang)
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    with pytest.raises(UnsupportedModel, match="'gemma2' model; this back end trains llama"):
        engine_of(tmp_path, gang)
    with pytest.raises(UnsupportedModel, match="sliding-window"):
        engine_of(make_model("mistral", sliding_window=64), gang)


def test_an_empty_prompt_is_refused(tiny_model: Path, gang: Gang) -> None:
    samples = random_samples()
    empty = replace(samples, prompt_ids=samples.prompt_ids[:0], prompt_offsets=torch.zeros_like(samples.prompt_offsets))
    with pytest.raises(BadBatch, match="empty prompt"):
        engine_of(tiny_model, gang).logprobs(empty, "policy")


def test_empty_and_fully_rejected_batches(tiny_model: Path, gang: Gang) -> None:
    engine = engine_of(tiny_model, gang)
    samples = random_samples(response=(0, 2))
    assert Jagged.from_lengths(samples.offsets.diff()).samples == len(samples)
    assert len(engine.logprobs(samples, "policy")) == samples.tokens
    experience = random_experience(samples)
    metrics = engine.train(replace(experience, mask=torch.zeros_like(experience.mask)), config())
    assert metrics["updates/done"] == 0
