"""What the decode path needs to know of a model: read from config.json, refused when it is another architecture."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.engines.rollout.errors import UnsupportedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` that decode here. SmolLM, SmolLM2 and many others are ``llama``."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the length of the sequence."""


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a dense decoder with grouped-query attention, RMS norm and a gated MLP."""

    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    context: int
    """Longest sequence: position limit of the model, or its sliding window where that is shorter."""
    inverse_frequencies: torch.Tensor
    """float32 [head_dim / 2]."""
    rope_scale: float

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads


def read_architecture(folder: Path) -> Architecture:
    """Reads ``config.json``.

    Raises:
        UnsupportedModel: no such folder, or a model that this back end would compute wrongly.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UnsupportedModel(f"{folder} is no Hugging Face model folder: it has no config.json")
    family = json.loads(path.read_text()).get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"{folder} holds a model of family {family!r}; the transformers rollout back end decodes "
            f"{', '.join(FAMILIES)} (Llama, SmolLM2, Mistral, Qwen2, Qwen3). Choose the vllm back end for others"
        )
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"{folder}: activation {config.hidden_act!r} is not decoded here, only 'silu'")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies, scale = _rope(config, head_dim, folder)
    bias = family == "qwen2" or bool(getattr(config, "attention_bias", False))
    return Architecture(
        family=family,
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=bias,
        output_bias=bias and family != "qwen2",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        context=_context(config),
        inverse_frequencies=frequencies,
        rope_scale=scale,
    )


def _rope(config, head_dim: int, folder: Path) -> tuple[torch.Tensor, float]:
    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in ROPES:
        raise UnsupportedModel(f"{folder}: rotary embedding {kind!r} is not decoded here, only {', '.join(ROPES)}")
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return frequencies.float(), float(scale)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0


def _context(config) -> int:
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return config.max_position_embeddings
    return min(config.max_position_embeddings, window)
