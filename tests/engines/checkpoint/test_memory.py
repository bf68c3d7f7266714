"""Both sides stay within two partitions and one tensor, whatever the model's size."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

MB = 1 << 20
PARTITION = 16 * MB
TENSOR = 40 * MB
"""The largest tensor on the wire (bfloat16); the iterator makes it in float32."""
SLACK = 12 * MB
"""Threads, event loop, allocator, on a GPU the hash's sums; the model has 400 MB."""

SIDE = """
import pathlib, sys, threading, time, torch
from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint import publish, pull, reserve

side, transport, address, store, quantization = sys.argv[1:]
device = "cuda" if transport == "cuda-ipc" else "cpu"
MB = 1 << 20
sizes = [4] * 40 + [40] + [4] * 40 + [40]  # MB on the wire, 400 in all
metas = [(f"t{i}_proj.weight", "float32", [size * MB // 2048, 1024]) for i, size in enumerate(sizes)]

def tensors():
    for i, (name, _, shape) in enumerate(metas):
        yield name, torch.full(shape, float(i), device=device)

def peak():
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def run(metas, tensors):
    global address
    told = pathlib.Path(store) / "address"
    if transport in ("tcp", "nixl") and side == "publish":
        address = reserve("127.0.0.1")
        (told.parent / "new").write_text(address)
        (told.parent / "new").rename(told)
    elif transport in ("tcp", "nixl"):
        end = time.monotonic() + 60
        while not told.exists() and time.monotonic() < end:
            time.sleep(0.05)
        address = told.read_text()
    if side == "publish":
        publish(tensors, metas, version=1, train_step=1, transport=transport, address=address, store=store,
                quantization=quantization or None, partition_bytes=16 * MB, device=device, deadline_s=60)
    else:
        source = WeightSource(version=1, transport=transport, address=address, store=store)
        last = {}
        pull(source, lambda name, tensor: last.update({name: float(tensor[-1, -1])}), device=device,
             deadline_s=60)
        if quantization:
            last = {name: value * last[name + "_scale_inv"] for name, value in last.items() if name[-3:] != "inv"}
        assert [round(value, 3) for value in last.values()] == [float(i) for i in range(len(sizes))], last

threading.Thread(target=print).start()
torch.full((1024, 1024), 1.0).to(torch.bfloat16)
if transport == "nixl":  # what UCX takes is not ours, and does not grow
    from headrace.engines.checkpoint.carriers import nixl
    nixl._agent(side == "publish")
if device == "cuda":  # nor is the workspace of cuBLAS, which computes the hashes: 32 MiB on an H200
    from headrace.engines.checkpoint.hashes import hash_of
    hash_of(torch.zeros(4 * MB, dtype=torch.uint8, device=device), "sums")
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
if device == "cuda":
    torch.cuda.reset_peak_memory_stats()
before = peak()
run(metas, tensors())
print(peak() - before)
"""


def side(*arguments: object) -> subprocess.Popen[str]:
    # A fixed threshold: else the allocator keeps freed blocks, and resident memory says nothing of what is alive.
    env = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    env |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    command = [sys.executable, "-c", SIDE, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def used(process: subprocess.Popen[str]) -> int:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return int(said.split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "quantization"),
    [("shm", ""), ("store", ""), ("tcp", ""), ("nixl", ""), ("shm", "fp8"), ("cuda-ipc", "")],
)
def test_memory_does_not_grow_with_the_model(transport: str, quantization: str, tmp_path: Path) -> None:
    if transport == "nixl" and not find_spec("nixl_cu12"):
        pytest.skip("NIXL is not installed")
    if transport == "cuda-ipc" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    arguments = (
        (transport, tmp_path / "w", tmp_path) if transport in ("shm", "cuda-ipc") else (transport, "w", tmp_path)
    )
    arguments = (*arguments, quantization)
    publisher = side("publish", *arguments)
    if transport == "store":
        sent = used(publisher)
        received = used(side("pull", *arguments))
    else:
        received = used(side("pull", *arguments))
        sent = used(publisher)
    print(f"publisher {sent / MB:.0f} MB, receiver {received / MB:.0f} MB, two partitions {2 * PARTITION / MB:.0f} MB")
    assert received <= 2 * PARTITION + TENSOR + SLACK
    made = TENSOR // 2 + 8 * MB if quantization else 0  # its quantised form, and what converting a strip takes
    assert sent <= 2 * PARTITION + 2 * TENSOR + made + SLACK  # its tensor is float32: twice what travels
