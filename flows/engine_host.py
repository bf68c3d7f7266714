"""The host of one engine: a flow run on a work pool that starts it, guards it and says why it ended."""

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from headrace.blocks.home import store_url
from headrace.blocks.lease import Lease
from headrace.blocks.recipe import Recipe
from headrace.engines.experience.store import Store
from headrace.engines.process import Child, describe_exit
from headrace.engines.specs import command_and_spec

WATCH_S = 1.0
"""How often the host forwards the engine's log."""
LOG_LINES = 200
"""Lines of the engine's log forwarded at a time; the rest stays in the file."""


class EngineDied(RuntimeError):
    """The engine process ended on its own; the message holds its last lines."""


@flow(name="engine-host", flow_run_name="{role}-{index}-{campaign}", persist_result=False)
async def engine_host(
    campaign: str,
    role: str,
    index: int,
    epoch: int,
    attempt: int,
    store: str,
    block: str = "",
    recipe: str = "recipe.json",
) -> None:
    """Holds one engine of a campaign until it is shut down, is idle for too long, or dies.

    Args:
        campaign: id of the campaign, for names.
        role: actor, rollout or reference.
        index: which of the role's engines.
        epoch: number of this engine among those that held the role; the lease and every call carry it.
        attempt: the campaign's attempt that asked for it.
        store: URL of the campaign's store, where recipe, token and lease lie.
        block: the recipe's ``block:NAME``, whose credentials the store needs; empty = none.
        recipe: path below the store of the recipe that says how the engine is started.
    """
    log = get_run_logger()
    if block:
        store_url(block)
    campaign_store = Store(store)
    settings = Recipe.model_validate_json(campaign_store.get(recipe))
    with tempfile.TemporaryDirectory(prefix=f"headrace-{role}-") as scratch:
        folder = Path(scratch)
        endpoint = folder / "endpoint.json"
        identity = {
            "role": role,
            "index": index,
            "epoch": epoch,
            "token": campaign_store.get("token").decode(),
            "store": store,
            "endpoint": str(endpoint),
            "log_folder": str(folder),
        }
        python = os.environ.get("HEADRACE_ENGINE_PYTHON", sys.executable)
        command, env, spec = command_and_spec(settings, role, identity, python)
        (folder / "spec.json").write_text(json.dumps(spec))
        (folder / "spec.json").chmod(0o600)
        child = Child([*command, "--spec", str(folder / "spec.json")], log=folder / "engine.log", env=env)
        try:
            reached = await _endpoint(child, endpoint, role, settings.deadlines.engine_start)
            lease = Lease(
                role=role,
                index=index,
                epoch=epoch,
                url=reached["url"],
                pid=reached["pid"],
                node=socket.gethostname(),
                flow_run_id=str(flow_run.id),
                recipe=recipe,
            )
            campaign_store.put(f"leases/{role}-{index}.json", lease.model_dump_json().encode())
            emit_event(
                "headrace.engine.ready", resource={"prefect.resource.id": f"headrace.engine.{campaign}.{role}-{index}"}
            )
            log.info("%s-%d is healthy at %s (pid %d, epoch %d)", role, index, lease.url, lease.pid, epoch)
            await _guard(child, role)
        finally:
            await asyncio.to_thread(child.stop)


async def _endpoint(child: Child, endpoint: Path, role: str, deadline_s: float) -> dict[str, Any]:
    """Waits until the engine has written where it listens, which it does once it is loaded."""
    end = time.monotonic() + deadline_s
    while not endpoint.exists():
        code = await asyncio.to_thread(child.wait, 0.2)
        if code is not None:
            raise EngineDied(
                f"the {role} engine ended before it was ready ({describe_exit(code)}). Its last lines:\n{child.tail()}"
            )
        if time.monotonic() > end:
            raise EngineDied(
                f"the {role} engine was not ready after {deadline_s:.0f} s. Its last lines:\n{child.tail()}"
            )
    return json.loads(endpoint.read_text())


async def _guard(child: Child, role: str) -> None:
    """Forwards the engine's log until the engine ends; an end that nobody asked for is an error."""
    log, sent = get_run_logger(), 0
    while True:
        code = await asyncio.to_thread(child.wait, WATCH_S)
        with child.log.open("rb") as f:
            f.seek(sent)
            news = f.read()
        sent += len(news)
        lines = news.decode(errors="replace").splitlines()
        if lines:
            log.info("\n".join(lines[-LOG_LINES:]))
        if code == 0:
            log.info("the %s engine left", role)
            return
        if code is not None:
            raise EngineDied(f"the {role} engine died ({describe_exit(code)}). Its last lines:\n{child.tail()}")
