"""Workers of several process pools in one process: `headrace up` runs it instead of several `prefect worker start`."""

import asyncio
import sys

from prefect.workers.process import ProcessWorker


async def serve(pools: list[str]) -> None:
    """Runs a worker for each pool until the process is stopped."""
    async with asyncio.TaskGroup() as group:
        for pool in pools:
            group.create_task(ProcessWorker(work_pool_name=pool, name=f"{pool}-local").start())


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
