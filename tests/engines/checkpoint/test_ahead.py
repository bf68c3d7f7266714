"""An engine joins a publish while it still works, and takes the bytes later, or never."""

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.blocks.weights import Served, Transport, WeightManifest, WeightSource
from headrace.engines.checkpoint import Ahead, WeightError, publish, pull, release, reserve

nixl = pytest.param("nixl", marks=pytest.mark.skipif(not find_spec("nixl_cu12"), reason="NIXL is not installed"))
METAS = [(f"t{i}", "bfloat16", [64, 48]) for i in range(9)]
MODEL = {name: torch.full(shape, float(i), dtype=torch.bfloat16) for i, (name, _, shape) in enumerate(METAS)}
EXPECT = {name: (dtype, shape) for name, dtype, shape in METAS}


class Publish:
    """Of MODEL to one address, in a thread."""

    def __init__(self, transport: Transport, tmp_path: Path) -> None:
        self.address = str(tmp_path / "w.sock") if transport == "shm" else reserve("127.0.0.1")
        self.source = WeightSource(version=1, transport=transport, address=self.address)
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, receivers: int = 1) -> None:
        self._done = self._pool.submit(
            publish,
            iter(MODEL.items()),
            METAS,
            version=1,
            train_step=1,
            transport=self.source.transport,
            address=self.address,
            receivers=receivers,
            partition_bytes=20_000,
            deadline_s=20,
        )

    def manifest(self) -> WeightManifest:
        return self._done.result(30)


@pytest.fixture(params=["shm", "tcp", nixl])
def publisher(request: pytest.FixtureRequest, tmp_path: Path):
    made = Publish(request.param, tmp_path)
    yield made
    release(made.address)


def take(publisher: Publish, ahead: Ahead | None) -> tuple[Served, dict[str, Tensor]]:
    got: dict[str, Tensor] = {}
    source = publisher.source
    served = pull(source, lambda n, t: got.update({n: t.clone()}), expect=EXPECT, ahead=ahead, deadline_s=20)
    return served, got


@pytest.mark.parametrize("first", ["the publisher", "the engine"])
def test_the_bytes_come_when_the_engine_takes_them(publisher: Publish, first: str) -> None:
    if first == "the publisher":
        publisher()
    ahead = Ahead(publisher.source, expect=EXPECT, deadline_s=20)
    if first == "the engine":
        publisher()
    ahead.joined()
    assert not publisher._done.done()  # it waits for this engine
    served, got = take(publisher, ahead)
    assert served.digest == publisher.manifest().digest
    assert all(torch.equal(got[name], value) for name, value in MODEL.items())


def test_another_model_is_refused_before_the_engine_pauses(publisher: Publish) -> None:
    publisher()
    other = {**EXPECT, "t3": ("bfloat16", [64, 49])}
    ahead = Ahead(publisher.source, expect=other, deadline_s=20)
    with pytest.raises(WeightError, match="t3 is bfloat16"):
        ahead.joined()
    with pytest.raises(WeightError, match="t3 is bfloat16"):  # and again where it would be used
        take(publisher, ahead)
    with pytest.raises(WeightError, match="t3 is bfloat16"):
        publisher.manifest()


def test_an_engine_that_joined_and_never_takes_anything_does_not_hold_up_others(publisher: Publish) -> None:
    publisher(receivers=2)
    left = Ahead(publisher.source, expect=EXPECT, deadline_s=20, rank=1)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take, publisher, None)
        left.joined()
        left.close()
        served, got = taking.result(30)
    assert served.digest == publisher.manifest().digest and got.keys() == MODEL.keys()


def test_one_that_is_closed_before_it_has_joined_takes_nobodys_place(publisher: Publish) -> None:
    left = Ahead(publisher.source, expect=EXPECT, deadline_s=20)
    left.close()
    ahead = Ahead(publisher.source, expect=EXPECT, deadline_s=20)
    publisher()
    served, _ = take(publisher, ahead)
    assert served.digest == publisher.manifest().digest
    with pytest.raises(WeightError, match="this engine has left"):
        left.joined()
