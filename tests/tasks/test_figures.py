"""The arithmetic of the overhead metric."""

from headrace.tasks.figures import covered


def test_covered_counts_overlaps_once_and_clips():
    spans = [(0.0, 2.0), (1.0, 3.0), (5.0, 9.0), (5.5, 6.0)]
    assert covered(spans, 0.5, 8.0) == 2.5 + 3.0
    assert covered([], 0.0, 1.0) == 0.0
    assert covered([(3.0, 4.0)], 0.0, 1.0) == 0.0
