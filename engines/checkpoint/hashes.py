"""Hashes of partitions, computed where the bytes lie.

``xxh3`` is xxh3-128 of the bytes: the hash of everything in host memory. ``sums`` is the hash of everything in GPU
memory, where xxh3 cannot run: the bytes are read as rows of 65,536 8-bit integers; each row gives 16 sums of its bytes
times fixed odd weights, a product of integer matrices, which reads the bytes once and never overflows 32 bits; the hash
is xxh3-128 over all sums and the length. Integer sums do not depend on their order, so any device gives the same. One
changed byte always changes its row's sums, because no weight is zero; two exchanged bytes meet different weights;
exchanged rows meet xxh3.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

Hashing = Literal["xxh3", "sums"]

_ROW = 65536
"""Bytes of a row."""
_SUMS = 16
"""Of a row, 32 bits each."""
_FEWEST = 32
"""Rows of a product: cuBLAS wants more than 16."""


def hashing_of(device: torch.device) -> Hashing:
    """The hash of what lies on that device."""
    return "xxh3" if device.type == "cpu" else "sums"


def hash_of(data: Tensor, hashing: Hashing) -> str:
    """The hash, as hex, of a contiguous uint8 tensor [n], whose first byte is aligned to 16 for ``sums``.

    On a GPU it waits for what was queued before it on the current stream.
    """
    return begin_hash(data, hashing)()


def begin_hash(data: Tensor, hashing: Hashing) -> Callable[[], str]:
    """As ``hash_of``, but on a GPU it only queues the work; what it returns waits for that, in any thread."""
    if hashing == "xxh3":
        found = xxhash.xxh3_128_hexdigest(data.numpy().data)
        return lambda: found
    sums, done = row_sums(data), None
    if data.device.type != "cpu":
        there, sums = sums, torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        sums.copy_(there, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(data.device))

    def finish() -> str:
        if done is not None:
            done.synchronize()
        state = xxhash.xxh3_128(sums.numpy().data)
        state.update(data.numel().to_bytes(8, "little"))
        return state.hexdigest()

    return finish


def row_sums(data: Tensor) -> Tensor:
    """int32 [rows, 16]: the weighted sums of each row of a uint8 tensor [n]; zeros fill the last row."""
    weights, values = _weights(data.device), data.view(torch.int8)
    whole = values.numel() // _ROW
    rows, rest = values[: whole * _ROW].view(whole, _ROW), values[whole * _ROW :]
    if whole < _FEWEST:
        few = torch.zeros(_FEWEST, _ROW, dtype=torch.int8, device=data.device)
        few[:whole] = rows
        sums = [torch._int_mm(few, weights)[:whole]]
    else:
        sums = [torch._int_mm(rows, weights)]
    if rest.numel():
        # A product of a row that is filled up with zeros takes as long as that of thousands of rows.
        sums.append((weights[: rest.numel()].int() * rest.int()[:, None]).sum(0, keepdim=True, dtype=torch.int32))
    return torch.cat(sums)


@lru_cache
def _weights(device: torch.device) -> Tensor:
    """int8 [bytes of a row, sums], odd, column by column, from a generator whose bits numpy promises to keep."""
    drawn = np.random.PCG64(20261130).random_raw(_ROW * _SUMS // 8) | np.uint64(0x0101010101010101)
    return torch.from_numpy(drawn.view(np.int8).copy()).view(_SUMS, _ROW).to(device).t()
