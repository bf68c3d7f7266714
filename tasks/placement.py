"""Which transport weights take, from where the engines are. Imports no torch."""

from collections.abc import Collection

from headrace.blocks.lease import Lease
from headrace.blocks.recipe import Recipe
from headrace.blocks.weights import Transport

LOCAL = ("shm", "cuda-ipc")
"""Transports that need one machine."""


class WrongPlacement(RuntimeError):
    """The recipe forces a transport that cannot work between these engines."""


def transport_for(recipe: Recipe, actor: Lease, rollouts: Collection[Lease]) -> Transport:
    """The recipe's choice, or the fastest that the placement allows and that has been seen to work there.

    Raises WrongPlacement before anything is sent.
    """
    asked = recipe.weights.transport
    nodes = sorted({lease.node for lease in rollouts} - {actor.node})
    if asked in LOCAL and nodes:
        raise WrongPlacement(
            f"weights.transport: {asked} needs actor and rollout on one machine, but the actor is on {actor.node} and "
            f"rollout engines are on {', '.join(nodes)}: choose auto, tcp or nixl"
        )
    if asked != "auto":
        return asked
    if nodes:
        return "tcp"
    roles = recipe.roles
    if recipe.model.lora is not None:
        return "shm"
    together = roles.actor.gpus and roles.rollout.gpus and roles.actor.pool == roles.rollout.pool
    return "cuda-ipc" if together and recipe.rollout.backend.kind == "vllm" else "shm"


def partition_mb(recipe: Recipe, transport: Transport) -> int:
    """Measured: few partitions cost less conversation, and small ones let both sides begin and end together."""
    if transport in ("cuda-ipc", "nccl") or (transport == "nixl" and recipe.roles.actor.gpus):
        return 1024
    return 64


def workers(recipe: Recipe) -> int:
    """Processes of one rollout engine that each pull the weights. A LoRA adapter is pulled by its host."""
    if recipe.model.lora is not None:
        return 1
    return max(1, recipe.roles.rollout.gpus) if recipe.rollout.backend.kind in ("vllm", "sglang") else 1
