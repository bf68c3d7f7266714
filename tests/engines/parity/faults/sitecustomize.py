"""Breaks vLLM's process on purpose: HEADRACE_FAULT names what. First on PYTHONPATH of the interpreter of ``broken``."""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _ignore(*_: Any, **__: Any) -> None: ...


def silent_load(module: ModuleType) -> None:
    """Weights arrive, their digest is right, and none of them reaches the model."""

    class Loading:
        begun = False
        take = place = settle = finish = _ignore

        def __init__(self, *_: Any) -> None: ...

    module._Loading = Loading  # type: ignore[attr-defined]


def base_instead_of_adapter(module: ModuleType) -> None:
    """Adapters arrive, their digest is right, vLLM takes them, and requests are answered by the base."""
    before = module.AsyncLLM.generate

    def generate(self: Any, *given: Any, **named: Any) -> Any:
        return before(self, *given, **named | {"lora_request": None})

    module.AsyncLLM.generate = generate


def stale_head(module: ModuleType) -> None:
    """A tied output head keeps a packed copy of the old embedding: a defect that vLLM 0.32 has on CPUs."""
    module._repack_tied_head = _ignore  # type: ignore[attr-defined]


def lasting_cache(module: ModuleType) -> None:
    """The prefix cache survives weight updates."""
    module.BlockPool.reset_prefix_cache = lambda self: True


def unsalted(module: ModuleType) -> None:
    """Requests of different weight versions share cached prefixes."""
    before = module.Request.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        before(self, *given, **named | {"cache_salt": None})

    module.Request.__init__ = init


WORKER = "headrace.engines.rollout.vllm_worker"
FAULTS: dict[str, dict[str, Callable[[ModuleType], None]]] = {
    "silent load": {WORKER: silent_load},
    "base instead of the adapter": {"vllm.v1.engine.async_llm": base_instead_of_adapter},
    "stale head": {WORKER: stale_head},
    "lasting prefix cache": {"vllm.v1.core.block_pool": lasting_cache, "vllm.v1.request": unsalted},
}


class Breaker(importlib.abc.MetaPathFinder):
    """Applies a fault right after its module was imported."""

    def __init__(self, faults: dict[str, Callable[[ModuleType], None]]) -> None:
        self.faults = faults

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        fault = self.faults.pop(name, None)
        if fault is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            fault(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if named := os.environ.get("HEADRACE_FAULT"):
    sys.meta_path.insert(0, Breaker(dict(FAULTS[named])))
