"""Numbers that objects keep about themselves, and the snapshots they hand out.

Counters are plain integers of the object that counts; what needs a shape is here.
No export format: who exports reads `statistics()` and snapshots.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

LATENCY_BOUNDS_S: Final = (
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025,
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of latency buckets: from an fsync of a good disk to a stalled one."""


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """What a histogram had seen at one moment."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, ascending, inclusive."""
    counts: tuple[int, ...]
    """Samples per bucket, not cumulated; one more than bounds, for what is above."""
    total: float
    """Sum of all samples."""

    @property
    def count(self) -> int:
        """Return the number of samples."""
        return sum(self.counts)


def merge_snapshots(snapshots: Iterable[HistogramSnapshot]) -> HistogramSnapshot:
    """Return what histograms with the same bounds, one or more, have seen together."""
    first, *others = snapshots
    counts, total = first.counts, first.total
    for other in others:
        assert other.bounds == first.bounds, (other.bounds, first.bounds)
        counts = tuple(map(sum, zip(counts, other.counts, strict=True)))
        total += other.total
    return HistogramSnapshot(first.bounds, counts, total)


class Histogram:
    """Counts samples in fixed buckets. One thread records; any may take a snapshot.

    A snapshot of another thread may have the newest sample in its counts and not yet
    in its total.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def record(self, value: float, count: int = 1) -> None:
        """Count `count` samples of the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def snapshot(self) -> HistogramSnapshot:
        """Return what was seen so far."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)
