"""Counts, times and boundaries of a whole log, with and without indexes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.model import Millis, Offset, SizeBytes
from metaq.storage.segment import Segment, segment_file_name
from metaq.storage.span_queries import boundaries, count_records, offset_for_time
from metaq.testing.fs import FaultyFileSystem
from tests.storage.logs import (
    DIRECTORY,
    disk_with_directory,
    put_file,
    put_segment,
    record,
)

SIZES = [0, 10, 60, 5, 90, 1, 30, 30, 70, 0, 10, 10]
RECORDS = [record(number, size) for number, size in enumerate(SIZES)]
STARTS = [sum(map(len, RECORDS[:number])) for number in range(len(RECORDS))]
END = sum(map(len, RECORDS))


def log(indexed: tuple[bool, ...]) -> tuple[FaultyFileSystem, list[Segment]]:
    """Three segments of four records; the last has two records behind its index."""
    disk = disk_with_directory()
    segments = []
    for part in range(3):
        records = RECORDS[4 * part : 4 * part + 4]
        commits = [[one] for one in (records[:2] if part == 2 else records)]
        base = STARTS[4 * part]
        disk.set_wall_ms(200 + 100 * part)
        put_segment(
            disk, base, commits, indexed=indexed[part], time_ms=100 + 100 * part
        )
        if part == 2:
            put_file(disk, segment_file_name(Offset(base)), b"".join(records[2:]))
        size = sum(map(len, records))
        path = DIRECTORY / segment_file_name(Offset(base))
        segments.append(Segment(path, Offset(base), SizeBytes(size)))
    return disk, segments


LOGS = [
    log((a, b, c)) for a in (True, False) for b in (True, False) for c in (True, False)
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(LOGS), st.integers(-5, END + 5), st.integers(-5, END + 5))
def test_records_between_two_offsets_are_counted_exactly(a_log, start, end) -> None:
    """Whatever the indexes cover, and wherever the offsets fall."""
    disk, segments = a_log
    count = count_records(disk, segments, Offset(start), Offset(end))
    assert count == sum(start <= offset < end for offset in STARTS)
    assert disk.open_paths() == []


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(LOGS), st.integers(-5, END + 5), st.integers(-5, END + 5))
def test_boundaries_are_starts_of_records(a_log, start, end) -> None:
    """In order, within the range, at least one per segment that begins in it."""
    disk, segments = a_log
    found = boundaries(disk, segments, Offset(start), Offset(end))
    assert list(found) == sorted(set(found))
    assert set(found) <= set(STARTS)
    inside = {s.base_offset for s in segments if start <= s.base_offset < end}
    assert inside <= set(found)


def test_a_log_with_indexes_is_split_at_its_spans() -> None:
    """Finer than segments."""
    disk, segments = LOGS[0]
    assert len(boundaries(disk, segments, Offset(0), Offset(END))) > 5


@pytest.mark.parametrize(
    ("time", "number"),
    [(0, 0), (102, 0), (103, 3), (104, 4), (200, 4), (301, 9), (302, 10), (401, 12)],
)
def test_a_time_gives_the_first_span_that_is_not_older(time: int, number: int) -> None:
    """A span has the time of its newest commit; behind the index the file's counts."""
    disk, segments = LOGS[0]
    expected = [*STARTS, END][number]
    assert offset_for_time(disk, segments, Millis(time)) == expected


def test_without_an_index_a_segment_is_as_new_as_its_file() -> None:
    """Nothing that is new enough is left out."""
    disk, segments = LOGS[-1]
    assert offset_for_time(disk, segments, Millis(200)) == STARTS[0]
    assert offset_for_time(disk, segments, Millis(201)) == STARTS[4]
    assert offset_for_time(disk, segments, Millis(401)) == END


def test_a_broken_chain_ends_the_count() -> None:
    """Damage gives a smaller number, not an error and not an endless walk."""
    disk, segments = log((False, False, False))
    for position, bit in [(0, 7), (0, 0)]:
        trial = disk.snapshot()
        trial.flip_bit(segments[0].path, 8 * position + bit)
        assert count_records(trial, segments, Offset(0), Offset(STARTS[4])) <= 4
