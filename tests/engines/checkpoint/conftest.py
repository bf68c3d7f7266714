"""A small model of every kind of tensor, and real processes at both ends of a transfer."""

import ctypes
import multiprocessing
import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.blocks.weights import Transport, WeightSource
from headrace.engines.checkpoint.carriers import shm

HERE = Path(__file__).parent
RING_BYTES = 1 << 14
Metas = list[tuple[str, str, list[int]]]
Start = Callable[..., "Child"]

# Children fork from one server that has torch already: real processes, without seconds of imports for each.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["pytest", "headrace.engines.checkpoint"])


def enter(network: str) -> None:
    """What ``ip netns exec`` does: the network, and a /sys that shows its devices."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network}") as namespace:
        done = libc.setns(namespace.fileno(), 0x40000000) == 0  # CLONE_NEWNET
    done = done and libc.unshare(0x20000) == 0  # CLONE_NEWNS
    done = done and libc.mount(b"", b"/", b"none", (1 << 19) | (1 << 14), None) == 0  # MS_SLAVE | MS_REC
    done = done and libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None) == 0
    assert done, os.strerror(ctypes.get_errno())


def run(script: str, pipe: Any, options: dict[str, Any]) -> None:
    """In the child: enters a network namespace (option ``network``) and sets variables (``env``) before the script."""
    if network := options.pop("network", ""):
        enter(network)
    os.environ.update(options.pop("env", {}))
    shm.RING_BYTES = RING_BYTES
    runpy.run_path(str(HERE / script), {"pipe": pipe, "options": options})


@pytest.fixture(autouse=True)
def ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller than the small model, so that publishers and receivers wait for each other."""
    monkeypatch.setattr(shm, "RING_BYTES", RING_BYTES)


class Child:
    """A process that runs a script of this folder; they talk through a pipe."""

    def __init__(self, script: str, options: dict[str, Any]) -> None:
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=run, args=(script, theirs, options))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def says(self) -> Any:
        """The next thing that it says."""
        assert self._pipe.poll(30), "the child says nothing"
        return self._pipe.recv()

    def go_on(self) -> None:
        self._pipe.send("go on")

    def do(self, what: Any) -> None:
        """Gives it something more to do."""
        self._pipe.send(what)

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._pipe.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """``start("sender.py", **options) -> Child``; all are killed at the end."""
    children: list[Child] = []

    def one(script: str, **options: Any) -> Child:
        children.append(Child(script, options))
        return children[-1]

    yield one
    for child in children:
        child.end()


@pytest.fixture
def start_receiver(start: Start, tmp_path: Path) -> Start:
    """``start_receiver(address, version, rank=0, **options) -> Child``; it writes ``got-<rank>.pt``."""

    def one(address: str, version: int, rank: int = 0, transport: Transport = "shm", **options: Any) -> Child:
        delta = options.pop("delta", False)
        source = WeightSource(version=version, transport=transport, address=address, delta=delta)
        return start("receiver.py", source=source, out=tmp_path / f"got-{rank}.pt", rank=rank, **options)

    return one


@pytest.fixture(scope="session")
def model() -> dict[str, Tensor]:
    """Small and large tensors, several dtypes, one empty, one of one element; about 110 kB on the wire."""
    make = torch.Generator().manual_seed(5)
    out = {f"layer.{i}.weight": torch.randn(5 + 7 * i, 16, generator=make) for i in range(12)}
    out["embed.weight"] = torch.randn(300, 64, generator=make)
    out["odd"] = torch.randn(3, generator=make).to(torch.bfloat16)
    out["counts"] = torch.arange(9)
    out["flags"] = torch.tensor([True, False, True])
    out["empty"] = torch.empty(0, 4)
    out["scalar"] = torch.tensor(2.5)
    out["half"] = torch.randn(64, 128, generator=make).to(torch.float16)
    return out


@pytest.fixture(scope="session")
def metas(model: dict[str, Tensor]) -> Metas:
    return [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in model.items()]


@pytest.fixture(scope="session")
def on_the_wire(model: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in model.items()}


@pytest.fixture
def model_file(model: dict[str, Tensor], tmp_path: Path) -> Path:
    torch.save(model, tmp_path / "model.pt")
    return tmp_path / "model.pt"
