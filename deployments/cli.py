"""The console command ``headrace``: what Prefect's own command line does not do, and no more."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.blocks import inheritance
from headrace.blocks.home import home
from headrace.deployments import stack
from headrace.engines.process import alive

STACK_DEADLINE_S = 240.0


class Refused(SystemExit):
    """Ends the command with a message for people and status 1."""

    def __init__(self, message: str) -> None:
        super().__init__(f"headrace: {message}")


def up(port: int = 4200) -> dict[str, Any]:
    """Starts server, work pools, workers and deployments in the background unless they run; returns addresses."""
    state = stack.read_state()
    if state and state["phase"] == "ready":
        return state
    if not state:
        api = os.environ.get("PREFECT_API_URL")
        if api and not stack.healthy(api):
            raise Refused(
                f"PREFECT_API_URL is {api}, but no Prefect server answers there. Start it, or unset the variable"
            )
        if not api and not stack.port_is_free(port):
            raise Refused(f"port {port} is taken by another program. Choose another: headrace up --port 4201")
        stack.launch(port, api)
    return _wait_until_ready()


def _wait_until_ready() -> dict[str, Any]:
    end, shown = time.monotonic() + STACK_DEADLINE_S, ""
    seen = False
    while time.monotonic() < end:
        state = stack.read_state()
        seen = seen or bool(state)
        if seen and not state:
            break
        if state and state["phase"] != shown:
            shown = state["phase"]
            print(
                f"  {shown}"
                + (f" (a first start takes half a minute); log: {home() / 'logs'}" if "server" in shown else "")
            )
        if shown == "ready":
            return state
        time.sleep(0.2)
    log = home() / "logs" / "stack.log"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:]) if log.exists() else ""
    down()
    raise Refused(f"the stack did not come up; the end of {log}:\n{tail}")


def down() -> None:
    """Stops everything that `up` started, and every process below it."""
    state = stack.read_state()
    if not state:
        print("nothing is running")
        return
    os.kill(state["pid"], signal.SIGTERM)
    end = time.monotonic() + stack.GRACE_S + 15
    while alive(state["pid"]):
        if time.monotonic() > end:
            raise Refused(f"process {state['pid']} does not end; kill -9 {state['pid']} ends it")
        time.sleep(0.1)
    stack.state_file().unlink(missing_ok=True)
    print("stopped: server, workers and engines")


def dry_run(recipe: str, settings: list[str]) -> None:
    """Prints the resolved recipe and where each value came from."""
    from headrace.blocks.recipe import Recipe

    given = _given(recipe, settings)
    resolved = _validated(given)
    assert isinstance(resolved, Recipe)
    origin = inheritance.origins({"base": recipe}, recipe) | dict.fromkeys(
        inheritance.flatten(inheritance.assignments(settings)), "--set"
    )
    for path, value in inheritance.flatten(resolved.model_dump(mode="json", exclude={"base"})).items():
        source = next((origin[p] for p in _prefixes(path) if p in origin), "default")
        print(f"{path + ':':46} {json.dumps(value):34} # {source}")


def _prefixes(path: str) -> list[str]:
    words = path.split(".")
    return [".".join(words[:n]) for n in range(len(words), 0, -1)]


def _given(recipe: str, settings: list[str]) -> dict[str, Any]:
    try:
        inheritance.find(recipe)
        return inheritance.merge({"base": recipe}, inheritance.assignments(settings))
    except inheritance.RecipeError as error:
        raise Refused(str(error)) from error


def _validated(given: dict[str, Any]) -> Any:
    from headrace.blocks.recipe import Recipe

    try:
        return Recipe.model_validate(given)
    except inheritance.RecipeError as error:
        raise Refused(str(error)) from error
    except ValidationError as error:
        lines = [
            f"- {'.'.join(map(str, e['loc'])) or 'recipe'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise Refused("the recipe is wrong:\n" + "\n".join(lines)) from error


def run(recipe: str, settings: list[str], campaign: str, bring_up: bool, port: int) -> None:
    """Starts or continues a campaign with `prefect deployment run` and follows it to its end."""
    from headrace.deployments import follow

    given = _given(recipe, settings)
    resolved = _validated(given)
    id = campaign or resolved.name
    if recipe.endswith((".yaml", ".yml")):
        given = inheritance.merge(given, {"base": str(Path(recipe).absolute())})
    try:
        state = up(port) if bring_up else _running(stack.read_state())
        os.environ["PREFECT_API_URL"] = state["api"]  # blocks that the recipe names are read from this server
        follow.campaign(state, resolved, given, id)
    except KeyboardInterrupt:
        if bring_up:
            print("\nstopping everything; the same command continues the campaign")
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            down()
        else:
            print("\nno longer following; the campaign goes on (headrace status). Stop it: prefect flow-run cancel")
        raise SystemExit(130) from None


def _running(state: dict[str, Any]) -> dict[str, Any]:
    api = os.environ.get("PREFECT_API_URL") or (state or {}).get("api")
    if not api or not stack.healthy(api):
        raise Refused("no Prefect server is running. Start one with its workers: headrace up")
    return {"api": api, "ui": api.removesuffix("/api")}


def status() -> None:
    """What runs here, and where each campaign is."""
    from headrace.tasks.progress import read

    state = stack.read_state()
    print(
        f"stack: {state['phase']}, UI {state['ui']}, API {state['api']}"
        if state
        else "stack: not running (headrace up)"
    )
    found = [path for place in ("store", "campaigns") for path in (home() / place).glob("*/progress.json")]
    for path in sorted(found, key=lambda p: p.stat().st_mtime):
        p = read(path)
        ago = time.time() - p["at"]
        reward = f", reward {p['reward']:.3f}" if "reward" in p else ""
        print(
            f"{path.parent.name}: iteration {p['iteration']}/{p['iterations']}, {p['stage']}{reward}, {ago:.0f} s ago"
        )


def doctor() -> None:
    """Checks this machine and says what is missing and how to get it."""
    from headrace.deployments.checks import all_checks

    bad = 0
    for name, ok, words in all_checks():
        bad += not ok
        print(f"{'ok ' if ok else 'NO '} {name}: {words}")
    raise SystemExit(1 if bad else 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="headrace", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    started = commands.add_parser("up", help="start Prefect server, UI, work pools, workers and deployments")
    started.add_argument("--port", type=int, default=4200)
    commands.add_parser("down", help="stop all of it")
    running = commands.add_parser("run", help="start or continue a campaign and follow it")
    running.add_argument("recipe", help="a name in deployments/recipes or a YAML file")
    running.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="settings")
    running.add_argument("--campaign", default="", help="campaign id; default: the recipe's name")
    running.add_argument(
        "--dry-run", action="store_true", help="print the resolved recipe and where each value came from"
    )
    running.add_argument("--up", action="store_true", help="headrace up first; Ctrl-C then stops everything")
    running.add_argument("--port", type=int, default=4200)
    commands.add_parser("status", help="what runs, and where each campaign is")
    commands.add_parser("doctor", help="check this machine")
    given = parser.parse_args()
    match given.command:
        case "up":
            state = up(given.port)
            print(f"UI: {state['ui']}\nFor Prefect's own commands: export PREFECT_API_URL={state['api']}")
        case "down":
            down()
        case "run" if given.dry_run:
            dry_run(given.recipe, given.settings)
        case "run":
            run(given.recipe, given.settings, given.campaign, given.up, given.port)
        case "status":
            status()
        case "doctor":
            doctor()


if __name__ == "__main__":
    sys.exit(main())
