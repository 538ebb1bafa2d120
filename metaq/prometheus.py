"""Metrics of a snapshot class as Prometheus metric families.

`metrics_of` walks the fields of a snapshot class and of the snapshots in it, and
collects the metrics that they declare with `metaq.stats`. Pure, but uses the library's
types.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any, TypeAlias, get_args, get_type_hints

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from metaq.stats import (
    FieldSpec,
    HistogramSnapshot,
    MetricKind,
    MetricSpec,
    merge_snapshots,
    spec_of,
)

Labels: TypeAlias = tuple[str, ...]
Found: TypeAlias = Iterator[tuple[Labels, Any]]
"""Numbers, histograms or snapshots, each with its labels."""


@dataclass(frozen=True, slots=True)
class ExportedMetric:
    """One metric, and the sources of its samples in a snapshot."""

    spec: MetricSpec
    """With all labels, those of the enclosing snapshots first."""
    sources: tuple[Callable[[Any], Found], ...]
    """Each yields the samples of a snapshot; labels may occur more than once."""

    def samples(self, snapshots: Iterable[object]) -> dict[Labels, Any]:
        """Return the samples of all snapshots, one for each set of labels."""
        found: dict[Labels, Any] = {}
        for snapshot in snapshots:
            for source in self.sources:
                for labels, value in source(snapshot):
                    known = found.get(labels)
                    found[labels] = value if known is None else self._both(known, value)
        return found

    def family(self, samples: Iterable[tuple[Labels, Any]]) -> Metric:
        """Return the library's family; each set of labels must occur once."""
        name, text, labels = self.spec.name, self.spec.help, self.spec.labels
        if self.spec.kind is MetricKind.HISTOGRAM:
            return _histogram_family(name, text, (value for _, value in samples))
        family = (
            CounterMetricFamily(name, text, labels=labels)
            if self.spec.kind is MetricKind.COUNTER
            else GaugeMetricFamily(name, text, labels=labels)
        )
        for values, number in samples:
            family.add_metric([_printable(value) for value in values], float(number))
        return family

    def _both(self, one: Any, other: Any) -> Any:
        if self.spec.kind is MetricKind.HISTOGRAM:
            return merge_snapshots([one, other])
        return self.spec.combine(one, other)


def metrics_of(snapshot: type) -> tuple[ExportedMetric, ...]:
    """Return the metrics that a class of snapshots declares, in the order of fields.

    A name that is declared in several places is one metric with all their samples.
    """
    found: dict[str, ExportedMetric] = {}
    for spec, source in _walk(snapshot, (), lambda root: iter([((), root)])):
        known = found.get(spec.name)
        sources = () if known is None else known.sources
        assert known is None or known.spec.labels == spec.labels, spec.name
        found[spec.name] = ExportedMetric(spec, (*sources, source))
    return tuple(found.values())


def _walk(
    owner: type, labels: Labels, reach: Callable[[Any], Found], *, closed: bool = False
) -> Iterator[tuple[MetricSpec, Callable[[Any], Found]]]:
    """Yield (metric, source) of a class; `reach` yields its snapshots in a root."""
    hints = get_type_hints(owner)
    for field in fields(owner):
        declared = spec_of(field)
        for spec in declared.metrics:
            if not (closed and spec.kind is MetricKind.GAUGE):
                full = replace(spec, labels=(*labels, *spec.labels))
                yield full, partial(_read, reach, field.name, spec)
        # Find the X in X | None, tuple[X, ...] and Mapping[key, X].
        hint = hints[field.name]
        for inner in reversed((hint, *get_args(hint))):
            if is_dataclass(inner) and isinstance(inner, type):
                parts = partial(_parts, reach, field.name, declared)
                inner_labels = (*labels, *declared.labels)
                is_closed = closed or declared.is_closed
                yield from _walk(inner, inner_labels, parts, closed=is_closed)
                break


def _read(
    reach: Callable[[Any], Found], name: str, spec: MetricSpec, root: object
) -> Found:
    for labels, owner in reach(root):
        value = getattr(owner, name)
        if spec.read is not None:
            value = spec.read(value)
        if isinstance(value, Mapping):
            for key, number in value.items():
                yield (*labels, *spec.label(key)), number
        elif value is not None:
            yield labels, value


def _parts(
    reach: Callable[[Any], Found], name: str, declared: FieldSpec, root: object
) -> Found:
    for labels, owner in reach(root):
        value = getattr(owner, name)
        if isinstance(value, Mapping):
            found = ((declared.label(key), one) for key, one in value.items())
        elif isinstance(value, tuple):
            found = ((declared.label(one), one) for one in value)
        else:
            found = (((), one) for one in (value,) if one is not None)
        for more, one in islice(found, declared.count_max):
            yield (*labels, *more), one


def _histogram_family(
    name: str, text: str, snapshots: Iterable[HistogramSnapshot]
) -> Metric:
    """Return the family of a histogram; without snapshots it has no samples."""
    family = HistogramMetricFamily(name, text)
    for seen in snapshots:
        bounds = [*map(floatToGoString, seen.bounds), "+Inf"]
        buckets = zip(bounds, accumulate(seen.counts), strict=True)
        family.add_metric([], list(buckets), seen.total)
    return family


def _printable(text: str) -> str:
    """Return a label value that UTF-8 can encode, because paths may have any bytes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
