"""What a Hugging Face folder has beside weights: configuration, tokenizer, chat template, generation defaults."""

import json
from pathlib import Path

_NOT_COPIED = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_OF_A_VERSION = ("manifest.json", "PINNED")
"""Where the start model is a kept version itself."""


def beside(folder: Path, dtype: str) -> dict[str, bytes]:
    """Name → content of the files that make weights of that dtype a model again; they have a few megabytes."""
    files = {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in _OF_A_VERSION and not path.name.endswith(_NOT_COPIED)
    }
    config = json.loads(files["config.json"])
    config.pop("torch_dtype", None)
    return files | {"config.json": json.dumps(config | {"dtype": dtype}, indent=2).encode()}
