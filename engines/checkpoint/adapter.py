"""LoRA adapters on disk, in PEFT's format."""

from pathlib import Path

import xxhash

from headrace.engines.checkpoint.errors import WeightError

FILES = ("adapter_config.json", "adapter_model.safetensors")


def digest_of(folder: Path) -> str:
    """xxh3-128 over the adapter's files, as hex. Raises WeightError when one is missing."""
    hash = xxhash.xxh3_128()
    for name in FILES:
        try:
            hash.update((folder / name).read_bytes())
        except OSError as error:
            raise WeightError(
                f"{folder} is no LoRA adapter: {name}: {error.strerror}", advice=f"a folder with {' and '.join(FILES)}"
            ) from error
    return hash.hexdigest()
