"""Weights between GPUs, against bare copies of the same bytes and against vLLM's own transfer.

``python -m benchmarks.weights_gpu same``: two processes on one GPU, CUDA IPC. ``… pair``: trainer on GPU 0, receiver on
GPU 1, NCCL, NIXL and CUDA IPC. ``… vllm --model FOLDER``: into vLLM, see ``benchmarks.weights_vllm``. Prints one line
of JSON for each measurement, and exits with status 1 when a bound is missed or a digest differs.

The bound on bandwidth is on the transfer itself: the copies from the publisher's memory into the receiver's parameters,
as the GPU times them. Of what else a version takes the hashes of both sides are told beside it, measured alone on the
same bytes; the rest is the publisher's copy into its slots and the conversation.
"""

import argparse
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import weights_vllm
from benchmarks.weights_figures import Metas, copy_seconds, hash_seconds, metas_of, nbytes_of, random_model, show
from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint import WeightError, publish, pull, release, reserve
from headrace.engines.checkpoint.hashes import hash_of

COPY_SHARE = 0.8
"""Bound: of the bare copy's bandwidth."""
BUSY = 20_000_000
"""Cycles of the GPU: some 10 ms. Should Python need longer, the time that the GPU waits for it counts as copies."""


def receiver(pipe: Connection, device: str, metas: Metas) -> None:
    """A process that pulls what it is told, into parameters of its own, as vLLM's worker does; answers with Served, the
    time of its end and the seconds of its copies, where they are to be timed, and then with a checksum."""
    torch.cuda.set_device(device)
    parameters = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, _, shape in metas}
    expect = {name: (dtype, shape) for name, dtype, shape in metas}
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    timed = under_way = False

    def place(name: str) -> Tensor:
        nonlocal under_way
        if timed and not under_way:  # of a partition the first
            under_way = True
            torch.cuda._sleep(BUSY)  # the GPU has something to do until all its copies are queued
            events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            events[-1][0].record()
        return parameters[name]

    def settle() -> None:
        nonlocal under_way
        if under_way:
            events[-1][1].record()
        under_way = False

    def load(name: str, tensor: Tensor) -> None:
        raise RuntimeError(f"{name} has a place")

    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        source, timed = told
        events.clear()
        under_way = False  # a pull that failed may have left it
        try:
            served = pull(source, load, expect=expect, device=device, settle=settle, place=place)
        except WeightError as error:
            pipe.send(error)
            continue
        torch.cuda.synchronize()
        ended = time.perf_counter()
        pipe.send((served, ended, sum(begin.elapsed_time(end) for begin, end in events) / 1e3))
        pipe.send(float(sum(p.double().sum() for p in parameters.values())))


def hear(pipe: Connection) -> Any:
    """What the receiver says. Raises RuntimeError when it says nothing for two minutes, or has ended."""
    if not pipe.poll(120):
        raise RuntimeError("the receiver says nothing")
    try:
        return pipe.recv()
    except EOFError as error:
        raise RuntimeError("the receiver ended") from error


def between(transport: str, size: str, source: str, target: str, partition_mb: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round but the first, from the first tensor to the confirmed digest. On one GPU, in rounds of
    their own, also seconds of the receiver's copies."""
    metas = metas_of(size)
    model = random_model(metas, source)
    torch.cuda.set_device(source)
    local = transport == "cuda-ipc"
    address = str(Path(tempfile.mkdtemp()) / "w.sock") if local else reserve("127.0.0.1")
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=receiver, args=(theirs, target, metas), daemon=True)
    process.start()
    theirs.close()  # else its end would not be heard
    seconds: list[float] = []
    copies: list[float] = []
    try:
        hear(pipe)
        for version in range(1 + rounds * (2 if source == target else 1)):
            timed = version > rounds
            with torch.no_grad():
                model["embed"].add_(1.0)
            torch.cuda.synchronize()
            pulled = WeightSource(version=version, transport=transport, address=address)  # pyright: ignore[reportArgumentType]
            pipe.send((pulled, timed))
            time.sleep(0.05)  # the receiver waits by now
            began = time.perf_counter()
            manifest = publish(
                iter(model.items()),
                metas,
                version=version,
                train_step=version,
                transport=transport,  # pyright: ignore[reportArgumentType]
                address=address,
                device=source,
                partition_bytes=partition_mb << 20,
            )
            answer = hear(pipe)
            if isinstance(answer, WeightError):
                raise answer
            served, ended, copied = answer
            if served.digest != manifest.digest or hear(pipe) != float(sum(p.double().sum() for p in model.values())):
                raise RuntimeError("the receiver has other weights")
            if timed:
                copies.append(copied)
            else:
                seconds.append(ended - began)
    finally:
        process.kill()
        process.join()
        release(address)
    return {"seconds": seconds[1:], "copies": copies, "first": seconds[0], "nbytes": nbytes_of(metas)}


