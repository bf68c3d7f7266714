"""reasoning-gym's problems: the same in every process, unseen when held out, scored by their own verifier."""

import importlib.util
import json

import pytest

pytest.importorskip("reasoning_gym")

from headrace.blocks.data import ReasoningGym
from headrace.engines.data import DataError, first, load_splits
from headrace.engines.data.generator import generate
from headrace.engines.data.reasoning_gym import problem, reasoning_gym
from headrace.engines.reward.functions import find

CHAIN = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def _spec(task: str, **fields) -> ReasoningGym:
    return ReasoningGym.model_validate({"kind": "reasoning_gym", "task": task, "size": 60, "held_out": 20, **fields})


def _questions(dataset) -> list[str]:
    return [p.messages[0]["content"] for _, p in first(dataset)]


def test_halves_share_no_question_and_the_instruction_is_added():
    splits = load_splits(_spec("chain_sum", config=CHAIN, instruction="Answer with only the number."))
    train, held_out = map(_questions, splits)
    assert len(held_out) == 20 and len(train) == len(set(train)) > 50 and not set(train) & set(held_out)
    assert all(q.endswith("\nAnswer with only the number.") for q in train)
    truth = splits.train.problem(0).ground_truth
    assert find("last_number", {})(f"It is {truth['answer']}.", truth) == 1.0


def test_neighbouring_seeds_share_few_problems():
    one, two = ({e["question"] for _, e in generate(_spec("chain_sum", config=CHAIN, seed=s))["train"]} for s in (0, 1))
    assert len(one) > 50 and len(one & two) < 10


def test_a_task_that_depends_on_pythons_hash_seed_is_the_same_every_time():
    spec = _spec("isomorphic_strings", size=8, held_out=4)
    assert first(reasoning_gym(spec).train) == first(reasoning_gym(spec).train)


def _truth(task: str) -> dict:
    """Ground truth of a problem of the task after its way through a table."""
    spec = _spec(task, size=2, held_out=1)
    return json.loads(json.dumps(problem(spec, generate(spec)["train"][0][1], "id").ground_truth))


@pytest.mark.parametrize("task", ["word_ladder", "arc_agi", "gcd", "number_sorting"])
def test_gold_answers_score_1(task):
    truth = _truth(task)
    assert find("reasoning_gym", {})(truth["answer"], truth) == 1.0
    tagged = find("reasoning_gym", {"extract": "answer_tag"})
    assert tagged(f"so <answer>{truth['answer']}</answer>", truth) == 1.0 and tagged(truth["answer"], truth) == 0.0
    assert find("reasoning_gym", {"extract": "last_number"})("none", truth) == 0.0


def test_a_task_without_gold_answer_is_scored_by_its_verifier():
    truth = _truth("rush_hour")
    score = find("reasoning_gym", {})("A+1", truth)
    assert truth["answer"] is None and isinstance(score, float) and 0.0 <= score < 1.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"task": "chain_summ"}, "no task 'chain_summ'; near: chain_sum"),
        ({"task": "chain_sum", "config": {"min_term": 2}}, "refuses this config of chain_sum: .*min_term"),
        ({"task": "chain_sum", "config": {"min_terms": 0}}, "refuses this config"),
    ],
)
def test_what_cannot_be_generated_says_what_to_change(fields, words):
    with pytest.raises(DataError, match=words):
        generate(_spec(**fields))


def test_errors_come_out_of_the_generating_process(monkeypatch):
    # Whatever else is on its stderr, as warnings are; and whatever the terminal's encoding is, here ASCII.
    for name, value in {"PYTHONVERBOSE": "1", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=r"^reasoning-gym has no task 'gcd–'; near: gcd"):
        load_splits(_spec("gcd–"))
    with pytest.raises(DataError, match="too few different problems"):
        load_splits(_spec("coin_flip", config={"min_trials": 3, "max_trials": 3}, held_out=50))


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'headrace\[cpu\]'"):
        reasoning_gym(_spec("gcd"))


@pytest.mark.slow
def test_every_task_of_the_package():
    from reasoning_gym.factory import DATASETS

    wrong = []
    for task in sorted(set(DATASETS) - {"composite"}):
        truth = _truth(task)
        answer = truth["answer"]
        value = find("reasoning_gym", {})(answer if isinstance(answer, str) else "no", truth)
        if not (value == 1.0 if isinstance(answer, str) else isinstance(value, float) and 0.0 <= value < 1.0):
            wrong.append((task, value))
    assert not wrong
