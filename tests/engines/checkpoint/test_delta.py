"""Only what changed travels, bit for bit; whoever has no base, or another, gets everything."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.blocks.weights import Transport, WeightSource
from headrace.engines.checkpoint import WeightError, publish, pull, release, reserve
from headrace.engines.checkpoint.changes import Finder, apply, packed_bytes
from headrace.engines.checkpoint.delta import kept_for

Tensors = dict[str, Tensor]


def packed(base: np.ndarray, fresh: np.ndarray, word: int) -> np.ndarray | None:
    """The changes that make ``base`` what ``fresh`` is, as they travel; ``base`` is changed."""
    finder, done = Finder(base, word), 0
    for room in finder.rooms():
        room.copy_(torch.from_numpy(fresh[done : done + room.numel()]))
        done += room.numel()
    assert done == fresh.size and np.array_equal(base, fresh)
    out = np.empty(fresh.size, np.uint8)
    nbytes = finder.pack(out)
    return None if nbytes is None else out[:nbytes]


@settings(max_examples=60, deadline=None)
@given(
    nbytes=st.integers(1, 1_500_000),
    word=st.sampled_from([1, 2, 4, 8]),
    changes=st.integers(0, 400),
    seed=st.integers(0, 2**32),
    helpers=st.sampled_from([0, 3]),
)
def test_changes_turn_the_base_into_the_new_bytes(
    nbytes: int, word: int, changes: int, seed: int, helpers: int
) -> None:
    nbytes = max(nbytes // word, 1) * word
    draw = np.random.default_rng(seed)
    base = draw.integers(0, 256, nbytes, np.uint8)
    fresh = base.copy()
    fresh[draw.integers(0, nbytes, changes)] ^= draw.integers(1, 256, changes, np.uint8)
    with patch("headrace.engines.checkpoint.changes._HELPERS", helpers):
        sent = packed(base.copy(), fresh, word)
    if sent is None:
        return
    words = int((base != fresh).reshape(-1, word).any(1).sum())
    assert len(sent) == packed_bytes(words, nbytes, word) < nbytes
    apply(sent, base, word)
    assert np.array_equal(base, fresh)


def test_many_changes_are_not_worth_it() -> None:
    base = np.zeros(1 << 21, np.uint8)
    assert packed(base.copy(), base + 1, 2) is None
    fresh = base.view(np.uint16).copy()
    fresh[::3] = 1
    assert packed(base.copy(), fresh.view(np.uint8), 2) is not None
    fresh[::2] = 1
    assert packed(base.copy(), fresh.view(np.uint8), 2) is None
    fresh[: fresh.size // 2] = 0
    assert packed(base.copy(), fresh.view(np.uint8), 8) is not None


@pytest.mark.parametrize("spoil", ["short", "long", "count", "blocks", "beyond"])
def test_changes_that_make_no_sense_are_refused(spoil: str) -> None:
    base = np.zeros(1000, np.uint8)
    fresh = base.view(np.uint16).copy()
    fresh[[3, 490]] = 7, 9
    sent = packed(base.copy(), fresh.view(np.uint8), 2)
    assert sent is not None and len(sent) == 20
    if spoil == "short":
        sent = sent[:-1]
    elif spoil == "long":
        sent = np.append(sent, np.uint8(0))
    elif spoil == "count":
        sent[0] = 3
    elif spoil == "blocks":
        sent[8] = 1
    else:
        sent[12:14] = 255
    with pytest.raises(ValueError, match=r"changes|add up|beyond"):
        apply(sent, base, 2)


class Pair:
    """A publisher and a receiver of this process, over one address."""

    def __init__(self, transport: Transport, tmp_path: Path) -> None:
        self.transport: Transport = transport
        self.address = str(tmp_path / "w.sock") if transport == "shm" else reserve("127.0.0.1")

    def send(
        self, version: int, model: Tensors, ranks: tuple[int, ...] = (0,), kept: bool = True, **options: Any
    ) -> list[Any]:
        """Served of each rank; every rank got every bit."""
        got: dict[int, Tensors] = {rank: {} for rank in ranks}

        def receive(rank: int) -> Any:
            source = WeightSource(version=version, transport=self.transport, address=self.address, delta=kept)
            return pull(source, lambda name, t: got[rank].update({name: t.clone()}), rank=rank, deadline_s=20)

        with ThreadPoolExecutor(len(ranks)) as pool:
            receiving = [pool.submit(receive, rank) for rank in ranks]
            manifest = self.publish(version, model, len(ranks), **options)
            served = [one.result(20) for one in receiving]
        assert {one.digest for one in served} == {manifest.digest}
        expected = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in model.items()}
        for tensors in got.values():
            assert all(torch.equal(tensors[name], value) for name, value in expected.items())
        return served

    def publish(self, version: int, model: Tensors, receivers: int = 1, **options: Any) -> Any:
        metas = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in model.items()]
        limits: dict[str, Any] = {"partition_bytes": 65536, "deadline_s": 20, "delta": True, **options}
        address, transport = self.address, self.transport
        return publish(
            iter(model.items()),
            metas,
            version=version,
            train_step=version,
            transport=transport,
            address=address,
            receivers=receivers,
            **limits,
        )


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path):
    pair = Pair(request.param, tmp_path)
    yield pair
    release(pair.address)


@pytest.fixture
def large() -> Tensors:
    make = torch.Generator().manual_seed(1)
    return {f"t{i}": torch.randn(200, 300, generator=make) for i in range(8)} | {"n": torch.arange(50)}


def changed(model: Tensors, share: float) -> Tensors:
    make = torch.Generator().manual_seed(2)
    out = {name: tensor.clone() for name, tensor in model.items()}
    for tensor in out.values():
        if tensor.is_floating_point():
            tensor[torch.rand(tensor.shape, generator=make) < share] += 1
    return out


def test_two_percent_of_the_elements_are_under_five_percent_of_the_bytes(pair: Pair, large: Tensors) -> None:
    (first,) = pair.send(1, large)
    assert first.wire_nbytes == first.nbytes
    (second,) = pair.send(2, changed(large, 0.02))
    assert 0 < second.wire_nbytes <= 0.05 * second.nbytes
    (third,) = pair.send(3, changed(large, 0.02))
    assert third.wire_nbytes == 0  # nothing changed
    (fourth,) = pair.send(4, changed(large, 0.9))
    assert fourth.wire_nbytes > 0.9 * fourth.nbytes  # not worth it


def test_unchanged_partitions_do_not_travel(pair: Pair, large: Tensors) -> None:
    pair.send(1, large)
    (served,) = pair.send(2, {**large, "t3": -large["t3"]})
    assert large["t3"].numel() * 2 * 0.9 < served.wire_nbytes < 3 * 65536


def test_who_joins_late_gets_everything_and_the_next_version_is_changes_again(pair: Pair, large: Tensors) -> None:
    pair.send(1, large)
    served = pair.send(2, changed(large, 0.02), ranks=(0, 1))
    assert [one.wire_nbytes for one in served] == [one.nbytes for one in served]
    served = pair.send(3, large, ranks=(0, 1))
    assert all(one.wire_nbytes <= 0.05 * one.nbytes for one in served)


def test_a_receiver_that_missed_a_version_or_keeps_none_gets_everything(pair: Pair, large: Tensors) -> None:
    pair.send(1, large, ranks=(0, 1))
    pair.send(2, changed(large, 0.01), ranks=(0,))
    served = pair.send(3, changed(large, 0.02), ranks=(0, 1))
    assert served[0].wire_nbytes == served[0].nbytes
    (forgetful,) = pair.send(4, large, kept=False)
    assert forgetful.wire_nbytes == forgetful.nbytes


def test_what_came_without_changes_is_a_base_too(pair: Pair, large: Tensors) -> None:
    pair.send(1, large, kept=False)  # the publisher keeps it
    pair.send(2, large, delta=False)  # the receiver does
    (served,) = pair.send(3, changed(large, 0.02))
    assert 0 < served.wire_nbytes <= 0.05 * served.nbytes


def test_another_model_gets_everything(pair: Pair, large: Tensors) -> None:
    pair.send(1, large)
    (served,) = pair.send(2, {**large, "more": torch.zeros(5)})
    assert served.wire_nbytes == served.nbytes


def test_after_a_failure_in_the_middle_everything_is_sent(pair: Pair, large: Tensors) -> None:
    pair.send(1, large)

    def failing(name: str, tensor: Tensor) -> None:
        if name == "t5":
            raise ZeroDivisionError

    source = WeightSource(version=2, transport=pair.transport, address=pair.address, delta=True)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(pair.publish, 2, changed(large, 0.02))
        with pytest.raises(ZeroDivisionError):
            pull(source, failing, deadline_s=20)
        with pytest.raises(WeightError):
            sent.result(20)
    (served,) = pair.send(3, changed(large, 0.03))
    assert served.wire_nbytes == served.nbytes


def test_helpers_end_with_a_publish_that_fails(pair: Pair) -> None:
    """They write into the base that the next publish begins with."""
    model = {"a": torch.zeros(1 << 21), "b": torch.zeros(1 << 21)}
    pair.send(1, model, partition_bytes=1 << 24)
    looking: list[int] = []
    looked = Finder._look

    def slow(finder: Finder, begin: int, fresh: np.ndarray) -> None:
        looking.append(begin)
        time.sleep(0.05)
        looked(finder, begin, fresh)
        looking.remove(begin)

    metas = [(name, "float32", [1 << 21]) for name in model]
    ending = iter([("a", model["a"] + 1)])
    source = WeightSource(version=2, transport=pair.transport, address=pair.address, delta=True)
    options: dict[str, Any] = {"transport": pair.transport, "address": pair.address, "partition_bytes": 1 << 24}
    slowed = patch.object(Finder, "_look", slow), patch("headrace.engines.checkpoint.changes._HELPERS", 3)
    with slowed[0], slowed[1], ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(pull, source, lambda name, t: None, deadline_s=20)
        with pytest.raises(WeightError, match="expected b"):
            publish(ending, metas, version=2, train_step=2, delta=True, deadline_s=20, **options)
        assert not looking
        with pytest.raises(WeightError):
            pulled.result(20)
    pair.send(3, model, partition_bytes=1 << 24)


def test_a_trainer_without_numba_says_what_it_needs(
    pair: Pair, large: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "headrace.engines.checkpoint.words", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)  # also one that does not like this NumPy raises ImportError
    with pytest.raises(WeightError, match="delta needs the package numba"):
        pair.publish(1, large)


def test_a_base_that_was_changed_in_memory_is_seen(pair: Pair, large: Tensors) -> None:
    pair.send(1, large)
    kept_for(pair.address, 0)._blocks[3][77] ^= 1
    with pytest.raises(WeightError, match="partition 3: its hash is"):
        pair.send(2, changed(large, 0.02))
    (served,) = pair.send(3, changed(large, 0.02))
    assert served.wire_nbytes == served.nbytes
