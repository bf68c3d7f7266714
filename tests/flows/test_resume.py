"""Whatever is killed, and whenever: no group is lost or trained twice, and the weights come out the same."""

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest

from headrace.engines.experience.ledger import Ledger

pytestmark = pytest.mark.slow


def _weights(stack, campaign: str) -> str:
    summary = json.loads(stack.store(campaign).get("summary.json"))
    return hashlib.sha256((Path(summary["model"]) / "model.safetensors").read_bytes()).hexdigest()


def _check(stack, campaign: str) -> None:
    ledger = Ledger(stack.store(campaign))
    ledger.verify()
    assert ledger.state().open == 0 and ledger.frontier() == (6, 24)
    assert _weights(stack, campaign) == _weights(stack, "undisturbed")


def _kill(stack, campaign: str, what: str) -> None:
    if what == "flow":
        pid = stack.progress(campaign)["pid"]
    elif what in ("worker", "server"):
        pid = stack.state["processes"]["workers" if what == "worker" else "server"]
    else:
        pid = json.loads(stack.store(campaign).get(f"leases/{what}-0.json"))["pid"]
    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def undisturbed(stack, tiny_recipe):
    done = stack.headrace("run", str(tiny_recipe), "--campaign", "undisturbed")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("what", ["actor", "rollout", "worker", "server"])
def test_the_campaign_goes_on_by_itself(stack, tiny_recipe, what):
    following = stack.start("run", str(tiny_recipe), "--campaign", f"without-{what}")
    stack.wait_for(f"without-{what}", lambda p: p.get("iteration", 0) >= 3)
    _kill(stack, f"without-{what}", what)
    out = stack.end_of(following)
    assert following.returncode == 0, out
    _check(stack, f"without-{what}")


def test_an_actor_that_dies_while_it_writes_its_state(stack, tiny_recipe):
    following = stack.start("run", str(tiny_recipe), "--campaign", "half-saved")
    states = stack.home / "store" / "half-saved" / "checkpoints"
    stack.wait_for("half-saved", lambda _: (states / "step-000002").exists() and any(states.glob(".*.tmp")))
    _kill(stack, "half-saved", "actor")
    out = stack.end_of(following)
    assert following.returncode == 0, out
    _check(stack, "half-saved")
    assert list(states.glob("step-*/COMPLETE"))


STAGES = ["start engines", "parity", "generate", "score", "train", "sync-weights", "report"]


@pytest.mark.timeout(1200)
def test_the_same_command_continues_wherever_the_flow_was_killed(stack, tiny_recipe):
    """One campaign, whose flow is killed in each stage in turn."""
    killed: list[int] = []
    for stage in STAGES:
        following = stack.start("run", str(tiny_recipe), "--campaign", "killed")
        at = 0 if stage in ("start engines", "parity") else 1

        def reached(p: dict, stage: str = stage, at: int = at) -> bool:
            return p.get("iteration", -1) >= at and p["stage"] == stage and p["pid"] not in killed

        killed.append(stack.wait_for("killed", reached)["pid"])
        _kill(stack, "killed", "flow")
        out = stack.end_of(following)
        assert following.returncode == 1 and "The same command continues it" in out, f"{stage}: {out}"
    again = stack.headrace("run", str(tiny_recipe), "--campaign", "killed")
    assert again.returncode == 0, again.stdout + again.stderr
    _check(stack, "killed")


def test_new_rollout_engines_while_the_trainer_may_be_a_step_ahead(stack, tiny_recipe):
    following = stack.start("run", str(tiny_recipe), "--campaign", "ahead")
    stack.wait_for("ahead", lambda p: p.get("iteration", -1) >= 2 and p["stage"] == "train")
    for what in ("flow", "rollout"):
        _kill(stack, "ahead", what)
    stack.end_of(following)
    again = stack.headrace("run", str(tiny_recipe), "--campaign", "ahead")
    assert again.returncode == 0, again.stdout + again.stderr
    _check(stack, "ahead")


def test_everything_is_killed_at_once(stack, tiny_recipe):
    following = stack.start("run", str(tiny_recipe), "--campaign", "all-dead")
    stack.wait_for("all-dead", lambda p: p.get("iteration", 0) >= 3)
    for what in ("flow", "actor", "rollout", "worker", "server"):
        _kill(stack, "all-dead", what)
    stack.end_of(following)
    again = stack.headrace("run", str(tiny_recipe), "--campaign", "all-dead")
    assert again.returncode == 0, again.stdout + again.stderr
    _check(stack, "all-dead")
