"""Filters that Spark hands down, as far as they help to leave out files.

Every filter is evaluated by Spark once more, so the conditions taken from them here may
be weaker, and never stronger. Filters are told apart by the names of their classes,
which Spark lacks before 4.1.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from metaq.model import MAX_OFFSET, Millis, Offset, TopicPartition
from metaq.spark.record_bounds import EVERYTHING, Bounds

T = TypeVar("T")

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EQUALS: Final = frozenset({"EqualTo", "EqualNullSafe"})


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """Conditions on files that follow from a set of filters, all of which must hold."""

    topics: frozenset[str] | None = None
    """Topics that can match; None: any."""
    broker_ids: frozenset[int] | None = None
    """Brokers that can match; None: any."""
    partitions: frozenset[int] | None = None
    """Partition numbers that can match; None: any."""
    bounds: Bounds = EVERYTHING
    """Offsets and times that can match."""

    def allows(self, partition: TopicPartition) -> bool:
        """Tell whether a record of a partition can match."""
        pairs = (
            (self.topics, partition.topic),
            (self.broker_ids, partition.broker_id),
            (self.partitions, partition.partition),
        )
        return all(allowed is None or value in allowed for allowed, value in pairs)


def read_filters(filters: Iterable[object]) -> PushedFilters:
    """Return the conditions on files in Spark's filters; other filters are passed by.

    Args:
        filters: Objects of `pyspark.sql.datasource.Filter`.
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
    """Return `found` and one more filter."""
    if value is None:
        return found
    if kind == "In" or kind in _EQUALS:
        values = frozenset(value if kind == "In" else (value,))
        if column == "topic":
            return replace(found, topics=_both(found.topics, values))
        if column == "broker_id":
            return replace(found, broker_ids=_both(found.broker_ids, values))
        if column == "partition":
            return replace(found, partitions=_both(found.partitions, values))
    bounds = None
    if column == "offset" and isinstance(value, int):
        bounds = _offset_bounds(kind, value)
    elif column == "timestamp" and isinstance(value, datetime):
        bounds = _time_bounds(kind, value)
    if bounds is None:
        return found
    return replace(found, bounds=found.bounds.narrowed(bounds))


def _both(before: frozenset[T] | None, values: frozenset[T]) -> frozenset[T]:
    return values if before is None else values & before


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
    since = aware - _EPOCH
    low = Millis(since // timedelta(milliseconds=1))
    # A part of a millisecond counts as a whole: a bound may be loose, never tight.
    high = Millis(low + 1)
    if kind in _EQUALS:
        return Bounds(start_ms=low, end_ms=high)
    if kind in {"GreaterThan", "GreaterThanOrEqual"}:
        return Bounds(start_ms=low)
    if kind in {"LessThan", "LessThanOrEqual"}:
        return Bounds(end_ms=high)
    return None
