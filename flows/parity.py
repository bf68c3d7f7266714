"""The parity gate alone, as a deployment: on any recipe, or on the weights that a campaign has reached."""

import asyncio

from prefect import Flow, flow
from prefect.client.schemas.objects import FlowRun, State

from headrace.blocks.recipe import Recipe
from headrace.flows.campaign import leave_engines, open_campaign
from headrace.flows.gate import parity_gate
from headrace.tasks.shutdown import release_engines

SUFFIX = "-parity"
"""Of the id under which the gate runs alone."""


def shut_down(flow: Flow, flow_run: FlowRun, state: State) -> None:
    """Cancellation: the engines leave at once. Runs in a process of its own, with ids and parameters only."""
    asyncio.run(release_engines(flow_run.parameters, SUFFIX))


@flow(
    name="parity",
    flow_run_name="{campaign}",
    on_cancellation=[shut_down],
    on_failure=[leave_engines],
    validate_parameters=True,
)
async def parity(recipe: Recipe, campaign: str = "") -> dict[str, float]:
    """Runs the gate alone; returns its metrics, or fails and says what differs.

    Args:
        recipe: as for a campaign.
        campaign: id to run under; empty = the recipe's name with -parity. A campaign that exists is measured with the
            weights that it has reached.
    """
    async with open_campaign(recipe, campaign or recipe.name + SUFFIX) as c:
        metrics = await parity_gate(campaign=c.id)
        await c.settle()
        return metrics
