"""Walk the bytes of a segment file: spans by checksum, records one by one, a search.

Recovery, the scrub and `metaq verify` share these functions. All of them read in
windows of bounded size, even if a length field is damaged, and none of them raises
because of the content: only disk errors are raised. Positions are relative to the file.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from metaq.fs import FileSystem, ReadFile
from metaq.model import (
    ID_MS_SHIFT,
    ID_ZERO_MS,
    MessageId,
    Millis,
    Offset,
    Position,
    SizeBytes,
)
from metaq.record.checksum import CHECKSUM_MASK, crc32
from metaq.record.ids import MS_MAX
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.scan import CleanEnd, Incomplete, find_next_record, scan_records
from metaq.storage.segment import Segment
from metaq.storage.segment_source import SegmentSource
from metaq.storage.span_index import NO_ID, Span

WINDOW_BYTES: Final = 1 << 20
"""Bytes read at once; small enough for a processor's cache during the checksum."""

SEARCH_BYTES: Final = 4 << 20
"""Bytes searched at once when records are searched byte by byte."""

SEARCH_PAYLOAD_BYTES_MAX: Final = 1 << 20
"""Maximum payload of a record that the search finds; a limit keeps it fast."""

MTIME_LAG_MS: Final = 1_000
"""Maximum time by which a file's mtime may be earlier than the clock that stamped its
bytes. It moves by kernel ticks of 10 ms, and on a machine that is not given its
processors a tick comes late."""

_UNLIMITED: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Walk:
    """Result of a walk over records: their spans, and where and why it ended."""

    spans: tuple[Span, ...]
    """Valid records, cut into spans; times are estimates."""
    end: Position
    flaw: str | None
    """Fault at `end`; None if the records fill the range."""
    last_id: MessageId
    """Largest of the last ids of the spans; -1 if all are negative."""


class RangeReader:
    """Reads ranges of one file in order through one buffer; not thread-safe."""

    def __init__(self, file: ReadFile, start: Position, end: Position) -> None:
        """Read `file` from `start` to `end` or its own end, whichever is first."""
        self._file = file
        self._end = end
        # Small ranges are frequent: they get a small buffer.
        self._view = memoryview(bytearray(min(WINDOW_BYTES, max(0, end - start))))
        self._start = 0
        self._filled = 0

    def read(self, position: Position, size: int) -> memoryview:
        """Return up to `size` bytes (at most a window), valid until the next call."""
        at = position - self._start
        wanted = min(size, self._end - position)
        if at < 0 or at + wanted > self._filled:
            size_max = min(len(self._view), self._end - position)
            self._start, at = position, 0
            self._filled = self._file.read_into(position, self._view[:size_max])
        return self._view[at : min(at + wanted, self._filled)]

    def checksum(self, position: Position, size: int, value: int = 0) -> int | None:
        """Return the CRC-32 of a range of any size; None if the file is too short."""
        end = position + size
        while position < end:
            part = self.read(position, min(end - position, WINDOW_BYTES))
            if not part:
                return None
            value = crc32(part, value)
            position = Position(position + len(part))
        return value


def damaged_spans(
    file: ReadFile, base_offset: Offset, spans: Iterable[Span]
) -> list[Span]:
    """Return the spans whose bytes do not have the checksum in their entry.

    Args:
        file: The segment.
        base_offset: The segment's base offset.
        spans: Entries in the order of offsets.
    """
    reader = RangeReader(file, Position(0), Position(file.size()))
    return [
        span
        for span in spans
        if reader.checksum(Position(span.base_offset - base_offset), span.size_bytes)
        != span.checksum
    ]


def walk_records(
    file: ReadFile,
    base_offset: Offset,
    start: Position,
    end: Position,
    *,
    span_bytes_min: int,
    time_ms: Millis,
    bytes_max: int = _UNLIMITED,
) -> Walk:
    """Walk the records from `start` to `end`, verifying the checksum of each.

    Args:
        file: The segment.
        base_offset: The segment's base offset.
        start: A record boundary.
        end: Expected end of the records, at most the size of the file.
        span_bytes_min: Approximate size of the spans into which records are grouped.
        time_ms: Latest possible time of the last append (the file's mtime).
        bytes_max: The walk ends, without a flaw, with the span that reaches this many
            bytes.

    Returns:
        The spans, and where and why the walk ended; a record cut by `end` is a flaw.
    """
    reader = RangeReader(file, start, end)
    spans: list[Span] = []
    position, last_id, flaw = start, NO_ID, None
    window = max(HEADER_BYTES, min(span_bytes_min, WINDOW_BYTES))
    while position < end and position - start < bytes_max and flaw is None:
        part = reader.read(position, window)
        if not part:
            flaw = f"the file ends {end - position} bytes early"
            break
        result = scan_records(part)
        size, count, newest = result.position, result.record_count, result.last_id
        checksum = crc32(part[:size])
        if isinstance(result, Incomplete) and not size:
            needed = result.needed_bytes
            found = _walk_large(reader, position, needed, end)
            if isinstance(found, str):
                flaw = found
            else:
                size, count = Position(needed), 1
                checksum, newest = found
        elif not isinstance(result, CleanEnd | Incomplete):
            flaw = result.detail
        if size:
            # An id of 0 or more contains the time when a broker stamped it.
            newest = NO_ID if newest is None else newest
            offset = Offset(base_offset + position)
            time = estimated_time_ms(newest, time_ms)
            spans.append(Span(offset, SizeBytes(size), count, time, checksum))
            last_id = max(last_id, newest)
            position = Position(position + size)
    return Walk(tuple(spans), position, flaw, last_id)


