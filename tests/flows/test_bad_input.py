"""What is wrong is said in one readable message, and nothing is lost."""

import json
import os
import socket
import subprocess
import sys

import pytest

from headrace.engines.experience.ledger import Ledger
from headrace.engines.report import History

pytestmark = pytest.mark.slow


def _headrace(home, *words, **env):
    environment = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"} | {"HEADRACE_HOME": str(home)} | env
    command = [sys.executable, "-m", "headrace.deployments.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_no_server(tmp_path, tiny_recipe):
    done = _headrace(tmp_path, "run", str(tiny_recipe))
    assert done.returncode == 1 and "headrace up" in done.stderr and "Traceback" not in done.stderr


def test_server_unreachable(tmp_path):
    done = _headrace(tmp_path, "up", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 1 and "no Prefect server answers" in done.stderr


def test_port_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = _headrace(tmp_path, "up", "--port", port)
    assert done.returncode == 1 and f"port {port} is taken" in done.stderr and "--port" in done.stderr


def test_a_pool_without_a_worker_is_named_within_30_seconds(stack, tiny_recipe):
    """Of the flow run; what the command and the run take to start is the machine's."""
    stack.ask("POST", "work_pools/", {"name": "nobody", "type": "process"})
    words = ("run", str(tiny_recipe), "--campaign", "nobody", "--set", "roles.rollout.pool=nobody")
    done = stack.headrace(*words, "--set", "deadlines.worker=5")
    assert done.returncode == 1 and "prefect worker start --pool nobody" in done.stderr, done.stderr
    (run,) = stack.ask("POST", "flow_runs/filter", {"flow_runs": {"name": {"any_": ["nobody"]}}})
    assert 5 <= run["total_run_time"] < 30


def test_a_pool_that_does_not_exist(stack, tiny_recipe):
    done = stack.headrace("run", str(tiny_recipe), "--campaign", "nowhere", "--set", "roles.actor.pool=nowhere")
    assert done.returncode == 1 and "prefect work-pool create nowhere" in done.stderr, done.stderr


def test_an_unknown_engine_is_told_with_those_that_there_are(stack, tiny_recipe):
    done = stack.headrace("run", str(tiny_recipe), "--campaign", "odd", "--set", "rollout.backend.kind=tgi")
    assert done.returncode == 1 and "rollout.backend" in done.stderr and "'vllm'" in done.stderr, done.stderr
    done = stack.headrace("run", str(tiny_recipe), "--campaign", "odd", "--set", "rollout.backend.kind=sglang")
    assert done.returncode == 1 and "needs GPUs" in done.stderr, done.stderr


def test_samples_whose_scoring_fails_are_counted_and_not_trained(stack, tiny_recipe, tmp_path):
    rows = [{"prompt": f"Say {n}.", "ground_truth": str(n) if n % 2 else "no number"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "failing.yaml"
    recipe.write_text(
        f"base: {tiny_recipe}\nname: failing\niterations: 2\nevaluate: {{problems: 0}}\n"
        f"data: {{kind: jsonl, path: {tmp_path / 'rows.jsonl'}, held_out: 2}}\n"
        "reward: {function: last_number}\n"
    )
    done = stack.headrace("run", str(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    store = stack.store("failing")
    failed = [row["score_failed"] for row in History(store).rows()]
    assert sum(failed) > 0 and sum(failed) % 4 == 0
    ledger = Ledger(store)
    ledger.verify()
    assert ledger.state().reasons.get("scoring failed", 0) * 4 == sum(failed), ledger.state()
