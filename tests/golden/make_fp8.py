"""Computes tests/golden/fp8.json with vLLM's own conversion of weights into blocks of FP8, on the CPU.

From the root of the repository, with vLLM's interpreter: ``python -m tests.golden.make_fp8 tests/golden/fp8.json``. The
weights are drawn from a generator whose bits numpy promises to keep; the file has hashes of what vLLM makes of them.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import xxhash

CASES = ((128, 128), (256, 384), (130, 257), (1, 1), (576, 200), (1024, 896))


def weight(seed: int, rows: int, columns: int) -> torch.Tensor:
    """bfloat16 [rows, columns] from random bits: magnitudes from 2^-31 to 2^16; one block of zeros."""
    bits = np.random.PCG64(seed).random_raw(rows * columns).astype(np.uint16)
    bits = bits & 0x8FFF | 0x3000  # sign, exponents 96 to 127
    drawn = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).view(rows, columns)
    drawn = drawn * torch.from_numpy(np.exp2(np.arange(rows) // 32 % 16)).bfloat16()[:, None]
    if columns > 128:
        drawn[:128, 128:256] = 0
    return drawn


def hash_of(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().data)


def main() -> None:
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.utils.deep_gemm import per_block_cast_to_fp8  # pyright: ignore[reportMissingImports]

    cases = []
    for seed, (rows, columns) in enumerate(CASES):
        drawn = weight(seed, rows, columns)
        values, scales = per_block_cast_to_fp8(drawn, block_size=[128, 128], use_ue8m0=False)
        made = {"weight": hash_of(drawn), "values": hash_of(values), "scales": scales.flatten().tolist()}
        cases.append({"seed": seed, "rows": rows, "columns": columns, **made})
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    Path(sys.argv[1]).write_text(json.dumps({"versions": versions, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
