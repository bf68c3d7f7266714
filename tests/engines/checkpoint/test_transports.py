"""What every transport between processes must do: every bit, every loss told, the next version works."""

import base64
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.blocks.weights import Plan, Transport, WeightManifest, WeightSource
from headrace.engines.checkpoint import WeightError, digest_of, publish, pull, release, rendezvous, reserve
from headrace.engines.checkpoint.carriers import nixl as nixl_carrier
from headrace.engines.checkpoint.carriers.base import Slots, unusable
from headrace.engines.checkpoint.courier import Courier

nixl = pytest.param("nixl", marks=pytest.mark.skipif(not find_spec("nixl_cu12"), reason="NIXL is not installed"))
ELASTIC = ["shm", "tcp", nixl]
"""Transports that outlive the loss of a receiver."""
Begin = Callable[..., Any]


@pytest.fixture
def begin(start, tmp_path: Path, model_file: Path) -> Begin:
    """``begin(transport, version=1, **options) -> (publisher, address)``."""

    def one(transport: Transport, version: int = 1, **options: Any):
        options = {"model": model_file, "transport": transport, "version": version, **options}
        if transport == "shm":
            address = str(tmp_path / "w.sock")
            return start("sender.py", address=address, **options), address
        publisher = start("sender.py", **options)
        return publisher, publisher.says()

    return one


def same(path: Path, expected: dict[str, Tensor]) -> bool:
    """Bits, and order."""
    return list(torch.load(path)) == list(expected) and equal(path, expected)


def equal(path: Path, expected: dict[str, Tensor]) -> bool:
    got = torch.load(path)
    return got.keys() == expected.keys() and all(
        got[name].dtype == value.dtype and torch.equal(got[name], value) for name, value in expected.items()
    )


@pytest.mark.parametrize("transport", [*ELASTIC, "gloo"])
def test_two_receivers_get_every_bit_of_two_versions(
    transport: Transport, begin: Begin, start_receiver, on_the_wire, model, tmp_path: Path
) -> None:
    changed = {name: t + 1 if t.is_floating_point() else t for name, t in model.items()}
    torch.save(changed, tmp_path / "changed.pt")
    publisher, address = begin(transport, receivers=2)
    receivers = [start_receiver(address, 1, rank=rank, transport=transport) for rank in (0, 1)]
    first = publisher.says()
    for rank, child in enumerate(receivers):
        served = child.says()
        assert (served.digest, served.nbytes, served.wire_nbytes) == (first.digest, *[first.plan.nbytes] * 2)
        assert same(tmp_path / f"got-{rank}.pt", on_the_wire)
    assert first.producer.endswith(f":{publisher.pid}")
    for child in receivers:
        child.do(WeightSource(version=2, transport=transport, address=address))
    publisher.do(tmp_path / "changed.pt")
    second = publisher.says()
    expected = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in changed.items()}
    for rank, child in enumerate(receivers):
        assert child.says().digest == second.digest != first.digest
        assert same(tmp_path / f"got-{rank}.pt", expected)


@pytest.mark.parametrize("delta", [False, True], ids=["", "delta"])
@pytest.mark.parametrize("transport", [*ELASTIC, "gloo"])
def test_bytes_go_where_they_are_used_all_of_them_or_some(
    transport: Transport, delta: bool, begin: Begin, start_receiver, on_the_wire, model, tmp_path: Path
) -> None:
    """Tensors that span partitions, some with a place and some without, and a second version over the first."""
    some = {name: t for name, t in on_the_wire.items() if name not in ("layer.3.weight", "half", "odd")}
    changed = {name: t + 1 if name == "embed.weight" else t for name, t in model.items()}
    torch.save(changed, tmp_path / "changed.pt")
    publisher, address = begin(transport, receivers=2, delta=delta)
    kinds = {"transport": transport, "delta": delta}
    receivers = [
        start_receiver(address, 1, rank=rank, places=places, **kinds) for rank, places in enumerate((on_the_wire, some))
    ]
    digest = publisher.says().digest
    for rank, child in enumerate(receivers):
        assert child.says().digest == digest and equal(tmp_path / f"got-{rank}.pt", on_the_wire)
        child.do(WeightSource(version=2, address=address, **kinds))
    publisher.do(tmp_path / "changed.pt")
    second = publisher.says().digest
    expected = {**on_the_wire, "embed.weight": changed["embed.weight"].to(torch.bfloat16)}
    for rank, child in enumerate(receivers):
        assert child.says().digest == second and equal(tmp_path / f"got-{rank}.pt", expected)


