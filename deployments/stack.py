"""What `headrace up` keeps running: a Prefect server, the local work pools and one process with their workers.

It runs in the background under a guard process (``engines/guard.py``) and starts again what dies. A worker that is
killed leaves its flow runs running; stopping the guard ends every process below it, whoever its parent is by then.
"""

import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import httpx

from headrace.blocks.home import home
from headrace.engines.process import GUARD, alive, describe_exit

POOLS = ("controller", "actor", "rollout", "rollout-vllm")
START_DEADLINE_S = 180.0
GRACE_S = 6.0
"""Seconds between SIGTERM and SIGKILL when the stack is stopped."""
MAX_RESTARTS = 20


def state_file() -> Path:
    """Pid, addresses and phase of the running stack."""
    return home() / "stack.json"


def read_state() -> dict[str, Any]:
    """State of the stack, or nothing when it does not run."""
    try:
        state = json.loads(state_file().read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return state if alive(state["pid"]) else {}


def settings() -> dict[str, str]:
    """The tuned Prefect settings of prefect.toml as environment variables, without the API's URL."""

    def flat(prefix: str, tree: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for key, value in tree.items():
            name = f"{prefix}_{key}".upper()
            found |= flat(name, value) if isinstance(value, dict) else {name: str(value).lower()}
        return found

    tuned = flat("PREFECT", tomllib.loads(Path(__file__).with_name("prefect.toml").read_text()))
    tuned.pop("PREFECT_API_URL")
    return tuned | {
        "DO_NOT_TRACK": "1",
        "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
        "PREFECT_LOGGING_TO_API_MAX_LOG_SIZE": "1000000",
    }


def healthy(api: str) -> bool:
    """Whether a Prefect server answers at ``api``."""
    try:
        return httpx.get(f"{api}/health", timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False


def port_is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def launch(port: int, api: str | None) -> int:
    """Starts the stack in the background; returns the guard's pid, whose SIGTERM ends everything."""
    logs = home() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    state_file().unlink(missing_ok=True)
    # The guard holds both ends of its lifeline: it never closes, only a signal or the stack's end ends it.
    read, write = os.pipe()
    command = [sys.executable, "-m", "headrace.deployments.stack", str(port), *([api] if api else [])]
    with (logs / "stack.log").open("ab") as log:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), str(read), str(GRACE_S), "--", *command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[read, write], start_new_session=True,
        )  # fmt: skip
    os.close(read)
    os.close(write)
    return guard.pid


class Stack:
    """The supervisor below the guard; it has no end of its own."""

    def __init__(self, port: int, api: str | None) -> None:
        self._own_server = api is None
        self._port = port
        self._api = api or f"http://127.0.0.1:{port}/api"
        self._env = {
            **os.environ,
            **settings(),
            "PREFECT_API_URL": self._api,
            "PREFECT_HOME": str(home() / "prefect"),
            "HEADRACE_HOME": str(home()),
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        }
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        if self._own_server:
            self._say("starting the Prefect server")
            self._start("server")
            self._wait_healthy()
        self._say("creating work pools and deployments")
        self._start("workers")
        self._register()
        self._say("ready")
        self._watch()

    def _say(self, phase: str) -> None:
        self._phase = phase
        processes = {name: child.pid for name, child in self._children.items()}
        state = {
            "pid": os.getppid(),
            "processes": processes,
            "api": self._api,
            "ui": self._api.removesuffix("/api"),
            "phase": phase,
        }
        written = state_file().with_suffix(".tmp")
        written.write_text(json.dumps(state))
        os.replace(written, state_file())
        print(phase, flush=True)

    def _command(self, name: str) -> list[str]:
        if name == "server":
            return [sys.executable, "-m", "headrace.deployments.server", "127.0.0.1", str(self._port)]
        return [sys.executable, "-m", "headrace.deployments.workers", *POOLS]

    def _start(self, name: str) -> None:
        env = self._env | ({"PREFECT_UI_API_URL": self._api} if name == "server" else {})
        with (home() / "logs" / f"{name}.log").open("ab") as log:
            self._children[name] = subprocess.Popen(
                self._command(name), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait_healthy(self) -> None:
        end = time.monotonic() + START_DEADLINE_S
        while not healthy(self._api):
            code = self._children["server"].poll()
            if code is not None or time.monotonic() > end:
                why = (
                    f"ended ({describe_exit(code)})"
                    if code is not None
                    else f"did not answer in {START_DEADLINE_S:.0f} s"
                )
                raise SystemExit(f"the Prefect server {why}; its log: {home() / 'logs' / 'server.log'}")
            time.sleep(0.2)

    def _register(self) -> None:
        command = [sys.executable, "-m", "headrace.deployments.register", *POOLS]
        done = subprocess.run(
            command, env=self._env, capture_output=True, text=True, timeout=START_DEADLINE_S, check=False
        )
        if done.returncode:
            raise SystemExit(f"registering work pools and deployments failed:\n{done.stdout}\n{done.stderr}")

    def _watch(self) -> None:
        """Starts again what dies; a server that was killed comes back with its database."""
        restarts = 0
        while True:
            time.sleep(0.5)
            for name, child in self._children.items():
                if (code := child.poll()) is not None:
                    restarts += 1
                    print(f"{name} ended ({describe_exit(code)}); start {restarts} of {MAX_RESTARTS}", flush=True)
                    if restarts > MAX_RESTARTS:
                        raise SystemExit(f"{name} ends too often; its log: {home() / 'logs' / name}.log")
                    self._start(name)
                    self._say(self._phase)


def main() -> None:
    port, api = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    home().mkdir(parents=True, exist_ok=True)
    Stack(port, api).run()


if __name__ == "__main__":
    main()
