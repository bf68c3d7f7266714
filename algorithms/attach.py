"""A loss whose derivative is known already, as a node of autograd."""

import torch
from torch import Tensor


class _Attach(torch.autograd.Function):
    """A loss whose derivative is known already: no graph of the steps between."""

    @staticmethod
    def forward(ctx, new: Tensor, loss: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slope,) = ctx.saved_tensors
        return slope * grad, None, None


def attach(live: Tensor, loss: Tensor, slope: Tensor) -> Tensor:
    """``loss`` (scalar) with the gradient ``slope`` [N] for ``live`` [N]."""
    return _Attach.apply(live, loss, slope)  # type: ignore[return-value]
