"""Weights through shared memory: real processes at both ends, killed and stopped at bad moments."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.blocks.weights import WeightManifest, WeightSource
from headrace.engines.checkpoint import WeightError, claims, digest_of, publish, pull, release
from tests.engines.checkpoint.conftest import RING_BYTES

PARTITION = 4096
Publish = Callable[..., WeightManifest]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "w.sock")


@pytest.fixture
def send(model: dict[str, Tensor], metas: list, address: str) -> Publish:
    """``publish`` of the model with all that these tests do not change."""

    def call(version: int = 1, **changes: Any) -> WeightManifest:
        settings: dict[str, Any] = {"partition_bytes": PARTITION, "deadline_s": 20, "address": address, **changes}
        tensors = settings.pop("tensors", None) or iter(model.items())
        return publish(tensors, metas, version=version, train_step=version, transport="shm", **settings)

    return call


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return list(got) == list(expected) and all(
        got[name].dtype == value.dtype and torch.equal(got[name], value) for name, value in expected.items()
    )


def test_two_receivers_get_every_bit(start_receiver, send: Publish, address: str, on_the_wire, tmp_path: Path) -> None:
    children = [start_receiver(address, 1, rank=rank) for rank in (0, 1)]
    manifest = send(receivers=2)
    for rank, child in enumerate(children):
        served = child.says()
        assert served.digest == manifest.digest
        assert served.nbytes == manifest.plan.nbytes
        assert same(torch.load(tmp_path / f"got-{rank}.pt"), on_the_wire)
    assert len(manifest.hashes) > 20
    assert digest_of(on_the_wire, manifest.plan) == manifest.digest
    assert not os.path.exists(address)


def test_the_same_memory_serves_the_next_version_and_is_given_back(send: Publish, address: str, on_the_wire) -> None:
    kept: list[object] = []
    for version in (1, 2):
        got: dict[str, Tensor] = {}
        with ThreadPoolExecutor(1) as pool:
            pulled = pool.submit(pull_into, got, address, version)
            assert send(version).digest == pulled.result(20).digest
        assert same(got, on_the_wire)
        kept.append(claims._carriers[address])
    assert kept[0] is kept[1]
    release(address)
    assert address not in claims._carriers


def pull_into(got: dict[str, Tensor], address: str, version: int, **options: Any):
    source = WeightSource(version=version, transport="shm", address=address)
    return pull(source, lambda name, tensor: got.update({name: tensor.clone()}), deadline_s=20, **options)


def test_kill_9_of_a_receiver_drops_only_that_one(
    start_receiver, send: Publish, address: str, on_the_wire, tmp_path
) -> None:
    dying = start_receiver(address, 1, hold="embed.weight", rank=0)
    healthy = start_receiver(address, 1, rank=1)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, receivers=2)
        assert dying.says() == "holding"
        os.kill(dying.pid, signal.SIGKILL)
        manifest = sent.result(20)
    assert healthy.says().digest == manifest.digest
    assert same(torch.load(tmp_path / "got-1.pt"), on_the_wire)


def test_a_receiver_that_stops_is_dropped_at_its_deadline(start_receiver, send: Publish, address: str) -> None:
    stopped = start_receiver(address, 1, hold="layer.5.weight", rank=3)
    healthy = start_receiver(address, 1, deadline_s=2, rank=4)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, receivers=2, deadline_s=4)
        assert stopped.says() == "holding"
        manifest = sent.result(20)
    # The healthy one's deadline is shorter than the wait for the other: it heard that the publisher was alive.
    assert healthy.says().digest == manifest.digest
    stopped.go_on()
    answer = stopped.says()
    assert answer.rank == 3
    assert "this receiver was dropped: it was silent for 4 s" in str(answer)


@pytest.mark.parametrize("kind", ["places", "slots", "changes"])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_receiver_that_stops_within_a_partition_is_dropped(
    how: signal.Signals, kind: str, start_receiver, send: Publish, address: str, model, on_the_wire, tmp_path: Path
) -> None:
    # The second partition is this tensor, larger than the ring: the publisher waits in it for whoever reads slowest.
    options = {"places": {"places": on_the_wire}, "slots": {}, "changes": {"delta": True}}[kind]
    victim = start_receiver(address, 1, rank=0, **options)
    healthy = start_receiver(address, 1, rank=1, **options)

    ended: list[float] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model.items():
            if name == "embed.weight":
                os.kill(victim.pid, how)
                ended.append(time.monotonic())
            yield name, tensor

    limits = {"partition_bytes": 40_000, "deadline_s": 4}
    assert limits["partition_bytes"] > on_the_wire["embed.weight"].nbytes > 2 * RING_BYTES
    manifest = send(tensors=tensors(), receivers=2, delta=kind == "changes", **limits)
    assert (time.monotonic() - ended[0] > 4) is (how == signal.SIGSTOP)
    assert healthy.says().digest == manifest.digest
    got = torch.load(tmp_path / "got-1.pt")
    assert all(torch.equal(got[name], value) for name, value in on_the_wire.items())
    if how == signal.SIGSTOP:
        os.kill(victim.pid, signal.SIGCONT)
        assert "this receiver was dropped: it was silent for 4 s" in str(victim.says())


def test_losing_all_receivers_is_an_error_with_their_reasons(start_receiver, send: Publish, address: str) -> None:
    dying = start_receiver(address, 1, hold="layer.3.weight", rank=7)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        assert dying.says() == "holding"
        os.kill(dying.pid, signal.SIGKILL)
        with pytest.raises(WeightError, match=r"weight version 1: no receiver is left: rank 7 \(process \d+\), after"):
            sent.result(20)


def test_kill_9_of_the_publisher_is_told_at_once_and_the_next_one_takes_over(
    start, start_receiver, send: Publish, model_file: Path, address: str
) -> None:
    publisher = start("sender.py", model=model_file, address=address, version=1, hold="embed.weight")
    receiver = start_receiver(address, 1, rank=2)
    assert publisher.says() == "holding"
    began = time.monotonic()
    os.kill(publisher.pid, signal.SIGKILL)
    answer = receiver.says()
    assert time.monotonic() - began < 10
    assert answer.rank == 2
    assert answer.partition >= 0
    assert f"the publisher at {address} ended" in str(answer)
    again = start_receiver(address, 2)
    manifest = send(2)
    assert again.says().digest == manifest.digest


def test_a_publisher_killed_while_it_waits_leaves_one_file_that_the_next_replaces(
    start, start_receiver, send: Publish, model_file: Path, address: str
) -> None:
    receiver = start_receiver(address, 1, rank=0)
    publisher = start("sender.py", model=model_file, address=address, version=1, receivers=2)
    folder = Path(address).parent
    deadline = time.monotonic() + 20
    while not os.path.exists(address):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(publisher.pid, signal.SIGKILL)
    publisher.end()
    left = {path.name for path in folder.iterdir()}
    assert left == {"w.sock", "model.pt"}
    receiver.end()
    again = start_receiver(address, 2)
    assert send(2).digest == again.says().digest
    assert {path.name for path in folder.iterdir()} == {"model.pt", "got-0.pt"}


def test_a_stopped_publisher_is_told_within_the_deadline(start, start_receiver, model_file: Path, address: str) -> None:
    publisher = start("sender.py", model=model_file, address=address, version=1, hold="embed.weight")
    receiver = start_receiver(address, 1, deadline_s=1.5)
    assert publisher.says() == "holding"
    os.kill(publisher.pid, signal.SIGSTOP)
    assert "was silent for 1.5 s" in str(receiver.says())


def test_an_exporter_that_hangs_is_told_within_the_deadline(
    start, start_receiver, model_file: Path, address: str
) -> None:
    publisher = start(
        "sender.py", model=model_file, address=address, version=1, hold="embed.weight"
    )  # waits inside the iterator
    receiver = start_receiver(address, 1, deadline_s=1.5)
    assert publisher.says() == "holding"
    assert "was silent for 1.5 s" in str(receiver.says())
    publisher.go_on()
    assert "no receiver is left" in str(publisher.says())


def test_nobody_comes(send: Publish, address: str) -> None:
    with pytest.raises(WeightError, match=r"no receiver is left: 2 of 2 did not come within 0\.3 s"):
        send(receivers=2, deadline_s=0.3)
    with pytest.raises(WeightError, match=r"weight version 1, rank 5: no publisher listened at .* for 0\.3 s"):
        pull(WeightSource(version=1, transport="shm", address=address), print, deadline_s=0.3, rank=5)


def test_publishing_goes_on_without_a_receiver_that_does_not_come(start_receiver, send: Publish, address: str) -> None:
    child = start_receiver(address, 1)
    assert send(receivers=2, deadline_s=3).digest == child.says().digest


def test_an_early_receiver_outlives_a_wait_that_is_longer_than_its_deadline(
    start_receiver, send: Publish, address: str
) -> None:
    early = start_receiver(address, 1, rank=0, deadline_s=2)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, receivers=2)
        time.sleep(3)
        late = start_receiver(address, 1, rank=1)
        assert early.says().digest == late.says().digest == sent.result(20).digest


def test_other_shapes_are_refused_before_the_first_byte(send: Publish, address: str, on_the_wire) -> None:
    expect = {name: (str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in on_the_wire.items()}
    got: dict[str, Tensor] = {}
    for change, why in (
        (
            {"embed.weight": ("bfloat16", [301, 64])},
            r"embed\.weight is bfloat16 \[300, 64\], expected bfloat16 \[301, 64\]",
        ),
        ({"odd": ("float32", [3])}, r"odd is bfloat16 \[3\], expected float32 \[3\]"),
        ({"lm_head.weight": ("bfloat16", [1])}, r"lm_head\.weight is missing"),
    ):
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send)
            with pytest.raises(WeightError, match=why):
                pull_into(got, address, 1, expect={**expect, **change})
            with pytest.raises(WeightError, match=why):  # the publisher knows why, too
                sent.result(20)
    assert got == {}
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        assert pull_into(got, address, 1, expect=expect).digest == sent.result(20).digest


def test_another_version_is_refused(send: Publish, address: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, 8)
        with pytest.raises(WeightError, match=r"weight version 7, rank 0: the publisher at .* sends version 8"):
            pull_into({}, address, 7)
        with pytest.raises(WeightError, match="no receiver is left"):
            sent.result(20)


def test_a_sink_that_raises_ends_both_sides(send: Publish, address: str) -> None:
    def sink(name: str, tensor: Tensor) -> None:
        raise ZeroDivisionError("in the sink")

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        with pytest.raises(ZeroDivisionError):
            pull(WeightSource(version=1, transport="shm", address=address), sink, deadline_s=20)
        with pytest.raises(WeightError, match="ZeroDivisionError: in the sink"):
            sent.result(20)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda items: items[:-1], r"expected half bfloat16 \[64, 128\], got nothing"),
        (lambda items: [*items, ("more", torch.zeros(1))], "the tensors do not end where their metas do: more follows"),
        (lambda items: [items[1], items[0], *items[2:]], r"expected layer\.0\.weight bfloat16 \[5, 16\], got layer\.1"),
        (
            lambda items: [("layer.0.weight", torch.zeros(5, 16, dtype=torch.int32)), *items[1:]],
            r"got layer\.0\.weight int32",
        ),
    ],
)
def test_tensors_that_are_not_the_metas_end_both_sides(spoil, why: str, send: Publish, address: str, model) -> None:
    left = iter(spoil(list(model.items())))
    with ThreadPoolExecutor(1) as pool:
        pulled: Future = pool.submit(pull_into, {}, address, 1)
        with pytest.raises(WeightError, match=why):
            send(tensors=left)
        with pytest.raises(WeightError, match=f"the publisher gave up.*{why}"):
            pulled.result(20)
    assert next(left, None) is None  # read to its end: no other rank is left in a gather


def test_one_publish_at_a_time(send: Publish, address: str, model: dict[str, Tensor]) -> None:
    def nested() -> Iterator[tuple[str, Tensor]]:
        with pytest.raises(WeightError, match=r"another publish to .* is under way"):
            send(2)
        yield from model.items()

    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(pull_into, {}, address, 1)
        assert send(tensors=nested()).digest == pulled.result(20).digest


def test_another_process_at_the_address_is_told(
    start, start_receiver, send: Publish, model_file: Path, address: str
) -> None:
    publisher = start("sender.py", model=model_file, address=address, version=1, receivers=2)
    deadline = time.monotonic() + 20
    while not os.path.exists(address):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(WeightError, match="another process publishes at"):
        send(1)
    children = [start_receiver(address, 1, rank=rank) for rank in (0, 1)]  # the look did it no harm
    digest = publisher.says().digest
    assert [child.says().digest for child in children] == [digest, digest]


def test_a_long_path_is_no_obstacle(send: Publish, tmp_path: Path) -> None:
    address = str(tmp_path / ("deep/" * 40) / "w.sock")
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(pull_into, {}, address, 1)
        assert send(address=address).digest == pulled.result(20).digest
