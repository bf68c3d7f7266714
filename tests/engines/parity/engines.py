"""The gate's two rounds on real engine processes without Prefect; and engines that are broken on purpose."""

import asyncio
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.blocks.algorithms import Algorithm
from headrace.blocks.lease import Lease
from headrace.blocks.manifest import Manifest
from headrace.blocks.parity import Excess, ParityBounds, bounds_of, exceeded
from headrace.blocks.weights import WeightSource
from headrace.engines import data
from headrace.engines.experience.store import Store
from headrace.engines.model.spec import EngineSpec
from headrace.engines.process import Child
from headrace.engines.rollout.spec import RolloutSpec
from headrace.engines.rpc.client import EngineClient

TOKEN = "secret"
REPOSITORY = Path(__file__).parents[3]
PROBE = -2


def broken(python: str, fault: str, folder: Path) -> str:
    """An interpreter that is ``python`` with a fault of ``faults/sitecustomize.py``."""
    script = folder / f"python-{fault.replace(' ', '-')}"
    faults = shlex.quote(str(Path(__file__).parent / "faults"))
    script.write_text(
        f'#!/bin/sh\nexport HEADRACE_FAULT={shlex.quote(fault)} PYTHONPATH={faults}:"$PYTHONPATH"\n'
        f'exec {shlex.quote(python)} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


@dataclass(frozen=True)
class Found:
    """One round, compared with the trainer."""

    weights: str
    manifest: Manifest

    def excesses(self, dtype: str, head_dtype: str = "model") -> list[Excess]:
        return exceeded(self.manifest.metrics, bounds_of(ParityBounds(), dtype), head_dtype)

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.metrics

    def __getitem__(self, name: str) -> float:
        return self.manifest.metrics[name]


class Engines:
    """A trainer and a rollout engine as processes of their own, and the jobs that the gate's tasks give them."""

    def __init__(self, folder: Path, prompts: Sequence[str], n: int, temperature: float, max_tokens: int) -> None:
        self.folder, self.store = folder, Store(str(folder / "store"))
        self.n, self.temperature, self.max_tokens = n, temperature, max_tokens
        problems = [
            (i, data.Problem(str(i), [{"role": "user", "content": text}], "")) for i, text in enumerate(prompts)
        ]
        part = self.store.write_table("prompts.arrow", data.prompts_table(problems))
        self.prompts = self.store.commit(Manifest(stage="prompts", step=-1, key="p", part=part))
        self._stack = AsyncExitStack()
        self._numbers = itertools.count()

    async def __aenter__(self) -> "Engines":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, actor: EngineSpec, rollout: RolloutSpec) -> None:
        """Starts both at the same time and waits until they are healthy."""
        self.actor, self.rollout = await asyncio.gather(
            self._start("model", {"engine": actor.model_dump(mode="json")}),
            self._start("rollout", {"rollout": rollout.model_dump(mode="json"), "log_dir": str(self.folder)}),
        )

    async def replace_rollout(self, rollout: RolloutSpec) -> None:
        """Another rollout engine in place of the first."""
        self._child.stop()
        given = {"rollout": rollout.model_dump(mode="json"), "log_dir": str(self.folder)}
        self.rollout = await self._start("rollout", given)

    async def _start(self, kind: str, spec: dict[str, Any]) -> EngineClient:
        number = next(self._numbers)
        endpoint, path = self.folder / f"{kind}-{number}.endpoint", self.folder / f"{kind}-{number}.json"
        path.write_text(json.dumps({"endpoint": str(endpoint), "epoch": 1, "token": TOKEN, **spec}))
        environment = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])}
        child = Child(
            [sys.executable, "-m", f"headrace.engines.{kind}.server", "--spec", str(path)],
            log=self.folder / f"{kind}-{number}.log",
            env=environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        self._stack.callback(child.stop)
        if kind == "rollout":
            self._child = child
        end = time.monotonic() + 280
        while not endpoint.exists():
            assert await asyncio.to_thread(child.wait, 0.2) is None and time.monotonic() < end, child.tail()
        reached = json.loads(endpoint.read_text())
        lease = Lease(role=kind, epoch=1, url=reached["url"], pid=reached["pid"], node="", flow_run_id="")
        return await self._stack.enter_async_context(EngineClient(lease, token=TOKEN, attempt=1))

    async def rounds(self) -> list[Found]:
        """changed and own as the gate's; and ``before``: the first's tokens under the weights before that update."""
        await self._call(self.actor, "probe", on=True)
        await self._sync(PROBE)
        first = await self._generate(PROBE)
        found = [Found("changed", await self._compare(first))]
        await self._call(self.actor, "probe", on=False)
        await self._sync(0)
        found += [
            Found("own", await self._compare(await self._generate(0))),
            Found("before", await self._compare(first)),
        ]
        return found

    async def _call(self, client: EngineClient, method: str, **params: Any) -> dict[str, Any]:
        return await client.call(method, params, job_id=f"{method}-{next(self._numbers)}", deadline_s=280)

    async def _sync(self, version: int) -> None:
        source = WeightSource(version=version, transport="shm", address=str(self.folder / "weights.sock"))
        publish = {"version": version, "transport": "shm", "address": source.address, "deadline_s": 60}
        sent, served = await asyncio.gather(
            self._call(self.actor, "publish", **publish),
            self._call(self.rollout, "load_weights", source=source.model_dump(), deadline_s=60),
        )
        assert (served["version"], served["digest"]) == (version, sent["digest"])

    async def _generate(self, version: int) -> Manifest:
        params = {
            "prompts": self.prompts.model_dump(),
            "start": 0,
            "stop": self.prompts.part.rows if self.prompts.part else 0,
            "n": self.n,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "campaign_seed": 0,
            "version": version,
            "inputs": ["p"],
        }
        return Manifest.model_validate(await self._call(self.rollout, "generate", **self._stage(), **params))

    async def _compare(self, generated: Manifest) -> Manifest:
        params = {"which": "old", "generate": generated.model_dump(), "inputs": [generated.key]}
        algorithm = Algorithm.model_validate({}).model_dump(mode="json")
        made = await self._call(self.actor, "logprobs", **self._stage(), **params, compare=algorithm)
        return Manifest.model_validate(made)

    def _stage(self) -> dict[str, Any]:
        return {"store": self.store.url, "key": f"k{next(self._numbers)}", "step": -1}
