"""LoRA adapters as folders in PEFT's format."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from headrace.blocks.weights import Adapter

CONFIG = "adapter_config.json"


def config_of(adapter: Adapter, base: str) -> bytes:
    """Content of ``CONFIG``. base: folder of the base model, for programs that load both."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": adapter.target_modules,
        "bias": "none",
        "inference_mode": True,
    }
    return json.dumps(config, indent=2).encode()


def write_adapter(folder: Path, adapter: Adapter, tensors: Mapping[str, Tensor], base: str) -> None:
    """Makes ``folder`` with both files. tensors: by their names in PEFT's files."""
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / CONFIG).write_bytes(config_of(adapter, base))