@pytest.mark.parametrize("transport", ELASTIC)
@pytest.mark.parametrize("point", ["before the plan", "in the middle", "during the load of the last"])
def test_a_killed_receiver_is_dropped_and_comes_back(
    transport: Transport, point: str, begin: Begin, start_receiver, tmp_path: Path, on_the_wire, model_file: Path
) -> None:
    publisher, address = begin(transport, receivers=2, deadline_s=4, hold="layer.0.weight")
    hold = {"before the plan": "layer.0.weight", "in the middle": "embed.weight"}.get(point, "half")
    dying = start_receiver(address, 1, rank=0, transport=transport, hold=hold)
    healthy = start_receiver(address, 1, rank=1, transport=transport)
    assert publisher.says() == "holding"  # nothing was sent yet
    if point == "before the plan":
        os.kill(dying.pid, signal.SIGKILL)
        publisher.go_on()
    else:
        publisher.go_on()
        assert dying.says() == "holding"
        os.kill(dying.pid, signal.SIGKILL)
    manifest = publisher.says()
    assert healthy.says().digest == manifest.digest
    assert same(tmp_path / "got-1.pt", on_the_wire)
    back = start_receiver(address, 2, rank=0, transport=transport)
    healthy.do(WeightSource(version=2, transport=transport, address=address))
    publisher.do(model_file)
    assert publisher.says() == "holding"
    publisher.go_on()
    digest = publisher.says().digest
    assert back.says().digest == healthy.says().digest == digest


@pytest.mark.parametrize("transport", [*ELASTIC, "gloo"])
@pytest.mark.parametrize("hold", ["layer.0.weight", "embed.weight", "half"])
def test_a_killed_publisher_is_told_and_the_next_one_serves(
    transport: Transport, hold: str, begin: Begin, start_receiver, tmp_path: Path, on_the_wire
) -> None:
    """Before the first partition, in the middle, and after all data but the last partition."""
    publisher, address = begin(transport, hold=hold)
    receiver = start_receiver(address, 1, rank=3, transport=transport)
    assert publisher.says() == "holding"
    os.kill(publisher.pid, signal.SIGKILL)
    error = receiver.says()
    assert isinstance(error, WeightError)
    assert (error.version, error.rank) == (1, 3)
    assert not (tmp_path / "got-3.pt").exists()
    following, address = begin(transport, version=2)
    receiver.do(WeightSource(version=2, transport=transport, address=address))
    assert receiver.says().digest == following.says().digest
    assert same(tmp_path / "got-3.pt", on_the_wire)


def test_the_static_group_says_that_a_receiver_was_lost_and_forms_again(
    begin: Begin, start_receiver, model_file: Path
) -> None:
    publisher, address = begin("gloo", receivers=2, deadline_s=4)
    dying = start_receiver(address, 1, rank=0, transport="gloo", hold="embed.weight", deadline_s=4)
    healthy = start_receiver(address, 1, rank=1, transport="gloo", deadline_s=4)
    assert dying.says() == "holding"
    os.kill(dying.pid, signal.SIGKILL)
    assert isinstance(publisher.says(), WeightError)
    assert isinstance(healthy.says(), WeightError)
    back = start_receiver(address, 2, rank=0, transport="gloo", deadline_s=4)
    healthy.do(WeightSource(version=2, transport="gloo", address=address))
    publisher.do(model_file)
    digest = publisher.says().digest
    assert back.says().digest == healthy.says().digest == digest


