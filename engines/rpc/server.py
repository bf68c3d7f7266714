"""The job server inside every engine process: submit, wait, cancel, over HTTP, manifests only.

A job's id is its content key, so submitting the same work twice attaches to the running job or returns its result: a
controller that was killed and started again loses nothing. Every request carries the campaign's token, the engine's
epoch (a client of an older engine is refused) and the campaign's attempt (an older attempt of the campaign is refused).
"""

import hmac
import json
import os
import queue
import socket
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request

KEPT_JOBS = 512
"""Finished jobs whose results are remembered."""


class Job:
    """One unit of work. ``execute`` may look at ``cancelled`` and call ``progress``."""

    def __init__(self, id: str, method: str, params: dict[str, Any]) -> None:
        self.id, self.method, self.params = id, method, params
        self.cancelled = threading.Event()
        self.done = threading.Event()
        self._changed = threading.Condition()
        self.state = "queued"
        self.result: dict[str, Any] | None = None
        self.error = self.kind = ""
        """What it raised: words for people, and the name of the class."""
        self.numbers: dict[str, float] = {}
        self.notes = 0
        """How often figures were published."""
        self.started = self.ended = 0.0

    def progress(self, **numbers: float) -> None:
        """Publishes figures; a client that follows them is answered at once."""
        with self._changed:
            self.numbers = dict(numbers)
            self.notes += 1
            self._changed.notify_all()

    def end(self, state: str) -> None:
        """The last thing that happens to it."""
        with self._changed:
            self.state = state
            self.done.set()
            self._changed.notify_all()

    def wait(self, seconds: float, seen: int | None) -> None:
        """Until it is done, or has published figures more than ``seen`` times."""
        with self._changed:
            self._changed.wait_for(lambda: self.done.is_set() or (seen is not None and self.notes > seen), seconds)

    def view(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "state": self.state,
            "result": self.result,
            "error": self.error,
            "kind": self.kind,
            "progress": self.numbers,
            "notes": self.notes,
            "span": (self.started, self.ended),
        }


