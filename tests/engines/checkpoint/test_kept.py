"""Weights through the store: kept versions on disk and on S3, damaged in every way, read by any reader."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from headrace.blocks.weights import WeightManifest, WeightSource
from headrace.engines.checkpoint import WeightError, publish, pull
from headrace.engines.experience.files import Files

FOLDER = "weights/000003"


@pytest.fixture(params=["local", "s3"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    if request.param == "local":
        return Files(str(tmp_path / "store"))
    return Files(f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}")


def keep(files: Files, model: dict[str, Tensor], version: int = 3, **changes: Any) -> WeightManifest:
    metas = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in model.items()]
    settings: dict[str, Any] = {"address": FOLDER, "partition_bytes": 4096, "store": files.url, **changes}
    return publish(iter(model.items()), metas, version=version, train_step=version, transport="store", **settings)


def fetch(files: Files, version: int = 3) -> tuple[Any, dict[str, Tensor]]:
    got: dict[str, Tensor] = {}
    source = WeightSource(version=version, transport="store", address=FOLDER, store=files.url)
    return pull(source, lambda name, tensor: got.update({name: tensor.clone()}), rank=1), got


def test_round_trip_bit_for_bit(files: Files, model: dict[str, Tensor], on_the_wire: dict[str, Tensor]) -> None:
    manifest = keep(files, model)
    served, got = fetch(files)
    assert (served.version, served.digest, served.nbytes) == (3, manifest.digest, manifest.plan.nbytes)
    assert list(got) == list(on_the_wire)
    assert all(got[name].dtype == t.dtype and torch.equal(got[name], t) for name, t in on_the_wire.items())
    assert WeightManifest.model_validate_json(files.get(f"{FOLDER}/manifest.json")) == manifest


def test_a_wire_dtype_of_float32_keeps_float32(tmp_path: Path, model: dict[str, Tensor]) -> None:
    files = Files(str(tmp_path))
    keep(files, model, wire_dtype="float32")
    assert torch.equal(fetch(files)[1]["embed.weight"], model["embed.weight"])


def test_a_plain_loop_with_safetensors_reads_it(tmp_path: Path, model: dict[str, Tensor], on_the_wire) -> None:
    keep(Files(str(tmp_path)), model)
    folder = tmp_path / FOLDER
    whole: dict[str, Tensor] = {}
    pieces: dict[str, list[Tensor]] = {}
    for path in sorted(folder.glob("part-*.safetensors")):
        for name, tensor in safetensors.torch.load_file(path).items():
            base, at, _ = name.partition("@")
            if at:
                pieces.setdefault(base, []).append(tensor)
            else:
                whole[name] = tensor
    shapes = {
        piece["name"]: (piece["dtype"], piece["shape"])
        for part in json.loads((folder / "manifest.json").read_text())["plan"]["partitions"]
        for piece in part["slices"]
    }
    assert pieces
    for name, parts in pieces.items():
        dtype, shape = shapes[name]
        whole[name] = torch.cat(parts).view(getattr(torch, dtype)).reshape(shape)
    assert whole.keys() == on_the_wire.keys()
    assert all(torch.equal(whole[name], t) for name, t in on_the_wire.items())


def damaged(files: Files, index: int, data: bytes) -> None:
    files.put(part(index), data)


def part(index: int) -> str:
    return f"{FOLDER}/part-{index:05d}.safetensors"


def test_spoiled_partitions_are_refused_by_name(files: Files, model: dict[str, Tensor]) -> None:
    keep(files, model)
    seven, eight = files.get(part(7)), files.get(part(8))
    stale = Files(files.url + "/old")
    keep(stale, {name: t + 1 if t.is_floating_point() else t for name, t in model.items()})
    for spoiled, why in (
        (seven[:-1] + bytes([seven[-1] ^ 1]), "another hash than its manifest"),
        (seven[:-1], "bytes, not"),
        (b"", "has 0 bytes, not"),
        (eight, "bytes, not|another header than its plan|another hash"),
        (stale.get(part(7)), "another hash than its manifest"),
        (seven[:9] + b"#" + seven[10:], "another header than its plan"),
    ):
        damaged(files, 7, spoiled)
        with pytest.raises(WeightError, match=rf"weight version 3, rank 1, partition 7: .*{part(7)} .*({why})"):
            fetch(files)
    damaged(files, 7, seven)
    fetch(files)


def test_a_missing_partition_is_named(tmp_path: Path, model: dict[str, Tensor]) -> None:
    files = Files(str(tmp_path))
    keep(files, model)
    os.unlink(files.locate(part(9)))
    with pytest.raises(WeightError, match=rf"partition 9: cannot read .*{part(9)}: it does not exist"):
        fetch(files)


def test_an_uncommitted_or_damaged_manifest_is_refused(files: Files, model: dict[str, Tensor]) -> None:
    with pytest.raises(WeightError, match=r"weight version 3, rank 1: .* has no manifest"):
        fetch(files)
    manifest = keep(files, model)
    path = f"{FOLDER}/manifest.json"
    files.put(path, files.get(path)[:-10])
    with pytest.raises(WeightError, match=r"manifest\.json is damaged"):
        fetch(files)
    for update, why in (
        ({"digest": "0" * 32}, "contradicts itself"),
        ({"hashes": manifest.hashes[:-1]}, "contradicts itself"),
        ({"version": 4}, "holds version 4"),
        ({"plan": manifest.plan.model_copy(update={"partitions": manifest.plan.partitions[1:]})}, "do not add up"),
    ):
        files.put(path, manifest.model_copy(update=update).model_dump_json().encode())
        with pytest.raises(WeightError, match=why):
            fetch(files)


def test_a_committed_version_never_changes(files: Files, model: dict[str, Tensor]) -> None:
    manifest = keep(files, model)
    assert keep(files, model) == manifest  # a retry
    changed = {**model, "odd": model["odd"] + 1}
    with pytest.raises(WeightError, match="is committed already, with other content; a version never changes"):
        keep(files, changed)
    assert fetch(files)[0].digest == manifest.digest
    assert keep(files, changed, version=4, address="weights/000004").digest != manifest.digest


def test_nothing_to_publish_and_unknown_dtypes_are_refused(tmp_path: Path) -> None:
    files = Files(str(tmp_path))
    with pytest.raises(WeightError, match="there is no tensor to publish"):
        keep(files, {})
    with pytest.raises(WeightError, match="safetensors has no complex64"):
        keep(files, {"z": torch.zeros(2, dtype=torch.complex64)})


KILLED = """
import os, signal, sys, torch
from headrace.engines.checkpoint import publish
def tensors():
    for i in range(8):
        if i == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        yield f"t{i}", torch.full((1024,), float(i))
