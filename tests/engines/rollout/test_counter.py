"""Random numbers: a function of (seed, t) only, and uniform."""

import numpy as np

from headrace.engines.rollout.counter import sample_seed, uniform


def test_numbers_do_not_depend_on_their_neighbours():
    seeds = np.array([sample_seed(7, group, sample) for group in range(4) for sample in range(4)], np.uint64)
    together = uniform(seeds, np.arange(16, dtype=np.uint64))
    alone = [uniform(seeds[i : i + 1], np.array([i], np.uint64))[0] for i in range(16)]
    assert together.tolist() == alone


def test_uniform_over_counters_and_over_seeds():
    few = np.full(20_000, sample_seed(0, 0, 0), np.uint64)
    many = np.array([sample_seed(0, i, 0) for i in range(20_000)], np.uint64)
    for numbers in (uniform(few, np.arange(20_000, dtype=np.uint64)), uniform(many, np.zeros(20_000, np.uint64))):
        assert (numbers >= 0).all() and (numbers < 1).all()
        counts = np.histogram(numbers, 20, (0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_every_part_of_the_identity_changes_the_seed():
    seeds = {sample_seed(c, g, s) for c in range(10) for g in range(10) for s in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)
