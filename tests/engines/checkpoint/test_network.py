"""The network between two hosts is cut: both sides say so in time, nothing is half served, the next version arrives.

Two network namespaces with a cable between them stand for two hosts; skipped where they may not be made.
"""

import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from headrace.blocks.weights import Transport, WeightSource
from headrace.engines.checkpoint import WeightError

pytestmark = pytest.mark.slow
NETWORKS = ("hr-trainer", "hr-rollout")
HERE = "10.77.0.1"


def ip(*words: str, inside: str = "") -> bool:
    command = ["ip", *(["netns", "exec", inside, "ip"] if inside else []), *words]
    return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0


def remove() -> None:
    for name in NETWORKS:
        ip("netns", "delete", name)


@pytest.fixture(scope="module")
def networks() -> Iterator[None]:
    remove()
    made = all(ip("netns", "add", name) for name in NETWORKS) and ip(
        "link", "add", "hr0", "netns", NETWORKS[0], "type", "veth", "peer", "name", "hr0", "netns", NETWORKS[1]
    )
    for number, name in enumerate(NETWORKS, 1):
        made = made and ip("addr", "add", f"10.77.0.{number}/24", "dev", "hr0", inside=name)
        made = made and ip("link", "set", "lo", "up", inside=name) and ip("link", "set", "hr0", "up", inside=name)
    if not made:
        remove()
        pytest.skip("network namespaces may not be made here")
    yield
    remove()


@pytest.fixture
def cable(networks: None) -> Iterator[None]:
    yield
    plug()


def cut() -> None:
    assert ip("link", "set", "hr0", "down", inside=NETWORKS[1])


def plug() -> None:
    assert ip("link", "set", "hr0", "up", inside=NETWORKS[1])


nixl = pytest.param("nixl", marks=pytest.mark.skipif(not find_spec("nixl_cu12"), reason="NIXL is not installed"))


@pytest.mark.parametrize("transport", ["tcp", nixl, "gloo"])
def test_a_cut_cable(
    transport: Transport, cable: None, start, start_receiver, model_file: Path, on_the_wire, tmp_path: Path
) -> None:
    # NIXL between these namespaces must not find shared memory; gloo has to be told the way.
    env = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "hr0", "GLOO_SOCKET_IFNAME": "hr0"}
    publisher = start(
        "sender.py",
        network=NETWORKS[0],
        env=env,
        model=model_file,
        host=HERE,
        transport=transport,
        version=1,
        deadline_s=3,
        hold="embed.weight",
    )
    address = publisher.says()
    receiver = start_receiver(address, 1, transport=transport, network=NETWORKS[1], env=env, deadline_s=3)
    assert publisher.says() == "holding"  # in the middle of the version
    cut()
    began = time.monotonic()
    publisher.go_on()
    lost, failed = publisher.says(), receiver.says()
    assert isinstance(lost, WeightError)
    assert isinstance(failed, WeightError)
    assert (failed.version, failed.rank) == (1, 0)
    assert time.monotonic() - began < 25
    assert not (tmp_path / "got-0.pt").exists()
    plug()
    receiver.do(WeightSource(version=2, transport=transport, address=address))
    publisher.do(model_file)
    assert publisher.says() == "holding"
    publisher.go_on()
    manifest = publisher.says()
    assert not isinstance(manifest, WeightError), manifest
    assert receiver.says().digest == manifest.digest
    got = torch.load(tmp_path / "got-0.pt")
    assert all(torch.equal(got[name], value) for name, value in on_the_wire.items())
