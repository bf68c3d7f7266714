"""Bounds of the parity gate: those of the dtype, those of the recipe, and what passes them."""

import math

import pytest

from headrace.blocks.parity import ParityBounds, bounds_of, exceeded

GOOD = {
    "mismatch/mean": 1.001,
    "mismatch/kl_k1": -0.002,
    "mismatch/kl_k3": 0.003,
    "mismatch/p999_abs_log_ratio": 0.5,
    "mismatch/max_abs_log_ratio": 0.6,
    "mismatch/ess": 0.99,
}
BOUNDS = bounds_of(ParityBounds(), "bfloat16")


def names(**changed: float) -> list[str]:
    metrics = GOOD | {f"mismatch/{name}": value for name, value in changed.items()}
    return [e.name for e in exceeded(metrics, BOUNDS, "model")]


def test_each_bound_is_watched_on_its_own():
    assert names() == []
    assert names(mean=0.96) == names(mean=1.04) == ["mean_ratio"]
    assert names(kl_k1=-0.04) == ["kl_k1"]
    assert names(kl_k3=0.02) == ["kl_k3"]
    assert names(p999_abs_log_ratio=2.5) == ["p999_abs_log_ratio"]
    assert names(max_abs_log_ratio=3.5) == ["max_abs_log_ratio"]
    assert names(ess=0.9) == ["ess"]


def test_what_is_not_a_number_or_not_there_passes_its_bound():
    assert names(kl_k3=math.nan) == ["kl_k3"]
    assert [e.name for e in exceeded({}, BOUNDS, "model")] == list(BOUNDS)


def test_the_recipe_s_bound_goes_before_the_dtype_s():
    bounds = bounds_of(ParityBounds(kl_k3=0.5, clip_fraction=0.2), "float32")
    assert bounds["kl_k3"] == 0.5 and bounds["clip_fraction"] == 0.2 and bounds["max_abs_log_ratio"] == 0.1


@pytest.mark.parametrize(
    ("head", "share", "pairs", "found"),
    [
        ("float32", 1.0, 30, ["rollout head"]),
        ("float32", 0.18, 100, ["rollout head"]),
        ("float32", 0.04, 100, []),
        ("float32", 0.2, 10, []),
        ("model", 1.0, 30, []),
    ],
)
def test_a_bfloat16_head_counts_where_float32_was_promised(head, share, pairs, found):
    metrics = GOOD | {"behaviour/bfloat16_share": share, "old/bfloat16_share": 0.02, "fork_pairs": pairs}
    assert [e.name for e in exceeded(metrics, BOUNDS, head)] == found


def test_an_excess_is_a_sentence():
    (ratio,) = exceeded(GOOD | {"mismatch/mean": 1.2}, BOUNDS, "model")
    (size,) = exceeded(GOOD | {"mismatch/ess": 0.5}, BOUNDS, "model")
    assert str(ratio) == "mean ratio old/behaviour is 1.2 (bound 1 ± 0.03)"
    assert str(size) == "effective sample size is 0.5 (bound ≥ 0.95)"
