"""A rollout engine whose program runs in another environment. Imports no engine."""

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from headrace.blocks.weights import Adapter, Served, WeightSource
from headrace.engines.checkpoint import pull
from headrace.engines.checkpoint.adapter import write_adapter
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.plan import wire_metas
from headrace.engines.folder import parameter_shapes
from headrace.engines.lora import adapter_of, adapter_shapes
from headrace.engines.rollout import wire
from headrace.engines.rollout.base import START_VERSION, Completion, Group, Request
from headrace.engines.rollout.errors import NotServing, RequestTooLong, WrongLogprobs
from headrace.engines.rollout.program import CALL_S, Launch, Program
from headrace.engines.rollout.spec import RolloutSpec

LOAD_LIMIT_S = 3600.0
"""Longest time that a load of weights may take in all."""
STATUS_EVERY_S = 5.0
SILENT_S = 60.0
"""A program that does not answer for so long is dead, though its process may live."""


@dataclass
class _Under:
    """A group under way."""

    request: Request
    done: asyncio.Future[Group] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class HostedEngine:
    """Implements ``RolloutEngine``. Seeds are honoured, but rounding depends on what else is in the batch."""

    deterministic = False

    def __init__(self, spec: RolloutSpec, launch: Launch, log_dir: Path) -> None:
        """Use the back end's ``start``."""
        self._spec, self.launch, self._log_dir = spec, launch, log_dir
        self._shapes = parameter_shapes(Path(spec.model))
        self._numbers = itertools.count()
        self._groups: dict[int, _Under] = {}
        self._program: Program | None = None
        self._loading = asyncio.Lock()
        self._served: Served | None = None
        self._adapter: Adapter | None = None
        """What every version is, with LoRA."""
        self._quantization = getattr(spec.backend, "quantization", None)
        self._broken = "weights for its quantised layers have not come yet" if self._quantization else ""
        self._spoiled = False

    @classmethod
    async def launched(cls, spec: RolloutSpec, launch: Launch, log_dir: Path) -> Self:
        """An engine that serves; leaves nothing behind when it cannot. Raises as ``open``."""
        engine = cls(spec, launch, log_dir)
        try:
            await engine.open()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def open(self) -> None:
        """Starts the program and waits until it serves.

        Raises:
            MissingPackage, UnsupportedEngine, ModelDoesNotFit, PortTaken: see ``errors``.
            EngineDied: it ended first, or was not ready in time; the message has the end of its log.
        """
        if self._spec.lora is not None and self._adapter is None:
            self._adapter = await asyncio.to_thread(adapter_of, Path(self._spec.model), self._spec.lora)
        options = {
            "places": self.launch.places,
            "salted": self.launch.salted,
            "start_version": START_VERSION,
            "empty": bool(self._quantization),
        }
        self._program = Program(self.launch, self._spec.python, self._log_dir)
        await self._program.start(options, self._note)

    @property
    def program(self) -> Program:
        """The one that runs now; a load that failed half-way may have replaced another."""
        assert self._program is not None, "open it first"
        return self._program

    @property
    def door(self) -> str:
        """URL of the OpenAI-compatible door, when it is open."""
        return self._program.door if self._program is not None else ""

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Group]:
        """See ``RolloutEngine.generate``.

        Raises:
            RequestTooLong: prompt and response do not fit into the engine's context.
            NotServing: the last load of weights failed, or quantised weights have not come yet.
            WrongLogprobs: the engine's answer cannot be trained on.
            EngineDied: the program ended or fell silent; the message has the end of its log.
        """
        self._check(requests)
        numbers = {next(self._numbers): request for request in requests}
        lost = self.program.lost
        try:
            waiting: set[asyncio.Future[Any]] = {self._submit(number, request) for number, request in numbers.items()}
            while waiting:
                done, _ = await asyncio.wait({*waiting, lost}, return_when=asyncio.FIRST_COMPLETED)
                waiting -= done
                for group in done - {lost}:
                    yield group.result()
                if lost in done:
                    lost.result()
        finally:
            for number in numbers:
                if self._groups.pop(number, None) is not None:
                    self.program.send({"op": "drop", "group": number})

    async def pause(self, mode: str = "keep") -> None:
        """See ``RolloutEngine.pause``."""
        await self.program.call("pause", mode=mode, timeout_s=LOAD_LIMIT_S)

    async def resume(self) -> None:
        """See ``RolloutEngine.resume``."""
        await self.program.call("resume")

    async def reset_caches(self) -> None:
        """See ``RolloutEngine.reset_caches``."""
        await self.program.call("reset_caches")

    async def sleep(self, level: int = 1) -> None:
        """See ``RolloutEngine.sleep``. Raises ValueError for level 2 with LoRA: no version brings a base back."""
        if level == 2 and self._adapter is not None:
            raise ValueError("an engine of LoRA adapters cannot give its base away: sleep with level 1")
        await self.program.call("pause", mode="keep", timeout_s=LOAD_LIMIT_S)
        await self.program.call("sleep", level=level)

    async def wake(self) -> None:
        """See ``RolloutEngine.wake``."""
        await self.program.call("wake")
        await self.program.call("resume")

    async def metrics(self) -> dict[str, float]:
        """See ``RolloutEngine.metrics``."""
        return await self.program.call("status")

    async def load_weights(self, source: WeightSource, *, deadline_s: float) -> Served:
        """See ``RolloutEngine.load_weights``."""
        async with self._loading:
            self._served, self._broken = None, f"version {source.version} was not loaded completely"
            if self._spoiled:
                await self._restart()
            load = self._load_model if self._adapter is None else self._load_adapter
            served, pause = await load(source, deadline_s)
            self._served = served.model_copy(update={"pause_seconds": pause})
            self._broken = ""
            return self._served

    async def _load_model(self, source: WeightSource, deadline_s: float) -> tuple[Served, float]:
        """Every worker pulls on its own; they must agree on the digest."""
        metas = [(name, self._spec.dtype, shape) for name, shape in self._shapes.items()]
        expect = {
            name: [dtype, shape] for name, dtype, shape in wire_metas(metas, self._spec.dtype, self._quantization)
        }
        self._spoiled = True  # until it is known better: the program may die under the load
        answer = await self.program.call(
            "load",
            source=source.model_dump_json(),
            expect=json.dumps(expect),
            deadline_s=str(deadline_s),
            version=source.version,
            timeout_s=LOAD_LIMIT_S,
        )
        outcomes = answer["outcomes"]
        self._spoiled = any(outcome.get("spoiled") for outcome in outcomes)
        if failed := [outcome["error"] for outcome in outcomes if "error" in outcome]:
            raise WeightError(failed[0])
        served = [Served.model_validate(outcome["served"]) for outcome in outcomes]
        if len({one.digest for one in served}) != 1:
            raise WeightError(f"{self.launch.name}'s workers loaded different weights", version=source.version)
        return served[0], answer["pause_seconds"]

    async def _load_adapter(self, source: WeightSource, deadline_s: float) -> tuple[Served, float]:
        """Pulls while requests go on; they wait only until the engine has read the adapter."""
        folder = self.program.folder / f"adapter-{next(self._numbers)}"
        served = await asyncio.to_thread(self._pull_adapter, source, folder, deadline_s)
        answer = await self.program.call(
            "load_adapter", path=str(folder), version=source.version, timeout_s=max(deadline_s, CALL_S)
        )
        if "error" in answer:
            raise WeightError(f"{self.launch.name} refused it: {answer['error']}", version=source.version)
        for other in set(folder.parent.glob("adapter-*")) - {folder}:  # that in use before, and such as were refused
            shutil.rmtree(other)
        return served, answer["pause_seconds"]

    def _pull_adapter(self, source: WeightSource, folder: Path, deadline_s: float) -> Served:
        assert self._adapter is not None
        shapes = adapter_shapes(self._shapes, self._adapter.rank, self._adapter.target_modules)
        tensors: dict[str, Any] = {}
        served = pull(
            source,
            lambda name, tensor: tensors.update({name: tensor.clone()}),
            deadline_s=deadline_s,
            expect={name: (self._spec.dtype, shape) for name, shape in shapes.items()},
            adapter=self._adapter,
        )
        write_adapter(folder, self._adapter, tensors, self._spec.model)
        return served

    async def _restart(self) -> None:
        """A new program in place of one whose model is half loaded."""
        await self.program.stop()
        await self.open()
        self._spoiled = False

    async def served(self) -> Served | None:
        """See ``RolloutEngine.served``."""
        return self._served

    def fingerprint(self) -> dict[str, str]:
        """See ``RolloutEngine.fingerprint``."""
        return {
            "engine": self.program.about["engine"],
            "device": "cuda" if self._spec.gpus else "cpu",
            "threads": str(self._spec.threads),
            "head_dtype": self._spec.head_dtype,
            "cache_salt": "weight version" if self.launch.salted else "no cache",
            "batch_invariant": self.launch.env.get("VLLM_BATCH_INVARIANT", "0"),
            "adapter": self._adapter.model_dump_json() if self._adapter else "none",
            "flags": " ".join(self.launch.flags),
        }

    async def watch(self) -> None:
        """See ``RolloutEngine.watch``. A program that is replaced on purpose is not lost."""
        while True:
            await asyncio.wait([self.program.lost], timeout=STATUS_EVERY_S)
            if not self._loading.locked():  # a load has its own deadline, and may replace the program
                await self.program.call("status", timeout_s=SILENT_S)
            elif self.program.lost.done():
                await asyncio.sleep(STATUS_EVERY_S)

    async def close(self) -> None:
        """Ends the program."""
        if self._program is not None:
            await self._program.stop()

    def _submit(self, number: int, request: Request) -> asyncio.Future[Group]:
        under = self._groups[number] = _Under(request)
        ints = list(request.prompt_ids)
        samples = []
        for index, seed in enumerate(request.seeds):
            begun = request.begun.get(index)
            if begun is not None and begun.finish_reason:
                continue
            tokens = begun.token_ids if begun is not None else []
            ints += tokens
            samples.append([index, seed, len(tokens)])
        if not samples:
            under.done.set_result(_group(request))
            return under.done
        sampling = request.sampling
        self.program.send(
            {
                "op": "submit",
                "group": number,
                "prompt": len(request.prompt_ids),
                "samples": samples,
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens,
                "stop": list(sampling.stop_token_ids),
            },
            wire.pack_ints(ints),
        )
        return under.done

    def _note(self, samples: list[list[Any]], block: memoryview) -> None:
        total = sum(entry[2] for entry in samples)
        if len(block) != 8 * total:
            return self.program.lose(
                f"{self.launch.name}'s host sent {len(block)} bytes for {total} tokens", WrongLogprobs
            )
        ids, logprobs = wire.unpack_ints(block[: 4 * total]), wire.unpack_floats(block[4 * total :])
        at = 0
        for number, index, count, version, reason in samples:
            stretch = slice(at, at + count)
            at += count
            under = self._groups.get(number)
            if under is None:  # dropped meanwhile
                continue
            begun = under.request.begun
            completion = begun.setdefault(index, Completion(index, [], [], "", []))
            completion.add(ids[stretch], logprobs[stretch], version)
            completion.finish_reason = reason
            if all(i in begun and begun[i].finish_reason for i in range(len(under.request.seeds))):
                del self._groups[number]
                if not under.done.done():
                    under.done.set_result(_group(under.request))

    def _check(self, requests: Sequence[Request]) -> None:
        if self._broken:
            raise NotServing(f"this engine serves no weights: {self._broken}")
        if self.program.lost.done():
            self.program.lost.result()
        for request in requests:
            prompt, answer = len(request.prompt_ids), request.sampling.max_tokens
            if not prompt or not request.seeds or answer < 1:
                raise ValueError(f"group {request.group}: a request needs a prompt, seeds and max_tokens ≥ 1")
            if prompt + answer > self.launch.max_len:
                raise RequestTooLong(
                    f"group {request.group}: its prompt has {prompt} tokens and max_tokens is {answer}, but "
                    f"max_model_len is {self.launch.max_len}; raise it, lower max_tokens or filter long prompts"
                )


def _group(request: Request) -> Group:
    return Group(request.group, [request.begun[index] for index in range(len(request.seeds))])
