"""Which rollout engine samples a shard: the least loaded living one, and another when it dies under the work."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefect.logging import get_run_logger

from headrace.blocks.recipe import Recipe
from headrace.engines.rpc.errors import EngineError
from headrace.tasks.engines import Engines, EngineStartFailed

QUEUED = 2
"""Samples that an engine is given for each that it decodes at a time: never short of work, and little to move when it
dies."""
LOOK_S = 2.0
"""How often one that waits looks for engines that joined."""


class NoRoom(TimeoutError):
    """No rollout engine took the work within the stage's deadline."""


class Router:
    """Places work on the rollout engines of a campaign. Not for a deterministic back end: there the place of a shard
    decides how it rounds, so it is fixed.

    A dead engine is started again in the background while the others go on. An engine that is started by hand, under a
    number that the recipe does not have, joins: its lease is found in the store. Who serves another version loads the
    current one before its first work.
    """

    def __init__(self, engines: Engines, recipe: Recipe) -> None:
        backend = recipe.rollout.backend
        self._most = QUEUED * getattr(backend, "max_num_seqs", 1)
        self._engines, self._recipe = engines, recipe
        self._load: Counter[int] = Counter()
        self._changed = asyncio.Condition()
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._failed: dict[int, EngineStartFailed] = {}

    @asynccontextmanager
    async def place(self, samples: int) -> AsyncIterator[int]:
        """The index of the engine that is to take so many samples; they count as its load inside the block.

        Raises:
            EngineStartFailed: no engine lives, and none can be started.
            NoRoom: none had room within ``deadlines.stage``.
        """
        index = await self._choose(samples)
        try:
            yield index
        finally:
            self._load[index] -= samples
            async with self._changed:
                self._changed.notify_all()

    async def _choose(self, samples: int) -> int:
        end = time.monotonic() + self._recipe.deadlines.stage
        while True:
            await self._look()
            living = self._engines.living("rollout")
            room = [i for i in living if not self._load[i] or self._load[i] + samples <= self._most]
            if room:
                index = min(room, key=lambda i: (self._load[i], i))
                self._load[index] += samples
                return index
            if not living and not self._starting:
                failed = self._failed.popitem()[1]
                self._failed.clear()
                raise failed
            if time.monotonic() > end:
                raise NoRoom(
                    f"no rollout engine had room for {samples} samples within {self._recipe.deadlines.stage:.0f} s; "
                    f"living: {living or 'none'}, in flight: {dict(self._load)}, starting: {list(self._starting)}"
                )
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), min(LOOK_S, max(end - time.monotonic(), 0.01)))
                except TimeoutError:
                    continue

    async def _look(self) -> None:
        """Starts what the recipe wants and does not live; takes in what has joined."""
        for index, task in list(self._starting.items()):
            if task.done():
                del self._starting[index]
                task.result()
        living = self._engines.living("rollout")
        for index in range(self._recipe.roles.rollout.engines):
            if index not in living and index not in self._starting and index not in self._failed:
                self._starting[index] = asyncio.create_task(self._start(index))
        await self._engines.greet_joined("rollout")

    async def _start(self, index: int) -> None:
        try:
            await self._engines.client("rollout", index)
        except EngineStartFailed as error:
            get_run_logger().error("rollout-%d is lost, and starting it again failed: %s", index, error)
            self._failed[index] = error
        except EngineError as error:
            get_run_logger().warning("rollout-%d was lost while it started: %s", index, error)
        finally:
            async with self._changed:
                self._changed.notify_all()

    def forgive(self) -> None:
        """Engines that could not be started are tried again: a new iteration begins."""
        self._failed.clear()

    async def settle(self) -> None:
        """Waits until no engine is being started: one that nobody knows would hold its GPU until its idle limit."""
        await asyncio.gather(*self._starting.values(), return_exceptions=True)

    def close(self) -> None:
        for task in self._starting.values():
            task.cancel()
