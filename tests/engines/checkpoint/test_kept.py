"""Weights through the store: kept versions on disk and on S3, damaged in every way, read by any reader."""

import itertools
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from headrace.blocks.weights import WeightManifest, WeightSource
from headrace.engines.checkpoint import WeightError, kept, publish, pull
from headrace.engines.checkpoint.layout import files_of
from headrace.engines.experience.files import Files
from tests.engines.checkpoint.conftest import Start

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


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file takes as much as three partitions, unless one tensor is larger."""
    monkeypatch.setattr(kept, "FILE_BYTES", 3 * 4096)


def test_it_is_a_hugging_face_folder(tmp_path: Path, model: dict[str, Tensor], on_the_wire, small_files) -> None:
    manifest = keep(Files(str(tmp_path)), model, beside={"config.json": b"{}", "tokenizer.json": b"[]"})
    folder = tmp_path / FOLDER
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": manifest.plan.nbytes}
    names = sorted(set(index["weight_map"].values()))
    assert len(names) == len(manifest.files) > 3
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    others = {"model.safetensors.index.json", "config.json", "tokenizer.json", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == others | set(names)
    found = {file: safetensors.torch.load_file(folder / file) for file in names}
    assert {name: found[file][name].dtype for name, file in index["weight_map"].items()} == {
        name: tensor.dtype for name, tensor in on_the_wire.items()
    }
    assert all(torch.equal(found[file][name], on_the_wire[name]) for name, file in index["weight_map"].items())
    assert sum(map(len, found.values())) == len(on_the_wire)
    spanning = [part for part in manifest.plan.partitions if part.slices[0].start]
    assert spanning, "one tensor is larger than a partition"


def test_files_of_every_layout_are_read_by_name(model: dict[str, Tensor], on_the_wire, tmp_path: Path) -> None:
    """Odd sizes and every order of dtypes, so that a tensor would be out of alignment in a file of many."""
    metas = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in on_the_wire.items()]
    values = {name: tensor for name, tensor in on_the_wire.items()}
    for seed in range(3):
        order = torch.randperm(len(metas), generator=torch.Generator().manual_seed(seed)).tolist()
        shuffled = {metas[i][0]: values[metas[i][0]] for i in order}
        for partition_bytes in (64, 1000, 1 << 20):
            files = Files(str(tmp_path / f"{seed}-{partition_bytes}"))
            manifest = keep(files, shuffled, partition_bytes=partition_bytes)
            got: dict[str, Tensor] = {}
            for path in (tmp_path / f"{seed}-{partition_bytes}" / FOLDER).glob("*.safetensors"):
                got |= safetensors.torch.load_file(path)
            assert got.keys() == values.keys() and all(torch.equal(got[name], t) for name, t in values.items())
            assert fetch(files)[0].digest == manifest.digest


def test_spoiled_partitions_are_refused_by_name(files: Files, model: dict[str, Tensor], small_files) -> None:
    plan, counts = (manifest := keep(files, model)).plan, manifest.files
    second, third = (file.name for file in files_of(plan, counts)[1:3])
    first, last = counts[0], counts[0] + counts[1] - 1
    good, other = (files.get(f"{FOLDER}/{name}") for name in (second, third))
    stale = Files(files.url + "/old")
    keep(stale, {name: t + 1 if t.is_floating_point() else t for name, t in model.items()})
    header = int.from_bytes(good[:8], "little") + 8
    for spoiled, at, why in (
        (good[:-1] + bytes([good[-1] ^ 1]), last, "another hash than its manifest"),
        (good[:header] + bytes([good[header] ^ 1]) + good[header + 1 :], first, "another hash than its manifest"),
        (good[:-1], first, "bytes, not"),
        (good + b"0", first, "bytes, not"),
        (b"", first, "has 0 bytes, not"),
        (other, first, "bytes, not|another header than its plan|another hash"),
        (stale.get(f"{FOLDER}/{second}"), first, "another hash than its manifest"),
        (good[:9] + b"#" + good[10:], first, "another header than its plan"),
    ):
        files.put(f"{FOLDER}/{second}", spoiled)
        with pytest.raises(WeightError, match=rf"weight version 3, rank 1, partition {at}: .*{second} .*({why})"):
            fetch(files)
    files.put(f"{FOLDER}/{second}", good)
    fetch(files)


def test_a_missing_file_is_named_and_a_retry_brings_it_back(tmp_path: Path, model: dict[str, Tensor]) -> None:
    files = Files(str(tmp_path))
    manifest = keep(files, model)
    first = files_of(manifest.plan, manifest.files)[0].name
    os.unlink(files.locate(f"{FOLDER}/{first}"))
    with pytest.raises(WeightError, match=rf"partition 0: cannot read .*/{first}: it does not exist"):
        fetch(files)
    assert keep(files, model) == manifest and fetch(files)[0].digest == manifest.digest


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
        ({"files": [*manifest.files, 1]}, "contradicts itself"),
        ({"files": []}, "contradicts itself"),
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


def read_plainly(folder: Path) -> set[float]:
    """The values in a folder, as a program that knows nothing of manifests reads it."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = [safetensors.torch.load_file(folder / name) for name in set(index["weight_map"].values())]
    return {value for part in tensors for tensor in part.values() for value in tensor.float().unique().tolist()}


