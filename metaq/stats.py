"""Numbers that objects keep about themselves, and the snapshots they hand out.

A snapshot is a dataclass. Each number of it that is exported is declared once, on its
field: `counter`, `gauge` or `histogram` give it a name, a sentence and labels, and
`part` says what distinguishes snapshots inside a snapshot. Metrics, the tables
of the pages and the sums of what is closed are made from that:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class ListenerStatistics:
        open_count: int = gauge("metaq_connections", "Connections that are open.")

No export format: who exports reads `statistics()` and declarations.

Sums over objects that come and go do not fall when one is closed (`Totals`): a sum that
fell would look like a restart to those who compute rates from it.
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
    """Samples per bucket, not cumulated; the one beyond the bounds is for larger
    values."""
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
        """Return a snapshot of the samples so far."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


# -- declarations ---------------------------------------------------------------------


class MetricKind(enum.Enum):
    """Kind of a metric, as Prometheus has it."""

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
    """Makes a number of the field's value, or a mapping from keys to numbers, or None
    where there is no sample; without it the value is one of these."""
    label: Callable[[Any], tuple[str, ...]] = lambda key: (key,)
    """Makes the values of `labels` of a key."""
    combine: Callable[[float, float], float] = operator.add
    """Puts samples with equal labels together."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """Declarations on one field of a snapshot."""

    metrics: tuple[MetricSpec, ...] = ()
    labels: tuple[str, ...] = ()
    """Labels that distinguish the snapshots in it."""
    label: Callable[[Any], tuple[str, ...]] = lambda _: ()
    """Their values, of a member of a tuple or a key of a mapping."""
    count_max: int | None = None
    """Snapshots in it that are exported, the first ones; None: all."""
    is_closed: bool = False
    """Holds what is closed: of the snapshots in it only sums are exported."""


_KEY: Final = "metaq.stats"


def spec_of(field: "dataclasses.Field[Any]") -> FieldSpec:
    """Return what is declared on a field; nothing where nothing is."""
    spec: FieldSpec = field.metadata.get(_KEY, FieldSpec())
    return spec


# Like `dataclasses.field`, these return no value of the declared type.
def counter(name: str, text: str, *, default: Any = 0, **more: Any) -> Any:
    """Declare a field that only grows; see `MetricSpec`. It begins with 0.

    Args:
        name: as exported.
        text: one sentence.
        default: of the field; a callable makes it.
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
    """Declare a field with snapshots in it: one or None, a tuple, or a mapping.

    One snapshot that is part of another needs no declaration.

    Args:
        metrics: numbers that the field itself gives.
        default: of the field; a callable makes it; none unless given.
        more: `labels`, `label`, `count_max`, `is_closed` of `FieldSpec`.
    """
    metadata = {_KEY: FieldSpec(metrics, **more)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def total_of(parts: Sequence[S]) -> S:
    """Return what snapshots of one class, one or more, counted together.

    Counters and histograms are added, also in snapshots that are part of them.
    Everything else has its default: nothing is buffered or in flight any more.
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
    """End of a counting object."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""

    @property
    def has_ended(self) -> bool:
        """Whether it is closed and its counters are final."""


E = TypeVar("E", bound=Ending)


class Totals(Generic[E, S]):
    """All of one kind that one owner has made.

    A closed object is dropped after its last count, and its counters are added to those
    of the closed ones before it. Nothing is buffered or in flight there.

    Concurrency: `add` on the owner's loop, the others in any thread.
    """

    def __init__(
        self, read: Callable[[E], S], total_of: Callable[[Sequence[S]], S]
    ) -> None:
        """Start with none.

        Args:
            read: takes a snapshot of one.
            total_of: puts snapshots together, one or more, the oldest first.
        """
        self._read = read
        self._total_of = total_of
        # One value, because a snapshot may be taken in another thread.
        self._state: tuple[tuple[S, ...], tuple[E, ...]] = ((), ())

    def add(self, new: E) -> None:
        """Count a new one, and forget those that have ended."""
        closed, known = self._state
        ended = [one for one in known if one.has_ended]
        if ended:
            closed = (self._total_of([*closed, *map(self._read, ended)]),)
        alive = (one for one in known if one not in ended)
        self._state = (closed, (*alive, new))

    def split(self) -> tuple[tuple[E, ...], S | None]:
        """Return those that are open, and the sum of the closed ones.

        None in place of the second: none was closed.
        """
        before, known = self._state
        opened: list[E] = []
        closed = list(before)
        for one in known:
            # Looked at once: another thread may close it, and it is in one of the two.
            if one.is_closed:
                closed.append(self._read(one))
            else:
                opened.append(one)
        return tuple(opened), self._total_of(closed) if closed else None

    def total(self) -> S | None:
        """Return the sum of all; None: there was none."""
        closed, known = self._state
        parts = [*closed, *map(self._read, known)]
        return self._total_of(parts) if parts else None
