"""Whole campaigns of other shapes than the quickstart's."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from headrace.engines.experience.ledger import Ledger
from headrace.engines.experience.store import Store
from headrace.engines.report import History

pytestmark = pytest.mark.slow

VARIANTS = {
    "kl-minibatches": {
        "algorithm": {"preset": "grpo", "kl": {"kind": "loss", "estimator": "k3", "coefficient": 0.01}},
        "train": {"minibatches": 2},
    },
    "two-rollouts": {"roles": {"rollout": {"engines": 2}}, "weights": {"transport": "store"}},
    "reference-engine": {
        "algorithm": {"preset": "grpo", "kl": {"kind": "reward", "coefficient": 0.01}},
        "roles": {"reference": {"pool": "actor", "threads": 1}},
    },
    "two-ranks": {"roles": {"actor": {"ranks": 2}}},
    "replaced": {"algorithm": {"preset": "dapo"}, "rollout": {"n": 2}},
}


def _recipe(tmp_path, tiny_recipe, name, **settings):
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"base": str(tiny_recipe), "name": name, "iterations": 3, **settings}))
    return str(path)


def _finished(stack, store: Store, done: subprocess.CompletedProcess[str]) -> list[dict[str, float]]:
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = Ledger(store)
    ledger.verify()
    assert ledger.state().open == 0 and ledger.frontier().step == 3
    assert json.loads(store.get("summary.json"))["iterations"] == 3
    rows = History(store).rows()
    assert [row["step"] for row in rows] == [0, 1, 2]
    return rows


@pytest.mark.parametrize("name", VARIANTS)
def test_a_campaign(stack, tiny_recipe, tmp_path, name):
    done = stack.headrace("run", _recipe(tmp_path, tiny_recipe, name, **VARIANTS[name]))
    rows = _finished(stack, stack.store(name), done)
    seconds = {key for row in rows for key in row if key.startswith("seconds/")}
    if name == "kl-minibatches":
        assert {"seconds/old-logprob", "seconds/ref-logprob"} <= seconds
        assert all(row["updates/done"] == 2 for row in rows)
    if name == "reference-engine":
        assert "seconds/ref-logprob" in seconds and stack.store(name).exists("leases/reference-0.json")
    if name == "two-rollouts":
        assert stack.store(name).exists("leases/rollout-1.json") and stack.store(name).exists("weights/v000003")


def test_groups_that_teach_nothing_are_replaced(stack, tiny_recipe, tmp_path):
    """After the campaign above: every iteration asked one new prompt for each group whose rewards were equal."""
    store = stack.store("replaced")
    rows, asked = History(store).rows(), 0
    for row in rows:
        rounds = sorted(store.manifests(int(row["step"]), "prompts"), key=lambda m: m.shard)
        missing = 4
        for drawn in rounds:
            assert drawn.part.rows == missing and drawn.info["first"] == asked
            asked += missing
            numbers = (2 * drawn.shard, 2 * drawn.shard + 1)
            scored = [m for m in store.manifests(int(row["step"]), "score") if m.shard in numbers]
            missing -= int(sum(m.metrics["differing_groups"] for m in scored))
        assert missing == 0 or len(rounds) == 3
        assert row["replacement_groups"] == sum(drawn.part.rows for drawn in rounds) - 4
        assert row["dropped/equal_reward_groups"] == row["replacement_groups"] + missing
    assert sum(row["replacement_groups"] for row in rows) > 0
    assert Ledger(store).frontier().cursor == asked


def test_a_kill_between_rounds_changes_nothing(stack, tiny_recipe, tmp_path):
    recipe = _recipe(tmp_path, tiny_recipe, "replaced", **VARIANTS["replaced"])
    following = stack.start("run", recipe, "--campaign", "replaced-again")
    store = stack.store("replaced-again")
    while following.poll() is None and not any(m.shard for m in store.manifests(1, "prompts")):
        time.sleep(0.01)
    os.kill(stack.progress("replaced-again")["pid"], signal.SIGKILL)
    stack.end_of(following)
    _finished(stack, store, stack.headrace("run", recipe, "--campaign", "replaced-again"))
    keys = [[m.key for m in s.manifests(2, "train")] for s in (store, stack.store("replaced"))]
    assert keys[0] == keys[1]


def test_on_s3(stack, tiny_recipe, tmp_path, s3_bucket):
    """Experience, ledger and weights in a bucket, with credentials that only a Prefect block knows."""
    code = (
        "import os; from headrace.blocks.stores import ExperienceStore; "
        f"ExperienceStore(url={s3_bucket + '/campaigns'!r}, endpoint_url=os.environ['AWS_ENDPOINT_URL'], "
        "access_key_id='test', secret_access_key='test').save('bucket', overwrite=True)"
    )
    env = {**os.environ, "PREFECT_API_URL": stack.state["api"]}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=300)
    recipe = _recipe(tmp_path, tiny_recipe, "on-s3", store="block:bucket", weights={"transport": "store"})
    done = stack.headrace("run", recipe)
    _finished(stack, Store(f"{s3_bucket}/campaigns/on-s3"), done)


def test_a_disk_that_fills_up(stack, tiny_recipe, tmp_path):
    """The campaign stops with one message; with room again, the same command continues it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        recipe = _recipe(tmp_path, tiny_recipe, "full", store=str(disk), roles={"actor": {"threads": 1}})
        store = Store(f"{disk}/full")
        following = stack.start("run", recipe)
        while following.poll() is None and not (store.exists("recipe.json") and store.manifests(1, "prompts")):
            time.sleep(0.01)
        ballast = disk / "ballast"
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(1 << 12))
        out = stack.end_of(following)
        assert following.returncode == 1 and "No space left" in out and "free" in out, out
        assert "Traceback" not in out
        ballast.unlink()
        _finished(stack, store, stack.headrace("run", recipe))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
