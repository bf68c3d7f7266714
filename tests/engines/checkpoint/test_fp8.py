"""Blockwise FP8 on the wire: the bits that vLLM makes, in every transport, as changes, and only of linear layers."""

import json
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.blocks.fp8 import quantised, scales_name, scales_shape, unservable
from headrace.blocks.weights import Transport, WeightManifest, WeightSource
from headrace.engines.checkpoint import WeightError, publish, pull, release, reserve
from headrace.engines.checkpoint.fp8 import from_blocks, to_blocks
from headrace.engines.checkpoint.plan import metas_of

GOLDEN = Path(__file__).parents[2] / "golden"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("case", json.loads((GOLDEN / "fp8.json").read_text())["cases"])
def test_the_bits_are_those_that_vllm_made(case: dict[str, Any]) -> None:
    made = runpy.run_path(str(GOLDEN / "make_fp8.py"))
    weight = made["weight"](case["seed"], case["rows"], case["columns"])
    assert made["hash_of"](weight) == case["weight"]
    values, scales = to_blocks(weight)
    assert list(scales.shape) == scales_shape(weight.shape)
    assert made["hash_of"](values) == case["values"]
    assert scales.flatten().tolist() == case["scales"]


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_converted_alone_and_come_back(device: str) -> None:
    """Pieces as large as a strip and views that are not contiguous give the same; the error is that of 3 bits."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(1300, 1700, generator=draw).to(device, torch.bfloat16)
    values, scales = to_blocks(weight)
    for first in (0, 512, 1280):
        part, own = to_blocks(weight[first : first + 256])
        assert torch.equal(part.view(torch.uint8), values[first : first + 256].view(torch.uint8))
        assert torch.equal(own, scales[first // 128 : first // 128 + 2])
    turned = weight.t().contiguous().t()
    assert torch.equal(to_blocks(turned)[0].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(to_blocks(weight.float())[1], scales)
    back, exact = from_blocks(values, scales), weight.float()
    error = (back - exact).abs()
    least = scales.max() * 2.0**-10  # half a step of the smallest numbers
    assert (error <= exact.abs() / 16 * 1.0001 + least).all()
    largest = weight.float().abs().max()
    assert float(back.abs().max()) == pytest.approx(float(largest), rel=1e-6)


def test_linear_layers_alone_are_quantised() -> None:
    for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.experts.7.gate_proj"):
        assert quantised(f"model.layers.0.{name}.weight", [256, 128])
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"):
        assert not quantised(name, [256, 128])
    assert not quantised("model.layers.0.self_attn.q_proj.bias", [256])
    assert not quantised("model.visual.q_proj.weight", [3, 256, 128])


def test_a_model_whose_sizes_do_not_fit_is_told_as_such() -> None:
    good = {"lm_head.weight": [259, 100], "a.q_proj.weight": [256, 128]}
    assert unservable(good) == ""
    assert "b.k_proj.weight is [192, 576]" in unservable(good | {"b.k_proj.weight": [192, 576]})
    assert "2 more" in unservable({f"l{i}.up_proj.weight": [128, 64] for i in range(5)})
    cut = good | {"a.k_proj.weight": [128, 128], "a.o_proj.weight": [128, 512], "a.up_proj.weight": [512, 128]}
    assert unservable(cut, gpus=2) == ""
    assert "a.q_proj.weight is [256, 128] for 4 GPUs" in unservable(cut, gpus=4)
    assert "a.o_proj.weight is [128, 384]" in unservable(cut | {"a.o_proj.weight": [128, 384]}, gpus=2)
    assert "no weight matrix" in unservable({"lm_head.weight": [256, 128]})


@pytest.fixture
def weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    shapes = {"embed_tokens": (300, 128), "norm": (128,), "q_proj": (256, 128), "up_proj": (257, 200)}
    made = {f"{name}.weight": torch.randn(*shape, generator=draw) for name, shape in shapes.items()}
    return made | {"q_proj.bias": torch.randn(256, generator=draw), "steps": torch.arange(7)}


def on_the_wire(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if quantised(name, tensor.shape):
            made[name], made[scales_name(name)] = to_blocks(tensor)
        else:
            made[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
    return made


def send(weights: dict[str, Tensor], version: int, **where: Any) -> WeightManifest:
    metas = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in weights.items()]
    sizes: dict[str, Any] = {"partition_bytes": 8192, "deadline_s": 20}
    return publish(
        iter(weights.items()), metas, version=version, train_step=version, quantization="fp8", **sizes, **where
    )


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    bits = [(a.dtype, a.shape, a.view(torch.uint8).tolist()) for a in got.values()]
    return list(got) == list(expected) and bits == [
        (b.dtype, b.shape, b.view(torch.uint8).tolist()) for b in expected.values()
    ]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("delta", [False, True])
def test_two_versions_come_bit_for_bit(
    transport: Transport, delta: bool, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    address = str(tmp_path / "w.sock") if transport == "shm" else reserve("127.0.0.1")
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed["q_proj.weight"][5, 7] += 1
    changed["up_proj.weight"][200, :] *= 3
    sizes: list[int] = []
    try:
        for version, model in enumerate((weights, changed)):
            got: dict[str, Tensor] = {}
            expected = on_the_wire(model)
            expect = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in expected.items()}
            source = WeightSource(version=version, transport=transport, address=address, delta=delta)
            with ThreadPoolExecutor(1) as pool:
                sending = pool.submit(send, model, version, transport=transport, address=address, delta=delta)
                served = pull(source, lambda name, t, got=got: got.update({name: t.clone()}), expect=expect)
                manifest = sending.result(20)
            assert served.digest == manifest.digest and same(got, expected)
            assert {name: dtype for name, (dtype, _) in metas_of(manifest.plan).items()} == {
                name: dtype for name, (dtype, _) in expect.items()
            }
            sizes.append(served.wire_nbytes)
        assert sizes[1] < 0.2 * sizes[0] if delta else sizes[1] == sizes[0] == manifest.plan.nbytes
    finally:
        release(address)


def test_a_kept_version_is_a_checkpoint_in_fp8(weights: dict[str, Tensor], tmp_path: Path) -> None:
    where: dict[str, Any] = {"transport": "store", "store": str(tmp_path), "address": "v1", "partition_bytes": 1 << 20}
    metas = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in weights.items()]
    manifest = publish(iter(weights.items()), metas, version=1, train_step=1, quantization="fp8", **where)
    read: dict[str, Tensor] = {}
    for file in sorted((tmp_path / "v1").glob("*.safetensors")):
        read |= load_file(file)
    assert same(dict(sorted(read.items())), dict(sorted(on_the_wire(weights).items())))
    got: dict[str, Tensor] = {}
    source = WeightSource(version=1, transport="store", address="v1", store=str(tmp_path))
    assert pull(source, lambda name, t: got.update({name: t.clone()})).digest == manifest.digest
    assert same(got, on_the_wire(weights))


def test_an_engine_that_serves_another_dtype_refuses_before_the_first_byte(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    send(weights, 1, transport="store", store=str(tmp_path), address="v1")
    source = WeightSource(version=1, transport="store", address="v1", store=str(tmp_path))
    expect = {name: ("bfloat16" if t.is_floating_point() else "int64", list(t.shape)) for name, t in weights.items()}
    taken: list[str] = []
    with pytest.raises(WeightError, match=r"q_proj.weight_scale_inv is unknown here.*quantization"):
        pull(source, lambda name, t: taken.append(name), expect=expect)
    assert not taken
