"""The built-in reward functions."""

from decimal import Decimal

import pytest

from headrace.engines.reward.functions import find, numbers


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("23 + 41 = 64.", ["23", "41", "64"]),
        ("it is 1,234,567 or 12,34", ["1234567", "12", "34"]),
        ("-5, −7, 3-2 and x-1", ["-5", "-7", "3", "2", "1"]),
        ("3.50 and 1.2.3", ["3.50", "1.2", "3"]),
        ("none", []),
    ],
)
def test_numbers(text, found):
    assert numbers(text) == [Decimal(n) for n in found]


@pytest.mark.parametrize(
    ("function", "options", "text", "truth", "reward"),
    [
        ("last_number", {}, "23 + 41 = 64.", 64, 1.0),
        ("last_number", {}, "64 is 23 + 41", "64", 0.0),
        ("last_number", {}, "I do not know", 64, 0.0),
        ("last_number", {}, "about 64.0", {"answer": "64"}, 1.0),
        ("exact", {}, " Yes\n", "Yes", 1.0),
        ("exact", {}, "yes", "Yes", 0.0),
        ("exact", {"ignore_case": True}, "yes", {"answer": "Yes"}, 1.0),
        ("contains", {}, "So the answer is Yes.", "Yes", 1.0),
        ("contains", {"ignore_case": True}, "no", "Yes", 0.0),
        ("matches", {"pattern": r"^<think>.*</think>"}, "<think>a</think> b", None, 1.0),
        ("matches", {"pattern": r"^\d+$"}, "64!", None, 0.0),
    ],
)
def test_built_ins(function, options, text, truth, reward):
    assert find(function, options)(text, truth, messages=None) == reward


def test_a_ground_truth_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="'many' is not one number"):
        find("last_number", {})("4", "many")
