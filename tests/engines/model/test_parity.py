"""The model engine's part of the parity gate: changed weights that come back bit for bit, tokens by class."""

from pathlib import Path

import pytest
import torch

from headrace.blocks.algorithms import Algorithm
from headrace.blocks.recipe import Optim
from headrace.engines.model.base import StepConfig
from headrace.engines.model.errors import ModelEngineError
from headrace.engines.model.fsdp2 import FSDP2Engine
from headrace.engines.model.gang import Gang
from headrace.engines.model.parity import CLASSES, classes
from headrace.engines.model.spec import EngineSpec
from tests.engines.model.conftest import RunGang
from tests.engines.model.experience import random_experience, random_samples


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_probe_changes_every_weight_and_takes_it_back(gang: Gang, tiny_model: Path, dtype: str):
    engine = FSDP2Engine(EngineSpec.model_validate({"model": str(tiny_model), "dtype": dtype}), gang)
    before = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    masters = {name: p.detach().clone() for name, p in engine.trained().weights.parameters.items()}
    samples = random_samples()
    own = engine.logprobs(samples, "policy")
    engine.probe(True)
    engine.probe(True)
    assert engine.train_step is None
    for name, tensor in engine.named_tensors():
        there = before[name] != 0  # the embedding of the padding token is not
        relative = ((tensor - before[name]).abs() / before[name].abs())[there]
        assert relative.min() > 0.04 and relative.max() < 0.14, name
    assert (engine.logprobs(samples, "policy") - own).abs().mean() > 0.05
    engine.probe(False)
    engine.probe(False)
    assert engine.train_step == 0
    assert all(torch.equal(p.detach(), masters[name]) for name, p in engine.trained().weights.parameters.items())
    assert torch.equal(engine.logprobs(samples, "policy"), own)


def test_nothing_is_trained_under_a_probe_and_a_load_ends_it(gang: Gang, tiny_model: Path):
    engine = FSDP2Engine(EngineSpec.model_validate({"model": str(tiny_model), "dtype": "float32"}), gang)
    before = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    engine.probe(True)
    config = StepConfig(Algorithm.model_validate({}), Optim.model_validate({}))
    with pytest.raises(ModelEngineError, match="load saved state"):
        engine.train(random_experience(random_samples()), config)
    engine.load(None)
    assert engine.train_step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_tensors())
    engine.probe(False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_tensors())


def test_two_ranks_probe_as_one(run_gang: RunGang, tiny_model: Path):
    actions = [("logprobs", 1), ("probe", True), ("logprobs", 1), ("probe", False), ("logprobs", 1)]
    one, two = (run_gang(actions, ranks=ranks, model=str(tiny_model), dtype="float32") for ranks in (1, 2))
    for own, other in zip(one, two, strict=True):
        assert own == pytest.approx(other, abs=1e-5)
    assert two[0] == two[2] != two[1]


def test_entropies_are_of_the_same_distributions(gang: Gang, tiny_model: Path):
    spec = {"model": str(tiny_model), "dtype": "float32", "temperature": 0.7}
    engine = FSDP2Engine(EngineSpec.model_validate(spec), gang)
    samples = random_samples()
    logprobs, entropies = engine.logprobs_and_entropies(samples, "policy")
    assert torch.equal(logprobs, engine.logprobs(samples, "policy"))
    assert entropies.shape == logprobs.shape and (entropies > 0).all() and entropies.max() < 5.6  # log 259


def test_tokens_by_class(tiny_model: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model, local_files_only=True)
    ids = tokenizer("a7. \n", add_special_tokens=False)["input_ids"] + tokenizer("é")["input_ids"] + [2]
    found = [CLASSES[k] for k in classes(torch.tensor(ids), tiny_model).tolist()]
    assert found == ["letter", "digit", "punctuation", "whitespace", "whitespace", "bytes", "bytes", "special"]
