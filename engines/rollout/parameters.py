"""The served weights: fused for speed, readable and writable under their Hugging Face names through views."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from headrace.engines.rollout.architecture import Architecture
from headrace.engines.rollout.errors import UnsupportedModel
from headrace.engines.rollout.matrix import Matrix


@dataclass
class Layer:
    """Weights of one layer; matrices are [out, in]."""

    input_norm: torch.Tensor
    qkv: Matrix
    """[(heads + 2 kv_heads) * head_dim, hidden]: queries, keys, values."""
    output: Matrix
    mlp_norm: torch.Tensor
    gate_up: Matrix
    """[2 * intermediate, hidden]: gate, then up."""
    down: Matrix
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None

    def weights_changed(self) -> None:
        """After the weights were written."""
        for matrix in (self.qkv, self.output, self.gate_up, self.down):
            matrix.weights_changed()


class Parameters:
    """All weights of a model on one device, uninitialised until every name has been assigned."""

    def __init__(self, arch: Architecture, *, dtype: torch.dtype, device: torch.device) -> None:
        self.arch = arch
        self._views: dict[str, torch.Tensor] = {}
        self._empty = {"dtype": dtype, "device": device}
        a, width = arch, arch.head_dim
        self.embedding = self._new(a.vocabulary, a.hidden, **{"model.embed_tokens": a.vocabulary})
        self.layers: list[Layer] = []
        for index in range(a.layers):
            p = f"model.layers.{index}."
            qkv = {
                f"{p}self_attn.q_proj": a.heads * width,
                f"{p}self_attn.k_proj": a.kv_heads * width,
                f"{p}self_attn.v_proj": a.kv_heads * width,
            }
            gate_up = {f"{p}mlp.gate_proj": a.intermediate, f"{p}mlp.up_proj": a.intermediate}
            output, down = {f"{p}self_attn.o_proj": a.hidden}, {f"{p}mlp.down_proj": a.hidden}
            self.layers.append(
                Layer(
                    input_norm=self._new(None, a.hidden, **{f"{p}input_layernorm": a.hidden}),
                    qkv=self._matrix(a.hidden, a.qkv_bias, qkv),
                    output=self._matrix(a.heads * width, a.output_bias, output),
                    mlp_norm=self._new(None, a.hidden, **{f"{p}post_attention_layernorm": a.hidden}),
                    gate_up=self._matrix(a.hidden, a.mlp_bias, gate_up),
                    down=self._matrix(a.intermediate, a.mlp_bias, down),
                    query_norm=self._new(None, width, **{f"{p}self_attn.q_norm": width}) if a.qk_norm else None,
                    key_norm=self._new(None, width, **{f"{p}self_attn.k_norm": width}) if a.qk_norm else None,
                )
            )
        self.norm = self._new(None, a.hidden, **{"model.norm": a.hidden})
        self.head = self.embedding if a.tied else self._new(a.vocabulary, a.hidden, lm_head=a.vocabulary)

    def _new(self, rows: int | None, columns: int, **parts: int) -> torch.Tensor:
        """A matrix [rows, columns] (or vector [columns] when rows is None) made of ``<part>.weight`` in this order."""
        tensor = torch.empty(columns if rows is None else (rows, columns), **self._empty)
        for name, view in zip(parts, tensor.split(list(parts.values())), strict=True):
            self._views[f"{name}.weight"] = view
        return tensor

    def _matrix(self, columns: int, biased: bool, parts: dict[str, int]) -> Matrix:
        """The parts one below the other."""
        return Matrix(self._new(sum(parts.values()), columns, **parts), self._bias(biased, parts))

    def _bias(self, present: bool, parts: dict[str, int]) -> torch.Tensor | None:
        if not present:
            return None
        tensor = torch.empty(sum(parts.values()), **self._empty)
        for name, view in zip(parts, tensor.split(list(parts.values())), strict=True):
            self._views[f"{name}.bias"] = view
        return tensor

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters in use, as views, under their Hugging Face names."""
        yield from self._views.items()

    def names(self) -> set[str]:
        return set(self._views)

    def shape(self, name: str) -> list[int]:
        return list(self._views[name].shape)

    def place(self, name: str) -> torch.Tensor | None:
        """Where that tensor is used, in host memory; None where it must be assigned."""
        view = self._views.get(name)
        return view if view is not None and view.is_contiguous() and view.device.type == "cpu" else None

    def assign(self, name: str, tensor: torch.Tensor) -> None:
        """Copies one tensor in, converted to the served dtype."""
        if name not in self._views:
            raise UnsupportedModel(f"the model has no parameter {name!r}")
        if self._views[name].shape != tensor.shape:
            raise UnsupportedModel(f"{name} has shape {list(tensor.shape)}, the model needs {self.shape(name)}")
        self._views[name].copy_(tensor)

    def read_folder(self, folder: Path) -> None:
        """Loads the safetensors files of a Hugging Face folder.

        Raises:
            UnsupportedModel: a file or a parameter is missing, or one has another shape than config.json says.
        """
        index = folder / "model.safetensors.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else []
        missing = self.names()
        for name in names or ["model.safetensors"]:
            if not (folder / name).is_file():
                raise UnsupportedModel(f"{folder} has no {name}: the rollout engine reads safetensors files only")
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    if key.endswith("rotary_emb.inv_freq") or (self.arch.tied and key == "lm_head.weight"):
                        continue
                    self.assign(key, file.get_tensor(key))
                    missing.discard(key)
        if missing:
            raise UnsupportedModel(f"{folder} lacks {len(missing)} parameters, first {sorted(missing)[0]}")
