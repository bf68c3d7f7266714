"""Plans are deterministic and whole; digests name content."""

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.blocks.weights import Plan
from headrace.engines.checkpoint import WeightError, digest_of, make_plan
from headrace.engines.checkpoint.plan import bytes_of, check_plan, digest_of_hashes, metas_of

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=12)
kinds = st.sampled_from(["bfloat16", "float32", "uint8", "int64"])


@settings(deadline=None, max_examples=150)
@given(shapes, st.lists(kinds, min_size=12, max_size=12), st.integers(16, 700))
def test_every_byte_lies_in_one_place(sizes: list[list[int]], dtypes: list[str], limit: int) -> None:
    metas = [(f"t{i}", dtype, shape) for i, (shape, dtype) in enumerate(zip(sizes, dtypes, strict=False))]
    plan = make_plan(metas, limit)
    check_plan(plan)
    assert plan == make_plan(iter(metas), limit)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert metas_of(plan) == {name: (dtype, shape) for name, dtype, shape in metas}
    assert all(part.nbytes <= limit for part in plan.partitions)
    for name, dtype, shape in metas:
        item, total = getattr(torch, dtype).itemsize, torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        pieces = [piece for part in plan.partitions for piece in part.slices if piece.name == name]
        assert sum(piece.nbytes for piece in pieces) == total
        assert len(pieces) == 1 or total > limit // 16 * 16
        assert all(piece.offset % item == 0 and piece.start % item == 0 for piece in pieces)


def test_small_tensors_share_and_large_ones_span() -> None:
    plan = make_plan([("a", "uint8", [10]), ("b", "uint8", [20]), ("c", "uint8", [70]), ("d", "uint8", [5])], 32)
    assert [[piece.name for piece in part.slices] for part in plan.partitions] == [["a", "b"], ["c"], ["c"], ["c", "d"]]


def test_a_plan_that_does_not_add_up_is_refused() -> None:
    plan = make_plan([("a", "uint8", [48]), ("b", "float32", [4])], 32)
    first, second = plan.partitions
    for partitions in (
        [second, first],
        [first],
        [first, second, second],
        [first.model_copy(update={"slices": []}), second],
        [first, second.model_copy(update={"slices": second.slices[::-1]})],
        [first.model_copy(update={"nbytes": 31}), second],
    ):
        with pytest.raises(WeightError):
            check_plan(Plan(partitions=partitions))


def test_bad_metas_are_refused() -> None:
    with pytest.raises(WeightError, match="tensor a occurs twice"):
        make_plan([("a", "uint8", [1]), ("a", "uint8", [1])], 32)
    with pytest.raises(WeightError, match="'floaty' is no torch dtype"):
        make_plan([("a", "floaty", [1])], 32)
    with pytest.raises(ValueError, match="at least 16"):
        make_plan([], 15)


def test_the_digest_is_that_of_the_bytes(on_the_wire: dict[str, Tensor]) -> None:
    metas = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in on_the_wire.items()]
    plan = make_plan(metas, 4096)
    whole = b"".join(bytes_of(t, t.dtype).numpy().tobytes() for t in on_the_wire.values())
    hashes, begin = [], 0
    for partition in plan.partitions:
        hashes.append(xxhash.xxh3_128_hexdigest(whole[begin : begin + partition.nbytes]))
        begin += partition.nbytes
    assert begin == len(whole)
    assert digest_of(on_the_wire, plan) == digest_of_hashes(hashes)


def test_the_digest_takes_views_any_order_and_wider_dtypes(on_the_wire: dict[str, Tensor], model, metas) -> None:
    wire = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in on_the_wire.items()]
    plan = make_plan(wire, 4096)
    digest = digest_of(on_the_wire, plan)
    assert digest_of(reversed(list(on_the_wire.items())), plan) == digest
    widened = {name: t.float() if t.is_floating_point() else t for name, t in on_the_wire.items()}
    assert digest_of(widened, plan) == digest
    fused = torch.stack([on_the_wire["embed.weight"]] * 2, dim=2)
    assert digest_of({**on_the_wire, "embed.weight": fused[:, :, 1]}, plan) == digest


def test_the_digest_sees_every_change(on_the_wire: dict[str, Tensor]) -> None:
    wire = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in on_the_wire.items()]
    plan = make_plan(wire, 4096)
    digest = digest_of(on_the_wire, plan)
    for name, tensor in on_the_wire.items():
        if tensor.numel():
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[-1] ^= 1
            assert digest_of({**on_the_wire, name: changed}, plan) != digest
    with pytest.raises(WeightError, match="tensor odd is missing"):
        digest_of({name: t for name, t in on_the_wire.items() if name != "odd"}, plan)
    with pytest.raises(WeightError, match=r"tensor odd has shape \[4\], the plan says \[3\]"):
        digest_of({**on_the_wire, "odd": torch.zeros(4)}, plan)
