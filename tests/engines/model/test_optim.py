"""The learning rate as a function of the update's number."""

from itertools import pairwise

import pytest

from headrace.blocks.recipe import Optim
from headrace.engines.model.optim import learning_rate


def rates(total: int = 10, **settings: object) -> list[float]:
    config = Optim.model_validate({"lr": 2.0, **settings})
    return [learning_rate(config, update, total) for update in range(total)]


def test_constant_after_a_linear_rise() -> None:
    assert rates(4) == [2.0] * 4
    assert rates(5, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 1.1), ("cosine", 1.1)])
def test_decay_goes_from_the_height_to_the_floor(schedule: str, middle: float) -> None:
    found = rates(12, schedule=schedule, warmup_steps=2, min_ratio=0.1)
    assert found[:3] == [1.0, 2.0, 2.0]
    assert found[7] == pytest.approx(middle)
    assert all(later < earlier for earlier, later in pairwise(found[2:]))
    config = Optim.model_validate({"lr": 2.0, "schedule": schedule, "min_ratio": 0.1})
    assert learning_rate(config, 12, 12) == pytest.approx(0.2) == learning_rate(config, 99, 12)
