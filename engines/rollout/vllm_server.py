"""How vLLM is started: its flags and its environment. Every setting that changes numbers is said."""

import json
from pathlib import Path

from headrace.blocks.fp8 import BLOCK, quantised, unservable
from headrace.blocks.recipe import VLLMRollout
from headrace.engines.folder import parameter_shapes
from headrace.engines.rollout.errors import UnsupportedModel
from headrace.engines.rollout.spec import RolloutSpec
from headrace.engines.rollout.vllm_child import START_METHOD

MIN_BATCHED_TOKENS = 2048
MODEL_NAME = "policy"


def flags(spec: RolloutSpec) -> list[str]:
    """Every setting that changes numbers is given, whatever vLLM's defaults are.

    Raises UnsupportedModel when the recipe wants FP8 and the model cannot be served so.
    """
    backend = spec.backend
    assert isinstance(backend, VLLMRollout)
    given = [
        "--model",
        spec.model,
        "--served-model-name",
        MODEL_NAME,
        "--dtype",
        spec.dtype,
        "--max-model-len",
        str(backend.max_model_len),
        "--max-num-seqs",
        str(backend.max_num_seqs),
        "--tensor-parallel-size",
        str(max(spec.gpus, 1)),
        "--logprobs-mode",
        backend.logprobs_mode,
        "--generation-config",
        "vllm",
        "--enable-prefix-caching" if backend.enable_prefix_caching else "--no-enable-prefix-caching",
        "--enforce-eager" if backend.enforce_eager else "--no-enforce-eager",
        "--worker-extension-cls",
        "headrace.engines.rollout.vllm_worker.HeadraceWorker",
    ]
    # A seeded request that is prefilled in pieces kills vLLM 0.32 on CPUs: their generators have no offset.
    chunked = bool(spec.gpus) and backend.enable_chunked_prefill is not False
    given += ["--enable-chunked-prefill" if chunked else "--no-enable-chunked-prefill"]
    if not chunked:
        given += ["--max-num-batched-tokens", str(max(backend.max_model_len, MIN_BATCHED_TOKENS))]
    ahead = bool(spec.gpus) and backend.async_scheduling is not False
    given += ["--async-scheduling" if ahead else "--no-async-scheduling"]
    if spec.gpus:
        if backend.step_graphs:
            given += ["--compilation-config", json.dumps(step_graphs(backend.max_num_seqs))]
        given += ["--gpu-memory-utilization", str(backend.gpu_memory_utilization)]
    if backend.kv_cache_memory_bytes:
        given += ["--kv-cache-memory-bytes", str(backend.kv_cache_memory_bytes)]
    if spec.lora is not None:  # the next version is loaded beside the one in use
        given += ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2"]
        given += ["--max-lora-rank", str(max_lora_rank(spec.lora.rank))]
    overrides: dict[str, object] = {}
    if spec.head_dtype == "float32":
        overrides["head_dtype"] = "float32"
    if backend.quantization:
        overrides["quantization_config"] = fp8_layers(Path(spec.model), spec.gpus)
        given += ["--load-format", "dummy"]  # the folder has other weights; they come as the first version
    if overrides:
        given += ["--hf-overrides", json.dumps(overrides)]
    return given


def fp8_layers(model: Path, gpus: int) -> dict[str, object]:
    """What an FP8 checkpoint of the model would say in its config.json. Raises UnsupportedModel."""
    shapes = parameter_shapes(model)
    if why := unservable(shapes, gpus):
        raise UnsupportedModel(f"{model} cannot be served in blocks of FP8: {why}; remove rollout.backend.quantization")
    others = [name for name, shape in shapes.items() if len(shape) > 1 and not quantised(name, shape)]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *(name.removesuffix(".weight") for name in others)],
    }


def max_lora_rank(rank: int) -> int:
    """vLLM's kernels have room for powers of two from 8 on; smaller adapters use a part of it."""
    return max(8, 1 << (rank - 1).bit_length())


def step_graphs(largest: int) -> dict[str, object]:
    """No compilation, and CUDA graphs of whole steps, of those too in which a new prompt comes among the decoding ones.

    Without them such a step waits for Python to launch every kernel, and there are many: one for each sample that ends.
    Ready much sooner than with vLLM's defaults. Attention that cannot be captured so falls back to decoding steps only.
    """
    decoding = [1 << n for n in range(largest.bit_length()) if 1 << n < largest] + [largest]
    mixed = [largest + more for more in (64, 128, 192, 256, 384, 512, 768, 1024, 1792)]
    return {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": decoding + mixed}


def environment(spec: RolloutSpec) -> dict[str, str]:
    """Variables of vLLM's process, on top of the host's."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "0",  # no development endpoints behind the door
    }
    assert isinstance(spec.backend, VLLMRollout)
    if spec.backend.batch_invariant:
        variables["VLLM_BATCH_INVARIANT"] = "1"
    if spec.backend.quantization:
        variables["VLLM_USE_DEEP_GEMM_E8M0"] = "0"  # it rounds scales to powers of two, and weights once more
    # Its engine process and its workers need not import everything again: a start is some 10 to 20 s faster.
    variables[START_METHOD] = "fork"
    if spec.gpus:
        return variables
    return variables | {"OMP_NUM_THREADS": str(spec.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
