"""The client that stage tasks use: one job, with a deadline, progress and cancellation."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import httpx

from headrace.blocks.lease import Lease
from headrace.engines.rpc.errors import EngineLost, Fenced, JobCancelled, JobDeadline, JobFailed

POLL_S = 10.0
"""How long the server holds one wait before it answers with the progress so far."""


class EngineClient:
    """Calls the engine that a lease names. Use it inside one event loop; close it when done."""

    def __init__(self, lease: Lease, *, token: str, attempt: int) -> None:
        self.lease = lease
        self.spans: list[tuple[float, float]] = []
        """Begin and end (seconds since the epoch, the engine's clock) of every job that was waited for."""
        self._http = httpx.AsyncClient(
            base_url=lease.url,
            timeout=httpx.Timeout(POLL_S + 20.0, connect=5.0),
            headers={
                "authorization": f"Bearer {token}",
                "x-headrace-epoch": str(lease.epoch),
                "x-headrace-attempt": str(attempt),
            },
        )

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def health(self, timeout_s: float = 3.0) -> dict[str, Any]:
        """Identity and state of the engine; raises EngineLost when it does not answer in time."""
        return await self._request("GET", "/health", timeout=timeout_s)

    async def shutdown(self) -> None:
        """Asks the engine to leave."""
        await self._request("POST", "/shutdown", timeout=5.0)

    async def call(
        self,
        method: str,
        params: dict[str, Any],
        *,
        job_id: str,
        deadline_s: float,
        on_progress: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, Any]:
        """Runs one job and returns its result.

        Args:
            job_id: content key of the work; the same id attaches to a job that already runs or is done.
            deadline_s: seconds until the job is cancelled and JobDeadline raised.
            on_progress: called with the job's latest figures whenever it has published some.

        Raises:
            EngineLost, JobFailed, JobCancelled, JobDeadline, Fenced: see ``errors``.
        """
        end = time.monotonic() + deadline_s
        view = await self._request("POST", "/jobs", json={"id": job_id, "method": method, "params": params})
        try:
            while view["state"] in ("queued", "running"):
                left = end - time.monotonic()
                if left <= 0:
                    raise JobDeadline(
                        f"{method} on the {self.lease.role} engine did not finish in {deadline_s:.0f} s "
                        f"(last progress: {view['progress'] or 'none'}); look at the log of flow run "
                        f"{self.lease.flow_run_id}, or raise the deadline in the recipe"
                    )
                seen = {"seen": view["notes"]} if on_progress else {}
                view = await self._request("GET", f"/jobs/{job_id}", params={"wait": min(POLL_S, left)} | seen)
                if on_progress and view["progress"]:
                    on_progress(view["progress"])
        except (asyncio.CancelledError, JobDeadline):
            with contextlib.suppress(EngineLost, JobFailed, Fenced):
                await asyncio.shield(self._request("DELETE", f"/jobs/{job_id}", timeout=3.0))
            raise
        self.spans.append(tuple(view["span"]))
        if view["state"] == "failed":
            raise JobFailed(f"{method} on the {self.lease.role} engine: {view['error']}", view["kind"])
        if view["state"] == "cancelled":
            raise JobCancelled(f"{method} on the {self.lease.role} engine was cancelled")
        return view["result"]

    async def _request(self, verb: str, path: str, **kwargs: Any) -> dict[str, Any]:
        try:
            answer = await self._http.request(verb, path, **kwargs)
        except httpx.TransportError as error:
            raise EngineLost(
                f"{self.lease.role} engine at {self.lease.url} (epoch {self.lease.epoch}) does not answer: "
                f"{type(error).__name__} {error}"
            ) from error
        if answer.status_code == 200:
            return answer.json()
        if answer.headers.get("content-type") != "application/json":
            # A server that is shutting down ends the requests that wait with an answer that is not the job server's.
            raise EngineLost(f"{self.lease.role} engine at {self.lease.url} is leaving ({answer.text[:200]})")
        detail = answer.json().get("detail", answer.text)
        if answer.status_code in (404, 409):
            raise EngineLost(f"{self.lease.role} engine at {self.lease.url}: {detail}")
        if answer.status_code == 423:
            raise Fenced(f"{self.lease.role} engine: {detail}")
        raise JobFailed(f"{self.lease.role} engine answered {answer.status_code}: {detail}")
