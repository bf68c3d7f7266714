"""A rollout engine in another environment: the host's side of ``child.Program``. Imports no engine."""

import asyncio
import contextlib
import itertools
import json
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import headrace
from headrace.blocks.weights import Adapter, Served, WeightSource
from headrace.engines.checkpoint import pull
from headrace.engines.checkpoint.adapter import write_adapter
from headrace.engines.checkpoint.errors import WeightError
from headrace.engines.checkpoint.plan import wire_metas
from headrace.engines.folder import parameter_shapes
from headrace.engines.lora import adapter_of, adapter_shapes
from headrace.engines.process import Child, describe_exit
from headrace.engines.rollout import errors, wire
from headrace.engines.rollout.base import START_VERSION, Completion, Group, Request
from headrace.engines.rollout.errors import EngineDied, NotServing, RequestTooLong, RolloutError, WrongLogprobs
from headrace.engines.rollout.spec import RolloutSpec

START_DEADLINE_S = 900.0
"""Seconds until the program must be ready: large models load and compile for minutes."""
LOAD_LIMIT_S = 3600.0
"""Longest time that a load of weights may take in all."""
CALL_S = 60.0
STATUS_EVERY_S = 5.0
SILENT_S = 60.0
"""A program that does not answer for so long is dead, though its process may live."""
LINES = 50
"""Of the program's log, in what is told about its end."""


