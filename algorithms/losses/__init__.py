"""Policy losses by kind. Each module registers its own.

Another package adds one through the entry point group ``headrace.losses``.
"""

from headrace.algorithms.losses import (  # noqa: F401
    cispo,
    covariance,
    dppo,
    dro,
    gmpo,
    gspo,
    ppo_clip,
    reinforce,
    sapo,
)
from headrace.algorithms.losses.registry import policy_loss, resolve

__all__ = ["policy_loss", "resolve"]
