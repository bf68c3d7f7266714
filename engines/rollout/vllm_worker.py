"""Runs inside vLLM's workers, in vLLM's environment: pulls a weight version into the running model.

``--worker-extension-cls`` mixes ``HeadraceWorker`` into vLLM's worker; its method is called by ``collective_rpc``, so
it runs between two steps of the engine. Needs torch, vllm, pydantic, fsspec and xxhash in that environment.
"""

import json
import traceback
from typing import Any

import torch
from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint import WeightError, pull
from headrace.engines.rollout.copies import Copies


class HeadraceWorker:
    """Methods that vLLM's worker gets."""

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
        with set_current_vllm_config(worker.vllm_config):
            try:
                wanted = {name: (dtype, shape) for name, (dtype, shape) in json.loads(expect).items()}
                served = pull(
                    WeightSource.model_validate_json(source),
                    loading.take,
                    deadline_s=float(deadline_s),
                    expect=wanted,
                    rank=worker.rank,
                    device=str(worker.device),
                    settle=loading.settle,
                    place=loading.place,
                )
                loading.finish(worker.vllm_config.model_config, served.version)
            except WeightError as error:
                return {"error": str(error), "spoiled": loading.begun}
            except Exception as error:  # vLLM's own, of a model that takes other weights than its folder says
                traceback.print_exc()
                return {"error": f"vLLM: {type(error).__name__}: {error}", "spoiled": loading.begun}
        self._copies = copies
        return {"served": served.model_dump()}


_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""What vLLM does with these weights after loading: nothing, on a GPU."""


class _Loading:
    """One load, fed one tensor at a time and passed on one partition at a time: each call of vLLM's loader lists all
    parameters of the model first."""

    def __init__(self, model: Any, device: torch.device, copies: Copies) -> None:
        self._model, self._copies = model, copies
        self._waiting: list[tuple[str, torch.Tensor]] = []
        methods = [getattr(module, "quant_method", None) for module in model.modules()]
        latent = any(type(module).__name__ == "MLAAttention" for module in model.modules())
        self._in_place = (
            device.type == "cuda"
            and not latent
            and all(method is None or type(method).__name__ in _PLAIN for method in methods)
        )
        """Whether parameters are used as they are loaded; else vLLM's layer-wise reload prepares them again."""
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
            if self._in_place:
                self._copies.load(self._waiting)
            else:
                self._copies.loaded |= self._model.load_weights(self._waiting)
            self._waiting = []

    def finish(self, model_config: Any, version: int) -> None:
        """Raises WeightError when a parameter of the model was not loaded."""
        missing = {name for name, _ in self._model.named_parameters()} - self._copies.loaded
        if model_config.hf_text_config.tie_word_embeddings:
            missing.discard("lm_head.weight")
        if missing:
            what = f"vLLM loaded nothing into {len(missing)} parameters, first {min(missing)}"
            raise WeightError(what, version=version)
        if self._in_place:
            self._copies.finish()
            return
        finalize_layerwise_reload(self._model, model_config)
        _repack_tied_head(self._model)


def _repack_tied_head(model: Any) -> None:
    """On CPUs a tied output head keeps a packed copy of the old embedding after a reload (vLLM 0.32): pack it again."""
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear") and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
