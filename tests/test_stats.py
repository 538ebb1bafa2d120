"""Histograms: where samples go, and that snapshots stay as they were."""

import pytest

from metaq.stats import LATENCY_BOUNDS_S, Histogram, merge_snapshots


@pytest.mark.parametrize(
    ("value", "counts"),
    [(0.0, (1, 0, 0)), (1.0, (1, 0, 0)), (1.1, (0, 1, 0)), (2.0, (0, 1, 0)),
     (2.1, (0, 0, 1))],
)  # fmt: skip
def test_bounds_are_inclusive(value: float, counts: tuple[int, ...]) -> None:
    """A sample on a bound belongs below it; the last bucket has no bound."""
    histogram = Histogram((1.0, 2.0))
    histogram.record(value)
    assert histogram.snapshot().counts == counts


def test_a_snapshot_does_not_change() -> None:
    """A snapshot stays as it was; samples may come in numbers."""
    histogram = Histogram()
    histogram.record(0.5, 10)
    before = histogram.snapshot()
    histogram.record(100.0)
    assert (before.count, before.total) == (10, 5.0)
    assert histogram.snapshot().counts[-1] == 1
    assert before.bounds == LATENCY_BOUNDS_S == tuple(sorted(LATENCY_BOUNDS_S))


def test_merged_snapshots_hold_every_sample_once() -> None:
    """Counts and totals add up, bucket by bucket."""
    histograms = [Histogram((1.0, 2.0)) for _ in range(3)]
    for number, histogram in enumerate(histograms):
        histogram.record(number + 0.5, number + 1)
    merged = merge_snapshots(each.snapshot() for each in histograms)
    assert (merged.counts, merged.total) == ((1, 2, 3), 0.5 + 3.0 + 7.5)
    assert merge_snapshots([merged]) == merged
