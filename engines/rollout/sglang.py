"""The ``sglang`` back end: SGLang's own engine in a process of its environment. Imports neither torch nor sglang."""

import json
from pathlib import Path
from typing import Any

from headrace.blocks.recipe import SGLangRollout
from headrace.engines.rollout.hosted import HostedEngine
from headrace.engines.rollout.program import Launch
from headrace.engines.rollout.spec import RolloutSpec

QUEUED = 2
"""Samples given to the engine for each that it decodes at a time: its queue never runs dry."""
TESTED = ("0.5.17", "0.5.23")
"""Versions of SGLang that were run: 0.5.17 on an H200, 0.5.23 on CPUs."""
VARIABLES = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


class SGLangEngine(HostedEngine):
    """Implements ``RolloutEngine``. Without ``deterministic`` SGLang takes no seeds of samples."""

    @classmethod
    async def start(cls, spec: RolloutSpec, log_dir: Path) -> "SGLangEngine":
        """Starts SGLang and waits until it serves; see ``HostedEngine.open`` for what it raises."""
        backend = spec.backend
        assert isinstance(backend, SGLangRollout)
        launch = Launch(
            name="SGLang",
            program=("-m", "headrace.engines.rollout.sglang_child"),
            flags=[json.dumps(arguments(spec))],
            env={**VARIABLES, **({} if spec.gpus else {"SGLANG_USE_CPU_ENGINE": "1"})},
            places=QUEUED * backend.max_num_seqs,
            max_len=backend.max_model_len,
            salted=backend.enable_prefix_caching,
            tested=TESTED,
        )
        return await cls.launched(spec, launch, log_dir)


def arguments(spec: RolloutSpec) -> dict[str, Any]:
    """SGLang's ``ServerArgs``: every setting that changes numbers is given, whatever the defaults are."""
    backend = spec.backend
    assert isinstance(backend, SGLangRollout)
    lora: dict[str, Any] = {}
    if spec.lora is not None:
        # All linear layers, whatever an adapter touches; the next version is loaded beside the one in use.
        lora = {"enable_lora": True, "max_lora_rank": spec.lora.rank, "lora_target_modules": ["all"]}
        lora |= {"max_loras_per_batch": 2, "max_loaded_loras": 2}
    # Its CPU engine has one attention kernel, and cannot schedule the next step while one runs.
    cpu = {"device": "cpu", "attention_backend": "torch_native", "disable_overlap_schedule": True}
    return {
        "model_path": spec.model,
        "served_model_name": "policy",
        "dtype": spec.dtype,
        "tp_size": max(spec.gpus, 1),
        "context_length": backend.max_model_len,
        "max_running_requests": backend.max_num_seqs,
        "mem_fraction_static": backend.gpu_memory_utilization,
        "attention_backend": backend.attention_backend,
        "sampling_backend": backend.sampling_backend,
        "grammar_backend": "none",
        "cuda_graph_backend_prefill": "disabled",
        "disable_radix_cache": not backend.enable_prefix_caching,
        "enable_deterministic_inference": backend.deterministic,
        "enable_fp32_lm_head": spec.head_dtype == "float32",
        **lora,
        "custom_weight_loader": ["headrace.engines.rollout.sglang_worker.load"],
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "random_seed": 0,
        "log_level": "info",
        **({} if spec.gpus else cpu),
    }
