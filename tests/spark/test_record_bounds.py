"""Ranges of offsets and times: half-open, cut with each other, applied to rows."""

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from metaq.model import Millis, Offset
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.record_bounds import EVERYTHING, Bounds


def test_narrowing_keeps_what_both_want() -> None:
    """Open sides take the other's bound."""
    one = Bounds(Offset(5), Offset(20), Millis(100), None)
    two = Bounds(Offset(1), Offset(9), Millis(50), Millis(300))
    both = Bounds(Offset(5), Offset(9), Millis(100), Millis(300))
    assert one.narrowed(two) == two.narrowed(one) == both
    assert EVERYTHING.narrowed(one) == one.narrowed(EVERYTHING) == one


@pytest.mark.parametrize(
    ("start", "end", "wanted"),
    [(0, 5, False), (0, 6, True), (9, 12, True), (10, 12, False)],
)
def test_ranges_overlap_where_they_share_an_offset(
    start: int, end: int, wanted: bool
) -> None:
    """Ends are not part of a range."""
    bounds = Bounds(Offset(5), Offset(10))
    assert bounds.overlaps(Offset(start), Offset(end)) is wanted


def test_rows_outside_are_cut_off_and_such_without_time_stay() -> None:
    """The start is wanted, the end is not."""
    rows = [
        {"offset": offset, "timestamp": time}
        for offset, time in enumerate([0, 1, None, 2, 3])
    ]
    for row in rows:
        if row["timestamp"] is not None:
            row["timestamp"] = datetime.fromtimestamp(row["timestamp"], UTC)
    full = [dict.fromkeys(ROW_SCHEMA.names) | row for row in rows]
    batch = pa.RecordBatch.from_pylist(full, schema=ROW_SCHEMA)

    def kept(bounds: Bounds) -> list[int]:
        return bounds.clip(batch).column("offset").to_pylist()

    assert kept(EVERYTHING) == [0, 1, 2, 3, 4]
    assert kept(Bounds(Offset(1), Offset(4))) == [1, 2, 3]
    assert kept(Bounds(start_ms=Millis(1000), end_ms=Millis(3000))) == [1, 2, 3]
    assert kept(Bounds(Offset(2), start_ms=Millis(2000))) == [2, 3, 4]
