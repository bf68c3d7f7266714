"""A load that is repeated without the model's loader gives what the loader gives, or is not repeated."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headrace.engines.rollout.copies import Batch, Copies

SHAPES = {"q": (4, 8), "k": (2, 8), "v": (2, 8), "embed": (10, 8), "norm": (8,), "down": (8, 6)}


class Fused(nn.Module):
    """q, k, v in one parameter, a padded vocabulary, a transposed parameter, a norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.embed, self.down_t = (
            nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
            for shape in ((8, 8), (16, 8), (6, 8))
        )
        self.norm = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.calls = 0

    def load_weights(self, batch: Batch) -> set[str]:
        self.calls += 1
        for name, tensor in batch:
            if name in "qkv":
                begin = {"q": 0, "k": 4, "v": 6}[name]
                self.qkv.data.narrow(0, begin, tensor.shape[0]).copy_(tensor)
            elif name == "embed":
                self.embed[: tensor.shape[0]].data.copy_(tensor)
                self.embed[tensor.shape[0] :].data.fill_(0)
            elif name == "down":
                self.down_t.data.copy_(tensor.t())
            else:
                self.norm.data.copy_(tensor)
        return {name for name, _ in batch}


def version(seed: int) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=make).bfloat16() for name, shape in SHAPES.items()}


def packed(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """As they come: views of one partition."""
    flat = torch.cat([t.reshape(-1) for t in tensors.values()])
    parts = flat.split([t.numel() for t in tensors.values()])
    return [(name, part.view(t.shape)) for (name, t), part in zip(tensors.items(), parts, strict=True)]


def halves(tensors: dict[str, Tensor]) -> list[list[tuple[str, Tensor]]]:
    """As two partitions."""
    batch = packed(tensors)
    return [batch[:2], batch[2:]]


def load(copies: Copies, tensors: dict[str, Tensor]) -> None:
    for some in halves(tensors):
        copies.load(some)
    copies.finish()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.clone() for name, p in model.named_parameters()}


def test_a_repeated_load_gives_what_the_loader_gives():
    model, reference = Fused(), Fused()
    copies = Copies(model, model.load_weights)
    load(copies, version(1))
    assert copies.known and model.calls == 2
    for seed in (2, 3):
        load(copies, version(seed))
        reference.load_weights(packed(version(seed)))
        for name, value in state(reference).items():
            assert torch.equal(dict(model.named_parameters())[name], value), name
    assert model.calls == 2 and copies.loaded == set(SHAPES)


def doubled(model: Fused, batch: Batch) -> None:
    model.load_weights([(name, tensor * 2) for name, tensor in batch])


def through_a_buffer(model: Fused, batch: Batch) -> None:
    model.load_weights([(name, torch.empty_like(tensor).copy_(tensor)) for name, tensor in batch])


def as_numbers(model: Fused, batch: Batch) -> None:
    for name, tensor in batch:
        model.norm.data.fill_(tensor.flatten()[0].item()) if name == "norm" else model.load_weights([(name, tensor)])


def without_one(model: Fused, batch: Batch) -> None:
    model.load_weights([(name, tensor) for name, tensor in batch if name != "k"])


def joined(model: Fused, batch: Batch) -> None:
    tensors = dict(batch)
    model.load_weights(batch)
    if "q" in tensors and "k" in tensors:
        model.qkv.data[2:].copy_(torch.cat([tensors["k"], tensors["q"]]))


@pytest.mark.parametrize("loader", [doubled, joined, through_a_buffer, as_numbers, without_one])
def test_a_loader_that_does_anything_else_is_called_each_time(loader: Callable[[Fused, Batch], None]):
    model, reference = Fused(), Fused()
    copies = Copies(model, lambda batch: loader(model, batch))
    for seed in (1, 2):
        load(copies, version(seed))
        for some in halves(version(seed)):
            loader(reference, some)
        assert not copies.known
        assert all(torch.equal(dict(model.named_parameters())[name], p) for name, p in state(reference).items())


def test_parameters_that_moved_are_noticed():
    model = Fused()
    copies = Copies(model, model.load_weights)
    load(copies, version(1))
    assert copies.fits()
    model.qkv = nn.Parameter(model.qkv.clone(), requires_grad=False)
    assert not copies.fits()


def test_what_is_used_as_it_comes_has_a_place():
    model = Fused()
    copies = Copies(model, model.load_weights)
    assert copies.place("q") is None, "nothing is known yet"
    load(copies, version(1))
    made = version(2)
    for name in ("q", "k", "v", "embed"):
        place = copies.place(name)
        assert place is not None and list(place.shape) == list(SHAPES[name])
        place.copy_(made[name])
    # Another dtype, another order: only the loader's copy does that.
    assert copies.place("norm") is None and copies.place("down") is None
    copies.load([pair for pair in packed(made) if pair[0] in ("norm", "down")])
    reference = Fused()
    reference.load_weights(packed(made))
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in state(reference).items())
