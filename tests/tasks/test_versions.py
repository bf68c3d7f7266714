"""A version that was trained and has the bits of the one before stops the campaign."""

import json

import pytest

from headrace.blocks.manifest import Manifest
from headrace.engines.experience.store import Store
from headrace.tasks.recovery import SyncMismatch, record_version, version_path

MOVED = {"updates/done": 1.0, "lr": 1e-5, "grad_norm": 0.3}


def trained(**metrics: float) -> Manifest:
    return Manifest(stage="train", step=0, key="k", metrics=MOVED | metrics)


def published(digest: str) -> dict[str, object]:
    return {"digest": digest, "hashing": "xxh3", "partition_bytes": 1 << 20, "quantization": None}


def test_the_base_instead_of_the_trained_weights_is_seen(tmp_path) -> None:
    store = Store(str(tmp_path))
    record_version(store, 0, published("aa"), None)
    with pytest.raises(SyncMismatch, match="version 1 has the same bits as version 0"):
        record_version(store, 1, published("aa"), trained())
    assert not store.exists(version_path(1))
    record_version(store, 1, published("bb"), trained())
    record_version(store, 1, published("bb"), trained())  # another engine gets the same version
    assert json.loads(store.get(version_path(1))) == {"version": 1, **published("bb"), "trained": "k"}


def test_a_version_that_came_out_otherwise_when_it_was_repeated_keeps_its_earlier_digests(tmp_path) -> None:
    store = Store(str(tmp_path))
    for digest in ("aa", "bb", "cc"):
        record_version(store, 0, published(digest), None)
    made = json.loads(store.get(version_path(0)))
    assert (made["digest"], made["earlier"]) == ("cc", ["aa", "bb"])


@pytest.mark.parametrize("still", ["updates/done", "lr", "grad_norm"])
def test_weights_that_did_not_move_may_stay_the_same(still: str, tmp_path) -> None:
    store = Store(str(tmp_path))
    record_version(store, 0, published("aa"), None)
    record_version(store, 1, published("aa"), trained(**{still: 0.0}))
