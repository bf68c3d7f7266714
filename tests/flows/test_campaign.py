"""A campaign on a real Prefect server with real engines, from the console command to the trained model."""

import json

import pytest
from safetensors.numpy import load_file

from headrace.engines.experience.ledger import Ledger

pytestmark = pytest.mark.slow


def test_a_campaign_from_one_command(stack, tiny_recipe, tiny_model):
    done = stack.headrace("run", str(tiny_recipe), "--campaign", "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out accuracy" in done.stdout and "trained model" in done.stdout
    store = stack.store("whole")
    ledger = Ledger(store)
    ledger.verify()
    assert ledger.state().reserved == 24 and ledger.state().open == 0
    summary = json.loads(store.get("summary.json"))
    assert summary["iterations"] == 6 and len(summary["samples"]) == 3
    before, after = (load_file(f"{folder}/model.safetensors") for folder in (tiny_model, summary["model"]))
    assert before.keys() == after.keys() and any((before[k] != after[k]).any() for k in before)


def test_what_a_person_sees_in_the_ui(stack):
    runs = stack.ask("POST", "flow_runs/filter", {"flow_runs": {"tags": {"all_": ["campaign", "campaign:whole"]}}})
    iterations = stack.ask("POST", "flow_runs/filter", {"flow_runs": {"name": {"any_": ["iteration-3"]}}})
    assert {run["state"]["type"] for run in runs} == {"COMPLETED"}
    ids = [run["id"] for run in iterations]
    tasks = stack.ask("POST", "task_runs/filter", {"flow_runs": {"id": {"any_": ids}}})
    names = {task["name"] for task in tasks}
    assert {"generate[3/0]", "generate[3/1]", "score[3/0]", "advantage[3]", "train[3]", "sync-weights[v4]"} <= names
    assert 8 <= len(names) <= 20
    artifacts = stack.ask("POST", "artifacts/latest/filter", {})
    found = {a["key"]: a for a in artifacts}
    table = json.loads(found["whole-iteration"]["data"])
    assert {"generate", "score", "train", "sync-weights"} <= {row["stage"] for row in table}
    assert found["whole-curves"]["data"].startswith("data:image/png;base64,")


def test_the_same_command_again_says_that_it_is_finished(stack, tiny_recipe):
    done = stack.headrace("run", str(tiny_recipe), "--campaign", "whole")
    assert done.returncode == 0 and "finished already" in done.stdout


def test_another_recipe_under_the_same_campaign_is_refused(stack, tiny_recipe):
    done = stack.headrace("run", str(tiny_recipe), "--campaign", "whole", "--set", "seed=5", "--set", "iterations=9")
    assert done.returncode == 1 and "another recipe (differs in: seed)" in done.stderr


def test_a_model_that_is_not_there_is_refused_before_engines_start(stack, tiny_recipe):
    done = stack.headrace(
        "run", str(tiny_recipe), "--campaign", "lost", "--set", "model.path=/nowhere", "--set", "prompts=99999"
    )
    assert done.returncode == 1 and "no model in /nowhere" in done.stderr and "training problems" in done.stderr
    assert not stack.store("lost").paths("leases")
