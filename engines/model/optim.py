"""The optimizer's side of a step: AdamW, the learning rate as a function of the update's number, clipping."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headrace.blocks.recipe import Optim


def learning_rate(config: Optim, update: int, total: int) -> float:
    """Learning rate of update number ``update`` (from 0) of ``total``.

    Rises linearly over ``warmup_steps`` updates, then stays, or falls to ``min_ratio`` of its height by a straight line
    or half a cosine.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min((update - config.warmup_steps) / max(total - config.warmup_steps, 1), 1.0)
    height = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_ratio + (1 - config.min_ratio) * height)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW in its fused form; every setting is set before each update, none is state."""
    return torch.optim.AdamW(parameters, fused=True)


def apply_update(optimizer: torch.optim.AdamW, config: Optim, lr: float) -> float:
    """Clips the gradients, steps, and drops them. Returns the global norm before clipping.

    A norm that is not finite means no step: weights and optimizer state stay as they are.
    """
    (group,) = optimizer.param_groups
    group |= {"lr": lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    parameters: list[nn.Parameter] = group["params"]
    norm = _whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if bool(norm.isfinite()):
        clip_grads_with_norm_(parameters, config.clip_norm, norm)
        optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
