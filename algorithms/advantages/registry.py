"""Where estimators register, and where they are found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headrace.algorithms.advantages.data import Samples
from headrace.algorithms.errors import AlgorithmError
from headrace.algorithms.losses.registry import plugin


@dataclass(frozen=True)
class Estimate:
    """Advantages of samples [M], or of trained tokens [N]; and the critic's targets [N] where there are any."""

    advantages: Tensor
    returns: Tensor | None = None
    per_sample: bool = False


@dataclass(frozen=True)
class Estimator:
    """A function from (configuration, samples) to an estimate.

    A plugin exports one; its configuration is its ``settings``.
    """

    function: Callable[[Any, Samples], Estimate]
    compares_group: bool
    """A group of one has no advantage, and is dropped before."""


_estimators: dict[str, Estimator] = {}
_plugins: dict[str, Estimator] = {}


def estimator(
    kind: str, *, compares_group: bool, plugin: bool = False
) -> Callable[[Callable[[Any, Samples], Estimate]], Callable[[Any, Samples], Estimate]]:
    """Registers the decorated function as the estimator of this kind.

    plugin: it has no configuration class; a recipe asks for it as ``{kind: plugin, name: <kind>, settings: {…}}``.
    """
    known = _plugins if plugin else _estimators

    def register(function: Callable[[Any, Samples], Estimate]) -> Callable[[Any, Samples], Estimate]:
        if kind in known:
            raise AlgorithmError(f"estimator '{kind}' is registered twice")
        known[kind] = Estimator(function, compares_group)
        return function

    return register


def resolve(config: Any) -> tuple[Estimator, Any]:
    """The configured estimator, and the configuration to call it with."""
    if config.kind == "plugin":
        return _plugins.get(config.name) or plugin("headrace.advantages", config.name, _plugins), config.settings
    if config.kind not in _estimators:
        raise AlgorithmError(f"there is no estimator '{config.kind}'; known: {', '.join(sorted(_estimators))}")
    return _estimators[config.kind], config
