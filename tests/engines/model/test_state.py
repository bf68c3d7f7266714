"""Trainer state on a disk: whatever the moment at which the trainer dies, a complete state is there and is found."""

import itertools
import multiprocessing
import shutil
import signal
from pathlib import Path

import pytest
import torch

from headrace.blocks.algorithms import Algorithm
from headrace.blocks.recipe import Optim
from headrace.engines.experience.files import Files
from headrace.engines.model.base import StepConfig
from headrace.engines.model.errors import BadState
from headrace.engines.model.fsdp2 import FSDP2Engine
from headrace.engines.model.gang import Gang, join
from headrace.engines.model.spec import EngineSpec
from headrace.tasks.retention import Shelf, states
from tests import kill
from tests.engines.model.experience import random_experience, random_samples

CONFIG = StepConfig(Algorithm.model_validate({}), Optim.model_validate({"lr": 1e-3}), total_steps=8)

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["pytest", "headrace.engines.model.fsdp2", "tests.engines.model.experience"])


def engine_of(model: Path, gang: Gang) -> FSDP2Engine:
    return FSDP2Engine(EngineSpec(model=str(model), dtype="float32", tokens_per_microbatch=64), gang)


def train(engine: FSDP2Engine) -> None:
    number = engine.train_step or 0
    engine.train(random_experience(random_samples(seed=number), seed=number), CONFIG)
    engine.last_key = f"key {number}"


def save_and_tidy(engine: FSDP2Engine, shelf: Shelf, folder: Path) -> None:
    """What a campaign does after an iteration."""
    assert engine.train_step is not None
    engine.save(folder / shelf.path(engine.train_step), cursor=10 * engine.train_step)
    engine.settle()
    shelf.tidy(1, engine.train_step)


def trainer(model: Path, folder: Path, kill_at: int) -> None:
    """Process: from the state of step 1 to that of step 2, killed before one of its changes of the disk."""
    engine, shelf = engine_of(model, join("cpu", 1, 60)), states(Files(str(folder)))
    engine.load(folder / shelf.path(1))
    train(engine)
    kill.before_change(kill_at)
    save_and_tidy(engine, shelf, folder)


def test_a_trainer_killed_at_any_step_leaves_a_state_that_loads(tiny_model: Path, tmp_path: Path, gang: Gang) -> None:
    first, samples = tmp_path / "first", random_samples(seed=9)
    engine, expected = engine_of(tiny_model, gang), {}
    for number in (1, 2):
        train(engine)
        expected[number] = engine.logprobs(samples, "policy")
        if number == 1:
            save_and_tidy(engine, states(Files(str(first))), first)
    assert not torch.equal(expected[1], expected[2])
    found: list[int] = []
    for kill_at in itertools.count():
        folder = tmp_path / f"killed-at-{kill_at}"
        shutil.copytree(first, folder)
        child = processes.Process(target=trainer, args=(tiny_model, folder, kill_at))
        child.start()
        child.join(60)
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        shelf = states(Files(str(folder)))
        found.append(last := shelf.complete()[-1])
        assert engine.load(folder / shelf.path(last)) == 10 * last
        assert engine.train_step == last and torch.equal(engine.logprobs(samples, "policy"), expected[last])
        if last == 1:
            train(engine)
        save_and_tidy(engine, shelf, folder)
        assert shelf.complete() == [2]
        assert engine.load(folder / shelf.path(2)) == 20
        assert torch.equal(engine.logprobs(samples, "policy"), expected[2])
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
        shutil.rmtree(folder)
    assert found == sorted(found) and found.count(1) > 4 and found.count(2) > 2


def test_a_complete_state_is_never_replaced(tiny_model: Path, tmp_path: Path, gang: Gang) -> None:
    engine = engine_of(tiny_model, gang)
    engine.save(tmp_path / "state", 1)
    engine.save(tmp_path / "state", 1)  # a retry
    train(engine)
    with pytest.raises(BadState, match="holds the state of step 0 of another run already: nothing was saved"):
        engine.save(tmp_path / "state", 2)
    assert engine.load(tmp_path / "state") == 1 and engine.train_step == 0
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_state_that_cannot_be_written_is_told_and_leaves_the_last_one(tiny_model: Path, tmp_path: Path, gang) -> None:
    engine = engine_of(tiny_model, gang)
    engine.save(tmp_path / "state", 1)
    engine.settle()
    (tmp_path / "next").touch()  # in the way of the rename, which comes last
    (tmp_path / ".killed.tmp").mkdir()
    engine.save(tmp_path / "next", 2)
    assert not (tmp_path / ".killed.tmp").exists()
    with pytest.raises(BadState, match="could not be saved; what was saved before is untouched"):
        engine.settle()
    assert engine.load(tmp_path / "state") == 1
