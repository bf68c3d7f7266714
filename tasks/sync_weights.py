"""Brings the rollout engines to the current weight version and verifies what they serve."""

from headrace.blocks.manifest import Manifest
from headrace.blocks.weights import Served
from headrace.tasks.campaign import current
from headrace.tasks.stage import stage


@stage("sync-weights", "sync-weights[v{version}]")
async def sync_weights(version: int, trained: Manifest | None = None) -> list[Served]:
    """Every rollout engine serves ``version`` with the published digest, or the campaign stops.

    ``trained`` made the version; it is only named so that the UI draws the edge.
    """
    c = current()
    c.progress.update(stage="sync-weights")
    c.start_deferred()
    return await c.engines.sync_all()
