"""Counts, times and boundaries of a whole log, with and without indexes."""

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metaq.model import ID_MS_SHIFT, ID_ZERO_MS, MessageId, Millis, Offset, SizeBytes
from metaq.record.layout import encode_record
from metaq.storage.segment import Damage, Segment, segment_file_name
from metaq.storage.span_index import Span, SpanIndex, write_index
from metaq.storage.span_lookup import MadeIndexes
from metaq.storage.span_queries import SPLIT_WALK_BYTES_MAX, SpanQueries
from metaq.storage.walk import MTIME_LAG_MS
from tests.rigs.fs import FaultyFileSystem
from tests.sampling import examples
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
LONGEST = max(map(len, RECORDS))


def log(indexed: tuple[bool, ...]) -> tuple[FaultyFileSystem, list[Segment]]:
    """Three segments of four records; the last has two records after its index."""
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


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(LOGS), st.integers(-5, END + 5), st.integers(-5, END + 5))
def test_records_between_two_offsets_are_counted_exactly(a_log, start, end) -> None:
    """Whatever the indexes cover, and wherever the offsets fall."""
    disk, segments = a_log
    count = SpanQueries(disk, segments).count_records(Offset(start), Offset(end))
    assert count == sum(start <= offset < end for offset in STARTS)
    assert disk.open_paths() == []


@pytest.mark.slow
def test_a_boundary_is_the_start_of_a_record_or_the_log_end() -> None:
    """Whatever the indexes cover."""
    for disk, segments in LOGS:
        found = {
            at
            for at in range(END + 2)
            if SpanQueries(disk, segments).is_boundary(Offset(at))
        }
        assert found == {*STARTS, END}
        assert disk.open_paths() == []


@settings(max_examples=examples(100), deadline=None)
@given(
    st.sampled_from(LOGS),
    st.sampled_from(STARTS),
    st.sampled_from([*STARTS, END]),
    st.integers(2, 20),
    st.booleans(),
)
def test_a_range_is_split_at_starts_of_records(a_log, start, end, count, is_long):
    """Growing, from end to end, and no more than were wanted."""
    disk, segments = a_log
    end = max(start, end)
    bound = -1 if is_long else SPLIT_WALK_BYTES_MAX
    found = SpanQueries(disk, segments).split_range(
        Offset(start), Offset(end), count, walk_bytes_max=bound
    )
    assert list(found) == sorted(set(found))
    assert set(found) <= {*STARTS, END}
    assert (found[0], found[-1]) == (start, end)
    assert len(found) <= count
    if not is_long:
        parts = [b - a for a, b in pairwise(found)]
        assert max(parts, default=0) <= (end - start) / (count - 1) + LONGEST
    assert disk.open_paths() == []


def test_a_long_range_is_split_at_its_spans() -> None:
    """Finer than segments, without a look at the records."""
    disk, segments = LOGS[0]
    found = SpanQueries(disk, segments).split_range(
        Offset(0), Offset(END), 6, walk_bytes_max=0
    )
    assert len(found) > 4
    assert max(b - a for a, b in pairwise(found)) <= END / 5 + 2 * LONGEST


def test_a_long_range_within_one_span_is_split_at_its_records() -> None:
    """There is always a cut where there is a record: limits are met by it."""
    disk, segments = LOGS[0]
    start = Offset(STARTS[10])
    found = SpanQueries(disk, segments).split_range(
        start, Offset(END), 3, walk_bytes_max=0
    )
    assert found == (STARTS[10], STARTS[11], END)


@pytest.mark.parametrize(
    ("time", "number"),
    [
        *((0, 0), (102, 0), (103, 3), (104, 4), (200, 4), (301, 9), (302, 10)),
        (401 + MTIME_LAG_MS, 12),
    ],
)
def test_a_time_gives_the_first_span_that_is_not_older(time: int, number: int) -> None:
    """A span has the time of its newest commit; after the index the file's counts."""
    disk, segments = LOGS[0]
    expected = [*STARTS, END][number]
    assert SpanQueries(disk, segments).offset_for_time(Millis(time)) == expected


def test_without_an_index_a_segment_is_as_new_as_its_file() -> None:
    """Nothing that is new enough is left out."""
    disk, segments = LOGS[-1]
    assert (
        SpanQueries(disk, segments).offset_for_time(Millis(200 + MTIME_LAG_MS))
        == STARTS[0]
    )
    assert (
        SpanQueries(disk, segments).offset_for_time(Millis(201 + MTIME_LAG_MS))
        == STARTS[4]
    )
    assert (
        SpanQueries(disk, segments).offset_for_time(Millis(401 + MTIME_LAG_MS)) == END
    )


