"""What the benchmarks of weights share: models on paper, floors, and how a figure is printed."""

import json
import time
from typing import Any

import torch
from torch import Tensor

from headrace.engines.checkpoint.hashes import hash_of

SIZES = {
    "0.5B": {"hidden": 896, "layers": 24, "kv": 128, "inter": 4864, "vocab": 151936},
    "2.5B": {"hidden": 2560, "layers": 26, "kv": 512, "inter": 9728, "vocab": 49152},
    "1.57B": {"hidden": 1536, "layers": 32, "kv": 256, "inter": 8960, "vocab": 49152},
    "8B": {"hidden": 4096, "layers": 36, "kv": 1024, "inter": 12288, "vocab": 151936},
}
Metas = list[tuple[str, str, list[int]]]


def metas_of(size: str) -> Metas:
    """A decoder's tensors in bfloat16."""
    c = SIZES[size]
    h, kv, inter = c["hidden"], c["kv"], c["inter"]
    layer = {"q": [h, h], "k": [kv, h], "v": [kv, h], "o": [h, h], "gate": [inter, h], "up": [inter, h]}
    layer |= {"down": [h, inter], "norm1": [h], "norm2": [h]}
    shapes = {"embed": [c["vocab"], h]}
    shapes |= {f"layers.{i}.{name}": shape for i in range(c["layers"]) for name, shape in layer.items()}
    return [(name, "bfloat16", shape) for name, shape in (shapes | {"norm": [h]}).items()]


def random_model(metas: Metas, device: str) -> dict[str, Tensor]:
    make = torch.Generator(device).manual_seed(7)
    return {name: torch.randn(shape, generator=make, device=device, dtype=torch.bfloat16) for name, _, shape in metas}


def nbytes_of(metas: Metas) -> int:
    return sum(2 * torch.Size(shape).numel() for _, _, shape in metas)


def copy_seconds(nbytes: int, source: str, target: str) -> float:
    """Best of ten bare copies of that many bytes."""
    a = torch.empty(nbytes, dtype=torch.uint8, device=source)
    b = torch.empty(nbytes, dtype=torch.uint8, device=target)
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        began = time.perf_counter()
        b.copy_(a)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        best = min(best, time.perf_counter() - began)
    return best


def hash_seconds(nbytes: int, device: str) -> float:
    """Best of three, of that many bytes in parts of 512 MiB: the slots of partition_mb 1024."""
    data = torch.zeros(min(nbytes, 512 << 20), dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        hash_of(data, "sums")
        best = min(best, time.perf_counter() - began)
    return best * nbytes / data.numel()


def show(what: str, **figures: Any) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)
