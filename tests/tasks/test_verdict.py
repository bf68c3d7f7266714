"""The message of a gate that fails says what differs and where to look."""

from types import SimpleNamespace
from typing import Any

from headrace.blocks.manifest import Manifest
from headrace.blocks.recipe import Recipe
from headrace.tasks.ablation import Knob
from headrace.tasks.verdict import CHANGED, OWN, Round, Trial, excesses, failure

RECIPE = {"data": {"kind": "sums"}, "reward": {"function": "last_number"}}
CAMPAIGN: Any = SimpleNamespace(id="c", recipe=Recipe.model_validate(RECIPE))
GENERATED = Manifest(stage="generate", step=-1, key="g", info={"fingerprint": {"engine": "vllm 0.32"}})


def compared(kl: float) -> Manifest:
    metrics = {"mean": 1.0, "kl_k1": kl, "kl_k3": kl, "p999_abs_log_ratio": 0.1, "max_abs_log_ratio": 0.1, "ess": 1.0}
    named = {f"mismatch/{name}": value for name, value in metrics.items()}
    return Manifest(stage="old-logprob", step=-1, key=f"{kl}", metrics=named | {"tokens": 99.0})


def rounds(changed: float, own: float) -> list[Round]:
    return [Round(CHANGED, 0, GENERATED, compared(changed)), Round(OWN, 0, GENERATED, compared(own))]


def test_a_setting_that_repairs_it_is_named():
    caching = Trial(Knob("rollout.backend.enable_prefix_caching", False, now=True), rounds(0.3, 0.3))
    logprobs = Trial(
        Knob("rollout.backend.logprobs_mode", "processed_logprobs", now="raw_logprobs"), rounds(1e-3, 1e-3)
    )
    said = failure(CAMPAIGN, rounds(0.4, 0.3), {0: compared(0.9)}, [caching, logprobs])
    assert "Under changed weights: KL by k1 is 0.4 (bound ≤ 0.03); KL(behaviour ‖ old) is 0.4 (bound ≤ 0.015)" in said
    assert "Under the weights of the campaign" in said and "99 tokens" in said
    assert "Look at rollout.backend.logprobs_mode: with logprobs_mode = processed_logprobs every bound holds" in said
    assert "prefix" not in said and "before the update" not in said
    assert "Nothing was trained" in said and "c-parity" in said


def test_tokens_that_fit_the_weights_before_tell_that_nothing_was_loaded():
    said = failure(CAMPAIGN, rounds(0.4, 1e-3), {0: compared(1e-3)}, [])
    assert "rollout-0 samples from the weights before the update" in said and "vllm 0.32" in said
    assert "second update" not in said


def test_a_fault_of_the_second_update_alone_is_something_that_outlived_it():
    said = failure(CAMPAIGN, rounds(1e-3, 0.4), {}, [])
    assert "It began with the second update" in said and "prefix cache" in said


def test_when_nothing_repairs_it_the_nearest_is_named():
    trials = [
        Trial(Knob("model.head_dtype", "float32", ("actor",)), rounds(0.2, 0.1)),
        Trial(Knob("model.head_dtype", "float32", ("rollout",)), rounds(0.1, 0.05)),
        Trial(Knob("model.dtype", "float32", ("actor", "rollout")), note="did not run: no memory"),
    ]
    said = failure(CAMPAIGN, rounds(0.4, 0.3), {}, trials)
    assert "Nearest: head_dtype (rollout engine) = float32 with KL 0.1 (now 0.4)" in said
    assert "No setting could be tried" in failure(CAMPAIGN, rounds(0.4, 0.3), {}, trials[2:])


def test_figures_that_are_missing_are_no_agreement():
    empty = Round(OWN, 0, GENERATED, Manifest(stage="old-logprob", step=-1, key="e", metrics={"tokens": 0.0}))
    assert len(excesses(CAMPAIGN, empty)) == 6
    assert "KL(behaviour ‖ old) is nan" in failure(CAMPAIGN, [empty], {}, [])
