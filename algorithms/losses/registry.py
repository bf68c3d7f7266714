"""Where policy losses register, and where they are found."""

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any

from headrace.algorithms.errors import AlgorithmError
from headrace.algorithms.tokens import LossTerms, Tokens

PolicyLoss = Callable[[Any, Tokens], LossTerms]
"""(configuration of the loss, tokens) → loss terms. A plugin's configuration is its ``settings`` dict."""

_losses: dict[str, PolicyLoss] = {}
_plugins: dict[str, PolicyLoss] = {}


def policy_loss(kind: str, *, plugin: bool = False) -> Callable[[PolicyLoss], PolicyLoss]:
    """Registers the decorated function as the loss of this kind.

    plugin: it has no configuration class; a recipe asks for it as ``{kind: plugin, name: <kind>, settings: {…}}``.
    """
    known = _plugins if plugin else _losses

    def register(function: PolicyLoss) -> PolicyLoss:
        if known.setdefault(kind, function) is not function:
            raise AlgorithmError(f"policy loss '{kind}' is registered twice")
        return function

    return register


def resolve(config: Any) -> tuple[PolicyLoss, Any]:
    """The function of a configured loss, and the configuration to call it with."""
    if config.kind == "plugin":
        return _plugins.get(config.name) or plugin("headrace.losses", config.name, _plugins), config.settings
    if config.kind not in _losses:
        raise AlgorithmError(f"there is no policy loss '{config.kind}'; known: {', '.join(sorted(_losses))}")
    return _losses[config.kind], config


def load_modules(package: str, paths: list[str]) -> None:
    """Imports every module of a package, so that each registers what it has: a new file needs no other change."""
    for module in iter_modules(paths):
        import_module(f"{package}.{module.name}")


def plugin(group: str, name: str, registered: Iterable[str]) -> Any:
    """The object behind an entry point. ``registered``: plugins that are modules here, for the message."""
    found = entry_points(group=group)
    if name not in found.names:
        known = ", ".join(sorted({*found.names, *registered})) or "none"
        raise AlgorithmError(
            f"no installed package has the entry point '{name}' in group '{group}' (installed: {known})"
        )
    return found[name].load()
