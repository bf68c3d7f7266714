"""Recipes: inheritance, strictness, all errors at once, and a run form that inherits."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from headrace.blocks import inheritance
from headrace.blocks.recipe import Recipe

RECIPES = sorted(path.stem for path in inheritance.RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_is_valid_and_survives_json(name):
    recipe = Recipe.model_validate({"base": name})
    assert recipe.name == name
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_inheritance_overrides_setting_by_setting(tmp_path):
    (tmp_path / "a.yaml").write_text("base: quickstart\ntrain: {optim: {lr: 1.0e-6}}\niterations: 3\n")
    recipe = Recipe.model_validate({"base": str(tmp_path / "a.yaml"), "iterations": 4})
    base = Recipe.model_validate({"base": "quickstart"})
    assert recipe.iterations == 4 and recipe.train.optim.lr == 1e-6
    assert recipe.train.optim.clip_norm == base.train.optim.clip_norm and recipe.data == base.data


def test_another_kind_drops_the_bases_settings_of_that_section():
    recipe = Recipe.model_validate(
        {
            "base": "quickstart",
            "data": {"kind": "reasoning_gym", "task": "gcd", "held_out": 9},
            "evaluate": {"problems": 9},
        }
    )
    assert recipe.data.kind == "reasoning_gym"


def test_another_reward_function_drops_the_bases_options(tmp_path):
    (tmp_path / "a.yaml").write_text('base: quickstart\nreward: {function: matches, options: {pattern: "4"}}\n')
    recipe = Recipe.model_validate({"base": str(tmp_path / "a.yaml"), "reward": {"function": "exact"}})
    assert recipe.reward.options == {}


def test_circles_and_unknown_names_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text(f"base: {tmp_path / 'b.yaml'}\n")
    (tmp_path / "b.yaml").write_text(f"base: {tmp_path / 'a.yaml'}\n")
    with pytest.raises(ValueError, match="circle"):
        Recipe.model_validate({"base": str(tmp_path / "a.yaml")})
    with pytest.raises(ValueError, match="quickstart"):
        Recipe.model_validate({"base": "quickstrat"})


def test_all_errors_at_once_with_their_paths():
    wrong = {"base": "quickstart", "iterations": 0, "train": {"optim": {"lr": -1}}, "rollout": {"top_p": 0.9}}
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate(wrong)
    assert {".".join(map(str, e["loc"])) for e in caught.value.errors()} == {
        "iterations",
        "train.optim.lr",
        "rollout.top_p",
    }


@pytest.mark.parametrize(
    "useless",
    [
        {"train": {"optim": {"schedule": "constant", "min_ratio": 0.1}}},
        {"evaluate": {"problems": 0, "every": 5}},
        {"roles": {"reference": {"pool": "actor"}}},
        {"rollout": {"shards": 17}},
        {"roles": {"rollout": {"pool": "rollout", "engines": 3}}},
    ],
)
def test_settings_without_effect_are_refused(useless):
    with pytest.raises(ValidationError):
        Recipe.model_validate({"base": "quickstart", **useless})


def test_fp8_is_for_vllm_on_gpus_and_bfloat16():
    fp8 = {"kind": "vllm", "quantization": "fp8"}
    gpus = {"actor": {"pool": "a", "gpus": 1}, "rollout": {"pool": "b", "gpus": 1}}
    base = {"base": "quickstart", "model": {"dtype": "bfloat16"}}
    recipe = Recipe.model_validate({**base, "rollout": {"backend": fp8}, "roles": gpus})
    assert recipe.rollout.backend.quantization == "fp8"  # type: ignore[union-attr]
    with pytest.raises(ValidationError, match="fp8 needs GPUs"):
        Recipe.model_validate({**base, "rollout": {"backend": fp8}})
    with pytest.raises(ValidationError, match=r"model\.dtype: bfloat16 only"):
        Recipe.model_validate(
            {**base, "model": {"dtype": "float32"}, "rollout": {"backend": fp8}, "roles": gpus},
        )
    with pytest.raises(ValidationError, match="fp8 is for whole models"):
        lora = {"dtype": "bfloat16", "lora": {"rank": 16}}
        Recipe.model_validate({**base, "model": lora, "rollout": {"backend": fp8}, "roles": gpus})
    with pytest.raises(ValidationError, match=r"not for weights\.transport: store"):
        Recipe.model_validate({**base, "rollout": {"backend": fp8}, "roles": gpus, "weights": {"transport": "store"}})
    with pytest.raises(ValidationError, match="quantization"):
        Recipe.model_validate({**base, "rollout": {"backend": {"kind": "sglang", "quantization": "fp8"}}})


LORA = {"model": {"lora": {"rank": 16}}}


def test_lora_is_for_engines_that_serve_adapters():
    recipe = Recipe.model_validate({"base": "quickstart-vllm", **LORA})
    assert recipe.model.lora is not None and (recipe.model.lora.rank, recipe.model.lora.alpha) == (16, 32)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    gpus = {"roles": {role: {"pool": "gpu", "gpus": 1} for role in ("actor", "rollout")}}
    Recipe.model_validate({"base": "quickstart", **LORA, **gpus, "rollout": {"backend": {"kind": "sglang"}}})
    for over, why in (
        ({"base": "quickstart"}, "back end transformers serves no adapters; set rollout.backend.kind: vllm"),
        ({"rollout": {"backend": {"kind": "vllm", "openai_port": 0}}}, "would serve the base without its adapter"),
        ({**gpus, "weights": {"transport": "nccl"}}, "adapters travel through host memory"),
        ({**gpus, "weights": {"transport": "cuda-ipc"}}, "adapters travel through host memory"),
        ({"model": {"lora": {"rank": 513}}}, "less than or equal to 512"),
        ({"model": {"lora": {"alpha": 16}}}, "Field required"),
        ({"model": {"lora": {"rank": 4, "target_modules": []}}}, "at least 1 item"),
    ):
        with pytest.raises(ValidationError, match=why):
            Recipe.model_validate({"base": "quickstart-vllm", **LORA, **over})


def test_the_run_form_has_no_defaults_that_would_override_the_base():
    schema = Recipe.model_json_schema()
    assert "required" not in schema
    assert all("default" not in field for field in schema["properties"].values())
    assert "Passes of the RL loop" in schema["properties"]["iterations"]["description"]
    assert schema["properties"]["iterations"]["description"].endswith("Default: 40.")


def test_dry_run_says_where_each_value_comes_from():
    command = [
        sys.executable,
        "-m",
        "headrace.deployments.cli",
        "run",
        "quickstart-vllm",
        "--dry-run",
        "--set",
        "seed=7",
    ]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {line.split(":")[0]: line.split("#")[-1].strip() for line in lines}
    assert found["seed"] == "--set"
    assert found["rollout.backend.kind"] == "quickstart-vllm"
    assert found["train.optim.lr"] == "quickstart"
    assert found["deadlines.stage"] == "default"


def test_a_wrong_recipe_is_one_readable_message():
    command = [
        sys.executable,
        "-m",
        "headrace.deployments.cli",
        "run",
        "quickstart",
        "--dry-run",
        "--set",
        "prompts=0",
        "--set",
        "nope=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "- prompts:" in done.stderr and "- nope:" in done.stderr


def test_an_untouched_run_form_is_the_base():
    """Prefect's form sends constants, false for boxes, and empty sections without being asked."""

    def sent(schema, definitions):
        if "$ref" in schema:
            schema = definitions[schema["$ref"].rsplit("/", 1)[1]]
        if "const" in schema or "default" in schema:
            return schema.get("default", schema.get("const"))
        if schema.get("type") == "boolean":
            return False
        if "properties" in schema:
            values = {name: sent(field, definitions) for name, field in schema["properties"].items()}
            return {name: value for name, value in values.items() if value is not None}
        first = schema.get("anyOf", [None])[0]  # of a choice between types, the first is shown
        return sent(first, definitions) if first else None

    schema = Recipe.model_json_schema()
    form = sent(schema, schema["$defs"]) | {"base": "quickstart"}
    assert form != {"base": "quickstart"}
    assert Recipe.model_validate(form) == Recipe.model_validate({"base": "quickstart"}).model_copy()


def test_versions_are_kept_in_a_store_only():
    recipe = Recipe.model_validate({"base": "quickstart", "weights": {"transport": "store", "keep": 3}})
    assert Recipe.model_validate_json(recipe.model_dump_json()).weights.keep == 3
    for weights, why in (
        ({"transport": "store", "keep": 1}, "greater than or equal to 2"),
        ({"keep": 3}, "keep has no effect under transport: auto; remove it, or choose transport: store"),
    ):
        with pytest.raises(ValidationError, match=why):
            Recipe.model_validate({"base": "quickstart", "weights": weights})