@pytest.mark.parametrize("lag_ms", [4, 400])
def test_a_file_may_seem_older_than_what_was_just_put_into_it(lag_ms: int) -> None:
    """The time of a file moves by ticks, and these may come late on a busy host.

    A message after the index is found anyway.
    """
    disk, stamped = disk_with_directory(), ID_ZERO_MS + 1000
    data = [encode_record(b"x", id=MessageId(n << ID_MS_SHIFT)) for n in (0, 1000)]
    disk.set_wall_ms(stamped - lag_ms)
    name = segment_file_name(Offset(0))
    put_file(disk, name, b"".join(data))
    segment = Segment(DIRECTORY / name, Offset(0), SizeBytes(2 * len(data[0])))
    assert SpanQueries(disk, [segment]).offset_for_time(Millis(stamped)) == len(data[0])


@settings(max_examples=examples(100), deadline=None)
@example([[0], [1, 2], [30]], 20, 0, 50)
@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), max_size=6),
    st.integers(0, 41),
    st.integers(0, 6),
    st.sampled_from((0, 3, 50)),
)
def test_the_time_in_the_ids_is_finer_than_that_of_a_span(
    commits, wanted, skipped, late
):
    """Also when the clock jumps; never after the right record, from any start on.

    A span may be later than all of its records: those of a transaction, or all of an
    index that was made again.
    """
    spans, data, records = [], b"", []
    for times in commits:
        base = len(data)
        for time in times:
            # A record is not newer than its commit, regardless of the clock before.
            records.append((len(data), min(time, times[-1] + late)))
            data += encode_record(b"x", id=MessageId(time << ID_MS_SHIFT))
        newest = Millis(ID_ZERO_MS + times[-1] + late)
        size = SizeBytes(len(data) - base)
        spans.append(Span(Offset(base), size, len(times), newest, 0))
    end = len(data)
    disk = disk_with_directory()
    name = segment_file_name(Offset(0))
    put_file(disk, name, data)
    segment = Segment(DIRECTORY / name, Offset(0), SizeBytes(end))
    write_index(disk, segment.path, SpanIndex(Offset(0), spans=tuple(spans)))
    start = [*(at for at, _time in records), end][min(skipped, len(records))]
    found = SpanQueries(disk, [segment]).offset_for_time(
        Millis(ID_ZERO_MS + wanted), start=Offset(start)
    )
    new = [at for at, time in records if time >= wanted and at >= start]
    assert found == (new[0] if new else end)


def test_a_broken_chain_ends_the_count() -> None:
    """Damage gives a smaller number, not an error and not an endless walk."""
    disk, segments = log((False, False, False))
    for position, bit in [(0, 7), (0, 0)]:
        trial = disk.snapshot()
        trial.flip_bit(segments[0].path, 8 * position + bit)
        assert (
            SpanQueries(trial, segments).count_records(Offset(0), Offset(STARTS[4]))
            <= 4
        )


@pytest.mark.sampled(30)
@pytest.mark.parametrize("per_span", [8, 3, 0])
@pytest.mark.parametrize("bit", range(32))
@pytest.mark.parametrize("broken", [0, 3, 6])
def test_no_walk_crosses_known_damage(per_span: int, bit: int, broken: int) -> None:
    """A broken length in a span hides nothing before it and nothing after it."""
    # Zeros look like records without a payload to a walk that has lost its way.
    data = [encode_record(bytes(9 + n), id=MessageId(n)) for n in range(8)]
    *starts, end = [Offset(sum(map(len, data[:n]))) for n in range(9)]
    disk = disk_with_directory()
    step = per_span or 8
    commits = [data[n : n + step] for n in range(0, 8, step)]
    path = put_segment(disk, 0, commits, indexed=per_span > 0, sealed=True)
    last = put_file(disk, segment_file_name(end), b"")
    segments = [
        Segment(path, Offset(0), SizeBytes(end)),
        Segment(last, end, SizeBytes(0)),
    ]
    disk.flip_bit(path, 8 * starts[broken] + bit)
    bad, good = starts[broken], starts[broken + 1]
    damage = [Damage(path, bad, good, "broken length")]
    made = MadeIndexes(span_bytes=40)
    queries = SpanQueries(disk, segments, made, damage)
    is_start, count = queries.is_boundary, queries.count_records
    split, since = queries.split_range, queries.offset_for_time
    merge_damage = [Offset(at) for at in range(end + 1) if not bad < at < good]
    found = [at for at in merge_damage if is_start(at)]
    assert found == [*starts, end]
    for low, high in combinations_with_replacement(found, 2):
        if low < good and high > bad:
            continue
        wanted = [at for at in starts if low <= at < high]
        assert count(low, high) == len(wanted)
        for bound in (0, SPLIT_WALK_BYTES_MAX):
            cuts = split(low, high, 9, walk_bytes_max=bound)
            assert (cuts[0], cuts[-1]) == (low, high)
            assert set(cuts) <= {*wanted, high}
    for at in found[broken + 1 :]:
        assert since(Millis(0), start=at) == at
