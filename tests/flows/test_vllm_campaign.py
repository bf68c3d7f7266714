"""The same campaign with real vLLM as the rollout engine, in its own environment."""

import json
import os
import signal
import time

import pytest
import yaml

from headrace.engines.experience.ledger import Ledger
from headrace.engines.report import History

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif("HEADRACE_VLLM_PYTHON" not in os.environ, reason="make vllm-env; set HEADRACE_VLLM_PYTHON"),
]


def test_an_engine_that_is_killed_costs_seconds_and_no_group(stack, tiny_recipe, make_model, tmp_path):
    """A campaign through the gate with two engines; one is killed with SIGKILL in the middle of a long generation."""
    recipe = {
        "base": str(tiny_recipe),
        "name": "two",
        "iterations": 2,
        "prompts": 8,
        "model": {"path": str(make_model(head_dim=32)), "dtype": "float32"},
        "roles": {"rollout": {"pool": "rollout-vllm", "engines": 2}},
        "rollout": {"n": 12, "max_tokens": 440, "shards": 4, "backend": {"kind": "vllm", "max_model_len": 512}},
        "train": {"tokens_per_microbatch": 4096},
        "evaluate": {"problems": 0},
        "parity": {"prompts": 2},
    }
    recipe["rollout"]["backend"] |= {"kv_cache_memory_bytes": 100_000_000, "max_num_seqs": 128}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(recipe))
    following = stack.start("run", str(tmp_path / "two.yaml"))
    stack.wait_for("two", lambda p: "iteration" in p and p["stage"] == "generate")
    time.sleep(0.5)
    store = stack.store("two")
    before = json.loads(store.get("leases/rollout-1.json"))
    os.kill(before["pid"], signal.SIGKILL)
    out = stack.end_of(following)
    assert following.returncode == 0, out
    ledger = Ledger(store)
    ledger.verify()
    assert ledger.state().open == 0 and ledger.frontier() == (2, 16)
    for shard in range(4):
        made = [m for m in store.manifests(0, "generate") if m.shard == shard]
        assert len(made) == 1 and made[0].part.rows == 2 * 12
    uids = [uid for m in store.manifests(0, "generate") for uid in store.read_table(m.part)["uid"].to_pylist()]
    assert len(set(uids)) == len(uids) == 8 * 12
    assert not [path for path in store.paths("experience") if "begun" in path or "early" in path]
    # Nobody waited for the engine to start again: the iteration went on with the other one; the next had both.
    rows = History(store).rows()
    assert len(rows) == 2 and all(row["mismatch/max_abs_log_ratio"] < 1e-3 for row in rows), rows
    table = store.read_table(store.manifests(1, "generate")[0].part)
    assert {span["version"] for spans in table["weight_spans"].to_pylist() for span in spans} == {1}
