"""What every pipeline begins and ends with: checks, engines, and the state that earlier attempts left."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from headrace.blocks.recipe import Recipe
from headrace.tasks.campaign import Campaign
from headrace.tasks.preflight import check_recipe, check_workers
from headrace.tasks.recovery import complete_ledger
from headrace.tasks.report import complete_history
from headrace.tasks.shutdown import release_engines


class DiskFull(RuntimeError):
    """What does not go through the store found no room: progress, checkpoints, pictures."""


@asynccontextmanager
async def open_campaign(recipe: Recipe, campaign: str) -> AsyncIterator[Campaign]:
    """Checks the recipe, takes the campaign over from any earlier attempt and brings up its engines.

    Engines that an earlier attempt left are used warm. On success they are shut down; on failure they stay for the next
    attempt until their idle limit.
    """
    id = campaign or recipe.name
    check_recipe(recipe)
    async with Campaign(id, recipe) as c:
        trained = c.trained()
        if trained:
            c.move_to(len(trained), trained[-1].key)
            complete_ledger(c, trained)
            c.cursor = c.ledger.frontier().cursor
            complete_history(c)
        get_run_logger().info(
            "campaign %s, attempt %d, at iteration %d; everything is in %s", id, c.attempt, c.version, c.url
        )
        c.progress.update(
            campaign=id,
            pid=os.getpid(),
            flow_run=str(flow_run.id),
            attempt=c.attempt,
            iteration=c.version,
            iterations=recipe.iterations,
            stage="start engines",
        )
        try:
            await check_workers(recipe)
            await c.engines.start_all()
            yield c
            await c.router.settle()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DiskFull(f"{error}: free some space for {c.folder}, then start the campaign again") from error
        await c.engines.shutdown_all()


def shut_down(flow: Flow, flow_run: FlowRun, state: State) -> None:
    """Cancellation: the engines leave at once. Runs in a process of its own, with ids and parameters only."""
    asyncio.run(release_engines(flow_run.parameters))


def leave_engines(flow: Flow, flow_run: FlowRun, state: State) -> None:
    """Failure: the engines stay warm for the next attempt; says so."""
    get_run_logger().error(
        "the campaign stopped: %s. Nothing is lost: start it again with the same parameters and it continues. "
        "Its engines stay warm until their idle limit",
        state.message,
    )
