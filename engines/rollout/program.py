"""An engine's program in an environment of its own, and what its host and it say to each other. Imports no engine."""

import asyncio
import contextlib
import itertools
import json
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headrace
from headrace.engines.process import Child, describe_exit
from headrace.engines.rollout import errors, wire
from headrace.engines.rollout.errors import EngineDied, RolloutError

START_DEADLINE_S = 900.0
"""Seconds until the program must be ready: large models load and compile for minutes."""
CALL_S = 60.0
LINES = 50
"""Of the program's log, in what is told about its end."""

News = Callable[[list[list[Any]], memoryview], None]
"""Gets [group, sample, tokens, version, finish reason] of each stretch of tokens, and the tokens themselves."""


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


class Program:
    """One run of it: the host's side of ``child.Program``. Start it once."""

    def __init__(self, launch: Launch, python: str, log_dir: Path) -> None:
        """python: the interpreter of the engine's environment."""
        self._launch, self._python = launch, python
        self._log = log_dir / f"{launch.name.lower()}.log"
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._child: Child | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._files = tempfile.TemporaryDirectory(prefix="headrace-engine-")
        self.folder = Path(self._files.name)
        """For what it needs as files; ends with it."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Never has a result; an EngineDied, WrongLogprobs or the like as soon as the program is of no use any more."""
        self.about: dict[str, Any] = {}
        """What it said of itself: version, engine."""
        self.door = ""
        """URL of the OpenAI-compatible door, when it is open."""

    async def start(self, options: Mapping[str, Any], news: News) -> None:
        """Starts it and waits until it serves. Raises as ``HostedEngine.open``; then ``stop`` it.

        options: of ``child.Program``.
        """
        # The interpreter must find our package, and nothing else of our environment.
        (self.folder / "headrace").symlink_to(Path(headrace.__file__).resolve().parent)
        mine, other = socket.socketpair()
        fds = [other.fileno()]
        options, env = dict(options), {**self._launch.env, "PYTHONPATH": str(self.folder)}
        with contextlib.ExitStack() as sockets:
            sockets.enter_context(other)
            if self._launch.door is not None:
                listener = sockets.enter_context(_listen(self._launch.door[0]))
                self.door = f"http://127.0.0.1:{listener.getsockname()[1]}"
                fds.append(listener.fileno())
                options["door_fd"] = listener.fileno()
                env["HEADRACE_DOOR_KEY"] = self._launch.door[1]
            arguments = [str(other.fileno()), json.dumps(options), *self._launch.flags]
            command = [self._python, *self._launch.program, *arguments]
            self._child = child = Child(command, log=self._log, env=env, grace_s=10.0, pass_fds=fds)
        mine.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=mine)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                self.about = await self._first(reader, child)
        except TimeoutError as error:
            raise EngineDied(
                f"{self._launch.name} was not ready after {START_DEADLINE_S:.0f} s. {self._last_lines()}"
            ) from error
        self._warn()
        self._reading = asyncio.create_task(self._read(reader, child, news))

    async def stop(self) -> None:
        """Ends it, if it was started, and what it needed."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._child is not None:
            await asyncio.to_thread(self._child.stop)
        self.lose(f"{self._launch.name} was stopped")
        self._files.cleanup()

    @property
    def pid(self) -> int:
        """Process id of its guard."""
        assert self._child is not None
        return self._child.pid

    def send(self, message: dict[str, Any], block: bytes = b"") -> None:
        """Into the void, when it has ended."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.pack(message, block))

    async def call(self, op: str, *, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """The answer to one question. Raises what ``lost`` has, also when none came in time."""
        number = next(self._numbers)
        call = self._calls[number] = asyncio.get_running_loop().create_future()
        self.send({"op": op, "call": number, "args": arguments})
        try:
            await asyncio.wait({call, self.lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._calls.pop(number, None)
        if self.lost.done():
            self.lost.result()
        if not call.done():
            self.lose(f"{self._launch.name} has not answered {op} for {timeout_s:.0f} s")
            self.lost.result()
        if "error" in call.result():
            raise EngineDied(f"{self._launch.name} failed to {op}: {call.result()['error']}. {self._last_lines()}")
        return call.result()["result"]

    def lose(self, what: str, kind: type[RolloutError] = EngineDied) -> None:
        """From now on it is of no use. kind: of error that everybody who waits gets."""
        if not self.lost.done():
            self.lost.set_exception(kind(f"{what}. {self._last_lines()}"))
            self.lost.exception()  # seen: nobody need wait for it now

    async def _first(self, reader: asyncio.StreamReader, child: Child) -> dict[str, Any]:
        frame = await wire.receive(reader)
        if frame is not None and frame[0]["op"] == "ready":
            return frame[0]
        code = await self._ended(child)
        if frame is not None:
            raise getattr(errors, frame[0]["kind"])(frame[0]["message"])
        lines = self._last_lines()
        what = f"{self._launch.name} ended while it started ({code}). "
        if advice := errors.does_not_fit(child.tail(LINES * 4)):
            raise errors.ModelDoesNotFit(f"{what}{advice} {lines}")
        raise EngineDied(what + lines)

    def _warn(self) -> None:
        version = self.about["version"]
        if not any(version == known or version.startswith(f"{known}.") for known in self._launch.tested):
            print(
                f"warning: {self._launch.name} {version} was not tested with this Headrace (tested: "
                f"{', '.join(self._launch.tested)}); what is used of it is there, but look at log-probability parity",
                flush=True,
            )

    async def _read(self, reader: asyncio.StreamReader, child: Child, news: News) -> None:
        """Everything that the program says, until it ends."""
        while (frame := await wire.receive(reader)) is not None:
            message, block = frame
            if message["op"] == "news":
                news(message["samples"], memoryview(block))
            elif message["op"] == "answer":
                if (call := self._calls.pop(message["call"], None)) is not None and not call.done():
                    call.set_result(message)
            elif message["op"] == "refused":
                self.lose(message["message"], getattr(errors, message["kind"]))
        code = await self._ended(child)
        self.lose(f"{self._launch.name} ended ({code})")

    async def _ended(self, child: Child) -> str:
        """How the program ended; it has closed its socket, so it is about to."""
        code = await asyncio.to_thread(child.wait, 10.0)
        return describe_exit(code) if code is not None else "its process hangs"

    def _last_lines(self) -> str:
        return f"Its last lines:\n{self._child.tail(LINES) if self._child is not None else ''}"


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise errors.PortTaken(
            f"port {port} on this machine is taken ({error.strerror}): choose another openai_port; 0 = any free one"
        ) from error
