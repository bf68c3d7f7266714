"""The flags of vLLM's server."""

import itertools

from headrace.blocks.recipe import VLLMRollout
from headrace.engines.rollout.spec import RolloutSpec
from headrace.engines.rollout.vllm_server import flags


def test_every_setting_that_changes_numbers_is_given():
    backend = VLLMRollout.model_validate({"kind": "vllm", "max_model_len": 4096})
    spec = RolloutSpec(model="m", dtype="float32", gpus=0, threads=1, python="python", backend=backend)
    given = flags(spec)
    for flag in ("--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--enable-scale-out", "--enforce-eager"):
        assert flag in given
    pairs = dict(itertools.pairwise(given))
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert pairs["--generation-config"] == "vllm"
    assert pairs["--dtype"] == "float32"
    assert pairs["--max-num-batched-tokens"] == "4096"  # without chunks a prompt must fit into one batch
