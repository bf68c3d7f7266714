"""How vLLM is started."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from headrace.blocks.recipe import VLLMRollout
from headrace.engines.rollout.child import Refused
from headrace.engines.rollout.errors import UnsupportedModel
from headrace.engines.rollout.spec import RolloutSpec
from headrace.engines.rollout.vllm_child import _said
from headrace.engines.rollout.vllm_server import environment, flags, step_graphs


def test_every_setting_that_changes_numbers_is_given():
    backend = VLLMRollout.model_validate({"kind": "vllm", "max_model_len": 4096})
    spec = RolloutSpec(model="m", dtype="float32", gpus=0, threads=1, python="python", backend=backend)
    given = flags(spec)
    for flag in ("--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--enforce-eager"):
        assert flag in given
    pairs = dict(itertools.pairwise(given))
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert pairs["--generation-config"] == "vllm"
    assert pairs["--dtype"] == "float32"
    assert pairs["--max-num-batched-tokens"] == "4096"  # without chunks a prompt must fit into one batch


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (48, 64), (512, 512)])
def test_adapters_get_the_room_that_vllm_has(rank: int, room: int):
    spec = {"model": "m", "python": "python", "backend": {"kind": "vllm"}, "lora": {"rank": rank}}
    pairs = dict(itertools.pairwise(flags(RolloutSpec.model_validate(spec))))
    assert pairs["--max-lora-rank"] == str(room) and "--enable-lora" in pairs
    assert "--enable-lora" not in flags(RolloutSpec.model_validate(spec | {"lora": None}))
    with pytest.raises(ValidationError, match="serves no LoRA adapters"):
        RolloutSpec.model_validate(spec | {"python": "", "backend": {"kind": "transformers"}})


def test_a_gpu_gets_graphs_of_whole_steps_when_asked():
    recipe = {"kind": "vllm", "max_num_seqs": 96, "enforce_eager": False, "step_graphs": True}
    spec = RolloutSpec(model="m", gpus=1, threads=1, python="python", backend=VLLMRollout.model_validate(recipe))
    pairs = dict(itertools.pairwise(flags(spec)))
    sizes = json.loads(pairs["--compilation-config"])["cudagraph_capture_sizes"]
    assert sizes[:9] == [1, 2, 4, 8, 16, 32, 64, 96, 160]
    assert step_graphs(64)["cudagraph_capture_sizes"][:7] == [1, 2, 4, 8, 16, 32, 64]  # type: ignore[index]
    with pytest.raises(ValidationError, match="step_graphs has no effect with enforce_eager"):
        VLLMRollout.model_validate({"kind": "vllm", "step_graphs": True})


def test_fp8_starts_without_weights_and_names_what_stays(make_model: Callable[..., Path]):
    backend = VLLMRollout.model_validate({"kind": "vllm", "quantization": "fp8"})
    model = make_model(hidden_size=128, head_dim=64, tie_word_embeddings=False)
    spec = RolloutSpec(model=str(model), head_dtype="float32", gpus=1, threads=1, python="python", backend=backend)
    pairs = dict(itertools.pairwise(flags(spec)))
    assert pairs["--load-format"] == "dummy"
    overrides = json.loads(pairs["--hf-overrides"])
    assert overrides["head_dtype"] == "float32"
    layers = overrides["quantization_config"]
    assert layers["quant_method"] == "fp8" and layers["weight_block_size"] == [128, 128]
    assert set(layers["modules_to_not_convert"]) == {"lm_head", "model.embed_tokens"}
    assert environment(spec)["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    small = RolloutSpec(model=str(make_model()), gpus=1, threads=1, python="python", backend=backend)
    with pytest.raises(UnsupportedModel, match="multiples of 128"):
        flags(small)


def test_development_endpoints_are_off():
    spec = RolloutSpec(
        model="m", gpus=0, threads=1, python="python", backend=VLLMRollout.model_validate({"kind": "vllm"})
    )
    assert environment(spec)["VLLM_SERVER_DEV_MODE"] == "0"


@pytest.mark.parametrize("tokens", [[], [7], [7, 8], [7, 8, 9]])
def test_log_probabilities_that_come_again_with_an_abort_are_not_heard_twice(tokens: list[int]):
    again = SimpleNamespace(token_ids=[*tokens, *(7, 8, 9)], logprobs=[*(-t / 10 for t in tokens), -0.7, -0.8, -0.9])
    said, logprobs = _said(SimpleNamespace(token_ids=tokens, logprobs=again))
    assert said == tokens
    assert logprobs == [-t / 10 for t in tokens]


def test_log_probabilities_of_other_tokens_are_refused():
    other = SimpleNamespace(token_ids=[7, 9], logprobs=[-0.7, -0.9])
    with pytest.raises(Refused, match="other tokens") as caught:
        _said(SimpleNamespace(token_ids=[7, 8], logprobs=other))
    assert caught.value.kind == "WrongLogprobs"
