"""The same campaign with real vLLM as the rollout engine, in its own environment."""

import os

import pytest
import yaml

from headrace.engines.experience.ledger import Ledger
from headrace.engines.report import History

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif("HEADRACE_VLLM_PYTHON" not in os.environ, reason="make vllm-env; set HEADRACE_VLLM_PYTHON"),
]


def test_a_campaign_on_vllm(stack, tiny_recipe, make_model, tmp_path):
    recipe = {
        "base": str(tiny_recipe),
        "name": "vllm",
        "iterations": 2,
        "model": {"path": str(make_model(head_dim=32)), "dtype": "float32"},
        "roles": {"rollout": {"pool": "rollout-vllm"}},
        "rollout": {"backend": {"kind": "vllm", "max_model_len": 256, "kv_cache_memory_bytes": 50_000_000}},
    }
    (tmp_path / "vllm.yaml").write_text(yaml.safe_dump(recipe))
    done = stack.headrace("run", str(tmp_path / "vllm.yaml"), timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    store = stack.store("vllm")
    Ledger(store).verify()
    rows = History(store).rows()
    assert len(rows) == 2 and all(row["mismatch/max_abs_log_ratio"] < 1e-3 for row in rows), rows
    table = store.read_table(store.manifests(1, "generate")[0].part)
    assert {span["version"] for spans in table["weight_spans"].to_pylist() for span in spans} == {1}