def test_a_publisher_killed_at_any_step_leaves_nothing_that_looks_whole(start: Start, tmp_path: Path) -> None:
    """One is killed before its first change of the disk, the next before its second, …; each has other weights."""
    files, folder = Files(str(tmp_path)), tmp_path / "weights/v000003"
    assert start("keeper.py", store=files.url, version=2, value=-1, kill_at=-1).says() == "done"
    before = {path.name: path.read_bytes() for path in (tmp_path / "weights/v000002").iterdir()}
    for attempt in itertools.count():
        with suppress(EOFError):
            start("keeper.py", store=files.url, version=3, value=attempt, kill_at=attempt).says()
        if (folder / "manifest.json").exists():
            break
        if (folder / "config.json").exists():
            assert read_plainly(folder) == {attempt}
        with pytest.raises(WeightError, match="has no manifest"):
            pull(WeightSource(version=3, transport="store", address="weights/v000003", store=files.url), print)
    assert attempt > 15, "killed at as many steps"
    assert read_plainly(folder) == {attempt}
    source = WeightSource(version=3, transport="store", address="weights/v000003", store=files.url)
    got: dict[str, Tensor] = {}
    pull(source, lambda name, tensor: got.update({name: tensor.clone()}))
    assert len(got) == 8 and all(torch.equal(t, torch.full_like(t, attempt)) for t in got.values())
    assert {path.name: path.read_bytes() for path in (tmp_path / "weights/v000002").iterdir()} == before


def test_a_publisher_killed_while_it_writes_to_s3_commits_nothing_and_the_next_one_does(
    start: Start, s3_bucket: str, tmp_path: Path
) -> None:
    files = Files(f"{s3_bucket}/{tmp_path.name}")
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    keeper = {"env": env, "store": files.url, "version": 3, "kill_at": -1}
    source = WeightSource(version=3, transport="store", address="weights/v000003", store=files.url)
    for number, tensor in enumerate(("t1", "t4", "t7")):
        with pytest.raises(EOFError):
            start("keeper.py", **keeper, value=number, kill_at_tensor=tensor).says()
        assert not files.exists("weights/v000003/config.json")
        with pytest.raises(WeightError, match="has no manifest"):
            pull(source, print)
    assert files.paths("weights/v000003"), "the last one had written some files"
    assert start("keeper.py", **keeper, value=5).says() == "done"
    got: dict[str, Tensor] = {}
    pull(source, lambda name, tensor: got.update({name: tensor.clone()}))
    assert len(got) == 8 and all(torch.equal(t, torch.full_like(t, 5)) for t in got.values())


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
    ran = subprocess.run([sys.executable, "-c", DISK_FULL, tmp_path], capture_output=True, text=True, timeout=300)
    last = ran.stderr.strip().splitlines()[-1]
    assert "WeightError: weight version 3: cannot write" in last
    assert "Nothing was committed. Free space there" in last
    assert Files(str(tmp_path)).paths("w/3") == []
