"""Weights between GPUs: CUDA IPC on one, NCCL and NIXL between two."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from headrace.blocks.weights import Transport, WeightSource

WAYS: list[tuple[Transport, int]] = [("cuda-ipc", 0), ("cuda-ipc", 1), ("nccl", 1), ("nixl", 1)]


@pytest.mark.parametrize(("transport", "target"), WAYS)
def test_two_versions_arrive(
    transport: Transport, target: int, start, start_receiver, model_file: Path, on_the_wire, tmp_path: Path
) -> None:
    if torch.cuda.device_count() <= target:
        pytest.skip(f"needs {target + 1} GPUs")
    if transport == "nixl" and not find_spec("nixl_cu13"):
        pytest.skip("NIXL is not installed")
    options = {"model": model_file, "transport": transport, "version": 1, "device": "cuda:0", "deadline_s": 60}
    if transport == "cuda-ipc":
        address = str(tmp_path / "w.sock")
        publisher = start("sender.py", address=address, **options)
    else:
        publisher = start("sender.py", **options)
        address = publisher.says()
    receiver = start_receiver(address, 1, transport=transport, device=f"cuda:{target}", deadline_s=60)
    for version in (1, 2):
        manifest, served = publisher.says(), receiver.says()
        assert (manifest.hashing, served.digest) == ("sums", manifest.digest)
        got = torch.load(tmp_path / "got-0.pt", map_location="cpu")
        assert all(torch.equal(got[name], value) for name, value in on_the_wire.items())
        if version == 1:
            receiver.do(WeightSource(version=2, transport=transport, address=address))
            publisher.do(model_file)
