"""The rollout engine's process: ``python -m headrace.engines.rollout.server --spec SPEC.json``."""

import argparse
import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.rollout import jobs
from headrace.engines.rollout.base import RolloutEngine
from headrace.engines.rollout.cohort import Cohorts
from headrace.engines.rollout.errors import EngineDied, RolloutError
from headrace.engines.rollout.render import Renderer
from headrace.engines.rollout.spec import RolloutSpec, ServerSpec
from headrace.engines.rpc.server import Job, JobServer

CANCEL_S = 0.25
"""How often a running job looks whether it was cancelled."""
STATUS_S = 5.0
"""Longest time that the engine's loop may take to say what it serves."""
LEAVE_S = 10.0
"""Longer than the job server needs to end."""
CLOSE_S = 30.0
"""Longest time that closing an engine may take."""

JOBS = 32
"""Jobs at the same time, so that the engine's batch is never short of work."""

T = TypeVar("T")


class LoadParams(BaseModel):
    """Job ``load_weights``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: WeightSource
    deadline_s: float


class RolloutHost:
    """One engine on an event loop of its own; jobs come from the job server's worker thread."""

    def __init__(self, spec: RolloutSpec, log_dir: Path, token: str) -> None:
        """Starts the engine; blocks until it can serve. token: the campaign's, which guards the engine's own door."""
        renderer = Renderer(Path(spec.model))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        # The back end has a deadline of its own for its start.
        self.lost: EngineDied | None = None
        self._leave: Callable[[], None] = lambda: None
        self.engine: RolloutEngine = asyncio.run_coroutine_threadsafe(_start(spec, log_dir, token), self._loop).result()
        self.bench = jobs.Bench(self.engine, renderer, Cohorts(self.engine))

    def guard(self, leave: Callable[[], None]) -> None:
        """From now on ``leave`` is called when the engine is lost."""
        self._leave = leave
        # The loop knows its tasks only weakly: one that nothing else holds may vanish while it waits.
        self._guarding = asyncio.run_coroutine_threadsafe(self._guard(), self._loop)

    async def _guard(self) -> None:
        try:
            await self.engine.watch()
        except EngineDied as error:
            self._lose(error)

    def _lose(self, error: EngineDied) -> None:
        if self.lost is None:
            self.lost = error
            print(f"the rollout engine is lost: {error}", file=sys.stderr, flush=True)
            self._leave()

    def execute(self, job: Job) -> dict[str, Any]:
        """Runs one job; called by JobServer."""
        try:
            return self._execute(job)
        except EngineDied as error:
            # The process leaves, so that the client sees a lost engine and starts another, not a failed job.
            self._lose(error)
            threading.Event().wait(LEAVE_S)
            raise

    def _execute(self, job: Job) -> dict[str, Any]:
        if job.method == "generate":
            work = jobs.generate(self.bench, jobs.GenerateParams(**job.params), job.progress)
        elif job.method == "evaluate":
            work = jobs.evaluate(self.bench, jobs.EvaluateParams(**job.params), job.progress)
        elif job.method == "load_weights":
            load = LoadParams(**job.params)
            work = self.engine.load_weights(load.source, deadline_s=load.deadline_s)
        else:
            raise ValueError(f"a rollout engine has no job {job.method!r}: generate, evaluate, load_weights")
        return self._run(work, job).model_dump(mode="json")

    def status(self) -> dict[str, Any]:
        """What ``/health`` adds."""
        served = asyncio.run_coroutine_threadsafe(self.engine.served(), self._loop).result(STATUS_S)
        return {
            "openai_api": self.engine.door,
            "version": served.version if served else None,
            "digest": served.digest if served else None,
            "deterministic": self.engine.deterministic,
            "fingerprint": self.engine.fingerprint(),
        }

    def close(self) -> None:
        """Ends the engine and its children."""
        asyncio.run_coroutine_threadsafe(self.engine.close(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _run(self, work: Coroutine[Any, Any, T], job: Job) -> T:
        """The result of a coroutine on the engine's loop; a cancelled job cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while not concurrent.futures.wait([future], CANCEL_S).done:
            if job.cancelled.is_set():
                future.cancel()
        if future.cancelled():
            raise RolloutError("the job was cancelled")
        return future.result()


async def _start(spec: RolloutSpec, log_dir: Path, token: str) -> RolloutEngine:
    if spec.backend.kind == "transformers":
        from headrace.engines.rollout.hf import TransformersEngine

        return TransformersEngine(spec)
    if spec.backend.kind == "vllm":
        from headrace.engines.rollout.vllm import VLLMEngine

        return await VLLMEngine.start(spec, log_dir, door_key=token)
    if spec.backend.kind == "sglang":
        from headrace.engines.rollout.sglang import SGLangEngine

        return await SGLangEngine.start(spec, log_dir)
    from headrace.engines.rollout.trtllm import start

    return await start(spec)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="JSON of headrace.engines.rollout.spec.ServerSpec")
    path: Path = parser.parse_args().spec
    try:
        spec = ServerSpec.model_validate_json(path.read_bytes())
        host = RolloutHost(spec.rollout, Path(spec.log_dir), spec.token)
    except (OSError, ValidationError, RolloutError, WeightError) as error:
        print(f"the rollout engine cannot start: {error}", file=sys.stderr)
        return 1
    server = JobServer(
        host.execute,
        role=spec.role,
        epoch=spec.epoch,
        token=spec.token,
        status=host.status,
        workers=JOBS,
        idle_limit_s=spec.idle_limit_s,
    )
    host.guard(server.shutdown)
    try:
        server.run(Path(spec.endpoint), host=spec.host, port=spec.port)
    finally:
        host.close()
    return 1 if host.lost else 0


if __name__ == "__main__":
    sys.exit(main())
