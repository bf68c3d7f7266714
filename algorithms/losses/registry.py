"""Where policy losses register, and where they are found."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from headrace.algorithms.errors import AlgorithmError
from headrace.algorithms.tokens import LossTerms, Tokens

PolicyLoss = Callable[[Any, Tokens], LossTerms]
"""(configuration of the loss, tokens) → loss terms. A plugin's configuration is its ``settings`` dict."""

_losses: dict[str, PolicyLoss] = {}


def policy_loss(kind: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Registers the decorated function as the loss of this kind."""

    def register(function: PolicyLoss) -> PolicyLoss:
        if _losses.setdefault(kind, function) is not function:
            raise AlgorithmError(f"policy loss '{kind}' is registered twice")
        return function

    return register


def resolve(config: Any) -> tuple[PolicyLoss, Any]:
    """The function of a configured loss, and the configuration to call it with."""
    if config.kind == "plugin":
        return plugin("headrace.losses", config.name), config.settings
    if config.kind not in _losses:
        raise AlgorithmError(f"there is no policy loss '{config.kind}'; known: {', '.join(sorted(_losses))}")
    return _losses[config.kind], config


def plugin(group: str, name: str) -> Any:
    """The object behind an entry point."""
    found = entry_points(group=group)
    if name not in found.names:
        known = ", ".join(sorted(found.names)) or "none"
        raise AlgorithmError(
            f"no installed package has the entry point '{name}' in group '{group}' (installed: {known})"
        )
    return found[name].load()
