"""The hash of what lies on a GPU: the same on every device, and no change goes unseen."""

import numpy as np
import pytest
import torch

from headrace.engines.checkpoint.hashes import hash_of, row_sums

ROW = 65536


def data(nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(3)).integers(0, 256, nbytes, np.uint8))


@pytest.mark.parametrize("nbytes", [0, 5, 8, 65536, 65536 + 13, 5 * 65536, 3 * 65536 - 8, 40 * 65536 + 13])
def test_every_byte_and_the_length_count(nbytes: int) -> None:
    whole = data(nbytes)
    found = {hash_of(whole, "sums")}
    for at in {0, 7, nbytes // 2, nbytes - 1} & set(range(nbytes)):
        for bit in (0, 7):
            other = whole.clone()
            other[at] ^= 1 << bit
            assert hash_of(other, "sums") not in found
    assert hash_of(torch.cat([whole, torch.zeros(1, dtype=torch.uint8)]), "sums") not in found


@pytest.mark.parametrize("rows", [2, 40])
def test_the_sums_are_those_of_arbitrary_precision(rows: int) -> None:
    whole = data(rows * ROW + 24)
    drawn = np.random.PCG64(20261130).random_raw(ROW * 16 // 8) | np.uint64(0x0101010101010101)
    weights = drawn.view(np.int8).reshape(16, ROW).astype(object)
    padded = np.zeros((rows + 1) * ROW, np.int8)
    padded[: len(whole)] = whole.numpy().view(np.int8)
    some = padded.reshape(-1, ROW)[[0, rows - 1, rows]].astype(object)
    assert row_sums(whole)[[0, rows - 1, rows]].tolist() == (some @ weights.T).tolist()


def test_no_row_overflows() -> None:
    for byte in (0x80, 0x7F):
        extreme = torch.full((ROW,), byte, dtype=torch.uint8)
        signed = byte - 256 if byte > 127 else byte
        drawn = np.random.PCG64(20261130).random_raw(ROW * 16 // 8) | np.uint64(0x0101010101010101)
        sums = drawn.view(np.int8).reshape(16, ROW).astype(np.int64).sum(1) * signed
        assert row_sums(extreme).tolist() == [sums.tolist()]
    assert ROW * 128 * 127 < 2**31


def test_exchanged_words_and_rows_are_seen() -> None:
    whole = data(4 * 65536)
    words, rows = whole.clone().view(torch.int64), whole.clone().view(4, 65536)
    words[[3, 9]] = words[[9, 3]]
    rows[[0, 2]] = rows[[2, 0]]
    assert len({hash_of(one.reshape(-1).view(torch.uint8), "sums") for one in (whole, words, rows)}) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_the_same() -> None:
    whole = data(300 * 65536 + 77)
    assert hash_of(whole.cuda(), "sums") == hash_of(whole, "sums")
