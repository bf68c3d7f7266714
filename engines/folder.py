"""What a model folder holds, read without torch."""

import json
from pathlib import Path

import xxhash

from headrace.engines.rollout.errors import UnsupportedModel


def parameter_shapes(folder: Path) -> dict[str, list[int]]:
    """Hugging Face name → shape of every parameter; a tied output head is not one.

    Raises:
        UnsupportedModel: no config.json or no safetensors files.
    """
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{folder} is no Hugging Face model folder: it has no config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{folder} has no safetensors files")
    shapes: dict[str, list[int]] = {}
    for path in files:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    if json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return shapes


def model_id(folder: Path) -> str:
    """Hash of a model folder's weights and configuration: what version 0 is."""
    digest = xxhash.xxh3_128()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json", folder / "tokenizer.json"]):
        if path.is_file():
            with path.open("rb") as f:
                while block := f.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()
