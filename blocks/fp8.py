"""Which weights travel and are served in 8 bits, and of which models. Torch-free: recipe, publisher and engine agree.

The layout is that of DeepSeek-V3's checkpoints (arXiv 2412.19437, section 3.3): ``X.weight`` in float8_e4m3fn and, for
each of its blocks of 128×128, one float32 in ``X.weight_scale_inv``; a weight is the product of the two.
"""

from collections.abc import Mapping, Sequence

BLOCK = 128
"""Rows and columns of a block."""
_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
"""Between GPUs these are cut by columns, all others by rows."""
_SHARED = ("k_proj.weight", "v_proj.weight")


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


def unservable(shapes: Mapping[str, Sequence[int]], gpus: int = 1) -> str:
    """Why an engine on so many GPUs cannot serve a model of these tensors (name → shape) blockwise; empty when it can.

    Engines fuse projections one below the other and cut them into a part for each GPU: no block may lie in two. (Keys
    and values may be the same on several GPUs; whether they can be cut is left to the engine.)
    """
    found = {name: list(shape) for name, shape in shapes.items() if quantised(name, shape)}
    if not found:
        return "it has no weight matrix whose name ends in _proj.weight"
    wrong = [f"{name} is {shape}" for name, shape in found.items() if any(size % BLOCK for size in shape)]
    if not wrong and gpus > 1:
        cut = {name: shape[name.endswith(_BY_COLUMNS)] for name, shape in found.items() if not name.endswith(_SHARED)}
        wrong = [f"{name} is {found[name]} for {gpus} GPUs" for name, size in cut.items() if size % (BLOCK * gpus)]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f"all sizes must be multiples of {BLOCK}, but {', '.join(wrong[:3])}{more}" if wrong else ""
