"""Files left by Spark's filters: never less than the matching ones."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.spark.versions import HAS_FILTERS

if not HAS_FILTERS:
    pytest.skip("PySpark hands filters to sources from 4.1 on", allow_module_level=True)

from pyspark.sql.datasource import (  # missing before 4.1
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from metaq.model import MAX_OFFSET, Offset, TopicPartition
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.record_bounds import EVERYTHING, Bounds, PushedFilters, read_filters

HERE = TopicPartition("logs", 7, 1)
MOMENT = datetime(2024, 5, 1, 12, 0, 0, 250_500, tzinfo=UTC)
MOMENT_MS = 1_714_564_800_250


def narrowed(*filters: Filter) -> Bounds:
    return read_filters(filters).bounds


@pytest.mark.parametrize(
    ("item", "is_here"),
    [
        (EqualTo(("topic",), "logs"), True),
        (EqualTo(("TOPIC",), "other"), False),
        (EqualNullSafe(("partition",), 1), True),
        (In(("partition",), (2, 3)), False),
        (In(("broker_id",), [7, None]), True),  # type: ignore[arg-type]
        (EqualTo(("broker_id",), 8), False),
        (EqualTo(("topic", "name"), "other"), True),
        (EqualTo(("value",), b"x"), True),
        (Not(EqualTo(("topic",), "logs")), True),
        (StringStartsWith(("topic",), "x"), True),
        (IsNotNull(("topic",)), True),
        (EqualNullSafe(("topic",), None), True),
    ],
)
def test_partitions_are_left_out_when_none_of_their_records_can_match(
    item: Filter, is_here: bool
) -> None:
    """Filters that say nothing about whole files are passed by."""
    assert read_filters([item]).allows(HERE) is is_here
    assert read_filters([IsNotNull(("topic",)), item]).allows(HERE) is is_here


def test_all_filters_hold_at_once() -> None:
    """Sets are cut with each other, ranges too."""
    pushed = read_filters(
        [
            In(("partition",), (1, 2)),
            In(("partition",), (2, 3)),
            GreaterThan(("offset",), 10),
            LessThanOrEqual(("offset",), 20),
        ]
    )
    assert pushed.partitions == {2}
    assert pushed.bounds == Bounds(Offset(11), Offset(21))


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        (EqualTo(("offset",), 5), Bounds(Offset(5), Offset(6))),
        (GreaterThan(("offset",), 5), Bounds(start=Offset(6))),
        (GreaterThanOrEqual(("offset",), 5), Bounds(start=Offset(5))),
        (LessThan(("offset",), 5), Bounds(end=Offset(5))),
        (LessThanOrEqual(("offset",), 5), Bounds(end=Offset(6))),
        (LessThanOrEqual(("offset",), 2**63 - 1), Bounds(end=MAX_OFFSET)),
        (Not(EqualTo(("offset",), 5)), EVERYTHING),
    ],
)
def test_offsets_are_bounded_exactly(item: Filter, wanted: Bounds) -> None:
    """Ranges are half-open."""
    assert narrowed(item) == wanted


@pytest.mark.parametrize(
    ("item", "start", "end"),
    [
        (EqualTo(("timestamp",), MOMENT), MOMENT_MS, MOMENT_MS + 1),
        (GreaterThan(("timestamp",), MOMENT), MOMENT_MS, None),
        (GreaterThanOrEqual(("timestamp",), MOMENT), MOMENT_MS, None),
        (LessThan(("timestamp",), MOMENT), None, MOMENT_MS + 1),
        (LessThanOrEqual(("timestamp",), MOMENT), None, MOMENT_MS + 1),
        (LessThan(("timestamp",), "yesterday"), None, None),
    ],
)
@pytest.mark.parametrize("hours", [0, -5])
def test_times_are_bounded_loosely(
    item: Filter, start: int | None, end: int | None, hours: int
) -> None:
    """A part of a millisecond counts as a whole one; zones do not matter."""
    value = item.value  # type: ignore[attr-defined]
    if isinstance(value, datetime):
        zone = timezone(timedelta(hours=hours))
        item = type(item)(item.attribute, value.astimezone(zone))  # type: ignore[attr-defined, call-arg]
    found = narrowed(item)
    assert (found.start_ms, found.end_ms) == (start, end)


KINDS = {
    EqualTo: lambda a, b: a == b,
    GreaterThan: lambda a, b: a > b,
    GreaterThanOrEqual: lambda a, b: a >= b,
    LessThan: lambda a, b: a < b,
    LessThanOrEqual: lambda a, b: a <= b,
}


@given(
    filters=st.lists(
        st.tuples(st.sampled_from(list(KINDS)), st.integers(-5, 5)), max_size=3
    ),
    offset=st.integers(0, 5),
    micros=st.integers(0, 5000),
)
def test_what_matches_is_never_left_out(
    filters: list[tuple[type, int]], offset: int, micros: int
) -> None:
    """Spark evaluates the filters again: too much is slow, too little is wrong."""
    base = datetime(2024, 5, 1, tzinfo=UTC)
    moment = base + timedelta(milliseconds=micros // 1000)
    given_filters: list[Filter] = []
    is_match = True
    for kind, number in filters:
        bound = base + timedelta(microseconds=number * 700)
        given_filters.append(kind(("offset",), number))
        given_filters.append(kind(("timestamp",), bound))
        is_match &= KINDS[kind](offset, number) and KINDS[kind](moment, bound)
    row = dict.fromkeys(ROW_SCHEMA.names) | {"offset": offset, "timestamp": moment}
    batch = batch_of(row)
    kept = read_filters(given_filters).bounds.clip(batch)
    assert kept.num_rows == 1 or not is_match


def batch_of(*rows: dict[str, object]):
    import pyarrow as pa

    return pa.RecordBatch.from_pylist(list(rows), schema=ROW_SCHEMA)


def test_no_filters_leave_everything() -> None:
    """The default of a reader."""
    assert read_filters([]) == PushedFilters()
    assert PushedFilters().allows(HERE)
