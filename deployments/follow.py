"""Starts a campaign with `prefect deployment run`, shows it live, and tells at the end what came of it."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.blocks.home import campaign_folder, store_url
from headrace.blocks.recipe import Recipe
from headrace.deployments.api import ask
from headrace.engines.experience.store import Store
from headrace.engines.process import alive
from headrace.tasks.progress import read

DEPLOYMENT = {"quickstart", "reasoning-gym", "quickstart-vllm"}
NUMBERS = [
    ("reward", "reward", ".3f"),
    ("held-out accuracy", "accuracy", ".3f"),
    ("tokens/s", "tokens_per_second", ".0f"),
    ("s/iteration", "iteration_seconds", ".1f"),
    ("overhead s", "overhead_seconds", ".2f"),
]
"""What the live display shows: label, field of the progress file, format."""
REFRESH_S = 1.0
STATE_EVERY_S = 3.0
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def campaign(state: dict[str, Any], recipe: Recipe, given: dict[str, Any], id: str) -> None:
    """Follows campaign ``id`` to its end; starts it unless it runs. Exits with status 1 when it does not complete."""
    console = Console()
    root = store_url(recipe.store)
    folder, store = campaign_folder(root, id), Store(f"{root.rstrip('/')}/{id}")
    if (done := _summary(store)) and done["iterations"] >= recipe.iterations:
        console.print(f"campaign [b]{id}[/b] is finished already; this is what came of it:")
        _tell(console, done, state, id, given)
        return
    run = _running(state["api"], id, folder) or _start(console, state["api"], recipe, given, id)
    console.print(f"flow run: {state['ui']}/runs/flow-run/{run}")
    final = _watch(console, state["api"], run, folder, recipe)
    if final["type"] != "COMPLETED":
        raise SystemExit(
            f"the campaign ended as {final['name']}: {final.get('message') or 'no message'}\n"
            f"Nothing is lost. The same command continues it; logs: {state['ui']}/runs/flow-run/{run}"
        )
    _tell(console, _summary(store), state, id, given)


def _summary(store: Store) -> dict[str, Any]:
    return json.loads(store.get("summary.json")) if store.exists("summary.json") else {}


def _running(api: str, id: str, folder: Path) -> str | None:
    """The flow run that already works on this campaign, if its process is alive."""
    active = {"type": {"any_": ["RUNNING", "PENDING", "SCHEDULED"]}}
    query = {"flow_runs": {"tags": {"all_": ["campaign", f"campaign:{id}"]}, "state": active}}
    for run in ask(api, "POST", "flow_runs/filter", query):
        if not (run["state"]["type"] == "RUNNING" and _process_is_gone(folder, run["id"])):
            return run["id"]
        _mark_crashed(api, run["id"])
    return None


def _process_is_gone(folder: Path, run: str) -> bool:
    """Whether the flow run wrote its process id here and there is no such process any more."""
    fields = read(folder / "progress.json")
    return fields.get("flow_run") == run and not alive(fields["pid"])


def _mark_crashed(api: str, run: str) -> None:
    """Says what nobody else can: a worker that was killed with its flow run reports nothing."""
    state = {"type": "CRASHED", "name": "Crashed", "message": "its process is gone"}
    ask(api, "POST", f"flow_runs/{run}/set_state", {"state": state, "force": True})


def _start(console: Console, api: str, recipe: Recipe, given: dict[str, Any], id: str) -> str:
    base = given.get("base", "")
    deployment = f"on-policy/{base if base in DEPLOYMENT else 'quickstart'}"
    command = [
        "prefect",
        "deployment",
        "run",
        deployment,
        "--param",
        f"recipe={json.dumps(given)}",
        "--param",
        f'campaign="{id}"',
    ]
    command += ["--tag", "campaign", "--tag", f"campaign:{id}"]
    console.print(Text("$ " + " ".join(command), style="dim"))
    environment = {**os.environ, "PREFECT_API_URL": api}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    found = re.search(r"UUID: *([0-9a-f-]{36})", done.stdout)
    if done.returncode or not found:
        raise SystemExit(f"prefect deployment run failed:\n{done.stdout}{done.stderr}")
    return found[1]


def _watch(console: Console, api: str, run: str, folder: Path, recipe: Recipe) -> dict[str, Any]:
    state: dict[str, Any] = {"type": "PENDING", "name": "Pending"}
    asked, gone = 0.0, 0
    with Live(console=console, refresh_per_second=1, transient=False) as live:
        while state["type"] not in FINAL:
            if time.monotonic() - asked > STATE_EVERY_S:
                asked = time.monotonic()
                try:
                    state = ask(api, "GET", f"flow_runs/{run}")["state"] or state
                    if state["type"] == "RUNNING" and _process_is_gone(folder, run):
                        gone += 1
                        if gone > 2:
                            _mark_crashed(api, run)
                except httpx.HTTPError:
                    state = {"type": "UNREACHABLE", "name": "Prefect server does not answer; the campaign goes on"}
            live.update(_picture(read(folder / "progress.json"), state, recipe))
            time.sleep(REFRESH_S)
    return state


def _picture(p: dict[str, Any], state: dict[str, Any], recipe: Recipe) -> Group:
    done, total = p.get("iteration", 0), recipe.iterations
    table = Table.grid(padding=(0, 2))
    table.add_row("iteration", f"{done}/{total}", "stage", p.get("stage", state["name"]))
    table.add_row(*(w for label, key, form in NUMBERS if key in p for w in (label, format(p[key], form))))
    return Group(table, ProgressBar(total=total, completed=done, width=60), Text(state["name"], style="dim"))


def _tell(console: Console, s: dict[str, Any], state: dict[str, Any], id: str, given: dict[str, Any]) -> None:
    table = Table(title=f"campaign {id}")
    for column in ("", "before", "after"):
        table.add_column(column)
    if "accuracy_after" in s:
        table.add_row(
            f"held-out accuracy ({s['problems']} problems, greedy)",
            f"{s['accuracy_before']:.3f}",
            f"{s['accuracy_after']:.3f}",
        )
    table.add_row("training reward (mean of 5 iterations)", f"{s['reward_before']:.3f}", f"{s['reward_after']:.3f}")
    console.print(table)
    for sample in s["samples"]:
        console.print(Text(f"Q: {sample['prompt']}\n  before: {sample['before']!r}\n  after:  {sample['after']!r}"))
    name = given.get("base", "quickstart")
    deployed = name if name in DEPLOYMENT else "quickstart"
    console.print(
        f"\ntrained model   {s['model']}\n"
        f"UI              {state['ui']}  (campaign: {state['ui']}/runs)\n"
        f"run it again    headrace run {name} --campaign {id}-2 --set seed=1\n"
        f"change it       headrace run {name} --campaign {id}-3 --set train.optim.lr=1e-5   (all settings: --dry-run)\n"
        f"schedule it     prefect deployment schedule create on-policy/{deployed} --cron '0 2 * * *'\n"
        f"stop the server headrace down",
        highlight=False,
    )
