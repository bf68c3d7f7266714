"""Jobs of one batch: sampled once, and told when it fails."""

import asyncio
from typing import Any

import pytest

from headrace.engines.rollout.base import Group, Request, Sampling
from headrace.engines.rollout.cohort import Cohorts
from headrace.engines.rollout.errors import RolloutError

REQUESTS = [Request(group, [1], [7], Sampling(1.0, 4, ())) for group in range(3)]


class Engine:
    """Gives the first ``gives`` groups, then ends or raises."""

    def __init__(self, gives: int, error: Exception | None = None) -> None:
        self.gives, self.error, self.calls = gives, error, 0

    async def generate(self, requests):
        self.calls += 1
        for request in requests[: self.gives]:
            await asyncio.sleep(0)
            yield Group(request.group)
        if self.error:
            raise self.error


async def _job(cohorts: Cohorts, wanted: set[int]) -> list[int]:
    return sorted([group.group async for group in cohorts.groups(REQUESTS, wanted, 0)])


def test_two_jobs_share_a_batch_also_when_one_comes_later():
    async def run(engine: Any) -> None:
        cohorts = Cohorts(engine)
        assert await asyncio.gather(_job(cohorts, {0}), _job(cohorts, {1, 2})) == [[0], [1, 2]]
        assert await _job(cohorts, {1}) == [1]

    engine = Engine(3)
    asyncio.run(run(engine))
    assert engine.calls == 1


@pytest.mark.parametrize("error", [None, RolloutError("broken")])
def test_a_batch_that_ends_early_is_told_and_the_next_call_begins_another(error):
    async def run(engine: Any) -> None:
        cohorts = Cohorts(engine)
        for _ in range(2):
            with pytest.raises(RolloutError, match="broken" if error else "without this group"):
                await asyncio.wait_for(_job(cohorts, {0, 2}), 5)

    engine = Engine(1, error)
    asyncio.run(run(engine))
    assert engine.calls == 2
