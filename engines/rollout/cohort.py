"""Jobs that an engine samples in one batch, so that its steps are full and depend on what was asked, not on when."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from headrace.engines.rollout.base import Group, Request, RolloutEngine
from headrace.engines.rollout.errors import RolloutError


class _Cohort:
    """One batch under way or done: a future for each of its groups."""

    def __init__(self, engine: RolloutEngine, requests: Sequence[Request], version: int) -> None:
        loop = asyncio.get_running_loop()
        self.requests, self.version = requests, version
        self.users, self.failed = 0, False
        self.groups = {request.group: loop.create_future() for request in requests}
        self.task = loop.create_task(self._run(engine))

    async def _run(self, engine: RolloutEngine) -> None:
        error: BaseException = RolloutError("the engine ended the batch without this group; run the stage again")
        try:
            async for group in engine.generate(self.requests):
                self.groups[group.group].set_result(group)
        except Exception as raised:  # it is raised where the groups are waited for
            error = raised
        except asyncio.CancelledError as raised:
            error = raised
            raise
        finally:
            for future in self.groups.values():
                if not future.done():
                    self.failed = True
                    future.set_exception(error)
                    future.exception()  # seen: not every job need still wait for it


class Cohorts:
    """The batches of one engine. A batch is kept until the next begins: others of its jobs may be on their way."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._cohorts: list[_Cohort] = []

    async def groups(self, requests: Sequence[Request], wanted: set[int], version: int) -> AsyncIterator[Group]:
        """Yields the wanted groups of ``requests`` as they finish. Jobs that ask for the same requests share a batch.

        Raises what the engine raised; the next call begins a new batch. A batch whose last job gives up is ended.
        """
        cohort = self._join(requests, version)
        cohort.users += 1
        missing = len(wanted)
        try:
            for group in asyncio.as_completed([cohort.groups[group] for group in wanted]):
                yield await group
                missing -= 1
        finally:
            cohort.users -= 1
            if missing and not cohort.users:
                self._cohorts.remove(cohort)
                cohort.task.cancel()
                await asyncio.gather(cohort.task, return_exceptions=True)

    def _join(self, requests: Sequence[Request], version: int) -> _Cohort:
        for cohort in self._cohorts:
            if not cohort.failed and (cohort.version, cohort.requests) == (version, requests):
                return cohort
        self._cohorts = [cohort for cohort in self._cohorts if cohort.users or not cohort.task.done()]
        self._cohorts.append(_Cohort(self._engine, requests, version))
        return self._cohorts[-1]
