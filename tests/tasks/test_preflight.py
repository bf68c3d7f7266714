"""All that is wrong is said at once, before any engine starts."""

import shutil

import pytest

from headrace.blocks.recipe import Recipe
from headrace.tasks.preflight import RecipeRefused, check_recipe


def _recipe(model, **over):
    return Recipe.model_validate({"base": "quickstart", "model": {"path": str(model)}, **over})


def test_a_good_recipe_passes(tiny_model, monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    check_recipe(_recipe(tiny_model))


def test_every_reason_is_in_one_message(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    with pytest.raises(RecipeRefused) as caught:
        check_recipe(_recipe("/nowhere/model", evaluate={"problems": 9999}, data={"kind": "sums", "held_out": 10}))
    message = str(caught.value)
    assert "no model in /nowhere/model" in message and "evaluate.problems is 9999, but 10" in message


def test_a_tokenizer_without_chat_template_is_refused(tiny_model, monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(RecipeRefused, match="no chat template"):
        check_recipe(_recipe(tmp_path / "model"))


def test_a_model_that_has_no_blocks_of_fp8_is_refused(tiny_model, make_model, monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    backend = {"kind": "vllm", "quantization": "fp8"}
    roles = {"actor": {"pool": "a", "gpus": 1}, "rollout": {"pool": "b", "gpus": 1}}
    over = {"rollout": {"backend": backend}, "roles": roles}
    with pytest.raises(RecipeRefused, match=r"multiples of 128, but model\.layers\.0\..*_proj\.weight is \["):
        check_recipe(_recipe(tiny_model, **over))
    check_recipe(_recipe(make_model(hidden_size=128, head_dim=64), **over))


def test_a_full_disk_is_seen_before_the_start(tiny_model, monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(RecipeRefused, match="GB free"):
        check_recipe(_recipe(tiny_model))


def test_lora_on_layers_that_the_model_does_not_have_is_refused(tiny_model, monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    model = {"path": str(tiny_model), "lora": {"rank": 4, "target_modules": ["q_proj", "lm_head", "w1"]}}
    with pytest.raises(RecipeRefused, match=r"no linear layer is called lm_head, w1; this model has down_proj, gate"):
        check_recipe(Recipe.model_validate({"base": "quickstart-vllm", "model": model}))


def test_the_state_of_an_adapter_takes_little_disk(tiny_model, monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(2_000_000, 0, 1_000_000))
    model = {"path": str(tiny_model)}
    with pytest.raises(RecipeRefused, match="GB free"):
        check_recipe(Recipe.model_validate({"base": "quickstart-vllm", "model": model}))
    check_recipe(Recipe.model_validate({"base": "quickstart-vllm", "model": model | {"lora": {"rank": 2}}}))
