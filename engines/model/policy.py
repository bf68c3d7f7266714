"""The module that is sharded: a transformers decoder whose forward pass ends in log-probabilities of given tokens."""

import json
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.algorithms.logprobs import token_logprobs
from headrace.engines.model import attention
from headrace.engines.model.errors import UnsupportedModel
from headrace.engines.model.prefix import Packed

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` that are computed rightly. SmolLM, SmolLM2 and many others are ``llama``."""


class Policy(nn.Module):
    """A causal language model. Attribute ``causal`` is the transformers model."""

    def __init__(self, causal: PreTrainedModel, head_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.causal = causal
        self.head_dtype = head_dtype

    def forward(self, packed: Packed, temperature: float, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """(log-probability, entropy or None) of the target tokens, float32 [t or 1] each, in nats."""
        given = {"attention_mask": packed.block_mask} if packed.block_mask is not None else {"blocks": packed.blocks}
        out = self.decoder(input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, **given)
        hidden = out.last_hidden_state[0].index_select(0, packed.source)
        weight, bias = self.head.weight, self.head.bias
        if self.head_dtype is not None:
            hidden, weight = hidden.to(self.head_dtype), weight.to(self.head_dtype)
            bias = None if bias is None else bias.to(self.head_dtype)
        found = token_logprobs(hidden, weight, packed.targets, temperature=temperature, bias=bias, entropy=entropy)
        logprobs, entropies = found if isinstance(found, tuple) else (found, None)
        each = packed.expand
        return logprobs.index_select(0, each), None if entropies is None else entropies.index_select(0, each)

    def layers(self) -> list[nn.Module]:
        """The decoder's layers, the units of sharding."""
        return list(cast(nn.ModuleList, self.decoder.layers))

    @property
    def decoder(self) -> nn.Module:
        return self.causal.get_decoder()

    @property
    def head(self) -> nn.Linear:
        return cast(nn.Linear, self.causal.get_output_embeddings())


def load_policy(folder: Path, dtype: torch.dtype, head_dtype: torch.dtype | None, on_cpu: bool) -> Policy:
    """Reads a Hugging Face folder into memory. Raises UnsupportedModel."""
    check_family(folder)
    causal = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=attention.NAME if on_cpu else "flex_attention",
        local_files_only=True,
    )
    return Policy(causal.eval(), head_dtype)


def check_family(folder: Path) -> None:
    """Raises UnsupportedModel unless ``folder`` holds a dense decoder with plain causal attention."""
    path = folder / "config.json"
    if not path.is_file():
        raise UnsupportedModel(f"{folder} is no Hugging Face model folder: it has no config.json")
    config = json.loads(path.read_text())
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(f"{folder} is a {family!r} model; this back end trains {', '.join(FAMILIES)}")
    windowed = config.get("use_sliding_window", family == "mistral") and config.get("sliding_window")
    if windowed:
        raise UnsupportedModel(f"{folder} uses sliding-window attention, which shared prompts do not support")
