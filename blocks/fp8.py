"""Which weights travel and are served in 8 bits, and of which models. Torch-free: recipe, publisher and engine agree.

The layout is that of DeepSeek-V3's checkpoints (arXiv 2412.19437, section 3.3): ``X.weight`` in float8_e4m3fn and, for
each of its blocks of 128×128, one float32 in ``X.weight_scale_inv``; a weight is the product of the two.
"""

from collections.abc import Mapping, Sequence

BLOCK = 128
"""Rows and columns of a block."""


def quantised(name: str, shape: Sequence[int]) -> bool:
    """Whether the tensor of that Hugging Face name is one: the matrices of attention and MLP, which transformers names
    projections. Embeddings, output head, norms, biases and routers keep their dtype."""
    return len(shape) == 2 and name.endswith("_proj.weight")


def scales_name(name: str) -> str:
    """The name of a quantised tensor's scales."""
    return f"{name}_scale_inv"


def scales_shape(shape: Sequence[int]) -> list[int]:
    """[n, k] → [ceil(n / 128), ceil(k / 128)]."""
    return [-(-size // BLOCK) for size in shape]


def unservable(shapes: Mapping[str, Sequence[int]]) -> str:
    """Why engines cannot serve a model of these tensors (name → shape) blockwise; empty when they can.

    Engines fuse projections one below the other, so a block must not lie in two of them.
    """
    found = {name: list(shape) for name, shape in shapes.items() if quantised(name, shape)}
    if not found:
        return "it has no weight matrix whose name ends in _proj.weight"
    wrong = [f"{name} is {shape}" for name, shape in found.items() if any(size % BLOCK for size in shape)]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f"both sizes must be multiples of {BLOCK}, but {', '.join(wrong[:3])}{more}" if wrong else ""