def compare(
    transports: list[str], source: str, target: str, sizes: list[str], partitions: list[int], rounds: int
) -> bool:
    """Each transport and partition size against the bare copy. Returns whether every transport's best is in bounds.

    partitions: ``partition_mb`` of each run; 0: the whole model lies in one slot, so that nothing else runs on a shared
    GPU while the receiver copies.
    """
    passed = True
    for size in sizes:
        nbytes = nbytes_of(metas_of(size))
        floor, hashing = copy_seconds(nbytes, source, target), hash_seconds(nbytes, source)
        show("bare copy", size=size, gpus=f"{source}→{target}", ms=round(1e3 * floor, 2))
        for transport in transports:
            shares: list[float] = []
            for partition_mb in (mb or 2 * nbytes // 2**20 + 2 for mb in partitions):
                try:
                    run = between(transport, size, source, target, partition_mb, rounds)
                except (WeightError, RuntimeError) as error:
                    show(transport, size=size, partition_mb=partition_mb, failed=str(error)[:400])
                    continue
                middle, copied = (statistics.median(run[part] or [0.0]) for part in ("seconds", "copies"))
                # Over a link it is everything from the first tensor on; on one GPU it is what the receiver copies.
                transfer = copied if source == target else middle
                shares.append(floor / transfer)
                show(
                    transport,
                    size=size,
                    partition_mb=partition_mb,
                    first_ms=round(1e3 * run["first"], 1),
                    median_ms=round(1e3 * middle, 2),
                    **({"copies_ms": round(1e3 * copied, 2)} if source == target else {}),
                    hashes_ms=round(2e3 * hashing, 2),
                    gb_s=round(run["nbytes"] / middle / 1e9, 1),
                    share_of_copy=round(floor / transfer, 3),
                )
            met = bool(shares) and max(shares) >= COPY_SHARE
            print(f"{transport} {size}: {max(shares, default=0):.2f} of the bare copy (bound {COPY_SHARE}), met: {met}")
            passed = passed and met
    return passed


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("same", "pair", "vllm"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="1.57B,8B")
    parser.add_argument("--partitions", default="256,1024,4096,0", help="MB; 0 for the whole model in one")
    parser.add_argument("--transports", default="nccl,nixl,cuda-ipc", help="of part pair")
    parser.add_argument("--model", type=Path, help="folder of the model, for part vllm")
    given = parser.parse_args(words)
    if given.part == "vllm":
        return not weights_vllm.compare(given.model, given.rounds)
    sizes, partitions = given.sizes.split(","), [int(mb) for mb in given.partitions.split(",")]
    if given.part == "same":
        data = torch.randint(256, (100_000_003,), dtype=torch.uint8)
        if hash_of(data, "sums") != hash_of(data.cuda(), "sums"):
            raise RuntimeError("CPU and GPU compute other hashes of the same bytes")
        return not compare(["cuda-ipc"], "cuda:0", "cuda:0", sizes, partitions, given.rounds)
    if torch.cuda.device_count() < 2:
        print("part pair needs two GPUs", file=sys.stderr)
        return 1
    return not compare(given.transports.split(","), "cuda:0", "cuda:1", sizes, partitions, given.rounds)


if __name__ == "__main__":
    sys.exit(main())
