"""Weights between processes of one machine, against the bare transfer of the same bytes.

``python -m benchmarks.weights [--gb 1] [--rounds 5] [--only shm,tcp]``: a publisher and a receiver process; every way
and its floor in turns, so that a noisy machine is noisy for all. Floors: one memcpy; gloo's broadcast and NIXL's read
of the same tensors, without plan, hash, export and load. Then a safetensors file written to and read from memory, and a
version with 2% changed elements. ``--sweep``: shm with several partition sizes. ``--gpu PART …`` passes on to
``benchmarks.weights_gpu``. Medians over the rounds; exits with status 1 when a bound is missed.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks import weights_gpu
from benchmarks.weights_figures import Metas, metas_of, nbytes_of, show
from headrace.blocks.weights import Transport, WeightSource
from headrace.engines.checkpoint import publish, pull, rendezvous, reserve
from headrace.engines.checkpoint.carriers.nixl import package

BOUNDS = {"shm": ("memcpy", 1.5), "tcp": ("raw gloo", 1.15), "gloo": ("raw gloo", 1.15), "nixl": ("raw nixl", 1.15)}
"""way → its floor, and how many times as long it may take."""
DELTA_SHARE = 0.05
"""Bytes on the wire for 2% changed elements, as a part of all."""
SO_MAX_PACING_RATE = 47
"""Linux; Python's socket module does not name it."""
MODELS = {1: "0.5B", 5: "2.5B"}
WAIT_S = 120


def fill(metas: Metas, seed: int) -> dict[str, Tensor]:
    """Random bits of ordinary weights, in float32's upper half: quick to make, all distinct."""
    make = torch.Generator().manual_seed(seed)
    out = {}
    for name, _, shape in metas:
        bits = torch.randint(-(2**15), 2**15, shape, generator=make, dtype=torch.int16)
        out[name] = (bits & ~0x4000).view(torch.bfloat16)  # no infinities
    return out


def peer(pipe: Connection, metas: Metas) -> None:
    """The receiver: does what it is told and says when it was done."""
    pin(1)
    parameters = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, _, shape in metas}
    expect = {name: (dtype, shape) for name, dtype, shape in metas}
    raw = Raw(1)

    def load(name: str, tensor: Tensor) -> None:
        parameters[name].copy_(tensor)

    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        what, given = told
        served: Any = None
        if what == "pull":
            served = pull(given, load, expect=expect, deadline_s=WAIT_S, place=parameters.get)
        elif what == "gloo":
            raw.gloo(given, parameters)
        elif what == "nixl":
            raw.nixl(given, parameters)
        elif what == "file":
            for name, tensor in load_file(given).items():
                load(name, tensor)
        ended = time.perf_counter()
        pipe.send((served, ended, checksum(parameters)))


def pin(side: int) -> None:
    """Publisher and receiver on half of the cores each: other work of the machine would else put both on one."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[side::2])


def checksum(tensors: dict[str, Tensor]) -> int:
    """Of every 61st element: the digest covers all."""
    return sum(int(tensor.view(torch.int16).view(-1)[::61].sum()) for tensor in tensors.values())


class Raw:
    """Bare transfers of a model's tensors; rank 0 has them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._group: Any = None
        self._agent: Any = None
        self._remote = ""

    def gloo(self, port: int, tensors: dict[str, Tensor]) -> None:
        if self._group is None:
            limit = timedelta(seconds=WAIT_S)
            store = TCPStore("127.0.0.1", port, is_master=self._rank == 0, timeout=limit, wait_for_workers=False)
            self._group = dist.ProcessGroupGloo(store, self._rank, 2, limit)
        for tensor in tensors.values():
            self._group.broadcast([tensor.view(-1).view(torch.uint8)], dist.BroadcastOptions()).wait()

    def agent(self) -> Any:
        if self._agent is None:
            os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
            api = import_module(f"{package()}._api")
            # A progress thread would keep rank 0's core busy in every other way's turn; see ``Bench.raw_nixl``.
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = api.nixl_agent(f"raw-{self._rank}", config)
        return self._agent

    def offer(self, tensors: dict[str, Tensor]) -> tuple[bytes, list[tuple[int, int, int]]]:
        """Rank 0: what rank 1 needs to read."""
        agent = self.agent()
        agent.register_memory(list(tensors.values()))
        return agent.get_agent_metadata(), [(t.data_ptr(), t.nbytes, 0) for t in tensors.values()]

    def nixl(self, offer: tuple[bytes, list[tuple[int, int, int]]], tensors: dict[str, Tensor]) -> None:
        """Rank 1: reads everything in one transfer."""
        agent = self.agent()
        if not self._remote:
            agent.register_memory(list(tensors.values()))
            name = agent.add_remote_agent(offer[0])
            self._remote = name.decode() if isinstance(name, bytes) else name
        here = agent.get_xfer_descs([(t.data_ptr(), t.nbytes, 0) for t in tensors.values()], "DRAM")
        handle = agent.initialize_xfer("READ", here, agent.get_xfer_descs(offer[1], "DRAM"), self._remote)
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(0.0002)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL's raw read ended as {state}")
        agent.release_xfer_handle(handle)


