"""Scores finished groups while the rest of their shard is still sampled: long answers do not hold up the short ones."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prefect.logging import get_run_logger

from headrace.blocks.manifest import Manifest
from headrace.engines.experience import early
from headrace.engines.reward.stage import ANSWER, Begun, samples_of
from headrace.tasks.campaign import Campaign


@asynccontextmanager
async def scored_early(
    c: Campaign, folder: str, prompts: Manifest
) -> AsyncIterator[tuple[Callable[[dict[str, float]], None], Begun]]:
    """Inside the block, every call of the first value has the groups scored that have come since; the second is what
    was begun. What the store or a reward has to complain about is said by the score stage, which does it again."""
    begun: Begun = {}
    seen: set[str] = set()
    news = asyncio.Event()

    def look() -> None:
        for rows in early.take(c.store, folder, seen):
            samples = samples_of(c.store, rows.select(ANSWER), prompts)
            for uid, sample in zip(rows["uid"].to_pylist(), samples, strict=True):
                begun[uid, sample.text] = c.rewards.submit(sample)

    async def follow() -> None:
        while True:
            await news.wait()
            news.clear()
            await asyncio.to_thread(look)

    following = asyncio.create_task(follow())
    try:
        yield lambda _figures: news.set(), begun
    finally:
        following.cancel()
        (ended,) = await asyncio.gather(following, return_exceptions=True)
        if isinstance(ended, Exception):
            get_run_logger().warning("groups of this shard were not scored early: %s", ended)
