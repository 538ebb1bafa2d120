"""Spans looked up in an index: right with any damage, and with little work."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.model import ID_MS_SHIFT, ID_ZERO_MS, MessageId, Millis, Offset, SizeBytes
from metaq.record.layout import HEADER_BYTES, encode_record
from metaq.storage.segment import Segment, segment_file_name
from metaq.storage.span_index import (
    ENTRY_BYTES,
    Span,
    SpanIndex,
    spans_path,
    write_index,
)
from metaq.storage.span_lookup import BLOCK_ENTRIES, BLOCKS_MAX, SpanLookup, open_spans
from metaq.storage.span_queries import SpanQueries
from tests.rigs.fs import FaultyFileSystem
from tests.sampling import examples
from tests.storage.logs import disk_with_directory, put_file

EACH = 4
"""Records of a span."""
RECORD = len(encode_record(b"0123456789", id=MessageId(0)))
SPAN_BYTES = EACH * RECORD
ONE_SPAN = SPAN_BYTES + HEADER_BYTES
"""Bytes read by a walk over a span."""


def log(
    span_count: int, *, is_sealed: bool = True
) -> tuple[FaultyFileSystem, list[Segment], tuple[Span, ...]]:
    """Return a segment of equal records; span n was appended at n ms."""
    spans, data = [], []
    for number in range(span_count):
        message_id = MessageId(number << ID_MS_SHIFT)
        data += [encode_record(b"0123456789", id=message_id)] * EACH
        time_ms = Millis(ID_ZERO_MS + number)
        at, size = Offset(number * SPAN_BYTES), SizeBytes(SPAN_BYTES)
        spans.append(Span(at, size, EACH, time_ms, 0))
    disk = disk_with_directory()
    path = put_file(disk, segment_file_name(Offset(0)), b"".join(data))
    size = SizeBytes(span_count * SPAN_BYTES)
    index = SpanIndex(Offset(0), spans=tuple(spans))
    write_index(disk, path, index, is_sealed=is_sealed)
    return disk, [Segment(path, Offset(0), size)], tuple(spans)


def work(disk: FaultyFileSystem, since: int) -> tuple[int, int]:
    """Return how many bytes of indexes, and of records, were read."""
    reads = [one for one in disk.log[since:] if one.name == "read"]
    of_index = sum(one.size for one in reads if one.path.suffix == ".spans")
    return of_index, sum(one.size for one in reads) - of_index


COUNT = 20 * BLOCK_ENTRIES
END = COUNT * SPAN_BYTES
BLOCK_BYTES = BLOCK_ENTRIES * ENTRY_BYTES
FEW = 8 * BLOCK_BYTES
"""Most bytes read by a bisection of an index of 20 blocks, and a few."""
LONG = log(COUNT)
MIDDLE = COUNT // 2 * SPAN_BYTES + RECORD


def test_a_boundary_costs_a_bisection_and_one_span() -> None:
    """However long the log is."""
    disk, segments, _spans = LONG
    since = disk.calls
    assert SpanQueries(disk, segments).is_boundary(Offset(MIDDLE))
    of_index, of_records = work(disk, since)
    assert of_index <= FEW
    assert of_records <= ONE_SPAN


def test_the_count_of_a_few_records_costs_as_little() -> None:
    """Also where it crosses spans."""
    disk, segments, _spans = LONG
    since = disk.calls
    end = Offset(MIDDLE + 10 * RECORD)
    assert SpanQueries(disk, segments).count_records(Offset(MIDDLE), end) == 10
    of_index, of_records = work(disk, since)
    assert of_index <= FEW
    assert of_records <= 2 * ONE_SPAN


def test_the_count_of_nearly_all_of_a_sealed_segment_is_that_of_the_rest() -> None:
    """Its seal knows how many there are."""
    disk, segments, _spans = LONG
    since = disk.calls
    count = SpanQueries(disk, segments).count_records(
        Offset(RECORD), Offset(END - RECORD)
    )
    assert count == COUNT * EACH - 2
    of_index, of_records = work(disk, since)
    assert of_index <= 2 * FEW
    assert of_records <= 2 * ONE_SPAN


@pytest.mark.parametrize("bytes_max", [0, 1 << 40])
def test_a_few_cuts_cost_a_few_spans(bytes_max: int) -> None:
    """A short range is cut at records, and only the spans of the cuts are walked."""
    disk, segments, _spans = LONG
    start, end = Offset(MIDDLE), Offset(MIDDLE + 16 * 101 * RECORD)
    since = disk.calls
    found = SpanQueries(disk, segments).split_range(
        start, end, 17, walk_bytes_max=bytes_max
    )
    assert len(found) == 17
    if bytes_max:
        assert [b - a for a, b in pairwise(found)] == [101 * RECORD] * 16
    of_index, of_records = work(disk, since)
    assert of_index <= FEW
    assert of_records <= 15 * ONE_SPAN


@pytest.mark.slow
def test_many_cuts_read_an_index_once_and_no_record_twice() -> None:
    """The most that can be asked for costs no more than a look at everything."""
    disk, segments, _spans = LONG
    since = disk.calls
    SpanQueries(disk, segments).split_range(Offset(0), Offset(END), 10_000)
    of_index, of_records = work(disk, since)
    assert of_index <= 22 * BLOCK_BYTES
    assert of_records <= END + COUNT * HEADER_BYTES


def test_a_time_costs_the_index_before_it_and_one_span() -> None:
    """Clocks jump, so all times before count; they are looked at in bulk."""
    disk, segments, spans = LONG
    since = disk.calls
    found = SpanQueries(disk, segments).offset_for_time(
        spans[COUNT // 2].append_time_ms
    )
    assert found == spans[COUNT // 2].base_offset
    of_index, of_records = work(disk, since)
    assert of_index <= COUNT * ENTRY_BYTES + FEW
    assert of_records <= ONE_SPAN


def test_blocks_in_memory_are_bounded() -> None:
    """A reader of more than it may keep reads the first ones again."""
    disk, segments, spans = LONG
    file = disk.open_read(spans_path(segments[0].path, Offset(0)))
    for blocks_max, reads in ((BLOCKS_MAX, 0), (3, 1)):
        lookup = SpanLookup(file, segments[0], blocks_max)
        for span in [*spans[:: BLOCK_ENTRIES // 2], spans[0]]:
            since, at = disk.calls, Offset(span.base_offset + 1)
            assert next(lookup.pieces(at, Offset(at + 1))) == span
        assert (work(disk, since)[0] > 0) == (reads > 0)
    file.close()
    assert BLOCKS_MAX * BLOCK_BYTES == 2 << 20


def flip(disk: FaultyFileSystem, segment: Segment, bits: Sequence[int]) -> None:
    path = spans_path(segment.path, segment.base_offset)
    size = 8 * disk.size_of(path)
    for bit in set(bits):
        disk.flip_bit(path, bit % size)


FIRST_PLACES = [0, BLOCK_ENTRIES - 20, 2 * BLOCK_ENTRIES - 20]
THREE_BLOCKS = {
    is_sealed: log(2 * BLOCK_ENTRIES + 20, is_sealed=is_sealed)
    for is_sealed in (True, False)
}
"""Sealed or not. What is damaged in an example is restored after it."""
places = st.builds(int.__add__, st.sampled_from(FIRST_PLACES), st.integers(0, 39))
"""Of spans at the begin and the end, and on both sides of the ends of blocks."""
bits_of_entries = st.builds(
    lambda place, bit: 8 * ENTRY_BYTES * place + bit,
    places,
    st.integers(0, 8 * 2 * ENTRY_BYTES - 1),
)
offsets_of_records = st.builds(
    lambda place, number: Offset(place * SPAN_BYTES + number * RECORD),
    places,
    st.integers(0, EACH),
)


@contextmanager
def damaged(
    is_sealed: bool, bits: Sequence[int]
) -> Iterator[tuple[FaultyFileSystem, list[Segment], tuple[Span, ...]]]:
    disk, segments, spans = THREE_BLOCKS[is_sealed]
    flip(disk, segments[0], bits)
    yield disk, segments, spans
    flip(disk, segments[0], bits)
    assert disk.open_paths() == []


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(
    st.booleans(),
    st.lists(bits_of_entries, max_size=6),
    offsets_of_records,
    offsets_of_records,
    st.integers(2, 30),
)
def test_answers_are_right_whatever_is_damaged(
    is_sealed: bool, bits: list[int], start: Offset, end: Offset, count: int
) -> None:
    """A damaged entry costs a walk, not the answer."""
    start, end = sorted((start, end))
    with damaged(is_sealed, bits) as (disk, segments, spans):
        size = segments[0].size_bytes
        start, end = Offset(min(start, size)), Offset(min(end, size))
        assert SpanQueries(disk, segments).is_boundary(start)
        assert not SpanQueries(disk, segments).is_boundary(Offset(start + 1))
        assert (
            SpanQueries(disk, segments).count_records(start, end)
            == (end - start) // RECORD
        )
        found = SpanQueries(disk, segments).split_range(start, end, count)
        assert all(at % RECORD == 0 for at in found)
        assert (found[0], found[-1]) == (start, end)
        if not bits:
            number = min(start // SPAN_BYTES, len(spans) - 1)
            time_ms = spans[number].append_time_ms
            assert (
                SpanQueries(disk, segments).offset_for_time(time_ms)
                == number * SPAN_BYTES
            )


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(bits_of_entries, max_size=4),
    offsets_of_records,
    st.integers(0, SPAN_BYTES - 1),
    st.integers(1, 20 * SPAN_BYTES) | st.integers(1, 2 * BLOCK_ENTRIES * SPAN_BYTES),
    st.booleans(),
)
def test_pieces_cover_a_range_without_a_gap(
    bits: list[int], start: Offset, within: int, size: int, is_merged: bool
) -> None:
    """They begin at records, and what has no records was damaged."""
    with damaged(True, bits) as (disk, segments, _spans):
        start = Offset(min(start + within, segments[0].size_bytes - 1))
        end = Offset(min(start + size, segments[0].size_bytes))
        with open_spans(disk, segments[0]) as lookup:
            pieces = list(lookup.pieces(start, end, is_merged=is_merged))
    assert pieces[0].base_offset <= start
    assert pieces[-1].end_offset >= end
    assert all(a.end_offset == b.base_offset for a, b in pairwise(pieces))
    for piece in pieces:
        assert piece.base_offset % SPAN_BYTES == 0
        assert piece.record_count * RECORD in {0, piece.size_bytes}
        assert piece.record_count or bits