class Bench:
    """The publisher's side; every method returns seconds."""

    def __init__(self, gb: int, partition_mb: int) -> None:
        self.metas = metas_of(MODELS[gb])
        self.nbytes, self.partition_mb = nbytes_of(self.metas), partition_mb
        self.model = fill(self.metas, 1)
        self._raw, self._version = Raw(0), 0
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._addresses: dict[str, str] = {}
        self._offer: Any = None
        self._port = 0
        self.served: Any = None
        self.copy: dict[str, Tensor] = {}
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=peer, args=(theirs, self.metas), daemon=True)
        self._process.start()
        pin(0)
        self._hear()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    def _hear(self) -> Any:
        if not self._pipe.poll(WAIT_S):
            raise RuntimeError("the receiver says nothing")
        return self._pipe.recv()

    def _until(self, began: float) -> float:
        self.served, ended, found = self._hear()
        if found != checksum(self.model):
            raise RuntimeError("the receiver has other weights")
        return ended - began

    def change(self, share: float) -> None:
        """Another version: this part of the elements, or all of them for 1, get other bits."""
        make = torch.Generator().manual_seed(self._version)
        for tensor in self.model.values():
            bits = tensor.view(torch.int16).view(-1)
            if share == 1:
                bits.bitwise_xor_(1)
            else:
                where = torch.randint(bits.numel(), (int(share * bits.numel()),), generator=make)
                bits[where] = bits[where] ^ 1

    def memcpy(self) -> float:
        """Once every tensor, within this process."""
        if not self.copy:
            self.copy = {name: torch.zeros_like(tensor) for name, tensor in self.model.items()}
        began = time.perf_counter()
        for name, tensor in self.model.items():
            self.copy[name].copy_(tensor)
        return time.perf_counter() - began

    def stream(self, transport: Transport, delta: bool = False, gbit: float = 0) -> float:
        """From the first tensor to the confirmed digest, loaded. gbit: as over a link of that speed; 0 = no limit."""
        self._version += 1
        key = f"{transport} {delta} {gbit}"
        if key not in self._addresses:
            path = str(Path(self._folder.name) / f"{len(self._addresses)}.sock")
            self._addresses[key] = path if transport == "shm" else reserve("127.0.0.1")
            if gbit:  # the kernel paces what is sent on the connections of this port
                listener = rendezvous._reserved[self._addresses[key]]
                listener.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(gbit * 1e9 / 8))
        address, version = self._addresses[key], self._version
        source = WeightSource(version=version, transport=transport, address=address, delta=delta)
        self._pipe.send(("pull", source))
        time.sleep(0.05)
        began = time.perf_counter()
        manifest = publish(
            iter(self.model.items()),
            self.metas,
            version=version,
            train_step=version,
            transport=transport,
            address=address,
            partition_bytes=self.partition_mb << 20,
            delta=delta,
            deadline_s=WAIT_S,
        )
        seconds = self._until(began)
        if self.served.digest != manifest.digest:
            raise RuntimeError("the receiver has another digest")
        return seconds

    def raw_gloo(self) -> float:
        self._port = self._port or free_port()
        self._pipe.send(("gloo", self._port))
        began = time.perf_counter()
        self._raw.gloo(self._port, self.model)
        return self._until(began)

    def raw_nixl(self) -> float:
        self._offer = self._offer or self._raw.offer(self.model)
        began = time.perf_counter()
        self._pipe.send(("nixl", self._offer))
        while not self._pipe.poll(0):
            self._raw.agent().get_new_notifs()  # there are none, but so its agent answers the receiver at once
        return self._until(began)

    def file(self) -> float:
        """Written to and read from a file in memory."""
        path = str(Path(self._folder.name) / "all.safetensors")
        began = time.perf_counter()
        save_file(self.model, path)
        self._pipe.send(("file", path))
        seconds = self._until(began)
        os.unlink(path)
        return seconds


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def in_turns(
    ways: dict[str, Callable[[], float]], bench: Bench, rounds: int, share: float = 1
) -> dict[str, list[float]]:
    """Seconds of each way in each round but the first."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            bench.change(share)
            found = way()
            if number:
                seconds[name].append(found)
    return seconds


def full(bench: Bench, rounds: int, only: set[str]) -> bool:
    """Every way against its floor."""
    ways: dict[str, Callable[[], float]] = {"memcpy": bench.memcpy}
    nixl = any(find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))
    for way in [way for way in BOUNDS if way in only and (way != "nixl" or nixl)]:
        ways[way] = lambda way=way: bench.stream(cast(Transport, way))
    if {"tcp", "gloo"} & only:
        ways["raw gloo"] = bench.raw_gloo
    if "nixl" in ways:
        ways["raw nixl"] = bench.raw_nixl
    if "file" in only:
        ways["safetensors file"] = bench.file
    seconds = in_turns(ways, bench, rounds)
    passed = True
    for way, times in seconds.items():
        middle = statistics.median(times)
        show(way, gb=round(bench.nbytes / 1e9, 2), s=round(middle, 3), all_s=_rounded(times))
    for way, (floor, bound) in BOUNDS.items():
        if way in seconds:
            ratio = statistics.median(seconds[way]) / statistics.median(seconds[floor])
            passed = passed and ratio <= bound
            print(f"{way} / {floor}: {ratio:.2f} (bound {bound}), met: {ratio <= bound}", flush=True)
    return passed


def changes(bench: Bench, rounds: int, gbit: float) -> bool:
    """2% of the elements changed: what travels, and how long it takes, over loopback (0) or a link of that speed."""
    wire: list[int] = []

    def delta() -> float:
        found = bench.stream("tcp", delta=True, gbit=gbit)
        wire.append(bench.served.wire_nbytes)
        return found

    # Each way sees every second version: both changes of 1% are in what it sends.
    ways = {"everything": lambda: bench.stream("tcp", gbit=gbit), "2% as changes": delta}
    delta()
    seconds = in_turns(ways, bench, rounds, 0.01)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    link = f"{gbit:g} Gb/s" if gbit else "loopback"
    for name, times in seconds.items():
        show(f"{name}, {link}", gb=round(bench.nbytes / 1e9, 2), s=round(middle[name], 3), all_s=_rounded(times))
    share, faster = max(wire[1:]) / bench.nbytes, middle["everything"] / middle["2% as changes"]
    met = share <= DELTA_SHARE and faster > 1
    print(
        f"changes, {link}: {share:.4f} of the bytes (bound {DELTA_SHARE}), {faster:.2f} × as fast (bound 1), met: {met}"
    )
    return met


def _rounded(times: list[float]) -> list[float]:
    return [round(value, 3) for value in times]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=int, choices=tuple(MODELS), default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--partition-mb", type=int, default=64)
    parser.add_argument("--only", default="shm,tcp,gloo,nixl,file,delta")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--gpu", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.gpu is not None:
        return weights_gpu.main(given.gpu)
    torch.set_num_threads(1)
    bench = Bench(given.gb, given.partition_mb)
    try:
        if given.sweep:
            for bench.partition_mb in (4, 8, 16, 32, 64):
                seconds = in_turns({"memcpy": bench.memcpy, "shm": lambda: bench.stream("shm")}, bench, given.rounds)
                middle = {name: round(statistics.median(times), 3) for name, times in seconds.items()}
                show("sweep", partition_mb=bench.partition_mb, **middle)
            return 0
        only = set(given.only.split(","))
        passed = full(bench, given.rounds, only)
        if "delta" in only and given.gb == 1:
            for gbit in (0, 10):
                passed = changes(bench, given.rounds, gbit) and passed
        return not passed
    finally:
        bench.close()
        print(json.dumps({"load": os.getloadavg()[0], "cores": os.cpu_count()}))


if __name__ == "__main__":
    sys.exit(main())
