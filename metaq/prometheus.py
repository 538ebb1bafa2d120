"""Metrics of Prometheus, each described once, and the families that samples become.

A table of `MetricSpec` and `HistogramSpec` says what an object's snapshot S gives; who
exports it reads the samples and makes the families. Pure but for the library's types.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from metaq.stats import HistogramSnapshot, merge_snapshots

S = TypeVar("S")

Sample = tuple[tuple[str, ...], float]
"""The values of the labels, and the number."""


# No slots: Python 3.11 cannot call a parameterized class that is frozen and has them.
@dataclass(frozen=True)
class MetricSpec(Generic[S]):
    """One counter or gauge of a table."""

    name: str
    """As exported; counters end in `_total`."""
    help: str
    """One sentence."""
    labels: tuple[str, ...]
    """Names of its labels."""
    read: Callable[[S], Iterable[Sample]]
    """Its samples; none where the part does not exist."""
    combine: Callable[[float, float], float] = operator.add
    """How samples with equal labels are put together, where there may be some."""

    @property
    def kind(self) -> str:
        """Return "counter" or "gauge"."""
        return "counter" if self.name.endswith("_total") else "gauge"


@dataclass(frozen=True)
class HistogramSpec(Generic[S]):
    """One histogram of a table."""

    name: str
    """As exported, without `_bucket`, `_sum` and `_count`."""
    help: str
    """One sentence."""
    read: Callable[[S], Iterable[HistogramSnapshot]]
    """Its snapshots, which are put together."""

    @property
    def kind(self) -> str:
        """Return "histogram"."""
        return "histogram"

    @property
    def labels(self) -> tuple[str, ...]:
        """Return no labels."""
        return ()


def metric_family(spec: MetricSpec[S], samples: Iterable[Sample]) -> Metric:
    """Return the family of a counter or gauge; the labels of each sample once."""
    family = (
        CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
        if spec.kind == "counter"
        else GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
    )
    for labels, value in samples:
        family.add_metric([_printable(label) for label in labels], float(value))
    return family


def histogram_family(
    spec: HistogramSpec[S], snapshots: Sequence[HistogramSnapshot]
) -> Metric:
    """Return the family of a histogram, without samples where there is no snapshot."""
    family = HistogramMetricFamily(spec.name, spec.help)
    if snapshots:
        seen = merge_snapshots(snapshots)
        bounds = [*map(floatToGoString, seen.bounds), "+Inf"]
        buckets = zip(bounds, accumulate(seen.counts), strict=True)
        family.add_metric([], list(buckets), seen.total)
    return family


def _printable(text: str) -> str:
    """Return a label that UTF-8 can hold, whatever bytes a path is made of."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
