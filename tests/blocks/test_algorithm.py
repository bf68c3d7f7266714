"""The algorithm as configuration: presets, overrides, refusals, and the form that a person sees."""

import json
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from headrace.blocks.algorithms import Algorithm
from headrace.blocks.algorithms.presets import Preset

PRESETS = get_args(Preset)
CONSTANT = {"dr_grpo": {"aggregation": {"constant": 512}}}


def algorithm(**settings) -> Algorithm:
    return Algorithm.model_validate(settings)


def bounded(bound: dict) -> dict:
    return {"correction": {"importance": {"bound": bound}}}


def rejecting(test: dict) -> dict:
    return {"correction": {"reject": [test]}}


def complaint(**settings) -> str:
    with pytest.raises(ValidationError) as error:
        algorithm(**settings)
    return str(error.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_a_round_trip(preset):
    made = algorithm(preset=preset, **CONSTANT.get(preset, {}))
    assert Algorithm.model_validate(made.model_dump()) == made
    assert Algorithm.model_validate_json(made.model_dump_json()) == made


def resolved(**settings) -> dict[str, Any]:
    return algorithm(**settings).model_dump()


def test_presets_are_the_published_algorithms():
    dapo = resolved(preset="dapo")
    assert (dapo["loss"]["clip_low"], dapo["loss"]["clip_high"]) == (0.2, 0.28)
    assert dapo["aggregation"] == {"kind": "token-mean"} and dapo["filter"]["kind"] == "equal_rewards"
    dr_grpo = resolved(preset="dr_grpo", aggregation={"constant": 512})
    assert dr_grpo["advantage"]["std"] is False
    assert dr_grpo["aggregation"] == {"kind": "seq-mean-token-sum-norm", "constant": 512}
    assert resolved(preset="gspo")["loss"] == {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
    assert resolved(preset="ppo")["value"] == {"clip": 0.2}
    ppo = algorithm(preset="ppo")
    assert ppo.needs_critic and ppo.needs_reference and algorithm(preset="remax").needs_greedy_reward
    assert algorithm(preset="dpo").needs_reference
    assert not algorithm(preset="dpo", loss={"reference_free": True}).needs_reference
    assert not algorithm().needs_reference and algorithm().preset == "grpo"


def test_overrides_of_single_settings_and_of_whole_sections():
    dapo = resolved(preset="dapo", loss={"clip_high": 0.3})
    assert dapo["loss"] == {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}
    other = resolved(preset="dapo", loss={"kind": "cispo"}, filter=None)
    assert other["loss"] == {"kind": "cispo", "clip_low": None, "clip_high": 0.2} and other["filter"] is None
    assert algorithm(preset="gmpo").aggregation is None and algorithm(loss={"kind": "gmpo"}).aggregation is None
    assert algorithm(advantage={"kind": "gae"}).value is not None
    assert algorithm(preset="ppo", advantage={"kind": "grpo"}).value is None
    assert algorithm(preset="dapo", loss={"kind": "dpo"}).advantage is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "gspo", "loss": {"dual_clip": 3}}, "no effect with loss 'gspo': it belongs to loss ppo_clip"),
        ({"loss": {"clip_ratio": 0.1}}, "'clip_ratio' has no effect with loss 'ppo_clip': no such setting exists"),
        ({"preset": "gmpo", "aggregation": {"kind": "token-mean"}}, "'aggregation' has no effect with loss 'gmpo'"),
        ({"preset": "dpo", "kl": {"kind": "loss", "coefficient": 1}}, "'kl' has no effect with loss 'dpo'"),
        ({"preset": "online_dpo", "entropy_coefficient": 0.1}, "'entropy_coefficient' has no effect"),
        ({"preset": "dpo", "overlong": {"max_length": 8, "buffer": 2}}, "'overlong' has no effect"),
        ({"preset": "dpo", "loss": {"form": "ipo", "label_smoothing": 0.1}}, "has no effect with form 'ipo'"),
        ({"value": {"clip": 0.2}}, "'value' has no effect without a critic"),
        ({"preset": "ppo", "value": None}, "needs 'value'"),
        ({"preset": "ppo", "filter": {"kind": "equal_rewards"}}, "which advantage 'gae' can learn from"),
        ({"preset": "remax", "advantage": {"gamma": 0.9}}, "'gamma' has no effect with advantage 'remax'"),
        ({"correction": {}}, "a correction without 'importance' and 'reject' has no effect"),
        (bounded({"kind": "truncate", "low": 0.5}), "'low' has no effect with bound 'truncate'"),
        (bounded({"kind": "mask", "low": 5, "high": 1}), "no weight would be left"),
        (rejecting({"kind": "ratio", "level": "sequence-max", "low": 0.5, "high": 2}), "sequence-mean"),
        ({"advantage": {"std": False, "epsilon": 1e-3}}, "'epsilon' has no effect with std: false"),
        ({"preset": "dr_grpo"}, "constant"),
        ({"advantage": None}, "needs an 'advantage'"),
        ({"aggregation": None}, "needs an 'aggregation'"),
        ({"loss": {"kind": "dro"}}, "beta"),
        ({"overlong": {"max_length": 4, "buffer": 8}}, "longer than max_length"),
        ({"preset": "grqo"}, "'grpo'"),
        ({"los": {}}, "Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_useless_and_wrong_settings_are_refused(settings, message):
    assert message in complaint(**settings)


def test_all_errors_at_once():
    text = complaint(loss={"clip_ratio": 0.1}, kl={"kind": "loss"}, entropy_coefficient=-1)
    assert all(part in text for part in ("clip_ratio", "kl.loss.coefficient", "entropy_coefficient"))


def test_the_form_describes_every_setting():
    schema = Algorithm.model_json_schema()
    json.dumps(schema)
    models = {"Algorithm": schema, **schema["$defs"]}
    missing = [
        f"{name}.{field}"
        for name, model in models.items()
        for field, spec in model["properties"].items()
        if field != "kind" and "description" not in spec
    ]
    assert not missing
    assert "required" not in schema
    assert set(schema["properties"]["loss"]["discriminator"]["mapping"]) >= {"ppo_clip", "gspo", "dpo", "plugin"}
