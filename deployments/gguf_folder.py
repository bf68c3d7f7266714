"""A GGUF of the Llama architecture with SmolLM's tokenizer as a Hugging Face folder, without torch.

What a straight conversion gets wrong, and is put right here: query and key rows are stored in llama.cpp's rotary
order; the pre-tokenizer ``smollm`` splits numbers into single digits; the context length and tokenizer class must be
set so that transformers 4 and 5 load the folder.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import GGUFReader

CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelError(RuntimeError):
    """The model cannot be brought; the message says what to do."""


def convert(gguf: Path, out: Path) -> None:
    """Writes weights, configuration and tokenizer of a GGUF of the Llama architecture into the folder ``out``."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)

    def field(name: str) -> Any:
        found = reader.get_field(name)
        if found is None:
            raise ModelError(f"{gguf.name} has no field {name}")
        return found.contents()

    if (pre := field("tokenizer.ggml.pre")) != "smollm":
        raise ModelError(f"{gguf.name} has the pre-tokenizer {pre!r}; only smollm is known")
    write_json(out / "config.json", _config(field))
    special = {name: field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding", "unknown")}
    ids = {"bos_token_id": special["bos"], "eos_token_id": special["eos"], "pad_token_id": special["padding"]}
    write_json(out / "generation_config.json", ids)
    _write_tokenizer(field, special, out)
    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    _write_weights(reader, heads, out / "model.safetensors")


def _config(field: Callable[[str], Any]) -> dict[str, Any]:
    hidden, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": field("llama.block_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        # GGUF keeps it as float32: 9.999999747378752e-06
        "rms_norm_eps": float(np.format_float_positional(np.float32(field("llama.attention.layer_norm_rms_epsilon")))),
        "rope_parameters": {"rope_theta": field("llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": field("llama.vocab_size"),
    }


def _write_tokenizer(field: Callable[[str], Any], special: dict[str, int], out: Path) -> None:
    tokens = field("tokenizer.ggml.tokens")
    kinds = field("tokenizer.ggml.token_type")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in field("tokenizer.ggml.merges")],
        },
    }
    write_json(out / "tokenizer.json", tokenizer)
    config = {
        "add_prefix_space": False,
        "bos_token": tokens[special["bos"]],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[special["eos"]],
        "model_max_length": field("llama.context_length"),
        "pad_token": tokens[special["padding"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[special["unknown"]],
    }
    write_json(out / "tokenizer_config.json", config)
    (out / "chat_template.jinja").write_text(field("tokenizer.chat_template"), encoding="utf-8")


def _write_weights(reader: "GGUFReader", heads: dict[str, int], path: Path) -> None:
    """One safetensors file, a tensor at a time: numpy has no bfloat16 that safetensors' own writer would take."""
    from gguf.quants import dequantize

    tensors = sorted((_hugging_face_name(tensor.name), tensor) for tensor in reader.tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + 2 * int(tensor.n_elements)
        shape = [int(n) for n in reversed(tensor.shape)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            kind = tensor.name.split(".")[-2]
            file.write(bfloat16(_rotary_halves(values, heads[kind]) if kind in heads else values).tobytes())


def _hugging_face_name(name: str) -> str:
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
    raise ModelError(f"the GGUF has an unknown tensor {name}")


def _rotary_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from llama.cpp's interleaved rotary pairs to Hugging Face's two halves: [rows, columns]."""
    paired = rows.reshape(heads, -1, 2, rows.shape[1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, ties to even, as uint16 of the same shape. For finite values."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