publish(tensors(), [(f"t{i}", "float32", [1024]) for i in range(8)], version=3, train_step=3, transport="store",
        address="weights/000003", store=sys.argv[1], partition_bytes=2048)
"""


def test_a_publisher_killed_in_the_middle_commits_nothing_and_a_retry_does(tmp_path: Path) -> None:
    files = Files(str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=60)
    assert ran.returncode == -signal.SIGKILL
    assert files.paths(FOLDER)
    with pytest.raises(WeightError, match="has no manifest"):
        fetch(files)
    model = {f"t{i}": torch.full((1024,), float(i)) for i in range(8)}
    assert keep(files, model, partition_bytes=2048).digest == fetch(files)[0].digest


DISK_FULL = """
import resource, signal, sys, torch
from headrace.engines.checkpoint import publish
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
tensors = iter([("a", torch.zeros(4096))])
try:
    publish(tensors, [("a", "float32", [4096])], version=3, train_step=3, transport="store", address="w/3",
            store=sys.argv[1])
finally:
    assert next(tensors, None) is None
"""


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", DISK_FULL, tmp_path], capture_output=True, text=True, timeout=60)
    last = ran.stderr.strip().splitlines()[-1]
    assert "WeightError: weight version 3: cannot write" in last
    assert "Nothing was committed. Free space there" in last
    assert Files(str(tmp_path)).paths("w/3") == []