class JobServer:
    """Serves jobs until it is shut down or has heard nothing for ``idle_limit_s``.

    Args:
        execute: runs one job in a worker thread and returns a JSON-able result; what it raises becomes the job's error.
        role: name of the role, for messages.
        epoch: number of this engine process among those that held the role.
        token: the campaign's token.
        status: extra fields of ``/health``.
        workers: jobs that run at the same time; 1 keeps them in order of submission.
        idle_limit_s: leave after so many seconds without a request while no job runs.
        exchanges: methods that need the other side of the attempt which asked for them: when a newer attempt takes the
            engine over, those that have not ended are cancelled. Other jobs go on, and may be attached to.
    """

    def __init__(
        self,
        execute: Callable[[Job], dict[str, Any]],
        *,
        role: str,
        epoch: int,
        token: str,
        status: Callable[[], dict[str, Any]] = dict,
        workers: int = 1,
        idle_limit_s: float = 900.0,
        exchanges: Collection[str] = (),
    ) -> None:
        self._execute, self._status = execute, status
        self._role, self._epoch, self._token, self._idle_limit = role, epoch, token, idle_limit_s
        self._attempt, self._exchanges = 0, exchanges
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._workers = workers
        self._stop = threading.Event()
        self.app = self._routes()

    def run(self, endpoint: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Binds, writes ``{"url", "pid"}`` to ``endpoint`` and serves until shut down."""
        for n in range(self._workers):
            threading.Thread(target=self._work, name=f"job-{n}", daemon=True).start()
        with socket.create_server((host, port)) as listener:
            server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=2))
            threading.Thread(target=self._watch, args=(server,), name="watch", daemon=True).start()
            written = endpoint.with_suffix(".tmp")
            written.write_text(
                json.dumps(
                    {"url": f"http://{host}:{listener.getsockname()[1]}", "pid": os.getpid(), "epoch": self._epoch}
                )
            )
            written.replace(endpoint)
            server.run(sockets=[listener])

    def shutdown(self) -> None:
        """Ends ``run``; jobs under way are told to stop."""
        self._stop.set()
        with self._lock:
            for job in self._jobs.values():
                job.cancelled.set()

    def _watch(self, server: uvicorn.Server) -> None:
        while not self._stop.wait(min(5.0, self._idle_limit)):
            busy = any(not job.done.is_set() for job in list(self._jobs.values()))
            if not busy and time.monotonic() - self._heard > self._idle_limit:
                break
        server.should_exit = True

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            if job.cancelled.is_set():
                state = "cancelled"
            else:
                job.state, job.started = "running", time.time()
                try:
                    job.result = self._execute(job)
                    state = "done"
                except Exception as error:  # the boundary of the process: whatever it is, the client must hear it
                    state = "cancelled" if job.cancelled.is_set() else "failed"
                    job.kind = type(error).__name__
                    job.error = f"{job.kind}: {error}"
                    traceback.print_exc()
                job.ended = time.time()
            job.end(state)

    def _submit(self, id: str, method: str, params: dict[str, Any]) -> Job:
        with self._lock:
            if self._stop.is_set():
                raise HTTPException(409, f"this {self._role} engine (epoch {self._epoch}) leaves")
            known = self._jobs.get(id)
            if known is not None and (known.state in ("queued", "running", "done")) and not known.cancelled.is_set():
                return known
            job = self._jobs[id] = Job(id, method, params)
            self._jobs.move_to_end(id)
            for old in list(self._jobs):
                if len(self._jobs) <= KEPT_JOBS:
                    break
                if self._jobs[old].done.is_set():
                    del self._jobs[old]
        self._queue.put(job)
        return job

    def _find(self, id: str) -> Job:
        with self._lock:
            if id not in self._jobs:
                raise HTTPException(404, f"{self._role} engine (epoch {self._epoch}) knows no job {id}")
            return self._jobs[id]

    def _seen(self, job: Job) -> dict[str, Any]:
        """What a client hears. Nobody cancelled a job that ends because the engine leaves: the engine is lost."""
        view = job.view()
        if self._stop.is_set() and view["state"] == "cancelled":
            raise HTTPException(409, f"this {self._role} engine (epoch {self._epoch}) left before {job.id} was done")
        return view

    def _admit(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise HTTPException(401, "wrong or missing campaign token")
        epoch, attempt = (int(request.headers.get(h, 0)) for h in ("x-headrace-epoch", "x-headrace-attempt"))
        if epoch != self._epoch:
            raise HTTPException(
                409, f"epoch: this {self._role} engine has epoch {self._epoch}, the caller means {epoch}"
            )
        if attempt < self._attempt:
            raise HTTPException(
                423, f"attempt {self._attempt} of the campaign holds this engine; {attempt} is fenced off"
            )
        if attempt > self._attempt:
            self._take_over(attempt)
        self._heard = time.monotonic()

    def _take_over(self, attempt: int) -> None:
        with self._lock:
            self._attempt = attempt
            for job in self._jobs.values():
                if job.method in self._exchanges and not job.done.is_set():
                    job.cancelled.set()

    def _routes(self) -> FastAPI:
        # Documentation pages would be outside the dependency that asks for the token: there are none.
        app = FastAPI(dependencies=[Depends(self._admit)], openapi_url=None)

        @app.post("/jobs")
        def submit(body: dict[str, Any]) -> dict[str, Any]:
            return self._seen(self._submit(body["id"], body["method"], body["params"]))

        @app.get("/jobs/{id}")
        def wait(id: str, wait: float = 0.0, seen: int | None = None) -> dict[str, Any]:
            job = self._find(id)
            job.wait(min(wait, 30.0), seen)
            self._heard = time.monotonic()
            return self._seen(job)

        @app.delete("/jobs/{id}")
        def cancel(id: str) -> dict[str, Any]:
            job = self._find(id)
            job.cancelled.set()
            return self._seen(job)

        @app.get("/health")
        def health() -> dict[str, Any]:
            running = [job.id for job in list(self._jobs.values()) if job.state == "running"]
            return {"role": self._role, "epoch": self._epoch, "pid": os.getpid(), "running": running, **self._status()}

        @app.post("/shutdown")
        def shutdown() -> dict[str, Any]:
            self.shutdown()
            return {"stopping": True}

        return app
