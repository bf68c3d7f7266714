"""Where shards go: least load, bounded, around dead engines, to those that join. Engines here only have a number."""

import asyncio
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from headrace.blocks.recipe import Recipe
from headrace.engines.rpc.errors import EngineLost
from headrace.tasks.engines import EngineStartFailed
from headrace.tasks.router import NoRoom, Router

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Numbers:
    """Stands for ``Engines``: which live, which join, and how starting them ends."""

    def __init__(self, *living: int) -> None:
        self.alive, self.joining = set(living), set[int]()
        self.starts: list[int] = []
        self.may_start = asyncio.Event()
        self.failure: Exception | None = None

    def living(self, role: str) -> list[int]:
        return sorted(self.alive)

    async def greet_joined(self, role: str) -> None:
        self.alive |= self.joining

    async def client(self, role: str, index: int) -> None:
        self.starts.append(index)
        await self.may_start.wait()
        if self.failure:
            raise self.failure
        self.alive.add(index)


def recipe(engines: int = 2, stage: float = 5.0) -> Recipe:
    return Recipe.model_validate(
        {
            "base": "quickstart",
            "prompts": 8,
            "roles": {"rollout": {"pool": "rollout", "engines": engines}},
            "rollout": {"shards": 4, "backend": {"kind": "vllm", "max_num_seqs": 8}},
            "deadlines": {"stage": stage},
        }
    )


def router(numbers: Any, **changes: Any) -> Router:
    return Router(numbers, recipe(**changes))


async def test_the_least_loaded_engine_gets_the_shard():
    r = router(Numbers(0, 1))
    async with r.place(4) as a, r.place(2) as b, r.place(1) as c, r.place(1) as d:
        assert (a, b, c, d) == (0, 1, 1, 1)
        async with r.place(1) as e:
            assert e == 0
    async with r.place(1) as again:
        assert again == 0


async def test_in_flight_work_is_bounded_and_waits_for_room():
    r = router(Numbers(0), engines=1)
    async with r.place(12) as first:
        waiting = asyncio.create_task(r._choose(8))
        await asyncio.sleep(0.05)
        assert first == 0 and not waiting.done()
        async with r.place(4) as fits:
            assert fits == 0
    assert await asyncio.wait_for(waiting, 1) == 0


async def test_more_than_fits_goes_to_an_idle_engine():
    r = router(Numbers(0), engines=1)
    async with r.place(1000) as index:
        assert index == 0


async def test_a_dead_engine_is_started_again_while_the_others_work():
    engines = Numbers(0, 1)
    r = router(engines)
    with pytest.raises(EngineLost):
        async with r.place(4) as index:
            engines.alive.remove(index)
            raise EngineLost("it died")
    async with r.place(4) as a, r.place(4) as b:
        assert (a, b) == (1, 1)
        await asyncio.sleep(0)
        assert engines.starts == [0]
        engines.may_start.set()
        await asyncio.sleep(0.01)
        async with r.place(4) as c:
            assert c == 0


async def test_an_engine_that_joins_gets_work():
    engines = Numbers(0)
    r = router(engines, engines=1)
    async with r.place(4) as a:
        engines.joining.add(5)
        async with r.place(4) as b:
            assert (a, b) == (0, 5)


async def test_waiting_ends_as_soon_as_an_engine_is_up():
    engines = Numbers()
    r = router(engines, engines=1)
    waiting = asyncio.create_task(r._choose(4))
    await asyncio.sleep(0.05)
    engines.may_start.set()
    assert await asyncio.wait_for(waiting, 1) == 0


async def test_one_that_cannot_be_started_is_no_reason_to_stop_while_another_lives():
    with disable_run_logger():
        await one_cannot_be_started()


async def one_cannot_be_started() -> None:
    engines = Numbers(0)
    engines.failure = EngineStartFailed("no GPU is left")
    engines.may_start.set()
    r = router(engines)
    for _ in range(3):
        async with r.place(1) as index:
            assert index == 0
        await asyncio.sleep(0.01)
    assert engines.starts == [1]
    r.forgive()  # a new iteration
    async with r.place(1):
        pass
    await asyncio.sleep(0.01)
    assert engines.starts == [1, 1]
    engines.alive.clear()
    with pytest.raises(EngineStartFailed, match="no GPU is left"):
        await asyncio.wait_for(r._choose(1), 5)


async def test_nothing_waits_forever():
    r = router(Numbers(0), engines=1, stage=0.05)
    async with r.place(16):
        with pytest.raises(NoRoom, match="16 samples within"):
            await asyncio.wait_for(r._choose(16), 20)
