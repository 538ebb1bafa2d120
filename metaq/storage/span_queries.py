"""Questions about a whole log that the span indexes answer: counts, times, boundaries.

All functions block: they read indexes, and records where an index does not reach or a
span is cut by the question. A segment without an index is walked, so the answers are
the same, only slower. They are asked about durable bytes of a log without damage: an
index is believed here without reading what it covers.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from metaq.fs import FileSystem
from metaq.model import Millis, Offset, Position
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.storage.segment import Segment
from metaq.storage.span_index import SpanIndex, read_index
from metaq.storage.walk import RangeReader


def count_records(
    fs: FileSystem, segments: Sequence[Segment], start: Offset, end: Offset
) -> int:
    """Return how many records begin within [start, end): the lag in messages.

    Args:
        fs: The disk.
        segments: The log, in order; sizes say how far it is durable.
        start: Any offset; inside a record, that record is not counted.
        end: Any offset; 0 for one at or before `start`.

    Raises:
        StorageError: The disk refused a read.
    """
    total = 0
    for segment, index in _indexed(fs, segments, start, end):
        low = max(start, segment.base_offset)
        high = min(end, segment.end_offset)
        first = bisect_left(index.spans, low, key=lambda span: span.base_offset)
        behind = index.place_of(high)
        whole = index.spans[first:behind]
        if not whole:
            total += _walk_count(fs, segment, index, low, high)
            continue
        total += sum(span.record_count for span in whole)
        total += _walk_count(fs, segment, index, low, whole[0].base_offset)
        total += _walk_count(fs, segment, index, whole[-1].end_offset, high)
    return total


def offset_for_time(
    fs: FileSystem, segments: Sequence[Segment], time_ms: Millis
) -> Offset:
    """Return where to begin to see all that was appended at `time_ms` or later.

    A reader that begins there may see a little that is older: a span has one time.

    Args:
        fs: The disk.
        segments: The log, in order, one or more; sizes say how far it is durable.
        time_ms: Wall clock, milliseconds since 1970.

    Returns:
        A record boundary; the log end when everything is older.

    Raises:
        StorageError: The disk refused a read.
    """
    end = segments[-1].end_offset
    for segment, index in _indexed(fs, segments, segments[0].base_offset, end):
        found = index.offset_for_time(time_ms)
        if found is not None:
            return min(found, end)
        if index.end_offset < segment.end_offset:
            file = fs.open_read(segment.path)
            try:
                mtime_ms = file.mtime_ms()
            finally:
                file.close()
            if mtime_ms >= time_ms:
                return index.end_offset
    return end


def boundaries(
    fs: FileSystem, segments: Sequence[Segment], start: Offset, end: Offset
) -> tuple[Offset, ...]:
    """Return record boundaries within [start, end), in order: places to split a read.

    There is one for each span, and one for each segment.

    Raises:
        StorageError: The disk refused a read.
    """
    found: list[Offset] = []
    for segment, index in _indexed(fs, segments, start, end):
        starts = index.boundaries(start, min(end, segment.end_offset))
        if not starts or starts[0] != segment.base_offset >= start:
            found.append(segment.base_offset)
        found += starts
    return tuple(offset for offset in found if start <= offset < end)


def _indexed(
    fs: FileSystem, segments: Sequence[Segment], start: Offset, end: Offset
) -> Iterator[tuple[Segment, SpanIndex]]:
    """Yield the segments that have bytes within [start, end), with their indexes."""
    for segment in segments:
        if segment.end_offset > start and segment.base_offset < end:
            index = read_index(fs, segment.path, segment.base_offset)
            yield segment, index or SpanIndex(segment.base_offset)


def _walk_count(
    fs: FileSystem, segment: Segment, index: SpanIndex, start: Offset, end: Offset
) -> int:
    """Count the records that begin within [start, end), header by header."""
    if start >= end:
        return 0
    span = index.span_at(start)
    at = index.end_offset if span is None else span.base_offset
    position, count = segment.position_of(at), 0
    low, high = segment.position_of(start), segment.position_of(end)
    file = fs.open_read(segment.path)
    try:
        reader = RangeReader(file, position, Position(segment.size_bytes))
        while position < high:
            header = reader.read(position, HEADER_BYTES)
            if len(header) < HEADER_BYTES:
                break
            length = HEADER.unpack(header)[0]
            if length < 0:
                break
            count += position >= low
            position = Position(position + HEADER_BYTES + length)
    finally:
        file.close()
    return count