@pytest.mark.parametrize("transport", ["tcp", nixl])
def test_a_stranger_learns_nothing_and_does_no_harm(transport: Transport, begin: Begin, start_receiver) -> None:
    publisher, address = begin(transport)
    wrong = address.partition("#")[0] + "#" + "0" * 32
    with pytest.raises(WeightError, match="ended, or dropped this receiver"):
        pull(WeightSource(version=1, transport=transport, address=wrong), print, deadline_s=5)
    child = start_receiver(address, 1, transport=transport)
    assert child.says().digest == publisher.says().digest


def test_a_port_that_is_not_there_is_told() -> None:
    address = reserve("127.0.0.1")
    release(address)
    with pytest.raises(WeightError, match=r"no publisher was reached at 127\.0\.0\.1:\d+ for 0\.3 s"):
        pull(WeightSource(version=1, transport="tcp", address=address), print, deadline_s=0.3)
    with pytest.raises(WeightError, match="was not reserved by this process"):
        publish(iter([]), [("a", "float32", [1])], version=1, train_step=1, transport="tcp", address=address)
    with pytest.raises(WeightError, match="is no address of a publisher"):
        pull(WeightSource(version=1, transport="tcp", address="nowhere"), print, deadline_s=0.3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("transport", [*ELASTIC, "gloo"])
def test_nothing_but_an_empty_tensor_is_a_version_too(transport: Transport, tmp_path: Path) -> None:
    address = str(tmp_path / "w.sock") if transport == "shm" else reserve("127.0.0.1")
    got: list[tuple[str, list[int]]] = []
    with ThreadPoolExecutor(1) as pool:
        source = WeightSource(version=1, transport=transport, address=address)
        pulled = pool.submit(pull, source, lambda name, t: got.append((name, list(t.shape))), deadline_s=20)
        empty, where = torch.empty(0, 4), {"transport": transport, "address": address, "deadline_s": 20}
        made = publish(iter([("e", empty)]), [("e", "bfloat16", [0, 4])], version=1, train_step=1, **where)
        assert pulled.result(20).digest == made.digest
    assert got == [("e", [0, 4])]
    release(address)


@pytest.mark.parametrize("transport", [*ELASTIC, "gloo"])
def test_a_publish_that_fails_before_the_first_byte_spoils_nothing(transport: Transport, tmp_path: Path) -> None:
    address = str(tmp_path / "w.sock") if transport == "shm" else reserve("127.0.0.1")
    asked: list[str] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        time.sleep(0.5)  # the receiver has heard that it begins
        raise ZeroDivisionError
        yield

    with ThreadPoolExecutor(1) as pool:
        source = WeightSource(version=1, transport=transport, address=address)
        pulled = pool.submit(pull, source, lambda *_: None, deadline_s=20, place=asked.append)
        settings: dict[str, Any] = {"transport": transport, "address": address, "deadline_s": 20}
        with pytest.raises(ZeroDivisionError):
            publish(tensors(), [("a", "bfloat16", [9])], version=1, train_step=1, **settings)
        assert "the publisher gave up" in str(pulled.exception(20))
    assert asked == []
    release(address)


@pytest.mark.parametrize("transport", [*ELASTIC, "gloo", "store"])
def test_a_tensor_with_gaps_in_memory_comes_whole(transport: Transport, tmp_path: Path) -> None:
    local = transport in ("shm", "store")
    address = str(tmp_path / "w.sock") if local else reserve("127.0.0.1")
    settings: dict[str, Any] = {"transport": transport, "address": address, "deadline_s": 20}
    if transport == "store":
        settings |= {"address": "w", "store": str(tmp_path)}
    gaps = torch.arange(40).bfloat16()[::2]
    got: list[Tensor] = []
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(publish, iter([("a", gaps)]), [("a", "bfloat16", [20])], version=1, train_step=1, **settings)
        if transport == "store":
            sent.result(20)
        source = WeightSource(
            version=1, transport=transport, address=settings["address"], store=settings.get("store", "")
        )
        assert pull(source, lambda name, t: got.append(t.clone()), deadline_s=20).digest == sent.result(20).digest
    assert torch.equal(got[0], gaps)
    release(address)


def test_a_ring_goes_as_far_as_the_slowest_has_read() -> None:
    """Also when a faster one reads on between two looks at it."""
    moves = {"slow": iter([11, 11, 11]), "fast": iter([10, 40, 40])}
    carrier, plan = Slots(64, torch.device("cpu")), Plan(partitions=[])
    courier = Courier(carrier, {"version": 1}, plan, receivers=2, deadline_s=5)
    courier._reading = tuple(SimpleNamespace(position=lambda one=one: next(one)) for one in moves.values())  # pyright: ignore
    assert courier.drained(5) <= 11


@pytest.mark.parametrize("transport", ["cuda-ipc", "nccl"])
def test_a_transport_that_this_machine_cannot_use_says_why(transport: Transport) -> None:
    assert "this engine has none" in unusable(transport, cuda=False)
    with pytest.raises(WeightError, match="moves weights between GPUs, and this engine has none"):
        publish(iter([]), [("a", "float32", [1])], version=1, train_step=1, transport=transport, address="/nowhere")
    with pytest.raises(WeightError, match="moves weights between GPUs, and this engine has none"):
        pull(WeightSource(version=1, transport=transport, address="/nowhere"), print, deadline_s=1)


def test_the_manifest_names_parent_and_producer(tmp_path: Path) -> None:
    def keep(version: int, parent: int | None) -> WeightManifest:
        settings = {"version": version, "train_step": version, "address": f"w/{version}", "store": str(tmp_path)}
        return publish(
            iter([("a", torch.ones(3))]), [("a", "float32", [3])], transport="store", parent=parent, **settings
        )

    assert keep(4, None).parent is None
    assert keep(5, 4).parent == 4
    assert keep(5, None).parent == 4  # as it was committed
    assert digest_of({"a": torch.ones(3)}, keep(4, None).plan) == keep(4, None).digest


def test_who_waits_for_a_publish_that_fails_is_turned_away(model: dict[str, Tensor], metas: list) -> None:
    """Else it would take the place of a receiver of the next one, which nobody may expect any more."""
    address = reserve("127.0.0.1")
    source = WeightSource(version=1, transport="tcp", address=address)
    sending: dict[str, Any] = {"version": 1, "train_step": 1, "transport": "tcp", "address": address}
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(pull, source, lambda *_: None, deadline_s=60) for _ in range(2)]
        time.sleep(0.3)  # both are connected, and one more than is served
        with pytest.raises(WeightError, match="the tensors are not those of the metas"):
            publish(iter([]), metas, **sending, deadline_s=60)
        assert all(isinstance(one.exception(10), WeightError) for one in waiting)
        served = pool.submit(pull, source, lambda *_: None, deadline_s=60)
        assert publish(iter(model.items()), metas, **sending, deadline_s=60).digest == served.result(10).digest
    release(address)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_nobody_waits_long_for_a_publisher_that_does_not_listen(
    transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_ABSENT_S", 0.5)
    address = reserve("127.0.0.1")
    release(address)
    where = str(tmp_path / "nobody.sock") if transport == "shm" else address
    with pytest.raises(WeightError, match=r"no publisher (listened|was reached) at .* for 0.5 s"):
        pull(WeightSource(version=1, transport=transport, address=where), lambda *_: None, deadline_s=600)


@pytest.mark.parametrize("transport", [*ELASTIC, "gloo"])
def test_a_publish_that_fails_in_the_middle_leaves_nothing_to_the_next(
    transport: Transport, model: dict[str, Tensor], metas: list, tmp_path: Path
) -> None:
    def half() -> Iterator[tuple[str, Tensor]]:
        yield from list(model.items())[: len(model) // 2]
        raise RuntimeError("the trainer failed")

    address = str(tmp_path / "w.sock") if transport == "shm" else reserve("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        for version in range(1, 9):
            source = WeightSource(version=version, transport=transport, address=address)
            pulling = pool.submit(pull, source, lambda *_: None, deadline_s=20)
            sending: dict[str, Any] = {"version": version, "train_step": 1, "transport": transport, "address": address}
            sending |= {"partition_bytes": 4096, "deadline_s": 20}
            began = time.monotonic()
            if version % 2:
                with pytest.raises(RuntimeError, match="the trainer failed"):
                    publish(half(), metas, **sending)
                assert isinstance(pulling.exception(10), WeightError)
            else:
                assert publish(iter(model.items()), metas, **sending).digest == pulling.result(10).digest
            assert time.monotonic() - began < 10
    release(address)


def test_what_nixl_knew_of_a_publisher_is_forgotten_before_it_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds what it is told to what it knew, and looks there first: a slot that began where an older one ended was
    now and then not found."""
    calls: list[tuple[str, bytes | str]] = []

    class Agent:
        def add_remote_agent(self, metadata: bytes) -> bytes:
            calls.append(("add", metadata))
            return b"publisher"

        def remove_remote_agent(self, name: str) -> None:
            calls.append(("remove", name))

    monkeypatch.setattr(nixl_carrier, "_agent", lambda passive: Agent())
    monkeypatch.setattr(nixl_carrier, "_known", {})
    for metadata in (b"one", b"one", b"two", b"one"):
        assert nixl_carrier._peer(base64.b64encode(metadata).decode()) == "publisher"
    anew = [("remove", "publisher")]
    assert calls == [("add", b"one"), ("add", b"two"), *anew, ("add", b"two"), ("add", b"one"), *anew, ("add", b"one")]


@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
def test_a_publish_that_nobody_wants_any_more_ends(
    transport: Transport, model: dict[str, Tensor], metas: list, tmp_path: Path
) -> None:
    address = str(tmp_path / "w.sock") if transport == "shm" else reserve("127.0.0.1")
    sending: dict[str, Any] = {"version": 1, "train_step": 1, "transport": transport, "address": address}
    unwanted = threading.Event()
    later = threading.Timer(0.5, unwanted.set)
    began = time.monotonic()
    with pytest.raises(WeightError, match="are not waited for any more"):
        publish(iter(model.items()), metas, **sending, deadline_s=60, listening=later.start, unwanted=unwanted.is_set)
    assert time.monotonic() - began < 5
    with ThreadPoolExecutor(1) as pool:
        source = WeightSource(version=1, transport=transport, address=address)
        served = pool.submit(pull, source, lambda *_: None, deadline_s=60)
        assert publish(iter(model.items()), metas, **sending, deadline_s=60).digest == served.result(10).digest
    release(address)


def test_a_library_that_fails_under_the_publisher_ends_the_publish(
    model: dict[str, Tensor], metas: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise OSError("the agent is gone")

    monkeypatch.setattr(Slots, "tend", staticmethod(fails))
    address = reserve("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        source = WeightSource(version=1, transport="tcp", address=address)
        pulling = pool.submit(pull, source, lambda *_: None, deadline_s=20)
        sending: dict[str, Any] = {"version": 1, "train_step": 1, "transport": "tcp", "address": address}
        with pytest.raises(WeightError, match="failed while receivers fetched: the agent is gone"):
            publish(iter(model.items()), metas, **sending, partition_bytes=4096, deadline_s=20)
        assert isinstance(pulling.exception(20), WeightError)
    release(address)
