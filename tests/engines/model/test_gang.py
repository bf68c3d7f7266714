"""The engine in real processes: two ranks equal one, and a new process goes on where the old one stopped."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from headrace.engines.model.errors import BadState
from headrace.engines.model.fsdp2 import FSDP2Engine
from headrace.engines.model.gang import Gang
from headrace.engines.model.spec import EngineSpec
from tests.engines.model.conftest import RunGang
from tests.engines.model.experience import random_samples
from tests.engines.model.test_engine import plain, plain_logprobs

FLOAT32 = {"dtype": "float32", "tokens_per_microbatch": 48}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_two_ranks_train_as_one(run_gang: RunGang, tiny_model: Path, tmp_path: Path) -> None:
    results = []
    for ranks in (1, 2):
        actions = [*(("train", i) for i in range(3)), ("logprobs", 9), ("export", str(tmp_path / f"ranks-{ranks}"))]
        results.append(run_gang(actions, ranks=ranks, model=str(tiny_model), **FLOAT32))
    *steps, logprobs = zip(*results, strict=True)
    for one, two in steps:
        assert two == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in one.items()}
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)
    two = weights(tmp_path / "ranks-2")
    for name, tensor in weights(tmp_path / "ranks-1").items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_process_continues_bit_for_bit(run_gang: RunGang, tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    state, spec = str(tmp_path / "state"), {"model": str(tiny_model), "dtype": dtype, "tokens_per_microbatch": 48}
    whole = [("train", 0), ("save", state), ("train", 1), ("train", 2), ("export", str(tmp_path / "whole"))]
    first = run_gang(whole, **spec)
    rest = [("load", state), ("train", 1), ("train", 2), ("export", str(tmp_path / "resumed"))]
    cursor, *second = run_gang(rest, **spec)
    assert cursor == 11
    assert second == first[1:]
    resumed = weights(tmp_path / "resumed")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights(tmp_path / "whole").items())


def test_state_moves_between_one_rank_and_two(run_gang: RunGang, tiny_model: Path, tmp_path: Path, gang: Gang) -> None:
    first, state, spec = tmp_path / "first", tmp_path / "state", {"model": str(tiny_model), **FLOAT32}
    engine = FSDP2Engine(EngineSpec.model_validate(spec), gang)
    engine.save(first, cursor=3)
    engine.settle()
    before = engine.logprobs(random_samples(seed=9), "policy").tolist()
    actions = [("train", 7), ("load", str(first)), ("logprobs", 9), ("train", 0), ("save", str(state)), ("logprobs", 9)]
    _, cursor, loaded, _, logprobs = run_gang(actions, ranks=2, **spec)
    assert cursor == 3 and loaded == pytest.approx(before, abs=1e-5)
    engine = FSDP2Engine(EngineSpec.model_validate(spec), gang)
    assert engine.load(state) == 11
    assert engine.train_step == 1
    assert engine.logprobs(random_samples(seed=9), "policy").tolist() == pytest.approx(logprobs, abs=1e-5)
    (state / "COMPLETE").unlink()
    with pytest.raises(BadState, match="COMPLETE"):
        engine.load(state)


def test_state_of_another_model_is_refused(make_model, tiny_model: Path, tmp_path: Path, gang: Gang) -> None:
    small = make_model(num_hidden_layers=1)
    other = FSDP2Engine(EngineSpec(model=str(small)), gang)
    other.save(tmp_path / "state", 0)
    other.settle()
    engine = FSDP2Engine(EngineSpec(model=str(tiny_model)), gang)
    with pytest.raises(BadState, match="another model"):
        engine.load(tmp_path / "state")
    assert engine.train_step == 0


def test_the_export_is_a_plain_hugging_face_folder(run_gang: RunGang, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    logprobs = run_gang([("train", 0), ("logprobs", 9), ("export", str(out))], model=str(tiny_model), **FLOAT32)[-1]
    with torch.no_grad():
        found = plain_logprobs(plain(out), random_samples(seed=9))
    torch.testing.assert_close(found, torch.tensor(logprobs), rtol=1e-5, atol=1e-5)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert AutoTokenizer.from_pretrained(out).chat_template
