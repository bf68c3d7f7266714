"""Tables, manifests and plain files, on a local folder and on a real S3 server."""

import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.blocks.base import Strict
from headrace.blocks.manifest import Manifest, Part
from headrace.engines.experience.store import NotInStore, Store, StoreError, stage_key


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(str(tmp_path / "store"))
    return Store(f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}")


def table(rows: int = 4, start: int = 0) -> pa.Table:
    tokens = [list(range(i)) for i in range(start, start + rows)]
    return pa.table({"uid": [f"{i}-0" for i in range(rows)], "ids": pa.array(tokens, pa.list_(pa.int32()))})


def damage(store: Store, path: str, data: bytes) -> None:
    if store.local:
        Path(store.locate(path)).write_bytes(data)
    else:
        store.fs.pipe_file(store.locate(path), data)


def test_a_table_comes_back_with_its_metadata(store: Store) -> None:
    written = table().replace_schema_metadata({"engine": "transformers"})
    part = store.write_table("experience/000001/generate-0000.arrow", written)
    assert part.rows == 4
    assert part.path.startswith("experience/000001/generate-0000-")
    assert part.digest.startswith(part.path.removesuffix(".arrow")[-16:])
    read = store.read_table(part, verify=True)
    assert read.equals(written, check_metadata=True)
    assert read.column("ids").num_chunks == 1


def test_a_table_in_many_chunks_is_read_in_one(store: Store) -> None:
    pieces = pa.concat_tables([table(3), table(2, start=3).slice(1)])
    assert store.read_table(store.write_table("a.arrow", pieces)).column("ids").num_chunks == 1


def test_an_empty_table_comes_back(store: Store) -> None:
    part = store.write_table("a.arrow", table(0))
    assert store.read_table(part, verify=True).equals(table(0))


def test_a_local_table_is_memory_mapped(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    part = store.write_table("a.arrow", table(1000))
    before = pa.total_allocated_bytes()
    read = store.read_table(part)
    assert pa.total_allocated_bytes() - before < part.nbytes / 10
    assert read.equals(table(1000))


def test_two_writers_of_one_path_keep_their_own_bytes(store: Store) -> None:
    first, second = store.write_table("a.arrow", table(3)), store.write_table("a.arrow", table(4))
    assert first.path != second.path
    assert store.read_table(first, verify=True).num_rows == 3


def test_truncated_flipped_and_missing_parts_are_refused(store: Store) -> None:
    part = store.write_table("a.arrow", table(50))
    whole = store.get(part.path)
    damage(store, part.path, whole[:-1])
    with pytest.raises(StoreError, match=r"is damaged: it has \d+ bytes"):
        store.read_table(part)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    damage(store, part.path, bytes(flipped))
    with pytest.raises(StoreError, match="its digest is"):
        store.read_table(part, verify=True)
    with pytest.raises(NotInStore, match=r"gone\.arrow: it does not exist"):
        store.read_table(part.model_copy(update={"path": "gone.arrow"}))


def test_a_manifest_counts_only_with_its_data(store: Store) -> None:
    part = store.write_table("a.arrow", table())
    manifest = Manifest(stage="generate", step=3, shard=1, key="k1", part=part, metrics={"seconds": 1.5})
    assert store.lookup("generate", 3, 1, "k1") is None
    assert store.commit(manifest) == manifest
    assert store.lookup("generate", 3, 1, "k1") == manifest
    assert store.lookup("generate", 3, 1, "k2") is None
    damage(store, part.path, store.get(part.path)[:-8])
    assert store.lookup("generate", 3, 1, "k1") is None
    with pytest.raises(StoreError, match="which is not in"):
        store.commit(manifest)


def test_the_first_commit_counts_until_its_data_is_lost(store: Store) -> None:
    early = Manifest(stage="score", step=1, key="k", part=store.write_table("a.arrow", table(3)))
    late = Manifest(stage="score", step=1, key="k", part=store.write_table("a.arrow", table(4)))
    assert store.commit(early) == early
    assert store.commit(late) == early
    assert early.part is not None
    damage(store, early.part.path, b"")
    assert store.commit(late) == late
    assert store.lookup("score", 1, 0, "k") == late


def test_a_truncated_manifest_is_none_and_can_be_committed_again(store: Store) -> None:
    manifest = Manifest(stage="train", step=1, key="k")
    store.commit(manifest)
    (path,) = store.paths("manifests")
    damage(store, path, store.get(path)[:20])
    assert store.lookup("train", 1, 0, "k") is None
    assert store.commit(manifest) == manifest
    assert store.lookup("train", 1, 0, "k") == manifest


def test_manifests_are_listed_by_stage_and_shard(store: Store) -> None:
    for stage, shard in (("score", 0), ("generate", 11), ("generate", 2)):
        store.commit(Manifest(stage=stage, step=7, shard=shard, key="k"))
    store.commit(Manifest(stage="generate", step=8, key="k"))
    found = [(m.stage, m.shard) for m in store.manifests(7)]
    assert found == [("generate", 2), ("generate", 11), ("score", 0)]
    assert [m.shard for m in store.manifests(7, "generate")] == [2, 11]
    assert store.manifests(9) == []


def test_of_many_creators_one_wins(store: Store) -> None:
    barrier = threading.Barrier(4)

    def create(number: int) -> bool:
        barrier.wait(10)
        return store.create("once", b"%d" % number)

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(create, range(4)))
    assert won.count(True) == 1
    assert store.get("once") == b"%d" % won.index(True)


