"""Sums in plain words: small, verifiable, learnable by a 135M model in minutes."""

from headrace.blocks.data import Sums
from headrace.engines.data.base import Listed, Problem, Splits, permutation


def sums(spec: Sums) -> Splits:
    """All sums of two numbers from ``low`` to ``high``; a held-out sum is in training in neither order."""
    numbers = range(spec.low, spec.high + 1)
    unordered = [(a, b) for a in numbers for b in numbers if a <= b]
    held: list[tuple[int, int]] = []
    train: list[tuple[int, int]] = []
    for i in permutation(len(unordered), spec.seed):
        a, b = unordered[i]
        orders = [(a, b)] if a == b else [(a, b), (b, a)]
        (held if len(held) < spec.held_out else train).extend(orders)

    def shuffled(pairs: list[tuple[int, int]]) -> list[Problem]:
        return [_problem(*pairs[i]) for i in permutation(len(pairs), spec.seed, 1)]

    name = f"sums/{spec.low}-{spec.high}"
    return Splits(Listed(name, shuffled(train)), Listed(f"{name}/held-out", shuffled(held[: spec.held_out])))


def _problem(a: int, b: int) -> Problem:
    question = f"What is {a} + {b}? Answer with only the number."
    return Problem(f"sums/{a}+{b}", [{"role": "user", "content": question}], a + b)
