"""Reward functions: the built-in ones, and how others are found.

A reward function is ``def reward(text, ground_truth, *, messages=None, **options) -> float | dict[str, float]``: the
decoded answer, what the data set gave as ground truth, and the chat before the answer where it is known. A dict names
the parts that add up to the reward. An installed package offers its own under the entry-point group
``headrace.rewards``.
"""

import difflib
import inspect
import json
import re
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache, partial
from importlib.metadata import entry_points
from typing import Any

from headrace.engines.data.packing import unpack
from headrace.engines.reward.errors import RewardError

Reward = Callable[..., float | dict[str, float]]
GROUP = "headrace.rewards"
NUMBER = re.compile(r"(?:(?<![\w.])[-\u2212])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def numbers(text: str) -> list[Decimal]:
    """All numbers of a text: 1,234 is one number; a minus counts where no letter, digit or point is before it."""
    return [Decimal(found.replace(",", "").replace("\u2212", "-")) for found in NUMBER.findall(text)]


def _gold(ground_truth: Any) -> Any:
    """The answer itself: data sets whose problems carry more put it under ``answer``."""
    return ground_truth["answer"] if isinstance(ground_truth, dict) else ground_truth


def last_number(text: str, ground_truth: Any, *, messages: Any = None) -> float:
    """1 when the last number of the text is the right one."""
    gold = numbers(str(_gold(ground_truth)))
    if len(gold) != 1:
        raise ValueError(f"ground truth {_gold(ground_truth)!r} is not one number")
    found = numbers(text)
    return float(bool(found) and found[-1] == gold[0])


def exact(text: str, ground_truth: Any, *, messages: Any = None, ignore_case: bool = False) -> float:
    """1 when the text, without blanks around it, is the answer."""
    said, gold = text.strip(), str(_gold(ground_truth)).strip()
    return float(said.casefold() == gold.casefold() if ignore_case else said == gold)


def contains(text: str, ground_truth: Any, *, messages: Any = None, ignore_case: bool = False) -> float:
    """1 when the answer is somewhere in the text."""
    gold = str(_gold(ground_truth)).strip()
    return float(gold.casefold() in text.casefold() if ignore_case else gold in text)


def matches(text: str, ground_truth: Any, *, messages: Any = None, pattern: str) -> float:
    """1 when the regular expression matches somewhere in the text; for the form of an answer."""
    return float(re.search(pattern, text) is not None)


def reasoning_gym(text: str, ground_truth: Any, *, messages: Any = None, extract: str = "text") -> float:
    """reasoning-gym's own score of its problem (0 to 1), also for tasks without a gold answer.

    ``extract`` chooses what is the answer: the whole ``text``, its ``last_number``, or what is in the last
    ``<answer>…</answer>`` (``answer_tag``). A text without it scores 0.
    """
    if extract == "text":
        answer = text.strip()
    elif extract == "last_number":
        answer = str(numbers(text)[-1]) if numbers(text) else ""
    elif extract == "answer_tag":
        tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        answer = tagged[-1].strip() if tagged else ""
    else:
        raise ValueError(f"extract is {extract!r}; it must be text, last_number or answer_tag")
    if not answer:
        return 0.0
    verifier = _verifier(ground_truth["task"], json.dumps(ground_truth["config"], sort_keys=True))
    return float(verifier.score_answer(answer, unpack(ground_truth["entry"])))


@lru_cache(maxsize=32)
def _verifier(task: str, config: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, seed=0, size=1, **json.loads(config))


BUILT_IN: dict[str, Reward] = {f.__name__: f for f in (last_number, exact, contains, matches, reasoning_gym)}


def find(name: str, options: dict[str, Any]) -> Reward:
    """The function of that name with its options bound.

    Raises:
        RewardError: nobody offers it, its package cannot be imported, or it does not take the options.
    """
    function = BUILT_IN.get(name)
    if function is None:
        offered = entry_points(group=GROUP)
        if name not in offered.names:
            known = sorted({*BUILT_IN, *offered.names})
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RewardError(f"no reward function {name!r}: {hint}known: {', '.join(known)}; group {GROUP}")
        try:
            function = offered[name].load()
        except (ImportError, AttributeError) as error:
            raise RewardError(f"reward function {name!r} ({offered[name].value}) cannot be loaded: {error}") from error
    try:
        inspect.signature(function).bind("", None, messages=None, **options)
    except TypeError as error:
        raise RewardError(
            f"reward function {name!r} cannot be called with (text, ground_truth, messages=…"
            f"{''.join(f', {option}=…' for option in options)}): {error}"
        ) from error
    return partial(function, **options)
