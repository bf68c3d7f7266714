"""The parity gate on a real Prefect server: before a campaign, alone, and when it fails."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headrace.engines.experience.ledger import Ledger
from headrace.engines.report import History
from tests.engines.parity.engines import broken

pytestmark = pytest.mark.slow
STEP = -1


def artifacts(stack) -> dict[str, dict]:
    return {a["key"]: a for a in stack.ask("POST", "artifacts/latest/filter", {})}


def recipe(path, tiny_recipe, **settings):
    path.write_text(yaml.safe_dump({"base": str(tiny_recipe), "evaluate": {"problems": 0}, **settings}))
    return str(path)


def test_a_campaign_passes_the_gate_once(stack, tiny_recipe, tmp_path):
    file = recipe(tmp_path / "gated.yaml", tiny_recipe, name="gated", iterations=1)
    done = stack.headrace("run", file)
    assert done.returncode == 0, done.stdout + done.stderr
    store = stack.store("gated")
    (passed,) = store.manifests(STEP, "parity")
    assert passed.metrics["mismatch/max_abs_log_ratio"] < 1e-4
    assert passed.info["fingerprint"]["engine"].startswith("headrace-transformers")
    # the second update brought the very weights back
    first, second = (store.read_table(m.part) for m in sorted(store.manifests(STEP, "generate"), key=lambda m: m.key))
    versions = [table["weight_spans"][0].as_py()[0]["version"] for table in (first, second)]
    assert sorted(versions) == [-2, 0]
    shown = artifacts(stack)
    assert shown["gated-parity-picture"]["data"].startswith("data:image/png;base64,")
    lines = {line["figure"]: line for line in json.loads(shown["gated-parity"]["data"])}
    assert lines["mean ratio old/behaviour"]["bound"] == "1 ± 0.001"
    assert float(lines["entropy, trainer"]["changed weights"]) > 0
    row = History(store).rows()[0]
    shared = {name for name in passed.metrics if name.startswith("mismatch/")} - {"mismatch/p999_abs_log_ratio"}
    assert shared <= row.keys() and "mismatch/clip_fraction" in shared
    again = stack.headrace("run", file, "--set", "iterations=2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert store.manifests(STEP, "parity") == [passed]
    assert [p for p in store.paths("parity") if p.endswith(".json")] == ["parity/attempt-0001.json"]


def test_an_actor_that_dies_under_changed_weights_leaves_no_trace(stack, tiny_recipe, tmp_path):
    file = recipe(tmp_path / "traceless.yaml", tiny_recipe, name="traceless", iterations=2)
    ungated = stack.headrace("run", file, "--campaign", "ungated", "--set", "parity.when=never")
    assert ungated.returncode == 0, ungated.stdout + ungated.stderr
    assert not stack.store("ungated").paths("parity")
    following = stack.start("run", file)
    stack.wait_for("traceless", lambda p: p.get("stage") == "parity")
    os.kill(json.loads(stack.store("traceless").get("leases/actor-0.json"))["pid"], signal.SIGKILL)
    out = stack.end_of(following)
    assert following.returncode == 0, out
    assert stack.store("traceless").manifests(STEP, "parity")
    models = [json.loads(stack.store(c).get("summary.json"))["model"] for c in ("ungated", "traceless")]
    one, two = (Path(model, "model.safetensors").read_bytes() for model in models)
    assert one == two


def test_the_gate_alone(stack, tiny_recipe, tmp_path):
    file = recipe(tmp_path / "alone.yaml", tiny_recipe, name="alone", parity={"when": "never", "prompts": 2})
    command = [sys.executable, "-m", "prefect", "deployment", "run", "parity/parity", "--watch"]
    done = subprocess.run(
        [*command, "-p", f"recipe={json.dumps({'base': file})}"],
        env={**stack.env, "PREFECT_API_URL": stack.state["api"]},
        capture_output=True,
        text=True,
        timeout=stack.guard_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    store = stack.store("alone-parity")
    assert store.manifests(STEP, "parity")[0].metrics["tokens"] <= 2 * 4 * 8
    assert not store.paths("manifests/000000") and not Ledger(store).state().reserved


def test_a_bound_that_is_passed_fails_the_campaign_and_names_the_setting(stack, tiny_recipe, tmp_path):
    bounds = {"kl_k3": 1e-6, "kl_k1": 1.0, "mean_ratio": 1.0}
    settings = {"name": "refused", "parity": {"prompts": 4, "bounds": bounds}, "model": {"dtype": "bfloat16"}}
    done = stack.headrace("run", recipe(tmp_path / "refused.yaml", tiny_recipe, **settings))
    assert done.returncode == 1
    for words in (
        "KL(behaviour ‖ old) is",
        "bound ≤ 1e-06",
        "Look at model.dtype: with dtype = float32",
        "Nothing was trained",
    ):
        assert words in done.stderr, done.stderr
    store = stack.store("refused")
    assert not store.manifests(STEP, "parity") and not store.paths("manifests/000000")
    assert not Ledger(store).state().reserved
    table = json.loads(artifacts(stack)["refused-parity-ablation"]["data"])
    results = {f"{line['setting']}={line['tried']}": line["result"] for line in table}
    assert results == {
        "as the recipe says=": "beyond a bound",
        "head_dtype (rollout engine)=float32": "beyond a bound",
        "head_dtype (trainer)=float32": "beyond a bound",
        "dtype=float32": "within all bounds",
    }
    leases = [json.loads(store.get(path)) for path in store.paths("leases")]
    assert {lease["recipe"] for lease in leases} == {"parity/dtype-actor-rollout.json"}
    assert not [lease for lease in leases if os.path.exists(f"/proc/{lease['pid']}")]


@pytest.mark.vllm
@pytest.mark.skipif("HEADRACE_VLLM_PYTHON" not in os.environ, reason="make vllm-env; set HEADRACE_VLLM_PYTHON")
@pytest.mark.timeout(1200)
def test_vllm_that_loads_nothing_is_found_before_anything_is_trained(stack, tiny_recipe, make_model, tmp_path):
    host = stack.ask("GET", "deployments/name/engine-host/rollout-vllm")
    python = broken(os.environ["HEADRACE_VLLM_PYTHON"], "silent load", tmp_path)
    variables = host["job_variables"] | {"env": {"HEADRACE_VLLM_PYTHON": python}}
    path = f"deployments/{host['id']}"
    stack.ask("PATCH", path, {"job_variables": variables})
    try:
        settings = {
            "name": "deceived",
            "model": {"path": str(make_model(head_dim=32)), "dtype": "float32"},
            "roles": {"rollout": {"pool": "rollout-vllm"}},
            "rollout": {"backend": {"kind": "vllm", "max_model_len": 256, "kv_cache_memory_bytes": 50_000_000}},
            "parity": {"ablation": False},
        }
        done = stack.headrace("run", recipe(tmp_path / "deceived.yaml", tiny_recipe, **settings))
    finally:
        stack.ask("PATCH", path, {"job_variables": host["job_variables"]})
    assert done.returncode == 1
    assert "rollout-0 samples from the weights before the update" in done.stderr, done.stdout + done.stderr
    assert not stack.store("deceived").paths("manifests/000000")
