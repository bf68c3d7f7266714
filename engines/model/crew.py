"""Every job on every rank: rank 0 hands jobs out through the gang's store, and hears how they ended.

An exception that all ranks raise is the job's error, and the gang goes on. A rank that fails alone may leave the others
inside a collective: after a grace period it ends its process, and torchrun then ends the gang.
"""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from headrace.engines.model.errors import ModelEngineError
from headrace.engines.model.gang import Gang

GRACE_S = 30.0
"""How long a rank that failed waits for the others to end the job as well."""
LISTEN_S = 600.0
"""How long one look for the next job lasts. A dead store is noticed at once."""


class Asked(Protocol):
    """The request behind the job that runs."""

    cancelled: threading.Event
    """Set when nobody wants the result any more."""

    def progress(self, **numbers: float) -> None:
        """Publishes figures."""
        ...


Run = Callable[[str, dict[str, Any], Asked], dict[str, Any]]


class Unasked:
    """Implements ``Asked``: nobody follows the job."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def progress(self, **numbers: float) -> None:
        """They are of no use."""


class RankFailed(ModelEngineError):
    """A job failed on another rank; the message names it."""


class Crew:
    """The ranks of a gang at work. Rank 0 calls ``run`` and ``dismiss``, the others ``follow``."""

    def __init__(self, gang: Gang, run: Run, deadline_s: float) -> None:
        """deadline_s: the longest that rank 0 waits for the other ranks after it has finished a job itself."""
        self._gang, self._run, self._deadline_s = gang, run, deadline_s
        self._number = 0
        self._turn = threading.Lock()

    def run(self, method: str, params: dict[str, Any], asked: Asked) -> dict[str, Any]:
        """Runs one job on all ranks; returns rank 0's result, or raises what rank 0 or another rank raised.

        asked: what rank 0 is told, and may tell.
        """
        with self._turn:
            self._number += 1
            if self._gang.size == 1:
                return self._run(method, params, asked)
            self._gang.store.set(_job(self._number), json.dumps([method, params]))
            try:
                result, error = self._run(method, params, asked), None
            except Exception as raised:  # the boundary of the process: other ranks must hear of it, whatever it is
                result, error = {}, raised
            self._report(error)
            failed = self._outcomes(self._deadline_s)
            self._forget(self._number - 1)
            if error is not None:
                raise error
            if failed:
                raise RankFailed("; ".join(f"rank {rank}: {said}" for rank, said in failed.items()))
            return result

    def follow(self) -> None:
        """Runs jobs until rank 0 dismisses the gang. Raises DistNetworkError when the store is gone."""
        while True:
            self._number += 1
            method, params = self._next_job()
            if not method:
                return
            try:
                self._run(method, params, Unasked())
                error = None
            except Exception as raised:  # as above
                traceback.print_exc()
                error = raised
            self._report(error)

    def dismiss(self, timeout_s: float) -> bool:
        """Ends ``follow`` on the other ranks; False when a job was still under way after ``timeout_s``."""
        if not self._turn.acquire(timeout=timeout_s):
            return False
        self._number += 1
        self._gang.store.set(_job(self._number), json.dumps(["", {}]))
        return True

    def _next_job(self) -> tuple[str, dict[str, Any]]:
        key = _job(self._number)
        while True:
            try:
                self._gang.store.wait([key], timedelta(seconds=LISTEN_S))
            except dist.DistStoreError:
                continue  # nothing to do yet; a dead store raises DistNetworkError
            method, params = json.loads(self._gang.store.get(key))
            return method, params

    def _report(self, error: Exception | None) -> None:
        said = "" if error is None else f"{type(error).__name__}: {error}"
        self._gang.store.set(_outcome(self._number, self._gang.rank), said)
        if error is None:
            return
        try:
            self._wait_for_all(GRACE_S)
        except dist.DistStoreError:
            traceback.print_exception(error)
            print(f"rank {self._gang.rank} failed alone and ends the gang: {said}", file=sys.stderr, flush=True)
            os._exit(1)

    def _outcomes(self, timeout_s: float) -> dict[int, str]:
        """What went wrong, by rank."""
        try:
            self._wait_for_all(timeout_s)
        except dist.DistStoreError:
            print(f"a rank did not finish its job within {timeout_s:.0f} s", file=sys.stderr, flush=True)
            os._exit(1)
        store, number = self._gang.store, self._number
        said = {rank: store.get(_outcome(number, rank)).decode() for rank in range(self._gang.size)}
        return {rank: text for rank, text in said.items() if text}

    def _forget(self, number: int) -> None:
        """Deletes a job's keys. Only those before the last: another rank may still look at the last one's."""
        if number:
            for key in (_job(number), *(_outcome(number, rank) for rank in range(self._gang.size))):
                self._gang.store.delete_key(key)

    def _wait_for_all(self, timeout_s: float) -> None:
        keys = [_outcome(self._number, rank) for rank in range(self._gang.size)]
        self._gang.store.wait(keys, timedelta(seconds=timeout_s))


def _job(number: int) -> str:
    return f"job/{number}"


def _outcome(number: int, rank: int) -> str:
    return f"outcome/{number}/{rank}"
