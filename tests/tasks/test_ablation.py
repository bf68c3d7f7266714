"""Which settings the ablation tries, by back end and by what the recipe says already."""

import pytest
from pydantic import ValidationError

from headrace.blocks.recipe import Recipe
from headrace.tasks.ablation import Knob, knobs

BASE = {"data": {"kind": "sums"}, "reward": {"function": "last_number"}}


def tried(**settings) -> list[tuple[str, object, tuple[str, ...]]]:
    return [(k.setting, k.value, k.roles) for k in knobs(Recipe.model_validate(BASE | settings)) if not k.already]


def test_the_transformers_back_end_has_precision_only():
    assert tried() == [
        ("model.head_dtype", "float32", ("rollout",)),
        ("model.head_dtype", "float32", ("actor",)),
        ("model.dtype", "float32", ("actor", "rollout")),
    ]
    assert tried(model={"dtype": "float32"}) == []
    assert [value for _, value, _ in tried(model={"head_dtype": "float32"})] == ["model", "model", "float32"]


def test_vllm_on_gpus_has_all_of_them():
    gpus = {"rollout": {"pool": "rollout", "gpus": 1}}
    backend = {"kind": "vllm", "enable_prefix_caching": True, "enforce_eager": False, "logprobs_mode": "raw_logprobs"}
    found = tried(roles=gpus, rollout={"backend": backend, "temperature": 1.0})
    assert [(setting.removeprefix("rollout.backend."), value) for setting, value, _ in found[:6]] == [
        ("logprobs_mode", "processed_logprobs"),
        ("enable_prefix_caching", False),
        ("async_scheduling", False),
        ("enable_chunked_prefill", False),
        ("batch_invariant", True),
        ("enforce_eager", True),
    ]
    off = {"kind": "vllm", "async_scheduling": False, "enable_chunked_prefill": False, "batch_invariant": True}
    assert [setting for setting, _, _ in tried(roles=gpus, rollout={"backend": off})] == [
        "model.head_dtype",
        "model.head_dtype",
        "model.dtype",
    ]


def test_a_knob_changes_one_setting():
    recipe = Recipe.model_validate(BASE | {"rollout": {"backend": {"kind": "vllm", "enable_prefix_caching": True}}})
    for knob in (k for k in knobs(recipe) if not k.already):
        changed = knob.applied(recipe).model_dump()
        section, *rest = knob.setting.split(".")
        for name in rest[:-1]:
            changed, section = changed[section], name
        assert changed[section][rest[-1]] == knob.value != knob.now
    raw = Knob("rollout.backend.logprobs_mode", "raw_logprobs")
    warm = Recipe.model_validate(BASE | {"rollout": {"backend": {"kind": "vllm"}, "temperature": 0.7}})
    with pytest.raises(ValidationError, match="raw_logprobs is wrong"):
        raw.applied(warm)


def test_settings_without_effect_are_refused():
    loss = {"algorithm": {"preset": "rloo"}, "parity": {"bounds": {"clip_fraction": 0.1}}}
    with pytest.raises(ValidationError, match=r"clip_fraction has no effect: loss reinforce"):
        Recipe.model_validate(BASE | loss)
    cpu = {"rollout": {"backend": {"kind": "vllm", "async_scheduling": True, "batch_invariant": True}}}
    with pytest.raises(ValidationError, match="async_scheduling and batch_invariant: vLLM has no such thing on CPUs"):
        Recipe.model_validate(BASE | cpu)
