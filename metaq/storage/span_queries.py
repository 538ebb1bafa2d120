"""Questions about a whole log that the span indexes answer: counts, times, boundaries.

All functions block: they read indexes, and records where an index does not reach or a
span is cut by the question. A segment without an index is walked, so the answers are
the same, only slower. They are asked about durable bytes of a log without damage: an
index is believed here without reading what it covers.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from metaq.fs import FileSystem
from metaq.model import MessageId, Millis, Offset, Position, SizeBytes
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.storage.segment import Segment
from metaq.storage.span_index import Span, SpanIndex, read_index, read_totals
from metaq.storage.walk import WINDOW_BYTES, RangeReader, estimated_time_ms

SPLIT_WALK_BYTES_MAX: Final = 16 << 20
"""A range up to this size is split at any record; a longer one at spans, unless it lies
in one of them."""


def is_boundary(fs: FileSystem, segments: Sequence[Segment], offset: Offset) -> bool:
    """Tell whether a record begins at `offset`, or the log ends there.

    Raises:
        StorageError: The disk refused a read.
    """
    if offset == segments[-1].end_offset:
        return True
    for segment, index in _indexed(fs, segments, offset, Offset(offset + 1)):
        first = _boundary_before(index, offset)
        if first == offset:
            return True
        return any(at == offset for at, _id in _walk(fs, segment, first, offset + 1))
    return False


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
    for segment in _within(segments, start, end):
        if start <= segment.base_offset and segment.end_offset <= end:
            # A sealed index says in its last entry what all of them add up to.
            totals = read_totals(fs, segment.path, segment.base_offset)
            if totals.end_offset == segment.end_offset:
                total += totals.record_count
                continue
        index = _read_index(fs, segment)
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
    fs: FileSystem,
    segments: Sequence[Segment],
    time_ms: Millis,
    *,
    start: Offset = Offset(0),  # noqa: B008  # a NewType is its number
) -> Offset:
    """Return where to begin to see all that was appended at `time_ms` or later.

    A record's time is the one in its id, but at most that of its span; where ids carry
    none (a Java broker's) it is that of the span, and a reader that begins at the
    answer may see a little that is older. Behind an index the file's time counts.

    Args:
        fs: The disk.
        segments: The log, in order, one or more; sizes say how far it is durable.
        time_ms: Wall clock, milliseconds since 1970.
        start: Nothing before this offset is looked at.

    Returns:
        A record boundary at `start` or behind it; the log end when everything there is
        older.

    Raises:
        StorageError: The disk refused a read.
    """
    end = segments[-1].end_offset
    for segment, index in _indexed(fs, segments, start, end):
        # The times need not be in order, because clocks jump: the first span that is
        # new enough is right for any order.
        for span in _spans_from(fs, segment, index, start):
            if span.append_time_ms >= time_ms:
                return _first_since(fs, segment, span, start, time_ms)
    return end


def split_range(
    fs: FileSystem,
    segments: Sequence[Segment],
    start: Offset,
    end: Offset,
    count_max: int,
) -> tuple[Offset, ...]:
    """Return record boundaries that divide [start, end) into about equal byte ranges.

    Args:
        fs: The disk.
        segments: The log, in order; sizes say how far it is durable.
        start: A record boundary of the log.
        end: A record boundary at `start` or behind it.
        count_max: Most offsets wanted, 2 or more.

    Returns:
        Growing offsets, the first `start` and the last `end`; `start` alone for an
        empty range. Fewer than wanted where records, or spans of a range of more than
        `SPLIT_WALK_BYTES_MAX` that lies in several of them, are longer than a part.

    Raises:
        StorageError: The disk refused a read.
    """
    size, parts = end - start, count_max - 1
    wanted = [Offset(start + size * part // parts) for part in range(1, parts)]
    found: tuple[Offset, ...] = ()
    if size > SPLIT_WALK_BYTES_MAX:
        found = _within_range(_split_at_spans(fs, segments, wanted), start, end)
    if not found:
        split = _split_at_records(fs, segments, wanted, start, end)
        found = _within_range(split, start, end)
    return tuple(dict.fromkeys((start, *found, end)))


def _within_range(
    found: Iterable[Offset], start: Offset, end: Offset
) -> tuple[Offset, ...]:
    return tuple(at for at in found if start < at < end)


def _split_at_records(
    fs: FileSystem,
    segments: Sequence[Segment],
    wanted: Sequence[Offset],
    start: Offset,
    end: Offset,
) -> Iterator[Offset]:
    """Yield the first record boundary at each wanted offset or behind it."""
    left = iter(wanted)
    target = next(left, None)
    for segment in _within(segments, start, end):
        first = max(start, segment.base_offset)
        for at, _id in _walk(fs, segment, first, min(end, segment.end_offset)):
            if target is None:
                return
            if at >= target:
                yield at
            while target is not None and at >= target:
                target = next(left, None)


def _split_at_spans(
    fs: FileSystem,
    segments: Sequence[Segment],
    wanted: Sequence[Offset],
) -> Iterator[Offset]:
    """Yield the end of a span, or of a segment, that is nearest to each offset."""
    segment, index = segments[0], None
    for target in wanted:
        if index is None or not segment.contains(target):
            found = next(iter(_within(segments, target, Offset(target + 1))), None)
            if found is None:
                continue
            segment, index = found, _read_index(fs, found)
        span = index.span_at(target)
        before = index.end_offset if span is None else span.base_offset
        behind = segment.end_offset if span is None else span.end_offset
        near = before if target - before <= behind - target else behind
        yield min(near, segment.end_offset)


def _within(
    segments: Sequence[Segment], start: Offset, end: Offset
) -> Iterator[Segment]:
    """Yield the segments that have bytes within [start, end)."""
    for segment in segments:
        if segment.end_offset > start and segment.base_offset < end:
            yield segment


def _indexed(
    fs: FileSystem, segments: Sequence[Segment], start: Offset, end: Offset
) -> Iterator[tuple[Segment, SpanIndex]]:
    """Yield the segments that have bytes within [start, end), with their indexes."""
    for segment in _within(segments, start, end):
        yield segment, _read_index(fs, segment)


def _read_index(fs: FileSystem, segment: Segment) -> SpanIndex:
    index = read_index(fs, segment.path, segment.base_offset)
    return index or SpanIndex(segment.base_offset)


def _boundary_before(index: SpanIndex, offset: Offset) -> Offset:
    """Return the last known record boundary at `offset` or before it."""
    span = index.span_at(offset)
    return index.end_offset if span is None else span.base_offset


def _spans_from(
    fs: FileSystem, segment: Segment, index: SpanIndex, start: Offset
) -> Iterator[Span]:
    """Yield the spans that end behind `start`, bytes behind the index as the last."""
    yield from index.spans[index.place_of(start) :]
    covered = index.end_offset
    if covered < segment.end_offset:
        file = fs.open_read(segment.path)
        try:
            mtime_ms = file.mtime_ms()
        finally:
            file.close()
        yield Span(covered, SizeBytes(segment.end_offset - covered), 1, mtime_ms, 0)


def _first_since(
    fs: FileSystem, segment: Segment, span: Span, start: Offset, time_ms: Millis
) -> Offset:
    """Return the first record of a span that is new enough, or the end of the span."""
    end = min(span.end_offset, segment.end_offset)
    for at, message_id in _walk(fs, segment, span.base_offset, end):
        if at < start:
            continue
        if estimated_time_ms(message_id, span.append_time_ms) >= time_ms:
            return at
    return end


def _walk_count(
    fs: FileSystem, segment: Segment, index: SpanIndex, start: Offset, end: Offset
) -> int:
    """Count the records that begin within [start, end), header by header."""
    if start >= end:
        return 0
    first = _boundary_before(index, start)
    return sum(at >= start for at, _id in _walk(fs, segment, first, end))


def _walk(
    fs: FileSystem, segment: Segment, start: Offset, end: int
) -> Iterator[tuple[Offset, MessageId]]:
    """Yield offset and id of the records that begin within [start, end).

    Args:
        fs: The disk.
        segment: Where they lie.
        start: A record boundary.
        end: Any offset; a broken header ends the walk before.
    """
    base, unpack = segment.base_offset, HEADER.unpack_from
    position = segment.position_of(start)
    # A header that begins before `end` is whole, and nothing behind it is read.
    behind = min(segment.size_bytes, end - base + HEADER_BYTES - 1)
    file = fs.open_read(segment.path)
    try:
        reader = RangeReader(file, position, Position(behind))
        while position + base < end:
            data = reader.read(position, WINDOW_BYTES)
            if len(data) < HEADER_BYTES:
                return
            at, last = 0, len(data) - HEADER_BYTES
            while at <= last:
                length, _checksum, message_id, _flag = unpack(data, at)
                if length < 0:
                    return
                yield Offset(base + position + at), MessageId(message_id)
                at += HEADER_BYTES + length
            position = Position(position + at)
    finally:
        file.close()