def _walk_large(
    reader: RangeReader, position: Position, needed: int, end: Position
) -> tuple[int, MessageId] | str:
    """Check a record that is longer than a window, or cut by `end`.

    Returns:
        The checksum of all its bytes and its id; a description of the fault if it is
        not a record.
    """
    left = end - position
    if needed > left:
        return f"incomplete record: expected {needed} bytes, got {left}"
    header = bytes(reader.read(position, HEADER_BYTES))
    if len(header) < HEADER_BYTES:
        return f"incomplete record: expected {needed} bytes, the file ends before"
    length, stored, message_id, _flag = HEADER.unpack(header)
    payload = Position(position + HEADER_BYTES)
    computed = reader.checksum(payload, length)
    whole = reader.checksum(payload, length, crc32(header))
    if computed is None or whole is None:
        return f"incomplete record: expected {needed} bytes, the file ends before"
    if computed & CHECKSUM_MASK != stored:
        masked = computed & CHECKSUM_MASK
        return f"checksum: expected {stored}, got {masked} over {length} bytes"
    return whole, MessageId(message_id)


def walk_headers(
    fs: FileSystem, segment: Segment, start: Offset, end: int
) -> Iterator[tuple[Offset, int, MessageId]]:
    """Yield offset, length and id of the records that begin within [start, end).

    Only headers are read. Lengths are in bytes and include the header.

    Args:
        fs: The disk.
        segment: The segment with the records.
        start: A record boundary.
        end: Any offset; an invalid header ends the walk earlier.
    """
    base, unpack = segment.base_offset, HEADER.unpack_from
    position = segment.position_of(start)
    # A header that begins before `end` is read whole, and nothing after it.
    after = min(segment.size_bytes, end - base + HEADER_BYTES - 1)
    with fs.open_read(segment.path) as file:
        reader = RangeReader(file, position, Position(after))
        while position + base < end:
            data = reader.read(position, WINDOW_BYTES)
            if len(data) < HEADER_BYTES:
                return
            at, last = 0, len(data) - HEADER_BYTES
            while at <= last:
                length, _checksum, message_id, _flag = unpack(data, at)
                if length < 0:
                    return
                size = HEADER_BYTES + length
                yield Offset(base + position + at), size, MessageId(message_id)
                at += size
            position = Position(position + at)


def estimated_time_ms(message_id: MessageId, latest_ms: Millis) -> Millis:
    """Return the append time of a record, estimated from its id; at most `latest_ms`.

    Ids of a Java broker are negative and contain no time: the result is `latest_ms`.
    """
    if message_id < 0 or message_id >> ID_MS_SHIFT > MS_MAX:
        return latest_ms
    return Millis(min((message_id >> ID_MS_SHIFT) + ID_ZERO_MS, latest_ms))


def search_record(
    file: SegmentSource,
    start: Position,
    end: Position,
    window_bytes: int = SEARCH_BYTES,
) -> Position | None:
    """Return the position of the next whole record, trying every byte.

    Args:
        file: The segment.
        start: First position to try.
        end: End of the records, at most the end of the file.
        window_bytes: Bytes read at once.

    Returns:
        The position, or None. Records with a payload of more than
        `SEARCH_PAYLOAD_BYTES_MAX` are not found.
    """
    while start < end:
        part = file.read_at(start, SizeBytes(min(window_bytes, end - start)))
        is_last = start + window_bytes >= end or len(part) < window_bytes
        # Records may cross into the next window, so only the first half is final.
        limit = None if is_last else Position(window_bytes // 2)
        found = find_next_record(
            part, limit=limit, payload_bytes_max=SEARCH_PAYLOAD_BYTES_MAX
        )
        if found is not None:
            return Position(start + found)
        if is_last:
            return None
        start = Position(start + window_bytes // 2)
    return None
