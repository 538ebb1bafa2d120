"""Bounds on the records to read, and the query's filters that narrow them.

Filters pushed down by Spark are used only as far as they exclude files. Spark evaluates
every filter again, so the conditions derived here may be weaker, never stronger.
Filters are distinguished by the names of their classes, which do not exist before Spark
4.1.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from metaq.model import MAX_OFFSET, Millis, Offset, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

_US_PER_MS: Final = 1000
_FIRST: Final = Offset(0)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Half-open ranges of offsets and times; a wanted record is in both. None: open.

    A record of unknown time, stamped by a Java broker, is in every range of times.
    """

    start: Offset = _FIRST
    """First wanted offset; need not be a record boundary."""
    end: Offset = MAX_OFFSET
    start_ms: Millis | None = None
    end_ms: Millis | None = None

    def narrowed(self, other: "Bounds") -> "Bounds":
        """Return the intersection of these bounds with others."""
        starts = [b.start_ms for b in (self, other) if b.start_ms is not None]
        ends = [b.end_ms for b in (self, other) if b.end_ms is not None]
        return Bounds(
            max(self.start, other.start),
            min(self.end, other.end),
            max(starts, default=None),
            min(ends, default=None),
        )

    def overlaps(self, start: Offset, end: Offset) -> bool:
        """Return whether a record in [start, end) may be wanted."""
        return start < self.end and self.start < end

    def clip(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the wanted rows of a batch; uses columns `offset` and `timestamp`."""
        masks = []
        offsets, times = batch.column("offset"), batch.column("timestamp")
        if self.start > 0:
            masks.append(pc.greater_equal(offsets, self.start))
        if self.end < MAX_OFFSET:
            masks.append(pc.less(offsets, self.end))
        if self.start_ms is not None:
            bound = pa.scalar(self.start_ms * _US_PER_MS, times.type)
            masks.append(pc.fill_null(pc.greater_equal(times, bound), True))
        if self.end_ms is not None:
            bound = pa.scalar(self.end_ms * _US_PER_MS, times.type)
            masks.append(pc.fill_null(pc.less(times, bound), True))
        for mask in masks[1:]:
            masks[0] = pc.and_(masks[0], mask)
        return batch.filter(masks[0]) if masks else batch


EVERYTHING: Final = Bounds()


_1970: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EQUALS: Final = frozenset({"EqualTo", "EqualNullSafe"})
_SETS: Final = {
    "topic": "topics", "broker_id": "broker_ids", "partition": "partitions",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """Conditions on files derived from filters, all of which must hold.

    None: any topic, broker or partition may match.
    """

    topics: frozenset[str] | None = None
    broker_ids: frozenset[int] | None = None
    partitions: frozenset[int] | None = None
    bounds: Bounds = EVERYTHING

    def allows(self, partition: TopicPartition) -> bool:
        """Return whether a record of a partition may match."""
        pairs = (
            (self.topics, partition.topic),
            (self.broker_ids, partition.broker_id),
            (self.partitions, partition.partition),
        )
        return all(allowed is None or value in allowed for allowed, value in pairs)


class TakesFilters:
    """Mixin of readers that skip parts which cannot match the query's filters."""

    _pushed: PushedFilters

    def pushFilters(self, filters: "list[Filter]") -> "Iterable[Filter]":  # noqa: N802  # Spark's name
        """Store filters; return all of them, so that Spark evaluates them too."""
        self._pushed = read_filters(filters)
        return filters


def read_filters(filters: Iterable[object]) -> PushedFilters:
    """Return the conditions on files that follow from filters; others are ignored.

    Args:
        filters: objects of `pyspark.sql.datasource.Filter`.
    """
    found = PushedFilters()
    for item in filters:
        path: tuple[str, ...] = getattr(item, "attribute", ())
        if len(path) == 1:
            kind, value = type(item).__name__, getattr(item, "value", None)
            found = _narrowed(found, path[0].lower(), kind, value)
    return found


def _narrowed(
    found: PushedFilters, column: str, kind: str, value: Any
) -> PushedFilters:
    """Return `found` narrowed by one more filter."""
    if value is None:
        return found
    if kind == "In" or kind in _EQUALS:
        values = frozenset(value if kind == "In" else (value,))
        if (name := _SETS.get(column)) is not None:
            before = getattr(found, name)
            changed: Any = {name: values if before is None else values & before}
            return replace(found, **changed)
    bounds = None
    if column == "offset" and isinstance(value, int):
        bounds = _offset_bounds(kind, value)
    elif column == "timestamp" and isinstance(value, datetime):
        bounds = _time_bounds(kind, value)
    if bounds is None:
        return found
    return replace(found, bounds=found.bounds.narrowed(bounds))


def _offset_bounds(kind: str, value: int) -> Bounds | None:
    low, high = Offset(value), Offset(min(value + 1, MAX_OFFSET))
    if kind in _EQUALS:
        return Bounds(start=low, end=high)
    ranges = {
        "GreaterThan": Bounds(start=high),
        "GreaterThanOrEqual": Bounds(start=low),
        "LessThan": Bounds(end=low),
        "LessThanOrEqual": Bounds(end=high),
    }
    return ranges.get(kind)


def _time_bounds(kind: str, value: datetime) -> Bounds | None:
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    since = aware - _1970
    low = Millis(since // timedelta(milliseconds=1))
    # Rounds up to a whole millisecond: a bound may be too loose, never too tight.
    high = Millis(low + 1)
    if kind in _EQUALS:
        return Bounds(start_ms=low, end_ms=high)
    if kind in {"GreaterThan", "GreaterThanOrEqual"}:
        return Bounds(start_ms=low)
    if kind in {"LessThan", "LessThanOrEqual"}:
        return Bounds(end_ms=high)
    return None
