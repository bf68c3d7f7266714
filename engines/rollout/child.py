"""What the engine programs of all environments share: groups come in, tokens go out, weights change in between.

Runs in the environment of vLLM or SGLang: standard library, numpy and this package only. A weight update ends the
requests under way, loads, and sends them again from the tokens that they have. So every token's version is known
exactly, whatever the engine reports, and no key or value of old weights is used again.
"""

import asyncio
import contextlib
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.engines.rollout import wire
from headrace.engines.rollout.counter import sample_seed

NEWS_S = 0.05
"""New tokens go to the host this often."""
DROP_AGAIN_S = 0.05

Heard = Callable[[list[int], list[float]], None]
"""Called with new token ids and their log-probabilities, in order."""


class Refused(RuntimeError):
    """The engine cannot start, or cannot do what was asked; ``kind`` names the host's error class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Sampling:
    temperature: float
    max_tokens: int
    stop_token_ids: list[int]
    seed: int
    """uint64."""
    salt: str
    """Cached keys and values are shared only between requests of the same salt; empty = no cache."""


class Backend(Protocol):
    """One engine in this process. A request that is dropped ends with the reason ``abort``."""

    def describe(self) -> dict[str, Any]:
        """``engine`` (name and version), ``tested``, and whatever else belongs to the fingerprint."""
        ...

    async def complete(self, name: str, prompt_ids: list[int], sampling: Sampling, heard: Heard) -> str:
        """Samples one response; returns why it ended: stop, length, abort."""
        ...

    async def drop(self, names: list[str]) -> None: ...

    async def join(self, source: str, expect: str, deadline_s: str) -> None:
        """May join the publish of the ``load`` that comes next; called while requests run."""
        ...

    async def load(self, source: str, expect: str, deadline_s: str) -> list[dict[str, Any]]:
        """One outcome of each worker, see ``vllm_worker``; called while no request of ``complete`` runs. Caches of what
        the weights before have computed are empty afterwards."""
        ...

    async def load_adapter(self, path: str, version: int) -> None:
        """The LoRA adapter for requests from now on; raises when it cannot be. Called while none runs."""
        ...

    async def reset_caches(self) -> None: ...

    async def sleep(self, level: int) -> None: ...

    async def wake(self) -> None: ...

    async def health(self) -> None:
        """Raises when the engine cannot go on."""
        ...


@dataclass
class _Sample:
    group: int
    index: int
    ids: list[int]
    """Prompt, then what was sampled."""
    left: int
    sampling: dict[str, Any]
    seed: int
    sampled: int
    """Tokens of the response so far."""
    tokens: list[int] = field(default_factory=list)
    """Those that the host has not heard of yet, and their log-probabilities."""
    logprobs: list[float] = field(default_factory=list)
    dropped: bool = False
    """A pause has ended its request."""

    def ended(self) -> str:
        """stop or length when it needs no more tokens, else ''."""
        if self.sampled and self.ids[-1] in self.sampling["stop"]:
            return "stop"
        return "length" if self.left <= 0 else ""

    @property
    def name(self) -> str:
        return f"{self.group}-{self.index}-{self.sampled}."  # no name begins with another: SGLang aborts by prefix


class Program:
    """Serves one host over a socket until it closes."""

    def __init__(self, backend: Backend, options: dict[str, Any]) -> None:
        """options: ``places`` (samples given to the engine at a time), ``salted``, ``start_version``."""
        self._backend = backend
        self._places = asyncio.Semaphore(options["places"])
        self._salted: bool = options["salted"]
        self._version: int = options["start_version"]
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._running: dict[str, _Sample] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._aborting = False
        self._idle = asyncio.Condition()
        self._news: dict[tuple[int, int], tuple[_Sample, int, str]] = {}
        self._out: asyncio.StreamWriter | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sampled = 0

    async def serve(self, sock: socket.socket) -> None:
        """Returns when the host closes; raises what the engine raised."""
        reader, self._out = await asyncio.open_connection(sock=sock)
        self._send({"op": "ready", **self._backend.describe()})
        news = asyncio.create_task(self._tell())
        reading = asyncio.create_task(self._read(reader))
        done, _ = await asyncio.wait({news, reading, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            error = ended.exception()
            if isinstance(error, Refused):
                self._send({"op": "refused", "kind": error.kind, "message": str(error)})
                self._out.close()
                await self._out.wait_closed()
            if error is not None:
                raise error

    async def _read(self, reader: asyncio.StreamReader) -> None:
        calls: set[asyncio.Task[None]] = set()
        while (frame := await wire.receive(reader)) is not None:
            message, block = frame
            if message["op"] == "submit":
                self._submit(message, block)
            elif message["op"] == "drop":
                for key, task in list(self._tasks.items()):
                    if key[0] == message["group"]:
                        task.cancel()
            else:
                call = asyncio.create_task(self._answer(message))
                calls.add(call)
                call.add_done_callback(calls.discard)

    async def _answer(self, message: dict[str, Any]) -> None:
        calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "pause": self.pause,
            "resume": self.resume,
            "load": self._load,
            "load_adapter": self._load_adapter,
            "reset_caches": self._backend.reset_caches,
            "sleep": self._backend.sleep,
            "wake": self._backend.wake,
            "status": self._status,
        }
        try:
            answer = {"result": await calls[message["op"]](**message["args"])}
        except Exception as error:  # the boundary of the process: whatever it is, the host must hear it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._send({"op": "answer", "call": message["call"], **answer})

    def _submit(self, message: dict[str, Any], block: bytes) -> None:
        """Samples of one group. block: token ids of the prompt, then of what each sample has already."""
        numbers = wire.unpack_ints(block)
        at = message["prompt"]
        prompt = numbers[:at]
        for index, seed, begun in message["samples"]:
            ids = [*prompt, *numbers[at : at + begun]]
            at += begun
            left = message["max_tokens"] - begun
            sample = _Sample(message["group"], index, ids, left, message, seed, begun)
            key = (sample.group, sample.index)
            task = self._tasks[key] = asyncio.create_task(self._sample(sample))
            task.add_done_callback(lambda task, key=key: self._ended(key, task))

    def _ended(self, key: tuple[int, int], task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _sample(self, sample: _Sample) -> None:
        """One sample from its first token to its last, over any number of weight versions."""
        async with self._places:
            reason = sample.ended()
            while not reason:
                while not self._open.is_set():
                    await self._open.wait()
                if self._aborting:
                    reason = "abort"
                    break
                version = self._version
                reason = await self._stretch(sample, version)
                if reason == "abort":
                    if not sample.dropped:
                        raise Refused("EngineDied", f"the engine gave up request {sample.name}, which nobody dropped")
                    sample.dropped = False
                    reason = sample.ended()
            self._note(sample, self._version, reason)

    async def _stretch(self, sample: _Sample, version: int) -> str:
        """Tokens under one weight version; ``abort`` when a pause ended it."""
        name = sample.name
        # What follows from a token on is another stream of random numbers: the first one's are used up.
        seed = sample_seed(sample.seed, sample.sampled, 0) if sample.sampled else sample.seed
        given = sample.sampling
        sampling = Sampling(
            given["temperature"], sample.left, given["stop"], seed, f"v{version}" if self._salted else ""
        )

        def heard(tokens: list[int], logprobs: list[float]) -> None:
            if len(tokens) != len(logprobs):
                raise Refused(
                    "WrongLogprobs", f"the engine gave {len(logprobs)} log-probabilities for {len(tokens)} tokens"
                )
            sample.ids += tokens
            sample.tokens += tokens
            sample.logprobs += logprobs
            sample.sampled += len(tokens)
            sample.left -= len(tokens)
            self.sampled += len(tokens)
            self._note(sample, version, "")

        self._running[name] = sample
        try:
            return await self._backend.complete(name, sample.ids.copy(), sampling, heard)
        finally:
            del self._running[name]
            async with self._idle:
                self._idle.notify_all()

    def _note(self, sample: _Sample, version: int, reason: str) -> None:
        self._news[sample.group, sample.index] = (sample, version, reason)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(NEWS_S)
            if self._news:
                self._flush()
                assert self._out is not None
                await self._out.drain()

    def _flush(self) -> None:
        """One frame with what is new: for each sample its group, place, number of tokens, version and reason."""
        told, ints, floats = [], [], []
        for sample, version, reason in self._news.values():
            told.append([sample.group, sample.index, len(sample.tokens), version, reason])
            ints += sample.tokens
            floats += sample.logprobs
            sample.tokens, sample.logprobs = [], []
        self._news.clear()
        self._send({"op": "news", "samples": told}, wire.pack_ints(ints) + wire.pack_floats(floats))

    def _send(self, message: dict[str, Any], block: bytes = b"") -> None:
        assert self._out is not None
        self._out.write(wire.pack(message, block))

    async def pause(self, mode: str) -> None:
        """keep: requests stop between two tokens and wait; wait: running ones end first; abort: all end."""
        self._open.clear()
        if mode == "abort":
            self._aborting = True
        while self._running:
            if mode != "wait":  # again and again: a request may be on its way into the engine
                for sample in self._running.values():
                    sample.dropped = True
                await self._backend.drop(list(self._running))
            async with self._idle:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._idle.wait_for(lambda: not self._running), DROP_AGAIN_S)
        if mode == "abort":
            self._open.set()  # those that wait end too
            while self._tasks:
                await asyncio.wait(self._tasks.values())
            self._open.clear()
            self._aborting = False

    async def resume(self) -> None:
        self._open.set()

    async def _load(self, source: str, expect: str, deadline_s: str, version: int) -> dict[str, Any]:
        """join → pause(keep) → load → resume. When the load fails, what was under way ends."""
        await self._backend.join(source, expect, deadline_s)
        was_open = self._open.is_set()
        began = time.monotonic()
        await self.pause("keep")
        self._flush()  # what is told from now on has another version
        outcomes = await self._backend.load(source, expect, deadline_s)
        if any("error" in outcome for outcome in outcomes):
            await self.pause("abort")
        else:
            self._version = version
        if was_open:
            await self.resume()
        return {"outcomes": outcomes, "pause_seconds": time.monotonic() - began}

    async def _load_adapter(self, path: str, version: int) -> dict[str, Any]:
        """pause(keep) → load → resume. When the engine refuses it, what was under way goes on as before."""
        was_open = self._open.is_set()
        began = time.monotonic()
        await self.pause("keep")
        self._flush()  # what is told from now on has another version
        try:
            await self._backend.load_adapter(path, version)
        except Exception as error:  # whatever the engine raises about a folder of somebody else's
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}
        else:
            await self._backend.reset_caches()
            self._version = version
            return {"pause_seconds": time.monotonic() - began}
        finally:
            if was_open:
                await self.resume()

    async def _status(self) -> dict[str, Any]:
        await self._backend.health()
        return {"running": len(self._running), "waiting": len(self._tasks) - len(self._running), "tokens": self.sampled}


def connect(fd: int) -> socket.socket:
    """The host's socket, which this process inherited."""
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock


def refuse(sock: socket.socket, error: Refused) -> int:
    """Tells the host why this program does not serve; returns its exit status."""
    print(f"{error.kind}: {error}", file=sys.stderr, flush=True)
    sock.setblocking(True)
    sock.sendall(wire.pack({"op": "refused", "kind": error.kind, "message": str(error)}))
    return 1
