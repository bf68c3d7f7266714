"""Scoring in processes that can be killed, with a deadline for each sample."""

import itertools
import os
import queue
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.blocks.reward import RewardSpec
from headrace.engines.process import Child, describe_exit
from headrace.engines.reward.channel import Channel
from headrace.engines.reward.errors import RewardError

START_DEADLINE_S = 120.0
"""For the imports of a user's reward package."""
ACCEPT_DEADLINE_S = 30.0
"""For an idle worker to take a sample."""
LOG_LIMIT = 1 << 20
"""Bytes of what reward functions print that are kept for each worker."""


@dataclass(frozen=True)
class Sample:
    """What is scored: the decoded answer, the ground truth, and the chat before the answer where it is known."""

    text: str
    ground_truth: Any
    messages: list[dict[str, str]] | None = None


@dataclass(frozen=True)
class Score:
    """What came of it. ``reward`` is None exactly where ``error`` says why scoring failed."""

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None


class _NotTaken(Exception):
    """The worker was gone before it began the sample: the sample is not to blame."""


class _Worker:
    """One scoring process, for one thread at a time; ``stop`` is for any thread, and more than once."""

    def __init__(self, log: Path) -> None:
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "headrace.engines.reward.worker", str(theirs.fileno())]
        with theirs:
            self._child = Child(argv, log=log, grace_s=0.0, pass_fds=[theirs.fileno()])
        self._channel = Channel(ours)
        self._stopping = threading.Lock()
        self._stopped = False

    def prepare(self, parts: dict[str, Any]) -> None:
        """Gives it the reward's parts and waits until it is warm. Raises RewardError."""
        try:
            self._channel.send(parts, START_DEADLINE_S)
            answer = self._channel.receive(START_DEADLINE_S)
        except TimeoutError as error:
            self.stop()
            raise RewardError(f"the reward functions were not ready within {START_DEADLINE_S:.0f} s") from error
        except (EOFError, OSError) as error:
            raise RewardError(f"a scoring process did not start: {self._last_words()}") from error
        if "error" in answer:
            self.stop()
            raise RewardError(answer["error"])

    def score(self, sample: Sample, deadline_s: float) -> tuple[Score, bool]:
        """The score, and whether the worker is still of use. Raises _NotTaken."""
        self._bound_log()
        try:
            self._channel.send(asdict(sample), ACCEPT_DEADLINE_S)
            self._channel.receive(ACCEPT_DEADLINE_S)
        except (TimeoutError, EOFError, OSError) as error:
            self.stop()
            raise _NotTaken from error
        try:
            answer = self._channel.receive(deadline_s)
        except TimeoutError:
            self.stop()
            return Score(None, error=f"no reward within {deadline_s:g} s (deadline_s); its process was killed"), False
        except (EOFError, OSError):
            return Score(None, error=f"the scoring process died of this sample: {self._last_words()}"), False
        if "error" in answer:
            return Score(None, error=answer["error"]), True
        return Score(answer["reward"], answer["parts"]), True

    def stop(self) -> None:
        """Kills it and its descendants."""
        with self._stopping:
            if not self._stopped:
                self._stopped = True
                self._child.stop()
                self._channel.close()

    def _last_words(self) -> str:
        code = self._child.wait(5.0)
        self.stop()
        lines = self._child.tail(5).strip()
        ended = "still running" if code is None else describe_exit(code)
        return f"{ended}; its last lines:\n{lines}" if lines else ended

    def _bound_log(self) -> None:
        if self._child.log.stat().st_size > LOG_LIMIT:
            os.truncate(self._child.log, 0)


class RewardPool:
    """Warm scoring processes of one reward. ``score`` may be called from any number of threads.

    A sample whose reward function raises, hangs past the deadline, ends its process or returns no finite number gets
    ``Score(None, error=why)``; no other sample is affected, and a worker that was lost is replaced.

    Raises:
        RewardError: at once, when a function is unknown, cannot be imported or refuses its options.
    """

    def __init__(self, spec: RewardSpec) -> None:
        self._parts = {name: part.model_dump() for name, part in spec.named().items()}
        self._deadline_s = spec.deadline_s
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-reward-")
        self._numbers = itertools.count()
        self._closed = False
        self._workers: set[_Worker] = set()
        # One slot for each thread: a worker, or None where one has to be started.
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._threads = ThreadPoolExecutor(spec.workers, thread_name_prefix="reward")
        try:
            for worker in self._threads.map(lambda _: self._start(), range(spec.workers)):
                self._slots.put(worker)
        except RewardError:
            self.close()
            raise

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores of the samples, in their order. Takes at most about ``deadline_s`` for each sample of a worker."""
        return self.results([self.submit(sample) for sample in samples])

    def submit(self, sample: Sample) -> Future[Score]:
        """Its score, in the future. Raises RewardError when the pool is closed."""
        if self._closed:
            raise RewardError("the reward pool is closed")
        return self._threads.submit(self._score, sample)

    @staticmethod
    def results(scores: Sequence[Future[Score]]) -> list[Score]:
        """What was submitted, when it is there. Raises RewardError when the pool was closed meanwhile."""
        try:
            return [score.result() for score in scores]
        except CancelledError as error:
            raise RewardError("the reward pool was closed while it scored") from error

    def close(self) -> None:
        """Kills all workers; samples that are being scored fail. No process and no file is left."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.stop()
        self._threads.shutdown(wait=True)
        self._folder.cleanup()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> _Worker:
        worker = _Worker(Path(self._folder.name) / f"{next(self._numbers)}.log")
        self._workers.add(worker)
        if self._closed:  # close() may have looked before this one was added
            worker.stop()
        worker.prepare(self._parts)
        return worker

    def _score(self, sample: Sample) -> Score:
        worker = self._slots.get_nowait()
        try:
            for _ in range(2):
                if self._closed:
                    return Score(None, error="the reward pool was closed")
                worker = worker or self._start()
                try:
                    score, alive = worker.score(sample, self._deadline_s)
                except _NotTaken:
                    alive, score = False, None
                if not alive:
                    self._workers.discard(worker)
                    worker = None
                if score is not None:
                    return score
            return Score(None, error="two scoring processes in a row were gone before they took the sample")
        except RewardError as error:
            return Score(None, error=str(error))
        finally:
            self._slots.put(worker)
