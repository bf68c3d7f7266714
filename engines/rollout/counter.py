"""Counter-based random numbers: number t of a sample depends on its seed and on t, on nothing else.

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195).
"""

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample_seed(campaign_seed: int, group_id: int, sample: int) -> int:
    """The seed of one sample, in [0, 2^64): a pure function of who it is, not of where or when it is generated."""
    state = 0
    for word in (campaign_seed, group_id, sample):
        state = (state + _GOLDEN + word) & _MASK
        state = ((state ^ (state >> 30)) * _M1) & _MASK
        state = ((state ^ (state >> 27)) * _M2) & _MASK
        state ^= state >> 31
    return state


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_M1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_M2)
    return x ^ (x >> np.uint64(31))


def uniform(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1).

    Args:
        seeds: uint64 [n].
        counters: uint64 [n], number of tokens that the sample has.

    Returns:
        float64 [n], multiples of 2^-53.
    """
    bits = _mix(_mix(seeds) + (counters + np.uint64(1)) * np.uint64(_GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
