"""A loss whose derivative is known already, as a node of autograd."""

import torch
from torch import Tensor

from headrace.algorithms.batch import Jagged


class _Attach(torch.autograd.Function):
    """Keeps the derivative only: no graph of the steps between, and no second pass over them."""

    @staticmethod
    def forward(ctx, live: Tensor, loss: Tensor, slope: Tensor, batch: Jagged) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.batch, ctx.dtype = batch, live.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (slope,) = ctx.saved_tensors
        return ctx.batch.scatter((slope * grad).to(ctx.dtype)), None, None, None


def attach(live: Tensor, loss: Tensor, slope: Tensor, batch: Jagged) -> Tensor:
    """``loss`` (scalar) with the gradient ``slope`` [N] of trained tokens for ``live`` [T]."""
    return _Attach.apply(live, loss, slope, batch)  # type: ignore[return-value]
