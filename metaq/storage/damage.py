"""Find the damage in a segment: where it starts, and where a reader can go on.

Used by recovery, the scrub and `metaq verify`. Bytes that the span index covers were
once on disk, so any contradiction there is corruption. After the index there are only
the records, and a crash may have torn the last of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from metaq.errors import DiskError
from metaq.fs import ReadFile
from metaq.model import MessageId, Millis, Offset, Position, SizeBytes
from metaq.record.checksum import CHECKSUM_MASK, checksum_of_joined, crc32
from metaq.record.layout import HEADER, HEADER_BYTES, PAYLOAD_BYTES_MAX
from metaq.storage.segment import Damage, Segment
from metaq.storage.span_index import NO_ID, Span, SpanIndex, is_unreadable
from metaq.storage.walk import (
    WINDOW_BYTES,
    RangeReader,
    damaged_spans,
    search_record,
    walk_records,
)

DAMAGES_MAX: Final = 100
"""Damaged ranges named per log; the last one then reaches to the end of the log."""

EXPLANATIONS_MAX: Final = 256
"""Checksums tried for a span with damaged records; beyond, all of it is named."""


@dataclass(frozen=True, slots=True)
class Tail:
    """State of the bytes after the last covered byte of a segment."""

    spans: tuple[Span, ...]
    """Valid records up to the first flaw, cut into spans; times are estimates."""
    end: Offset
    """End of the last valid record, also where that is after damage."""
    flaw: str | None
    """Fault at `end` that a crash explains; None if there is none."""
    damage: tuple[Damage, ...]
    """Faults that no crash explains, by offset."""
    last_id: MessageId
    """Largest id that was seen, -1 for none."""


def damage_in_spans(
    file: ReadFile, segment: Segment, spans: Iterable[Span]
) -> tuple[Damage, ...]:
    """Verify every byte of some spans; return the damaged ranges, apart and in order.

    Args:
        file: The segment's file.
        segment: Its base offset and the size it has, or should have.
        spans: Believed entries of its index, in order.
    """
    damage: list[Damage] = []
    size = Position(min(file.size(), segment.size_bytes))
    for span in damaged_spans(file, segment.base_offset, spans):
        damage += _damage_in_span(file, segment, span, size)
        if segment.offset_at(size) < span.end_offset:
            break
    return apart(damage)


def _damage_in_span(
    file: ReadFile, segment: Segment, span: Span, size: Position
) -> list[Damage]:
    """Walk the records of a span whose checksum is wrong, to name the bytes.

    Where they do not explain that checksum something else is wrong in the span as well,
    in headers, which checksums of records do not cover. Then all of it is named, except
    in a span that the end of the file cuts off: the rest has no other checksum.
    """
    whole = segment.position_of(span.end_offset)
    end = min(whole, size)
    position = min(segment.position_of(span.base_offset), end)
    reader = RangeReader(file, position, end)
    damage: list[Damage] = []
    checksums = {0}
    while True:
        walk = walk_records(
            file,
            segment.base_offset,
            position,
            end,
            span_bytes_min=span.size_bytes,
            time_ms=span.append_time_ms,
        )
        good = search_record(file, Position(walk.end + 1), end) if walk.flaw else None
        if walk.flaw is None or (good is None and end < whole):
            break
        checksums = _after(reader, position, walk.end, checksums)
        position = end if good is None else good
        checksums = _explained(reader, walk.end, position, checksums)
        offset, next_good = segment.offset_at(walk.end), segment.offset_at(position)
        damage.append(Damage(segment.path, offset, next_good, walk.flaw))
    if end < whole:
        detail = f"file is too short: expected {whole} bytes, got {end}"
        is_cut = segment.end_offset < span.end_offset
        resume = None if is_cut else segment.end_offset
        offset = segment.offset_at(walk.end)
        return [*damage, Damage(segment.path, offset, resume, detail)]
    if span.checksum in _after(reader, position, end, checksums):
        return damage
    detail = "header or index: span checksum differs, payload checksums do not"
    if damage:
        detail = f"{damage[0].detail}; it is not all that is wrong in its span"
    return [Damage(segment.path, span.base_offset, span.end_offset, detail)]


def _after(
    reader: RangeReader, start: Position, end: Position, before: set[int]
) -> set[int]:
    """Return the possible checksums after some bytes, given those before them."""
    found = {reader.checksum(start, end - start, value) for value in before}
    return {value for value in found if value is not None}


def _explained(
    reader: RangeReader, start: Position, end: Position, before: set[int]
) -> set[int]:
    """Return the possible checksums after damaged records, by one bad field of each.

    Either a payload is damaged, and had the checksum of its header (31 bits of it); or
    the payload is good, and its length or checksum in the header is damaged.

    Args:
        reader: Reads the segment.
        start: Where the damaged bytes begin.
        end: Where they end.
        before: The possible checksums of all bytes before.

    Returns:
        Nothing where that does not explain these bytes.
    """
    if start == end or not before:
        return before
    payload = Position(start + HEADER_BYTES)
    if payload > end:
        return set()
    header = bytes(reader.read(start, HEADER_BYTES))
    length, stored, message_id, flag = HEADER.unpack(header)
    found: set[int] = set()
    for size in {length, end - payload}:
        after = Position(payload + size)
        actual = reader.checksum(payload, size) if payload <= after <= end else None
        if actual is None or size > PAYLOAD_BYTES_MAX:
            continue
        mended = HEADER.pack(size, actual & CHECKSUM_MASK, message_id, flag)
        forms = [(mended, actual)]
        if size == length:
            stored &= CHECKSUM_MASK
            forms += [(header, stored), (header, stored | CHECKSUM_MASK + 1)]
        if len(before) * len(forms) > EXPLANATIONS_MAX:
            return set()
        values = {
            checksum_of_joined(crc32(head, value), checksum, size)
            for value in before
            for head, checksum in forms
        }
        found |= _explained(reader, after, end, values)
    return found


@dataclass(frozen=True, slots=True)
class Part:
    """Result of checking one part of a segment."""

    end: Offset
    """Start of the next part: a record boundary, or the end of the segment."""
    damage: tuple[Damage, ...]
    record_count: int
    spans: tuple[Span, ...]
    """Spans made of bytes that the index does not cover; times are estimates."""
    miscounted: tuple[Span, ...] = ()
    """Entries of the index that do not have the number of records of their bytes."""


def check_part(
    file: ReadFile,
    segment: Segment,
    index: SpanIndex,
    start: Offset,
    *,
    bytes_max: int,
    span_bytes_min: int,
) -> Part:
    """Check durable bytes of a segment from `start` on, about `bytes_max` of them.

    Bytes that the index covers are checked against it and record by record; others
    record by record only. Nothing here may be torn: every flaw is damage, and so are
    unreadable bytes.

    Args:
        file: The segment's file.
        segment: Its base offset, and as size how far its bytes are durable, or should
            be.
        index: The valid part of its index.
        start: `end` of the part before, or the base offset; below the segment's end.
        bytes_max: The part ends with the span that reaches this many bytes.
        span_bytes_min: Size of the spans that are made.
    """
    spans: list[Span] = []
    if start < index.end_offset:
        for span in index.spans[index.index_of(start) :]:
            spans.append(span)
            if span.end_offset - start >= bytes_max:
                break
    try:
        if spans:
            return _check_covered(file, segment, start, spans)
        return _check_uncovered(file, segment, start, bytes_max, span_bytes_min)
    except DiskError as error:
        if not is_unreadable(error):
            raise
        end = spans[-1].end_offset if spans else segment.end_offset
        return Part(end, (Damage(segment.path, start, end, str(error)),), 0, ())


def check_parts(
    file: ReadFile,
    segment: Segment,
    index: SpanIndex,
    start: Offset,
    end: Offset,
    *,
    bytes_max: int,
) -> Iterator[Part]:
    """Check a segment from `start` on, part by part, until one reaches `end`.

    The last part names the missing bytes of a segment that ends before `end`.
    Arguments are those of `check_part`.
    """
    is_cut = False
    while start < end and not is_cut:
        part = check_part(
            file,
            segment,
            index,
            start,
            bytes_max=min(bytes_max, end - start),
            span_bytes_min=WINDOW_BYTES,
        )
        yield part
        is_cut = any(each.next_good_offset is None for each in part.damage)
        start = part.end


def _check_uncovered(
    file: ReadFile, segment: Segment, start: Offset, bytes_max: int, span_bytes_min: int
) -> Part:
    size = Position(segment.size_bytes)
    walk = walk_records(
        file,
        segment.base_offset,
        segment.position_of(start),
        size,
        span_bytes_min=span_bytes_min,
        time_ms=file.mtime_ms(),
        bytes_max=bytes_max,
    )
    count = sum(span.record_count for span in walk.spans)
    end = segment.offset_at(walk.end)
    if walk.flaw is None:
        return Part(end, (), count, walk.spans)
    good = search_record(file, Position(walk.end + 1), size)
    next_good = segment.offset_at(size if good is None else good)
    damage = Damage(segment.path, end, next_good, walk.flaw)
    return Part(next_good, (damage,), count, walk.spans)


def _check_covered(
    file: ReadFile, segment: Segment, start: Offset, spans: Sequence[Span]
) -> Part:
    damage = list(damage_in_spans(file, segment, spans))
    bad = tuple(damage)
    count, miscounted = 0, []
    for span in spans:
        if any(one.overlaps(span.base_offset, span.end_offset) for one in bad):
            continue
        walk = walk_records(
            file,
            segment.base_offset,
            segment.position_of(span.base_offset),
            segment.position_of(span.end_offset),
            span_bytes_min=span.size_bytes,
            time_ms=span.append_time_ms,
        )
        found = sum(part.record_count for part in walk.spans)
        count += found
        if walk.flaw is not None:
            # Stored as it was handed in: the span agrees, the records do not.
            offset = segment.offset_at(walk.end)
            damage.append(Damage(segment.path, offset, span.end_offset, walk.flaw))
        elif found != span.record_count:
            miscounted.append(span)
    end = max(min(spans[-1].end_offset, segment.end_offset), start)
    if damage and damage[-1].next_good_offset in {None, segment.end_offset}:
        end = segment.end_offset
    return Part(end, apart(damage), count, (), tuple(miscounted))


def check_tail(
    file: ReadFile,
    segment: Segment,
    start: Offset,
    *,
    unsynced_bytes_max: SizeBytes | None,
    span_bytes_min: int,
    time_ms: Millis,
) -> Tail:
    """Walk the records after the covered bytes; separate a torn tail from corruption.

    Args:
        file: The segment's file.
        segment: Its base offset and the size it has.
        start: End of the covered bytes, a record boundary.
        unsynced_bytes_max: A flaw is a torn tail unless a whole record begins this
            far after it; None: it always is.
        span_bytes_min: Size of the spans that are made.
        time_ms: Time of the last append at the latest.
    """
    spans: tuple[Span, ...] | None = None
    damage: list[Damage] = []
    last_id = NO_ID
    size = Position(segment.size_bytes)
    position = segment.position_of(start)
    for _ in range(DAMAGES_MAX):
        walk = walk_records(
            file,
            segment.base_offset,
            position,
            size,
            span_bytes_min=span_bytes_min,
            time_ms=time_ms,
        )
        spans = walk.spans if spans is None else spans
        last_id = max(last_id, walk.last_id)
        end = segment.offset_at(walk.end)
        far = None
        if walk.flaw is not None and unsynced_bytes_max is not None:
            # Cheap after a crash: no bytes are that far after the flaw.
            start_at = Position(walk.end + max(1, unsynced_bytes_max))
            far = search_record(file, start_at, size)
        if walk.flaw is None or far is None:
            return Tail(spans, end, walk.flaw, tuple(damage), last_id)
        near = search_record(file, Position(walk.end + 1), far)
        position = far if near is None else near
        good = segment.offset_at(position)
        damage.append(Damage(segment.path, end, good, walk.flaw))
    damage[-1] = replace(damage[-1], next_good_offset=None)
    return Tail(spans or (), segment.end_offset, None, tuple(damage), last_id)


def apart(damage: Iterable[Damage]) -> tuple[Damage, ...]:
    """Sort damaged ranges and merge such as touch, so that a good offset is good.

    Empty ranges, which name a file and cost no offset, stay as they are. At most
    `DAMAGES_MAX` are returned; the last one then has no next good offset.
    """
    merged: list[Damage] = []
    found = set(damage)
    for each in sorted(found, key=lambda item: (item.offset, str(item))):
        last = merged[-1] if merged else None
        if each.is_empty:
            continue
        if last is None or not _touch(last, each):
            merged.append(each)
            continue
        merged[-1] = replace(last, next_good_offset=_later(last, each))
    merged += [each for each in found if each.is_empty]
    merged.sort(key=lambda item: (item.offset, str(item)))
    if len(merged) > DAMAGES_MAX:
        merged = merged[:DAMAGES_MAX]
        merged[-1] = replace(merged[-1], next_good_offset=None)
    return tuple(merged)


def _touch(one: Damage, two: Damage) -> bool:
    """Return whether two damaged ranges, in order, leave nothing good between them."""
    return one.next_good_offset is None or two.offset <= one.next_good_offset


def _later(one: Damage, two: Damage) -> Offset | None:
    """Return the good offset after both; None where one has none."""
    first, second = one.next_good_offset, two.next_good_offset
    return None if first is None or second is None else max(first, second)