@dataclass(frozen=True)
class Launch:
    """How an engine program is started."""

    name: str
    """For messages: vLLM, SGLang."""
    program: Sequence[str]
    """What the interpreter runs: ``-m``, module."""
    flags: Sequence[str]
    """Its arguments after the socket and the options."""
    env: Mapping[str, str]
    places: int
    """Samples given to the engine at a time; the others wait here, so that it may be lost or paused cheaply."""
    max_len: int
    """Longest prompt and response."""
    salted: bool
    tested: Sequence[str]
    """Versions that were run, oldest first: ``0.26``."""
    door: tuple[int, str] | None = None
    """Port (0 = any) and key of the OpenAI-compatible door."""


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
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._loading = asyncio.Lock()
        self._served: Served | None = None
        self._adapter: Adapter | None = None
        """What every version is, with LoRA."""
        self._quantization = getattr(spec.backend, "quantization", None)
        self._broken = "weights for its quantised layers have not come yet" if self._quantization else ""
        self._spoiled = False
        self._about: dict[str, Any] = {}
        self.door = ""
        """URL of the OpenAI-compatible door, when it is open."""

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
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-engine-")
        if self._spec.lora is not None and self._adapter is None:
            self._adapter = await asyncio.to_thread(adapter_of, Path(self._spec.model), self._spec.lora)
        # The interpreter must find our package, and nothing else of our environment.
        (Path(self._folder.name) / "headrace").symlink_to(Path(headrace.__file__).resolve().parent)
        mine, other = socket.socketpair()
        fds = [other.fileno()]
        options: dict[str, Any] = {
            "places": self.launch.places,
            "salted": self.launch.salted,
            "start_version": START_VERSION,
            "empty": bool(self._quantization),
        }
        env = {**self.launch.env, "PYTHONPATH": self._folder.name}
        with contextlib.ExitStack() as sockets:
            sockets.enter_context(other)
            if self.launch.door is not None:
                listener = sockets.enter_context(_listen(self.launch.door[0]))
                self.door = f"http://127.0.0.1:{listener.getsockname()[1]}"
                fds.append(listener.fileno())
                options["door_fd"] = listener.fileno()
                env["HEADRACE_DOOR_KEY"] = self.launch.door[1]
            arguments = [str(other.fileno()), json.dumps(options), *self.launch.flags]
            log = self._log_dir / f"{self.launch.name.lower()}.log"
            command = [self._spec.python, *self.launch.program, *arguments]
            self._child = Child(command, log=log, env=env, grace_s=10.0, pass_fds=fds)
        mine.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=mine)
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                first = await self._first(reader)
        except TimeoutError as error:
            raise EngineDied(
                f"{self.launch.name} was not ready after {START_DEADLINE_S:.0f} s. {self.last_lines()}"
            ) from error
        self._about = first
        self._warn()
        self._reading = asyncio.create_task(self._read(reader, self._child))

    async def _first(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        frame = await wire.receive(reader)
        if frame is not None and frame[0]["op"] == "ready":
            return frame[0]
        code = await self._ended(self._child)
        if frame is not None:
            raise getattr(errors, frame[0]["kind"])(frame[0]["message"])
        lines = self.last_lines()
        what = f"{self.launch.name} ended while it started ({code}). "
        if advice := errors.does_not_fit(self._child.tail(LINES * 4)):
            raise errors.ModelDoesNotFit(f"{what}{advice} {lines}")
        raise EngineDied(what + lines)

    def _warn(self) -> None:
        version = self._about["version"]
        if not any(version == known or version.startswith(f"{known}.") for known in self.launch.tested):
            print(
                f"warning: {self.launch.name} {version} was not tested with this Headrace (tested: "
                f"{', '.join(self.launch.tested)}); what is used of it is there, but look at log-probability parity",
                flush=True,
            )

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
        lost = self._lost
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
                    self._send({"op": "drop", "group": number})

    async def pause(self, mode: str = "keep") -> None:
        """See ``RolloutEngine.pause``."""
        await self._call("pause", mode=mode, timeout_s=LOAD_LIMIT_S)

    async def resume(self) -> None:
        """See ``RolloutEngine.resume``."""
        await self._call("resume")

    async def reset_caches(self) -> None:
        """See ``RolloutEngine.reset_caches``."""
        await self._call("reset_caches")

    async def sleep(self, level: int = 1) -> None:
        """See ``RolloutEngine.sleep``. Raises ValueError for level 2 with LoRA: no version brings a base back."""
        if level == 2 and self._adapter is not None:
            raise ValueError("an engine of LoRA adapters cannot give its base away: sleep with level 1")
        await self._call("pause", mode="keep", timeout_s=LOAD_LIMIT_S)
        await self._call("sleep", level=level)

    async def wake(self) -> None:
        """See ``RolloutEngine.wake``."""
        await self._call("wake")
        await self._call("resume")

    async def metrics(self) -> dict[str, float]:
        """See ``RolloutEngine.metrics``."""
        return await self._call("status")

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
        answer = await self._call(
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
        folder = Path(self._folder.name) / f"adapter-{next(self._numbers)}"
        served = await asyncio.to_thread(self._pull_adapter, source, folder, deadline_s)
        answer = await self._call(
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
        await self._stop()
        await self.open()
        self._spoiled = False

    async def served(self) -> Served | None:
        """See ``RolloutEngine.served``."""
        return self._served

    def fingerprint(self) -> dict[str, str]:
        """See ``RolloutEngine.fingerprint``."""
        return {
            "engine": self._about["engine"],
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
            await asyncio.wait([self._lost], timeout=STATUS_EVERY_S)
            if not self._loading.locked():  # a load has its own deadline, and may replace the program
                await self._call("status", timeout_s=SILENT_S)
            elif self._lost.done():
                await asyncio.sleep(STATUS_EVERY_S)

    async def close(self) -> None:
        """Ends the program."""
        if hasattr(self, "_child"):
            await self._stop()

    async def _stop(self) -> None:
        if hasattr(self, "_reading"):
            self._reading.cancel()
        self._writer.close()
        await asyncio.to_thread(self._child.stop)
        self._lose(f"{self.launch.name} was stopped")
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Process id of the program's guard."""
        return self._child.pid

    def last_lines(self) -> str:
        return f"Its last lines:\n{self._child.tail(LINES)}"

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
        self._send(
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

    async def _read(self, reader: asyncio.StreamReader, child: Child) -> None:
        """Everything that the program says, until it ends."""
        while (frame := await wire.receive(reader)) is not None:
            message, block = frame
            if message["op"] == "news":
                self._note(message["samples"], memoryview(block))
            elif message["op"] == "answer":
                if (call := self._calls.pop(message["call"], None)) is not None and not call.done():
                    call.set_result(message)
            elif message["op"] == "refused":
                self._lose(message["message"], getattr(errors, message["kind"]))
        code = await self._ended(child)
        self._lose(f"{self.launch.name} ended ({code})")

    def _note(self, samples: list[list[Any]], block: memoryview) -> None:
        total = sum(entry[2] for entry in samples)
        if len(block) != 8 * total:
            return self._lose(f"{self.launch.name}'s host sent {len(block)} bytes for {total} tokens", WrongLogprobs)
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

    def _send(self, message: dict[str, Any], block: bytes = b"") -> None:
        if not self._writer.is_closing():
            self._writer.write(wire.pack(message, block))

    async def _call(self, op: str, *, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        number = next(self._numbers)
        call = self._calls[number] = asyncio.get_running_loop().create_future()
        lost = self._lost
        self._send({"op": op, "call": number, "args": arguments})
        try:
            await asyncio.wait({call, lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._calls.pop(number, None)
        if lost.done():
            lost.result()
        if not call.done():
            self._lose(f"{self.launch.name} has not answered {op} for {timeout_s:.0f} s")
            lost.result()
        if "error" in call.result():
            raise EngineDied(f"{self.launch.name} failed to {op}: {call.result()['error']}. {self.last_lines()}")
        return call.result()["result"]

    def _lose(self, what: str, kind: type[RolloutError] = EngineDied) -> None:
        if not self._lost.done():
            self._lost.set_exception(kind(f"{what}. {self.last_lines()}"))
            self._lost.exception()  # seen: nobody need wait for it now

    async def _ended(self, child: Child) -> str:
        """How the program ended; it has closed its socket, so it is about to."""
        code = await asyncio.to_thread(child.wait, 10.0)
        return describe_exit(code) if code is not None else "its process hangs"

    def _check(self, requests: Sequence[Request]) -> None:
        if self._broken:
            raise NotServing(f"this engine serves no weights: {self._broken}")
        if self._lost.done():
            self._lost.result()
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


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise errors.PortTaken(
            f"port {port} on this machine is taken ({error.strerror}): choose another openai_port; 0 = any free one"
        ) from error
