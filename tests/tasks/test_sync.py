"""A version holds the weights of its step, also when the trainer is further than the campaign knows."""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.blocks.manifest import Manifest
from headrace.blocks.recipe import Recipe
from headrace.blocks.weights import Transport, WeightSource
from headrace.engines.checkpoint import WeightError, publish, pull
from headrace.engines.experience.files import Files
from headrace.engines.experience.store import Store
from headrace.engines.rpc.errors import JobFailed
from headrace.tasks import recovery
from headrace.tasks.recovery import sync, train_job_path, version_path
from headrace.tasks.retention import states


class Engines:
    """A trainer whose weights are its step, and a rollout engine that pulls them."""

    def __init__(self, step: int, drift: float = 0.0) -> None:
        """drift: what this trainer's weights are beside their step."""
        self.step, self.drift, self.served, self.serving = step, drift, None, {}
        self.lease = SimpleNamespace(node="here", url="http://here", epoch=1)
        self.listening, self.loads = False, 0

    async def client(self, role: str, index: int) -> "Engines":
        return self

    async def health(self) -> dict[str, Any]:
        return {"train_step": self.step}

    async def call_on(self, client: Any, role: str, index: int, method: str, params: Any, job_id: str, _: float) -> Any:
        return await self.call(method, params)

    async def call(
        self, *arguments: Any, job_id: str = "", deadline_s: float = 0, on_progress: Callable[..., None] | None = None
    ) -> Any:
        method, params = arguments[-2:]
        if method == "load":
            self.step = 0
        elif method == "train":
            self.step += 1
        elif method == "publish":
            assert on_progress is not None
            return await asyncio.to_thread(self._publish, asyncio.get_running_loop(), on_progress, **params)
        else:
            assert method == "load_weights" and self.listening, "it would wait for a publish that may never begin"
            self.loads += 1
            got: dict[str, torch.Tensor] = {}
            source = WeightSource.model_validate(params["source"])
            served = await asyncio.to_thread(pull, source, lambda name, tensor: got.update({name: tensor.clone()}))
            self.served = float(got["a"][0])
            return served.model_dump()

    def _publish(self, loop: Any, on_progress: Callable[..., None], *, step: int | None, **params: Any) -> Any:
        if step not in (None, self.step):
            raise JobFailed(f"the trainer is at step {self.step}, not {step}", "StepRefused")
        self.listening = params["transport"] == "store"  # from there they load when the publish has ended
        tensors = iter([("a", torch.full((4096,), self.step + self.drift))])

        def listening() -> None:
            self.listening = True
            loop.call_soon_threadsafe(on_progress, {"listening": 1.0})

        try:
            made = publish(tensors, [("a", "float32", [4096])], train_step=self.step, **params, listening=listening)
        except WeightError as error:
            raise JobFailed(str(error), type(error).__name__) from error
        layout = {"partition_bytes": params["partition_bytes"], "quantization": None}
        return {"digest": made.digest, "hashing": made.hashing, **layout}


def synced(folder: Path, engines: Engines, monkeypatch: Any, gpus: int = 0, transport: Transport = "store") -> Engines:
    """Version 2 in a campaign that has committed two train stages, from a trainer with so many GPUs."""
    log = SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)
    monkeypatch.setattr(recovery, "get_run_logger", lambda: log)
    store = Store(f"{folder}/store")
    trained = [Manifest(stage="train", step=n, key=f"k{n}") for n in range(2)]
    for n in range(2):
        store.put(train_job_path(n), json.dumps({}).encode())
    c = SimpleNamespace(version=2, attempt=2, sync_numbers=itertools.count(), probed=None, weights_folder="weights")
    c.recipe = Recipe.model_validate(
        {
            "base": "quickstart",
            "weights": {"transport": transport},
            "roles": {"actor": {"pool": "actor", "gpus": gpus}, "rollout": {"pool": "rollout"}},
        }
    )
    c.folder, c.store, c.url, c.engines = folder, store, store.url, engines
    c.states, c.trained, c.defer = states(Files(str(folder))), lambda: trained, lambda later: later.close()
    asyncio.run(sync(c, [0]))  # type: ignore[arg-type]
    return engines


@pytest.mark.parametrize("transport", ["store", "shm"])
def test_a_trainer_that_is_a_step_ahead_is_brought_back(transport: Transport, tmp_path: Path, monkeypatch: Any) -> None:
    """And engines are asked to load once: not before the trainer has agreed to publish."""
    ahead = synced(tmp_path / "ahead", Engines(3), monkeypatch, transport=transport)
    assert (ahead.step, ahead.served, ahead.serving, ahead.loads) == (2, 2.0, {0: 2}, 1)
    there = synced(tmp_path / "there", Engines(2), monkeypatch, transport=transport)
    assert (there.step, there.served, there.loads) == (2, 2.0, 1)


def test_a_committed_version_that_a_gpu_cannot_repeat_stays_served(tmp_path: Path, monkeypatch: Any) -> None:
    synced(tmp_path, Engines(2), monkeypatch)
    recorded = (tmp_path / "store" / version_path(2)).read_bytes()
    with pytest.raises(JobFailed, match="is committed already, with other content"):  # a CPU repeats bit for bit
        synced(tmp_path, Engines(2, drift=0.25), monkeypatch)
    again = synced(tmp_path, Engines(2, drift=0.25), monkeypatch, gpus=1)
    assert (again.served, again.serving) == (2.0, {0: 2})
    assert (tmp_path / "store" / version_path(2)).read_bytes() == recorded
    ahead = Engines(3, drift=0.25)
    ahead.serving = {0: 2, 1: 2}
    assert synced(tmp_path, ahead, monkeypatch, gpus=1).serving == {0: 2}, "rollout-1 is brought up to it as well"
