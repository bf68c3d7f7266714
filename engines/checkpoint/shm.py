"""Transport ``shm``, the publisher: two slots of shared memory, and a unix socket for what is said about them.

Receivers get the memory's descriptor, read-only, over the socket; nothing can be left behind but the socket's file,
which the next publish replaces. Partition i lies in slot i % 2. A slot is written again when every living receiver has
acknowledged what was in it. Linux only.
"""

import asyncio
import contextlib
import mmap
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace.blocks.weights import Partition, Plan, WeightManifest
from headrace.engines.checkpoint.courier import Courier
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.plan import digest_of_hashes
from headrace.engines.checkpoint.rendezvous import listen
from headrace.engines.checkpoint.segment import claim, unclaim

T = TypeVar("T")

_HASHING_S = 60.0
"""Far beyond what hashing a partition takes."""


class ShmSender:
    """One publish. ``buffer``, ``send`` and ``commit`` belong to the exporting thread, the courier has its own."""

    def __init__(
        self, address: str, plan: Plan, version: int, train_step: int, receivers: int, deadline_s: float
    ) -> None:
        if receivers < 1:
            raise WeightError(f"receivers is {receivers}; transport shm needs one at least", version=version)
        self._address, self._plan, self._version, self._train_step = address, plan, version, train_step
        self._receivers, self._deadline_s = receivers, deadline_s
        self._announcing: Future[None] | None = None

    def __enter__(self) -> "ShmSender":
        page = mmap.PAGESIZE
        slot_bytes = max(-(-partition.nbytes // page) * page for partition in self._plan.partitions) or page
        self._segment = claim(self._address, slot_bytes, self._version)
        try:
            listener = listen(self._address, self._version)
        except WeightError:
            unclaim(self._address)
            raise
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weights-courier", daemon=True)
        self._thread.start()
        offer = {"version": self._version, "slot_bytes": self._segment.slot_bytes, "plan": self._plan.model_dump()}
        count = len(self._plan.partitions)
        self._courier = Courier(self._segment, offer, count, self._receivers, self._deadline_s)
        try:
            self._ask(self._courier.gather(listener))
        except BaseException as error:
            self.__exit__(type(error), error)
            raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._address)
            listener.close()
        return self

    def __exit__(self, *raised: object) -> None:
        if raised and raised[1] is not None:
            self._ask(self._courier.abort(str(raised[1])))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._deadline_s)
        self._loop.close()
        unclaim(self._address)

    def buffer(self, partition: Partition) -> memoryview:
        self._ask(self._courier.free(partition.index))
        return self._segment.slot(partition)

    def send(self, partition: Partition) -> None:
        if self._announcing is not None:
            self._announcing.result(_HASHING_S)  # hashes are made in order, one behind the export
        self._announcing = asyncio.run_coroutine_threadsafe(self._courier.announce(partition), self._loop)

    def commit(self) -> WeightManifest:
        if self._announcing is not None:
            self._announcing.result(_HASHING_S)
        hashes = self._ask(self._courier.finish())
        return WeightManifest(
            version=self._version,
            train_step=self._train_step,
            plan=self._plan,
            hashes=hashes,
            digest=digest_of_hashes(hashes),
        )

    def _ask(self, coroutine: Coroutine[Any, Any, T]) -> T:
        # Every wait inside the courier has its own deadline; at most six of them follow each other in one call.
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(6 * self._deadline_s + 5)
        except TimeoutError as error:
            raise WeightError(
                f"the receivers at {self._address} could not be served in time", version=self._version
            ) from error
