"""Policy losses by kind. Each module of this package registers its own: to add one, add a file.

Another package adds one through the entry point group ``headrace.losses``.
"""

from headrace.algorithms.losses.registry import load_modules, policy_loss, resolve

load_modules(__name__, __path__)

__all__ = ["policy_loss", "resolve"]
