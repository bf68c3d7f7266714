"""Runs inside vLLM's workers, in vLLM's environment: pulls a weight version into the running model.

``--worker-extension-cls`` mixes ``HeadraceWorker`` into vLLM's worker; its method is called by ``collective_rpc``, so
it runs between two steps of the engine. Needs torch, vllm, pydantic, fsspec and xxhash in that environment.
"""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.attention.attention import (  # pyright: ignore[reportMissingImports]
    set_default_quant_scales,
)
from vllm.model_executor.layers.quantization.kv_cache import (  # pyright: ignore[reportMissingImports]
    BaseKVCacheMethod,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore[reportMissingImports]
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.sanitize import (  # pyright: ignore[reportMissingImports]
    restore_layer_refs,
)

from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint import Ahead, WeightError, pull
from headrace.engines.rollout.copies import Copies


class HeadraceWorker:
    """Methods that vLLM's worker gets."""

    _ahead: tuple[str, Ahead] | None = None
    """What has joined already, and the JSON of its source."""

    def headrace_join(self, source: str, expect: str, deadline_s: str) -> None:
        """Begins to join a publish, and returns at once: the engine works on until it pauses. See
        ``headrace_load_weights``, which goes on from there."""
        worker: Any = self
        if self._ahead is not None:  # it was never loaded
            self._ahead[1].close()
            self._ahead = None
        given = WeightSource.model_validate_json(source)
        if given.transport != "store":
            about = {"rank": worker.rank, "device": str(worker.device)}
            self._ahead = source, Ahead(given, deadline_s=float(deadline_s), expect=_wanted(expect), **about)

    def headrace_load_weights(self, source: str, expect: str, deadline_s: str) -> dict[str, Any]:
        """Streams a version into the model.

        source: JSON of WeightSource; expect: JSON of name → [dtype, shape]; deadline_s: of each wait, as text.

        Returns:
            ``served`` (JSON of Served) when the whole version is in use. Else ``error``, and ``spoiled``: whether the
            model has been touched, so that this process must not serve any more.
        """
        worker: Any = self
        model = worker.model_runner.get_model()
        copies = getattr(self, "_copies", None)
        if copies is None or not copies.fits():
            copies = Copies(model, model.load_weights)
        self._copies = None  # until this load is complete
        loading = _Loading(model, worker.device, copies)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] != source:
            ahead[1].close()
            ahead = None
        with set_current_vllm_config(worker.vllm_config):
            try:
                served = pull(
                    WeightSource.model_validate_json(source),
                    loading.take,
                    deadline_s=float(deadline_s),
                    expect=_wanted(expect),
                    rank=worker.rank,
                    device=str(worker.device),
                    settle=loading.settle,
                    place=loading.place,
                    ahead=ahead[1] if ahead else None,
                )
                loading.finish(worker.vllm_config.model_config, served.version)
            except WeightError as error:
                return {"error": str(error), "spoiled": loading.begun}
            except Exception as error:  # vLLM's own, of a model that takes other weights than its folder says
                traceback.print_exc()
                return {"error": f"vLLM: {type(error).__name__}: {error}", "spoiled": loading.begun}
        self._copies = copies
        return {"served": served.model_dump()}


def _wanted(expect: str) -> dict[str, tuple[str, list[int]]]:
    return {name: (dtype, shape) for name, (dtype, shape) in json.loads(expect).items()}


_PLAIN = (
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "CutlassFp8BlockScaledMMKernel",
    "TritonFp8BlockScaledMMKernel",
    "Fp8KVCacheMethod",
)
"""What vLLM does with these weights after loading: nothing, on a GPU."""


def _used_as_loaded(model: Any, device: torch.device) -> bool:
    """Else vLLM's layer-wise reload prepares parameters again."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    latent = any(type(module).__name__ == "MLAAttention" for module in model.modules())
    return device.type == "cuda" and not latent and all(_plain(method) for method in methods)


def _plain(method: Any) -> bool:
    """method: a layer's way to compute; None for what has no weights of its own, or only such as norms."""
    kind = type(method.fp8_linear if type(method).__name__ == "Fp8LinearMethod" else method).__name__
    return method is None or kind in _PLAIN


class _Loading:
    """One load, fed one tensor at a time and passed on one partition at a time: each call of vLLM's loader lists all
    parameters of the model first."""

    def __init__(self, model: Any, device: torch.device, copies: Copies) -> None:
        self._model, self._copies = model, copies
        self._waiting: list[tuple[str, torch.Tensor]] = []
        self._in_place = copies.known or _used_as_loaded(model, device)
        self.begun = False

    def place(self, name: str) -> torch.Tensor | None:
        """Where the tensor is used as it comes, once that is known."""
        if not self._in_place:
            return None
        self.begun = True
        return self._copies.place(name)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        # A layer-wise reload keeps what it is given until a layer is complete, longer than the tensor is valid.
        self._waiting.append((name, tensor if self._in_place else tensor.clone()))

    def settle(self) -> None:
        """Loads what was taken since the last call."""
        if not self.begun:
            self.begun = True
            if not self._in_place:
                initialize_layerwise_reload(self._model)
        if self._waiting:
            if self._in_place and self._copies.known:
                self._copies.load(self._waiting)
            elif self._in_place:
                with _loadable(self._model):
                    self._copies.load(self._waiting)
            else:
                self._copies.loaded |= self._model.load_weights(self._waiting)
            self._waiting = []

    def finish(self, model_config: Any, version: int) -> None:
        """Raises WeightError when a parameter of the model was not loaded."""
        if self._copies.known:  # the copies of a load that was complete
            return
        caches = _quantised_caches(self._model)
        names = {name for name, _ in self._model.named_parameters() if name.rpartition(".")[0] not in caches}
        missing = names - self._copies.loaded
        if model_config.hf_text_config.tie_word_embeddings:
            missing.discard("lm_head.weight")
        if missing:
            what = f"vLLM loaded nothing into {len(missing)} parameters, first {min(missing)}"
            raise WeightError(what, version=version)
        if not self._in_place:
            finalize_layerwise_reload(self._model, model_config)
            _repack_tied_head(self._model)
        for attention in caches.values():  # an engine that started without weights made these up as well
            set_default_quant_scales(attention)
        if self._in_place:
            self._copies.finish()


@contextmanager
def _loadable(model: Any) -> Iterator[None]:
    """vLLM puts plain parameters, of the same memory, in the place of those that its loader knows how to fill, when
    FP8 layers are loaded. Inside the block the loader finds its own kind again."""
    replaced: list[tuple[Any, str, torch.nn.Parameter]] = []
    for layer in model.modules():
        recorded, _ = get_layerwise_info(layer).restore_metadata
        for name, parameter in layer.named_parameters(recurse=False):
            if name in recorded and type(recorded[name]) is not type(parameter):
                alias = parameter.detach()
                alias.__class__, alias.__dict__ = type(recorded[name]), recorded[name].__dict__.copy()
                replaced.append((layer, name, parameter))
                layer._parameters[name] = restore_layer_refs(alias, layer)
    try:
        yield
    finally:
        for layer, name, parameter in replaced:
            layer._parameters[name] = parameter


def _quantised_caches(model: Any) -> dict[str, Any]:
    """Attention layers, by name, for which a quantised model could bring scales of keys and values; ours bring none."""
    modules = model.named_modules()
    return {name: one for name, one in modules if isinstance(getattr(one, "quant_method", None), BaseKVCacheMethod)}


def _repack_tied_head(model: Any) -> None:
    """On CPUs a tied output head keeps a packed copy of the old embedding after a reload (vLLM 0.32): pack it again."""
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear") and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
