"""Hashes of partitions, computed where the bytes lie.

``xxh3`` is xxh3-128 of the bytes: the hash of everything in host memory. ``sums`` is the hash of everything in GPU
memory, where xxh3 cannot run: the bytes are read as 64-bit words in rows of 8,192; each row gives the sum of its words
times fixed odd weights, modulo 2^64; the hash is xxh3-128 over the rows' sums, the last words and the length. Integer
sums do not depend on their order, so any device gives the same. One changed word always changes its row's sum, because
an odd weight is invertible; two exchanged words meet different weights; exchanged rows meet xxh3.
"""

from functools import lru_cache
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

Hashing = Literal["xxh3", "sums"]

_ROW = 8192
"""Words of a row: 64 KiB."""
_CHUNK = 1024
"""Rows that are multiplied at a time, so that the product takes 64 MiB."""


def hashing_of(device: torch.device) -> Hashing:
    """The hash of what lies on that device."""
    return "xxh3" if device.type == "cpu" else "sums"


def hash_of(data: Tensor, hashing: Hashing) -> str:
    """The hash, as hex, of a contiguous uint8 tensor [n], whose first byte is aligned to 8 for ``sums``.

    On a GPU it waits for what was queued before it on the current stream.
    """
    if hashing == "xxh3":
        return xxhash.xxh3_128_hexdigest(data.numpy().data)
    state = xxhash.xxh3_128(row_sums(data).numpy().data)
    state.update(data[data.numel() // 8 * 8 :].cpu().numpy().data)
    state.update(data.numel().to_bytes(8, "little"))
    return state.hexdigest()


def row_sums(data: Tensor) -> Tensor:
    """int64 [rows] on the CPU: the weighted sum of each row of a uint8 tensor [n]; the last row may be short."""
    if data.numel() < 8:
        return torch.zeros(1, dtype=torch.int64)
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    weights = _weights(data.device)
    whole = words.numel() // _ROW
    rows = words[: whole * _ROW].view(whole, _ROW)
    sums = [(rows[i : i + _CHUNK] * weights).sum(1) for i in range(0, whole, _CHUNK)]
    rest = words[whole * _ROW :]
    return torch.cat([*sums, (rest * weights[: rest.numel()]).sum().reshape(1)]).cpu()


@lru_cache
def _weights(device: torch.device) -> Tensor:
    """Odd words from a generator whose bits numpy promises to keep."""
    drawn = np.random.PCG64(20261130).random_raw(_ROW) | np.uint64(1)
    return torch.from_numpy(drawn.view(np.int64).copy()).to(device)