def test_bytes_come_back_and_paths_stay_below_the_store(store: Store) -> None:
    store.put("x/y.json", b"{}")
    store.put("x/y.json", b"{1}")
    assert store.get("x/y.json") == b"{1}"
    assert store.exists("x/y.json") and not store.exists("x/z.json")
    assert store.get_many(["x/y.json", "x/y.json"]) == [b"{1}", b"{1}"]
    assert store.paths("x") == ["x/y.json"]
    with pytest.raises(NotInStore, match=r"x/z\.json"):
        store.get("x/z.json")
    for bad in ("../up", "/etc/passwd", ""):
        with pytest.raises(StoreError, match="no path below"):
            store.put(bad, b"")


def test_a_store_crosses_processes(store: Store) -> None:
    store.put("here", b"1")
    assert pickle.loads(pickle.dumps(store)).get("here") == b"1"
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, store.get("here"))
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 1) == b"1"
    assert os.waitpid(child, 0)[1] == 0
    os.close(reading)


def test_a_failing_writer_leaves_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with pytest.raises(ZeroDivisionError), store.writing("a/b") as sink:
        sink.write(b"half")
        _ = 1 / 0
    assert list((tmp_path / "a").iterdir()) == []


DISK_FULL = """
import resource, signal, sys
import pyarrow as pa
from headrace.engines.experience.store import Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
Store(sys.argv[1]).write_table("e/big.arrow", pa.table({"x": pa.array(range(1_000_000))}))
"""


def test_a_full_disk_is_told_and_nothing_is_half_written(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", DISK_FULL, tmp_path], capture_output=True, text=True, timeout=300)
    last = ran.stderr.strip().splitlines()[-1]
    assert f"cannot write {tmp_path}/e/big.arrow" in last
    assert "Nothing was committed. Free space there" in last
    assert list((tmp_path / "e").iterdir()) == []


KILLED = """
import os, signal, sys
from headrace.engines.experience.store import Store
with Store(sys.argv[1]).writing("a/b") as sink:
    sink.write(b"x" * 3_000_000)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_no_file_under_its_name(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=300)
    store = Store(str(tmp_path))
    assert not store.exists("a/b")
    assert store.paths("a") == []


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    hide = (
        "import sys; sys.modules['s3fs'] = None\nfrom headrace.engines.experience.store import Store\nStore('s3://b/p')"
    )
    ran = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, timeout=300)
    assert "pip install 'headrace[s3]'" in ran.stderr.strip().splitlines()[-1]


def test_an_unreachable_server_and_a_missing_bucket_are_told(s3_bucket: str) -> None:
    with pytest.raises(StoreError, match="cannot write s3://no-such-bucket/x/a"):
        Store("s3://no-such-bucket/x").put("a", b"")
    quick = {"connect_timeout": 1, "retries": {"max_attempts": 0}}
    away = Store("s3://headrace-test", endpoint_url="http://127.0.0.1:9", config_kwargs=quick)
    with pytest.raises(StoreError, match="cannot read s3://headrace-test/a"):
        away.get("a")


def test_the_key_is_that_of_the_content() -> None:
    class Config(Strict):
        a: int = 1
        b: str = "x"

    key = stage_key("score", "1", Config(), ["i"], "w")
    assert key == stage_key("score", "1", {"b": "x", "a": 1}, ["i"], "w")
    assert len(key) == 32
    others = [
        stage_key("train", "1", Config(), ["i"], "w"),
        stage_key("score", "2", Config(), ["i"], "w"),
        stage_key("score", "1", Config(a=2), ["i"], "w"),
        stage_key("score", "1", Config(), ["i", "j"], "w"),
        stage_key("score", "1", Config(), ["i"], "v"),
    ]
    assert len({key, *others}) == 6


def test_torch_is_not_imported() -> None:
    code = "import sys, headrace.engines.experience.ledger; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_part_names_no_file_outside(store: Store) -> None:
    with pytest.raises(StoreError, match="no path below"):
        store.read_table(Part(path="../a.arrow", rows=0, nbytes=0, digest=""))


def test_a_long_file_goes_up_in_pieces_and_an_abandoned_one_leaves_nothing(s3_bucket: str, tmp_path: Path) -> None:
    store = Store(f"{s3_bucket}/{tmp_path.name}")
    block = bytes(range(256)) * (1 << 15)  # 8 MB
    with store.writing("whole") as sink:
        for _ in range(5):
            sink.write(block)
    assert store.size("whole") == 5 * len(block) and store.get("whole", 10, 300) == block[10:300]
    assert store.get("whole") == 5 * block
    with pytest.raises(KeyError), store.writing("abandoned") as sink:
        for _ in range(3):
            sink.write(block)
        raise KeyError
    assert not store.exists("abandoned")
    s3: Any = store.fs
    assert not s3.list_multipart_uploads(s3_bucket.removeprefix("s3://"))
