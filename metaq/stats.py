"""Statistics that objects keep about themselves, and the snapshots they return.

A snapshot is a dataclass. Each exported number of it is declared once, on its field:
`counter`, `gauge` or `histogram` give it a name, a sentence and labels, and `part`
gives the labels of snapshots inside a snapshot. The metrics, the tables in the pages
and the sums over closed objects are made from these declarations:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class ListenerStatistics:
        open_count: int = gauge("metaq_connections", "Connections that are open.")

This module knows no export format: an exporter reads `statistics()` and the
declarations.

The counters of closed objects stay in the sums (`Totals`), because a sum that falls
looks like a restart to a monitoring system that computes rates.
"""

import dataclasses
import enum
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

S = TypeVar("S")

LATENCY_BOUNDS_S: Final = (
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025,
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of latency buckets: from an fsync of a good disk to a stalled one."""


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Values of a histogram at one moment."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, ascending, inclusive."""
    counts: tuple[int, ...]
    """Samples per bucket, not cumulative; the last is for values above the bounds."""
    total: float

    @property
    def count(self) -> int:
        """Return the number of samples."""
        return sum(self.counts)


def merge_snapshots(snapshots: Iterable[HistogramSnapshot]) -> HistogramSnapshot:
    """Return the sum of histograms with the same bounds, one or more."""
    first, *others = snapshots
    counts, total = first.counts, first.total
    for other in others:
        assert other.bounds == first.bounds, (other.bounds, first.bounds)
        counts = tuple(map(sum, zip(counts, other.counts, strict=True)))
        total += other.total
    return HistogramSnapshot(first.bounds, counts, total)


class Histogram:
    """Counts samples in fixed buckets. One thread records; any may take a snapshot.

    A snapshot taken on another thread may have the newest sample in its counts but not
    yet in its total.
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
        """Return a snapshot of the samples so far."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


# -- declarations ---------------------------------------------------------------------


class MetricKind(enum.Enum):
    """Kind of a metric, as in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One exported number."""

    kind: MetricKind
    name: str
    """As exported: base units, counters end in `_total`."""
    help: str
    labels: tuple[str, ...] = ()
    read: Callable[[Any], object] | None = None
    """Converts the field's value to a number, a mapping from keys to numbers, or None
    for no sample. Without it, the value already is one of these."""
    label: Callable[[Any], tuple[str, ...]] = lambda key: (key,)
    """Converts a key of such a mapping to the values of `labels`."""
    combine: Callable[[float, float], float] = operator.add
    """Combines samples with equal labels."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """Declarations on one field of a snapshot."""

    metrics: tuple[MetricSpec, ...] = ()
    labels: tuple[str, ...] = ()
    """Names of the labels that distinguish the snapshots in the field."""
    label: Callable[[Any], tuple[str, ...]] = lambda _: ()
    """Values of `labels`, from a member of a tuple or a key of a mapping."""
    count_max: int | None = None
    """Maximum number of snapshots exported, from the first; None: all."""
    is_closed: bool = False
    """The field is the sum of closed objects; gauges in it are not exported."""


_KEY: Final = "metaq.stats"


def spec_of(field: "dataclasses.Field[Any]") -> FieldSpec:
    """Return the declarations on a field; empty if there are none."""
    spec: FieldSpec = field.metadata.get(_KEY, FieldSpec())
    return spec


# Like `dataclasses.field`, these return no value of the declared type.
def counter(name: str, text: str, *, default: Any = 0, **more: Any) -> Any:
    """Declare a field that only grows, from 0; see `MetricSpec`.

    Args:
        name: name of the metric.
        text: help of the metric, one sentence.
        default: default of the field; a callable is its factory.
        more: `labels`, `read`, `label`, `combine`.
    """
    return part(MetricSpec(MetricKind.COUNTER, name, text, **more), default=default)


def gauge(name: str, text: str, *, default: Any = 0, **more: Any) -> Any:
    """Declare a field that goes up and down; otherwise as `counter`."""
    return part(MetricSpec(MetricKind.GAUGE, name, text, **more), default=default)


def histogram(name: str, text: str) -> Any:
    """Declare a field with a `HistogramSnapshot`; it has no default."""
    return part(MetricSpec(MetricKind.HISTOGRAM, name, text))


def part(*metrics: MetricSpec, default: Any = MISSING, **more: Any) -> Any:
    """Declare a field that holds snapshots: one or None, a tuple, or a mapping.

    A field that always holds one snapshot needs no declaration.

    Args:
        metrics: metrics of the field itself.
        default: default of the field; a callable is its factory; without it, none.
        more: `labels`, `label`, `count_max`, `is_closed` of `FieldSpec`.
    """
    metadata = {_KEY: FieldSpec(metrics, **more)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def total_of(parts: Sequence[S]) -> S:
    """Return the sum of snapshots of one class; one or more.

    Counters and histograms are added, also those of inner snapshots. Other fields get
    their defaults: a closed object has nothing buffered or in flight.
    """
    sums: dict[str, object] = {}
    for field in dataclasses.fields(parts[0]):  # type: ignore[arg-type]  # a dataclass
        values = [getattr(one, field.name) for one in parts]
        kinds = {metric.kind for metric in spec_of(field).metrics}
        inner = [value for value in values if dataclasses.is_dataclass(value)]
        if MetricKind.HISTOGRAM in kinds:
            sums[field.name] = merge_snapshots(values)
        elif MetricKind.COUNTER in kinds:
            sums[field.name] = _added(values)
        elif inner:
            sums[field.name] = total_of(inner)
    return type(parts[0])(**sums)


def _added(values: Sequence[Any]) -> object:
    if not isinstance(values[0], Mapping):
        return sum(values)
    total: Counter[object] = Counter()
    for value in values:
        total.update(value)
    return dict(total)


class Ending(Protocol):
    """The end of an object that counts."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""

    @property
    def has_ended(self) -> bool:
        """Whether it is closed and its counters are final."""


E = TypeVar("E", bound=Ending)


class Totals(Generic[E, S]):
    """Counters of all objects of one kind that one owner has made.

    An object that has ended is dropped, and its counters are added to the sum of those
    before it; nothing in it is buffered or in flight.

    Concurrency: call `add` on the owner's loop, the others on any thread.
    """

    def __init__(
        self, read: Callable[[E], S], total_of: Callable[[Sequence[S]], S]
    ) -> None:
        """Start without objects.

        Args:
            read: returns a snapshot of one object.
            total_of: sums snapshots, one or more, the oldest first.
        """
        self._read = read
        self._total_of = total_of
        # One value, because another thread may take a snapshot.
        self._state: tuple[tuple[S, ...], tuple[E, ...]] = ((), ())

    def add(self, new: E) -> None:
        """Add a new object, and drop those that have ended."""
        closed, known = self._state
        ended = [one for one in known if one.has_ended]
        if ended:
            closed = (self._total_of([*closed, *map(self._read, ended)]),)
        alive = (one for one in known if one not in ended)
        self._state = (closed, (*alive, new))

    def split(self) -> tuple[tuple[E, ...], S | None]:
        """Return the open objects, and the sum of the closed ones.

        The sum is None if none was closed.
        """
        before, known = self._state
        opened: list[E] = []
        closed = list(before)
        for one in known:
            # Read once: another thread may close it, and it must be in exactly one of
            # the two.
            if one.is_closed:
                closed.append(self._read(one))
            else:
                opened.append(one)
        return tuple(opened), self._total_of(closed) if closed else None

    def total(self) -> S | None:
        """Return the sum of all, open and closed; None if there were none."""
        closed, known = self._state
        parts = [*closed, *map(self._read, known)]
        return self._total_of(parts) if parts else None
