"""The hash of what lies on a GPU: the same on every device, and no change goes unseen."""

import numpy as np
import pytest
import torch

from headrace.engines.checkpoint.hashes import hash_of, row_sums

WORDS = 8192


def data(nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(3)).integers(0, 256, nbytes, np.uint8))


@pytest.mark.parametrize("nbytes", [0, 5, 8, 65536, 65536 + 13, 5 * 65536, 3 * 65536 - 8])
def test_every_byte_and_the_length_count(nbytes: int) -> None:
    whole = data(nbytes)
    found = {hash_of(whole, "sums")}
    for at in {0, 7, nbytes // 2, nbytes - 1} & set(range(nbytes)):
        for bit in (0, 7):
            other = whole.clone()
            other[at] ^= 1 << bit
            assert hash_of(other, "sums") not in found
    assert hash_of(torch.cat([whole, torch.zeros(1, dtype=torch.uint8)]), "sums") not in found


def test_the_sums_are_those_of_arbitrary_precision() -> None:
    whole = data(2 * 65536 + 24)
    weights = [int(w) | 1 for w in np.random.PCG64(20261130).random_raw(WORDS)]
    words = [int(w) for w in whole.numpy().view(np.uint64)]
    expected = [
        sum(w * m for w, m in zip(words[i : i + WORDS], weights, strict=False)) % 2**64
        for i in range(0, len(words), WORDS)
    ]
    assert [value % 2**64 for value in row_sums(whole).tolist()] == expected


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
