"""A campaign that trains a LoRA adapter: real vLLM serves each version, and only the adapter travels."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from headrace.blocks.recipe import Lora
from headrace.engines.experience.ledger import Ledger
from headrace.engines.experience.store import Store
from headrace.engines.folder import parameter_shapes
from headrace.engines.lora import adapter_shapes, target_modules
from headrace.engines.report import History

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif("HEADRACE_VLLM_PYTHON" not in os.environ, reason="make vllm-env; set HEADRACE_VLLM_PYTHON"),
]
LORA = Lora.model_validate({"rank": 4, "alpha": 8})


def test_an_adapter_is_trained_served_and_resumed(stack, tiny_recipe, make_model, tmp_path):
    model = make_model(head_dim=32)
    recipe = {
        "base": str(tiny_recipe),
        "name": "adapter",
        "iterations": 2,
        "model": {"path": str(model), "dtype": "float32", "lora": LORA.model_dump()},
        "roles": {"actor": {"pool": "actor", "ranks": 2}, "rollout": {"pool": "rollout-vllm"}},
        "rollout": {"backend": {"kind": "vllm", "max_model_len": 512, "kv_cache_memory_bytes": 100_000_000}},
        "algorithm": {"kl": {"kind": "loss", "coefficient": 0.01}},
        "evaluate": {"problems": 0},
        "checkpoint": {"every": 2},
        "parity": {"prompts": 2},
    }
    (tmp_path / "adapter.yaml").write_text(yaml.safe_dump(recipe))
    done = stack.headrace("run", str(tmp_path / "adapter.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    store = stack.store("adapter")
    shapes = parameter_shapes(model)
    nbytes = 4 * sum(
        torch.Size(shape).numel() for shape in adapter_shapes(shapes, 4, target_modules(shapes, LORA)).values()
    )
    rows = History(store).rows()
    assert [row["weight_bytes"] for row in rows] == [nbytes, nbytes]
    assert nbytes < sum(torch.Size(shape).numel() for shape in shapes.values())
    assert all(row["mismatch/max_abs_log_ratio"] < 1e-3 for row in rows), rows
    # The reference is the base, so the policy is on it at first and has left it then.
    assert rows[0]["reference/kl_k3"] < 1e-6 < rows[1]["reference/kl_k3"]
    [gate] = store.manifests(-1, "parity")
    assert gate.metrics["mismatch/max_abs_log_ratio"] < 1e-3
    before = digests(store)
    assert len({*before}) == 3
    check_export(store, model)
    # Further, with new engines: the trainer begins with what was saved. It is killed, and a new one repeats a step.
    following = stack.start("run", str(tmp_path / "adapter.yaml"), "--set", "iterations=5")
    stack.wait_for("adapter", lambda p: p.get("iteration", 0) >= 3)
    os.kill(json.loads(store.get("leases/actor-0.json"))["pid"], signal.SIGKILL)
    out = stack.end_of(following)
    assert following.returncode == 0, out
    rows = History(store).rows()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["mismatch/max_abs_log_ratio"] < 1e-3 for row in rows), rows
    after = digests(store)
    assert after[:3] == before and len({*after}) == 6
    ledger = Ledger(store)
    ledger.verify()
    assert ledger.state().open == 0 and ledger.frontier() == (5, 20)


def digests(store: Store) -> list[str]:
    """Of the versions; what was sampled names the same."""
    paths = sorted(path for path in store.paths("weights") if path.count("/") == 1 and path.endswith(".json"))
    kept = [json.loads(store.get(path))["digest"] for path in paths]
    for step, digest in enumerate(kept[:-1]):
        for made in store.manifests(step, "generate"):
            assert (made.info["version"], made.info["digest"]) == (step, digest)
    return kept


def check_export(store: Store, model: Path) -> None:
    """PEFT makes of it what was trained: another model than the base."""
    folder = json.loads(store.get("summary.json"))["model"]
    base = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([[1, 50, 60, 70]])
    with torch.no_grad():
        plain = base(ids).logits
        tuned = PeftModel.from_pretrained(base, folder)(ids).logits
    assert (tuned - plain).abs().max() > 1e-4
