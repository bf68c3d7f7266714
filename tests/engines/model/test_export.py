"""A kept version is a Hugging Face folder: what transformers and rollout engines read is what was published."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.blocks.weights import WeightManifest, WeightSource
from headrace.engines.checkpoint import kept, pull
from headrace.engines.model.fsdp2 import FSDP2Engine
from headrace.engines.model.gang import Gang
from headrace.engines.model.jobs import Jobs
from headrace.engines.model.spec import EngineSpec
from headrace.engines.rollout.architecture import read_architecture
from headrace.engines.rollout.parameters import Parameters
from tests.engines.model.experience import random_samples
from tests.engines.model.test_engine import config, random_experience

IDS = torch.tensor([[1, 70, 71, 72, 200, 5, 9]])


def export(jobs: Jobs, store: Path, version: int) -> Path:
    job = {"transport": "store", "store": str(store), "address": f"weights/v{version:06d}", "partition_bytes": 8192}
    jobs.run("publish", job | {"version": version, "step": version, "deadline_s": 60})
    return store / job["address"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("split", [False, True])
def test_what_is_read_is_what_was_published(
    make_model: Callable[..., Path], tmp_path: Path, gang: Gang, monkeypatch, tied: bool, split: bool
) -> None:
    if split:
        monkeypatch.setattr(kept, "FILE_BYTES", 50_000)
    start = make_model(tie_word_embeddings=tied)
    engine = FSDP2Engine(EngineSpec(model=str(start), dtype="bfloat16"), gang)
    jobs = Jobs(engine)
    engine.train(random_experience(random_samples(seed=0), seed=0), config())
    folder = export(jobs, tmp_path, 1)
    published = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    assert (len(list(folder.glob("*.safetensors"))) > 3) == split

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert dict(model.named_parameters()).keys() == published.keys()
    assert all(torch.equal(parameter, published[name]) for name, parameter in model.named_parameters())
    expected = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)
    before = expected(IDS).logits
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.copy_(published[name])
    assert torch.equal(model(IDS).logits, expected(IDS).logits) and not torch.equal(model(IDS).logits, before)
    assert AutoTokenizer.from_pretrained(folder).chat_template

    parameters = Parameters(read_architecture(folder), dtype=torch.bfloat16, device=torch.device("cpu"))
    parameters.read_folder(folder)
    assert all(torch.equal(tensor, published[name]) for name, tensor in parameters.named_tensors())

    # A campaign that begins with it publishes the same bits; nothing of the version that it was comes with them.
    (folder / "PINNED").touch()
    again = export(Jobs(FSDP2Engine(EngineSpec(model=str(folder), dtype="bfloat16"), gang)), tmp_path / "next", 0)
    assert {p.name for p in again.iterdir()} == {p.name for p in folder.iterdir()} - {"PINNED"}
    one, two = (WeightManifest.model_validate_json((f / "manifest.json").read_text()) for f in (folder, again))
    assert (one.version, two.version) == (1, 0) and one.digest == two.digest
    source = WeightSource(version=1, transport="store", address="weights/v000001", store=str(tmp_path))
    assert pull(source, lambda name, tensor: None).digest == one.digest


def test_the_parent_is_the_version_before_also_when_one_is_published_again(
    tiny_model: Path, tmp_path: Path, gang: Gang
) -> None:
    engine = FSDP2Engine(EngineSpec(model=str(tiny_model), dtype="float32"), gang)
    jobs, parents = Jobs(engine), []
    for version, store in ((0, "a"), (0, "b"), (1, "a"), (1, "b"), (1, "c")):
        if version and engine.train_step == 0:
            engine.train(random_experience(random_samples(seed=0), seed=0), config())
        folder = export(jobs, tmp_path / store, version)
        parents.append(WeightManifest.model_validate_json((folder / "manifest.json").read_text()).parent)
    assert parents == [None, None, 0, 0, 0]
