"""A weight matrix as the decoder multiplies with it."""

import torch
import torch.nn.functional as F

ROWS = 64
"""Rows that the packed layout is chosen for; it serves any number."""


class Matrix:
    """x → x Wᵀ + b, for a weight [out, in].

    On CPUs in bfloat16 with a copy of the weight in the layout of oneDNN's matrix product, as torch.compile makes one
    for weights that do not change: for the few rows of decoding the product takes about three quarters of the time.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._packed: torch.Tensor | None = None

    def weights_changed(self) -> None:
        """After the weight was written: packs it anew."""
        bfloat16 = self.weight.device.type == "cpu" and self.weight.dtype == torch.bfloat16
        # oneDNN packs bfloat16 only on processors that compute in it, or have AVX-512.
        if bfloat16 and torch.backends.mkldnn.enabled and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
