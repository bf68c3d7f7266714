"""LoRA adapters of a model folder: what trainer, rollout engines and campaign must agree on. Imports no torch."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from headrace.blocks.recipe import Lora
from headrace.blocks.weights import Adapter
from headrace.engines.folder import model_id, parameter_shapes

NOT_ADAPTED = ("embed_tokens", "lm_head")
"""Matrices that rollout engines serve without adapters."""


def target_modules(shapes: Mapping[str, Sequence[int]], lora: Lora) -> tuple[str, ...]:
    """Last parts of the names of the layers that get an adapter, sorted.

    shapes: of the model's parameters. Raises ValueError for a name that no linear layer of the model has.
    """
    there = {_module(name).rpartition(".")[2] for name, shape in shapes.items() if len(shape) == 2} - {*NOT_ADAPTED}
    asked = there if lora.target_modules is None else set(lora.target_modules)
    if unknown := asked - there:
        raise ValueError(
            f"model.lora.target_modules: no linear layer is called {', '.join(sorted(unknown))}; "
            f"this model has {', '.join(sorted(there))}"
        )
    return tuple(sorted(asked))


def adapter_of(folder: Path, lora: Lora) -> Adapter:
    """The adapter that ``lora`` asks for on the model in ``folder``; reads all of its weights for their hash."""
    targets = target_modules(parameter_shapes(folder), lora)
    return Adapter(rank=lora.rank, alpha=lora.alpha, target_modules=targets, base=model_id(folder))


def adapter_shapes(shapes: Mapping[str, Sequence[int]], rank: int, targets: Collection[str]) -> dict[str, list[int]]:
    """Name in PEFT's files → shape of every tensor of the adapter. shapes: of the base's parameters."""
    found: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        module = _module(name)
        if len(shape) == 2 and module.rpartition(".")[2] in targets:
            found[f"base_model.model.{module}.lora_A.weight"] = [rank, shape[1]]
            found[f"base_model.model.{module}.lora_B.weight"] = [shape[0], rank]
    return found


def _module(parameter: str) -> str:
    return parameter.removesuffix(".weight")
