"""The inner loop of finding changes, compiled: NumPy has none that finds single words here and there at the speed of
memory."""

import numba
import numpy as np

_DE_BRUIJN = 0x03F79D71B4CB0A89
_WHICH = np.zeros(64, np.uint64)
"""Which bit a word's only one is, by the upper six bits of its product with a de Bruijn sequence (Leiserson, Prokop and
Randall, *Using de Bruijn sequences to index a 1 in a computer word*, 1998)."""
for _bit in range(64):
    _WHICH[((_DE_BRUIJN << _bit) & (1 << 64) - 1) >> 58] = _bit
_FACTOR, _SHIFT = np.uint64(_DE_BRUIJN), np.uint64(58)
_NONE, _ONE, _ROW = np.uint64(0), np.uint64(1), np.uint64(64)


@numba.njit(nogil=True)
def gather(
    changed: np.ndarray,
    new: np.ndarray,
    old: np.ndarray,
    block: int,
    counts: np.ndarray,
    places: np.ndarray,
    values: np.ndarray,
) -> int:
    """Makes ``old`` what ``new`` is, and lists what that changes.

    changed: uint64 [ceil(words / 64)], a bit for each word, the lowest first. block: words of a block, a multiple of
    64, at most 65,536. counts: gets the changes of each block; places: of each change, in its block; values: its word.
    Returns the number of changes.
    """
    # Everything is unsigned: an index that may be negative costs a third of the time more.
    found, rows = _NONE, np.uint64(block) // _ROW
    for number in range(np.uint64(counts.size)):
        before, first = found, number * rows
        for row in range(first, min(first + rows, np.uint64(changed.size))):
            bits = changed[row]
            while bits != _NONE:
                which = _WHICH[((bits & (~bits + _ONE)) * _FACTOR) >> _SHIFT]
                word = row * _ROW + which
                places[found] = word - first * _ROW
                values[found] = old[word] = new[word]
                found += _ONE
                bits &= bits - _ONE
        counts[number] = found - before
    return np.int64(found)
