"""The export is a kept version that is verified to be what engines serve, and pinned."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.blocks.recipe import Recipe
from headrace.blocks.weights import WeightManifest
from headrace.engines.checkpoint import publish
from headrace.engines.experience.files import Files
from headrace.engines.experience.store import Store
from headrace.tasks import campaign
from headrace.tasks.export import export
from headrace.tasks.recovery import SyncMismatch, record_version
from headrace.tasks.retention import states


class Actor:
    """Publishes what a trainer would; counts how often."""

    def __init__(self, value: float) -> None:
        self.value, self.asked = value, []
        self.serving = {0: 7}

    async def sync_all(self) -> None:
        """They serve it."""

    async def call(self, role: str, index: int, method: str, params: dict[str, Any], job_id: str) -> None:
        assert (role, index, method) == ("actor", 0, "publish")
        self.asked.append(job_id)
        self.publish(**params)

    def publish(self, step: int, **params: Any) -> WeightManifest:
        tensors = iter([("a", torch.full((4096,), self.value))])
        return publish(tensors, [("a", "float32", [4096])], train_step=step, **params)


def run(actor: Actor, folder: Path, attempt: int = 1) -> Path:
    c = SimpleNamespace(version=7, attempt=attempt, folder=folder, store=Store(f"{folder}/store"), engines=actor)
    c.states = states(Files(str(folder)))
    c.recipe = Recipe.model_validate({"base": "quickstart"})
    token = campaign._current.set(c)  # type: ignore[arg-type]
    try:
        return Path(asyncio.run(export.fn()))
    finally:
        campaign._current.reset(token)


def served(folder: Path, value: float, **changes: Any) -> str:
    """What engines were verified to serve, sent in partitions of 1000 bytes; returns the digest."""
    manifest = Actor(value).publish(
        7, version=7, transport="store", address="w", store=f"{folder}/sent", partition_bytes=1000
    )
    facts = {"digest": manifest.digest, "hashing": "xxh3", "partition_bytes": 1000, "quantization": None} | changes
    record_version(Store(f"{folder}/store"), 7, facts, None)
    return manifest.digest


def test_it_has_the_digest_that_is_served_and_stays(tmp_path: Path) -> None:
    digest = served(tmp_path, 1.0)
    actor = Actor(1.0)
    folder = run(actor, tmp_path)
    assert folder == tmp_path / "weights/v000007" and (folder / "PINNED").exists()
    assert json.loads((folder / "manifest.json").read_text())["digest"] == digest
    (folder / "PINNED").unlink()  # killed before it was pinned
    assert run(actor, tmp_path, attempt=2) == folder and (folder / "PINNED").exists()
    assert actor.asked == ["export-7-1"], "what is committed is taken as it is"


def test_what_a_killed_export_left_goes_with_the_next_one(tmp_path: Path) -> None:
    served(tmp_path, 1.0)
    for version, names in ((4, ["model.safetensors"]), (5, ["model.safetensors", "manifest.json", "PINNED"])):
        (tmp_path / f"weights/v{version:06d}").mkdir(parents=True)
        for name in names:
            (tmp_path / f"weights/v{version:06d}" / name).touch()
    run(Actor(1.0), tmp_path)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["v000005", "v000007"]


def test_other_weights_than_those_that_are_served_are_refused(tmp_path: Path) -> None:
    served(tmp_path, 1.0)
    with pytest.raises(SyncMismatch, match=r"the exported version 7 in .*weights/v000007 has digest"):
        run(Actor(2.0), tmp_path)
    assert not (tmp_path / "weights/v000007/PINNED").exists()


@pytest.mark.parametrize("changes", [{"hashing": "sums"}, {"quantization": "fp8"}])
def test_a_digest_of_other_hashes_or_bytes_is_not_compared(tmp_path: Path, changes: dict[str, str]) -> None:
    served(tmp_path, 1.0, digest="of a GPU", **changes)
    assert (run(Actor(1.0), tmp_path) / "PINNED").exists()
