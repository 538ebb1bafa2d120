"""Indexes in memory: as right as a walk, and one walk is enough."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.model import Offset, SizeBytes
from metaq.storage.segment import Segment, segment_file_name
from metaq.storage.span_index import ENTRY_BYTES, decode_index
from metaq.storage.span_lookup import MADE_BYTES_MAX, MADE_SPAN_BYTES, MadeIndexes
from metaq.storage.span_queries import SpanQueries
from tests.rigs.fs import FaultyFileSystem
from tests.sampling import examples
from tests.storage.logs import disk_with_directory, put_file, record
from tests.storage.test_span_queries import END, LOGS, STARTS

LENGTH = len(record(0))
COUNT = 2000
"""Records of a segment."""


def bare_log(segment_count: int) -> tuple[FaultyFileSystem, list[Segment]]:
    """Segments without an index, and an empty active one."""
    disk = disk_with_directory()
    segments = []
    size = SizeBytes(COUNT * LENGTH)
    for number in range(segment_count + 1):
        base = Offset(number * size)
        data = b"" if number == segment_count else record(0) * COUNT
        path = put_file(disk, segment_file_name(base), data)
        segments.append(Segment(path, base, SizeBytes(len(data))))
    return disk, segments


def read_of_records(disk: FaultyFileSystem, since: int) -> int:
    reads = [one for one in disk.log[since:] if one.name == "read"]
    return sum(one.size for one in reads if one.path.suffix == ".meta")


SmallSpans = partial(MadeIndexes, span_bytes=10 * LENGTH)
"""A small segment has many of them."""


def test_the_first_question_walks_and_the_next_ones_look_up() -> None:
    """Counts, boundaries and cuts share what was found."""
    disk, segments = bare_log(1)
    made = SmallSpans()
    whole = segments[0].size_bytes
    middle = Offset(LENGTH * (COUNT // 2) + LENGTH)
    since = disk.calls
    assert (
        SpanQueries(disk, segments, made=made).count_records(middle, Offset(whole))
        == 999
    )
    assert whole <= read_of_records(disk, since) <= whole + 20 * LENGTH
    since = disk.calls
    assert (
        SpanQueries(disk, segments, made=made).count_records(Offset(0), middle) == 1001
    )
    assert SpanQueries(disk, segments, made=made).is_boundary(middle)
    assert not SpanQueries(disk, segments, made=made).is_boundary(Offset(middle + 1))
    found = SpanQueries(disk, segments, made=made).split_range(Offset(0), middle, 4)
    assert len(found) == 4
    assert read_of_records(disk, since) <= 100 * LENGTH
    assert made.made_count == 1


def test_the_active_segment_has_none() -> None:
    """It grows, and recovery has made its index."""
    disk, segments = bare_log(1)
    made = SmallSpans()
    count = SpanQueries(disk, segments[:1], made=made).count_records(
        Offset(0), Offset(LENGTH)
    )
    assert (count, made.made_count) == (1, 0)


def test_a_file_that_changed_is_walked_again() -> None:
    """A topic of the same name may have been made again."""
    disk, segments = bare_log(1)
    made = SmallSpans()
    made.index_of(disk, segments[0])
    disk.set_wall_ms(10**9)
    disk.unlink(segments[0].path)
    put_file(disk, segments[0].path.name, record(0, 10 + LENGTH) * (COUNT // 2))
    end = segments[0].end_offset
    count = SpanQueries(disk, segments, made=made).count_records(Offset(0), end)
    assert (count, made.made_count) == (COUNT // 2, 2)


def test_indexes_are_bounded_and_the_oldest_one_goes() -> None:
    """One that is asked for is young again."""
    disk, segments = bare_log(3)
    one = len(SmallSpans().index_of(disk, segments[0]))
    made = SmallSpans(bytes_max=2 * one)
    for number, walks in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):
        made.index_of(disk, segments[number])
        assert made.made_count == walks
    large = SmallSpans(bytes_max=1)
    assert large.index_of(disk, segments[0]) == large.index_of(disk, segments[0])
    assert large.made_count == 1


def test_the_bound_is_enough_for_the_log_that_the_pages_name() -> None:
    """64 GiB; longer records make fewer spans."""
    assert MADE_BYTES_MAX // ENTRY_BYTES * MADE_SPAN_BYTES == 64 << 30


def test_threads_that_want_one_index_share_a_walk() -> None:
    """The second one waits for the first."""
    disk, segments = bare_log(1)
    made = SmallSpans()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _n: made.index_of(disk, segments[0]), range(8)))
    assert len(set(found)) == 1
    assert made.made_count == 1


def test_bytes_that_are_no_records_end_an_index() -> None:
    """Bytes after them are walked by each query, as without an index."""
    disk, segments = bare_log(1)
    disk.flip_bit(segments[0].path, 8 * 55 * LENGTH)
    index = decode_index(SmallSpans().index_of(disk, segments[0]), Offset(0))
    assert index is not None
    assert (index.end_offset, index.record_count) == (50 * LENGTH, 50)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.sampled_from(LOGS),
    st.sampled_from(STARTS),
    st.sampled_from([*STARTS, END]),
    st.integers(2, 20),
)
def test_answers_are_those_of_a_walk(a_log, start, end, count) -> None:
    """Whichever segments have an index on disk."""
    disk, segments = a_log
    start, end = Offset(min(start, end)), Offset(max(start, end))
    made = SmallSpans()
    expected = SpanQueries(disk, segments).count_records(start, end)
    assert SpanQueries(disk, segments, made=made).count_records(start, end) == expected
    found = SpanQueries(disk, segments, made=made).split_range(start, end, count)
    assert found == SpanQueries(disk, segments).split_range(start, end, count)
    assert all(a < b for a, b in pairwise(found))
    assert SpanQueries(disk, segments, made=made).is_boundary(start)
    assert not SpanQueries(disk, segments, made=made).is_boundary(Offset(start + 1))
    assert disk.open_paths() == []
