"""The engines of a campaign as its tasks see them: found warm, started when missing, brought to the needed state."""

import asyncio
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger

from headrace.blocks.lease import Lease
from headrace.blocks.recipe import Role
from headrace.blocks.weights import Served
from headrace.engines.rpc.client import EngineClient
from headrace.engines.rpc.errors import EngineLost, JobFailed
from headrace.tasks import recovery

if TYPE_CHECKING:
    from headrace.tasks.campaign import Campaign


RECIPE = "recipe.json"
"""The campaign's own recipe, below its store."""
LEAVE_S = 120.0
"""Longest time that an engine which was asked to leave may take."""


class EngineStartFailed(RuntimeError):
    """A host ended, or was not healthy in time; the message holds the end of the engine's log."""


def lease_path(role: str, index: int) -> str:
    return f"leases/{role}-{index}.json"


class Engines:
    """Clients of the campaign's engines, one for each (role, index)."""

    def __init__(self, campaign: "Campaign") -> None:
        self._campaign = campaign
        self._clients: dict[tuple[str, int], EngineClient] = {}
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}
        self._old_spans: list[tuple[float, float]] = []
        self._syncing = asyncio.Lock()
        self.serving: dict[int, int] = {}
        """Weight version that each rollout engine was verified to serve."""
        self._recipes: dict[tuple[str, int], str] = {}

    def roles(self) -> dict[str, Role]:
        """The roles that have engines, in the order in which they start."""
        roles = self._campaign.recipe.roles
        found = {"actor": roles.actor, "rollout": roles.rollout}
        return found | ({"reference": roles.reference} if roles.reference else {})

    def everyone(self) -> list[tuple[str, int]]:
        return [(name, index) for name, role in self.roles().items() for index in range(role.engines)]

    def rollouts(self) -> list[int]:
        """Those that have to serve the current version: all of a deterministic back end, else the living ones.

        A lost engine that is started again loads the current version before its first work; nobody waits for it.
        """
        recipe = self._campaign.recipe
        living = [] if recipe.rollout.deterministic else self.living("rollout")
        return living or list(range(recipe.roles.rollout.engines))

    def living(self, role: str) -> list[int]:
        """Engines that were reached and not lost since."""
        return sorted(index for name, index in self._clients if name == role)

    async def greet_joined(self, role: str) -> None:
        """Takes in engines that the recipe does not have: started by hand, their lease is in the store."""
        known = self.roles()[role].engines
        for path in await asyncio.to_thread(self._campaign.store.paths, "leases"):
            found = re.fullmatch(rf"leases/{role}-(\d+)\.json", path)
            if found is None or (index := int(found[1])) < known or (role, index) in self._clients:
                continue
            if (client := await self._alive(role, index)) is not None:
                get_run_logger().info("%s-%d has joined", role, index)
                self._clients[role, index] = client

    async def call(
        self,
        role: str,
        index: int,
        method: str,
        params: dict[str, Any],
        *,
        job_id: str,
        deadline_s: float | None = None,
        on_progress: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, Any]:
        """One job on a ready engine. Raises EngineLost when it dies under the job; the next call starts it again."""
        client = await self.ready(role, index)
        deadline = deadline_s or self._campaign.recipe.deadlines.stage
        return await self.call_on(client, role, index, method, params, job_id, deadline, on_progress)

    async def call_on(
        self,
        client: EngineClient,
        role: str,
        index: int,
        method: str,
        params: dict[str, Any],
        job_id: str,
        deadline_s: float,
        on_progress: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, Any]:
        """One job on this client, in whatever state its engine is."""
        try:
            return await client.call(method, params, job_id=job_id, deadline_s=deadline_s, on_progress=on_progress)
        except EngineLost:
            await self.forget(role, index)
            raise

    async def client(self, role: str, index: int) -> EngineClient:
        """A client of a living engine: the one in use, one that an earlier attempt left warm, or a new one."""
        key = (role, index)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._clients:
                client = await self._alive(role, index) or await self._start(role, index)
                if role == "actor":
                    await recovery.restore_actor(self._campaign, client)
                self._clients[key] = client
            return self._clients[key]

    async def ready(self, role: str, index: int) -> EngineClient:
        """A client of a living engine that is in the state which the campaign needs now."""
        client = await self.client(role, index)
        if role == "rollout":
            async with self._syncing:
                if self.serving.get(index) != self._campaign.version:
                    await recovery.sync(self._campaign, [index])
        return client

    async def sync_all(self) -> list[Served]:
        """Brings every rollout engine to the campaign's version; those that serve it already are left alone."""
        async with self._syncing:
            behind = [index for index in self.rollouts() if self.serving.get(index) != self._campaign.version]
            return await recovery.sync(self._campaign, behind) if behind else []

    async def start_all(self) -> None:
        """Starts or finds every engine, at the same time."""
        await asyncio.gather(*(self.client(role, index) for role, index in self.everyone()))

    async def replace(self, role: str, index: int, recipe: str = RECIPE) -> None:
        """Ends an engine that was started with another recipe than this one (a path in the store).

        The next call starts it. Waits until the old one's host has ended, so that its memory is free.
        """
        self._recipes[role, index] = recipe
        client = self._clients.get((role, index))
        if client is not None and client.lease.recipe != recipe:
            await self._end(client)
            await self.forget(role, index)

    async def _end(self, client: EngineClient) -> None:
        lease = client.lease
        try:
            await client.shutdown()
        except (EngineLost, JobFailed) as error:
            get_run_logger().info("%s-%d was gone already: %s", lease.role, lease.index, error)
        end = time.monotonic() + LEAVE_S
        async with get_client() as api:
            while not ((state := (await api.read_flow_run(UUID(lease.flow_run_id))).state) and state.is_final()):
                if time.monotonic() > end:
                    raise EngineStartFailed(
                        f"{lease.role}-{lease.index} was asked to leave, but its host (flow run {lease.flow_run_id}) "
                        f"has not ended after {LEAVE_S:.0f} s"
                    )
                await asyncio.sleep(0.3)

    async def shutdown_all(self) -> None:
        """Asks every engine to leave; their hosts complete."""
        for role, index in dict.fromkeys([*self.everyone(), *self._clients]):
            client = self._clients.get((role, index)) or await self._alive(role, index)
            if client is not None:
                try:
                    await client.shutdown()
                except (EngineLost, JobFailed) as error:
                    get_run_logger().info("%s-%d was gone already: %s", role, index, error)

    async def close(self) -> None:
        for role, index in list(self._clients):
            await self.forget(role, index)

    def spans(self) -> list[tuple[float, float]]:
        return [*self._old_spans, *(span for client in self._clients.values() for span in client.spans)]

    async def forget(self, role: str, index: int) -> None:
        """Drops an engine that was lost; the next call finds or starts another."""
        if role == "rollout":
            self.serving.pop(index, None)
        if (client := self._clients.pop((role, index), None)) is not None:
            self._old_spans += client.spans
            await client.__aexit__()

    def _lease(self, role: str, index: int) -> Lease | None:
        path = lease_path(role, index)
        return Lease.model_validate_json(self._campaign.store.get(path)) if self._campaign.store.exists(path) else None

    async def _alive(self, role: str, index: int) -> EngineClient | None:
        lease = self._lease(role, index)
        if lease is None:
            return None
        client = EngineClient(lease, token=self._campaign.token, attempt=self._campaign.attempt)
        try:
            await client.health()
        except EngineLost as error:
            get_run_logger().info("%s-%d has to be started: %s", role, index, error)
            await client.__aexit__()
            return None
        if lease.recipe != self._recipes.get((role, index), RECIPE):
            await self._end(client)
            await client.__aexit__()
            return None
        return client

    async def _start(self, role: str, index: int) -> EngineClient:
        c = self._campaign
        before = self._lease(role, index)
        epoch = before.epoch + 1 if before else 1
        pool = self.roles()[role].pool
        name = f"engine-host/{pool}"
        try:
            run = await arun_deployment(
                name,
                parameters={
                    "campaign": c.id,
                    "role": role,
                    "index": index,
                    "epoch": epoch,
                    "attempt": c.attempt,
                    "store": c.url,
                    "block": c.recipe.store if c.recipe.store.startswith("block:") else "",
                    "recipe": self._recipes.get((role, index), RECIPE),
                },
                timeout=0,
                idempotency_key=f"{c.id}-{role}-{index}-{epoch}-{c.attempt}",
                tags=[f"campaign:{c.id}"],
            )
        except ObjectNotFound as error:
            raise EngineStartFailed(
                f"there is no deployment {name}: add it to prefect.yaml for work pool {pool}; prefect deploy --all"
            ) from error
        end = time.monotonic() + c.recipe.deadlines.engine_start
        async with get_client() as api:
            while True:
                lease = self._lease(role, index)
                if lease is not None and lease.epoch == epoch:
                    break
                state = (await api.read_flow_run(run.id)).state
                if state is not None and state.is_final():
                    raise EngineStartFailed(
                        f"the host of {role}-{index} (flow run {run.name}) ended as {state.name}: {state.message}"
                    )
                if time.monotonic() > end:
                    raise EngineStartFailed(
                        f"{role}-{index} was not healthy within {c.recipe.deadlines.engine_start:.0f} s "
                        f"(flow run {run.name}, now {state.name if state else 'unknown'}); is a worker of its pool "
                        f"online? Start one with: prefect worker start --pool {pool}"
                    )
                await asyncio.sleep(0.3)
        client = EngineClient(lease, token=c.token, attempt=c.attempt)
        await client.health()
        return client
