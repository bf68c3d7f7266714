"""Whatever way the weights take, the campaign trains the same model: real engines, all transports of CPUs."""

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace.tasks.retention import versions

pytestmark = pytest.mark.slow

WAYS = ["store", "tcp", "gloo", "tcp delta", "shm delta", "nixl"]


def _run(stack, recipe: Path, campaign: str, *settings: str) -> str:
    sets = [word for setting in settings for word in ("--set", setting)]
    done = stack.headrace("run", str(recipe), "--campaign", campaign, *sets)
    assert done.returncode == 0, done.stdout + done.stderr
    model = Path(json.loads(stack.store(campaign).get("summary.json"))["model"])
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def by_shm(stack, tiny_recipe) -> str:
    return _run(stack, tiny_recipe, "by-shm", "iterations=3", "weights.transport=shm")


@pytest.mark.parametrize("way", WAYS)
def test_the_same_model_comes_out(way: str, stack, tiny_recipe, by_shm: str) -> None:
    if way == "nixl" and not find_spec("nixl_cu12"):
        pytest.skip("NIXL is not installed")
    transport, _, delta = way.partition(" ")
    settings = ["iterations=3", f"weights.transport={transport}", f"weights.delta={str(bool(delta)).lower()}"]
    assert _run(stack, tiny_recipe, way.replace(" ", "-"), *settings) == by_shm
    kept = versions(stack.store(way.replace(" ", "-"))).complete()
    assert kept == ([1, 2, 3] if way == "store" else [3])  # 3 is pinned, and so does not count
