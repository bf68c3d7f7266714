"""A LoRA adapter as a version: every way carries what it is, and other receivers refuse it before the first byte."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.blocks.weights import Adapter, Transport, WeightManifest, WeightSource
from headrace.engines.checkpoint import WeightError, publish, pull, release, reserve
from headrace.engines.checkpoint.adapter import write_adapter

nixl = pytest.param("nixl", marks=pytest.mark.skipif(not find_spec("nixl_cu12"), reason="NIXL is not installed"))
WAYS: list[Any] = ["shm", "tcp", "gloo", nixl, "store"]
ADAPTER = Adapter(rank=4, alpha=8, target_modules=("q_proj", "v_proj"), base="b" * 32)


def tensors_of(rank: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    shapes = {"lora_A": (rank, 64), "lora_B": (96, rank)}
    return {
        f"base_model.model.model.layers.{layer}.self_attn.{target}.{matrix}.weight": torch.randn(shape, generator=draw)
        for layer in range(3)
        for target in ADAPTER.target_modules
        for matrix, shape in shapes.items()
    }


TENSORS = tensors_of(ADAPTER.rank)
EXPECT = {name: ("float32", list(tensor.shape)) for name, tensor in TENSORS.items()}
BASE = {"model.embed_tokens.weight": torch.ones(30, 64), "model.norm.weight": torch.ones(64)}


@pytest.fixture(params=WAYS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightSource]:
    transport: Transport = request.param
    if transport == "store":
        yield WeightSource(version=1, transport=transport, address="weights/v1", store=str(tmp_path))
        return
    address = str(tmp_path / "w.sock") if transport == "shm" else reserve("127.0.0.1")
    yield WeightSource(version=1, transport=transport, address=address)
    release(address)


def send(
    source: WeightSource, tensors: dict[str, Tensor], adapter: Adapter | None, deadline_s: float = 20
) -> WeightManifest:
    return publish(
        iter(tensors.items()),
        [(name, "float32", list(tensor.shape)) for name, tensor in tensors.items()],
        adapter=adapter,
        train_step=1,
        wire_dtype="float32",
        partition_bytes=4096,
        deadline_s=deadline_s,
        **source.model_dump(exclude={"delta"}),
    )


def test_every_way_carries_it(source: WeightSource) -> None:
    got: dict[str, Tensor] = {}
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, source, TENSORS, ADAPTER)
        if source.transport == "store":
            sending.result(20)
        served = pull(
            source,
            lambda name, tensor: got.update({name: tensor.clone()}),
            expect=EXPECT,
            adapter=ADAPTER,
            deadline_s=20,
        )
        manifest = sending.result(20)
    assert manifest.plan.adapter == ADAPTER and served.digest == manifest.digest
    assert served.wire_nbytes == served.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    assert list(got) == list(TENSORS) and all(torch.equal(got[name], tensor) for name, tensor in TENSORS.items())


WRONG = {
    "the base instead of the adapter": (BASE, None, "a whole model was published, but this engine serves a LoRA adap"),
    "the base under the adapter's name": (BASE, ADAPTER, "lora_A.weight is missing"),
    "another rank": (tensors_of(8), ADAPTER.model_copy(update={"rank": 8}), "adapter of rank 8.*adapter of rank 4"),
    "another rank under this one's name": (tensors_of(8), ADAPTER, r"lora_A.weight is float32 \[8, 64\], expected"),
    "another alpha": (TENSORS, ADAPTER.model_copy(update={"alpha": 16}), "alpha 16.*alpha 8"),
    "another base": (TENSORS, ADAPTER.model_copy(update={"base": "c" * 32}), "of base cccc.*of base bbbb"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("transport", ["shm", "store"])
def test_anything_else_is_refused_before_the_first_byte(transport: Transport, what: str, tmp_path: Path) -> None:
    tensors, adapter, why = WRONG[what]
    at = {"address": "weights/v1", "store": str(tmp_path)} if transport == "store" else {"address": f"{tmp_path}/w"}
    source = WeightSource(version=1, transport=transport, **at)  # type: ignore[arg-type]
    got: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, source, tensors, adapter, 2)
        if transport == "store":
            sending.result(20)
            for part in (tmp_path / "weights" / "v1").glob("part-*"):
                part.unlink()  # whoever reads one fails otherwise
        with pytest.raises(WeightError, match=why):
            pull(source, lambda name, _: got.append(name), expect=EXPECT, adapter=ADAPTER, deadline_s=20)
        if transport == "shm":
            with pytest.raises(WeightError, match=why):  # the publisher hears the reason
                sending.result(20)
    assert not got


def test_a_receiver_of_whole_models_refuses_an_adapter(tmp_path: Path) -> None:
    source = WeightSource(version=1, transport="store", address="weights/v1", store=str(tmp_path))
    send(source, TENSORS, ADAPTER)
    with pytest.raises(
        WeightError, match=r"a LoRA adapter of rank 4.*was published, but this engine serves a whole mo"
    ):
        pull(source, lambda *_: None, expect=EXPECT)


def test_the_folder_is_in_pefts_format(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", ADAPTER, TENSORS, "/models/base")
    loaded = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert loaded.keys() == TENSORS.keys() and all(torch.equal(loaded[name], t) for name, t in TENSORS.items())
    about = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert about["peft_type"] == "LORA" and about["base_model_name_or_path"] == "/models/base"
    assert (about["r"], about["lora_alpha"], about["target_modules"]) == (4, 8, ["q_proj", "v_proj"])
