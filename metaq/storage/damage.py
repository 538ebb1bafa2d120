"""Find the damage in a segment: where it begins, and where a reader can resume.

Used by recovery, the scrub and `metaq verify`. Bytes that the span index covers were
once on disk, so any contradiction there is corruption. After the index there are only
records, the last of which may be torn by a crash.
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
"""Maximum number of damaged ranges per log; the last one then extends to its end."""

EXPLANATIONS_MAX: Final = 256
"""Maximum number of checksums tried for a span with damaged records; with more, the
whole span counts as damaged."""


@dataclass(frozen=True, slots=True)
class Tail:
    """State of the bytes after the last covered byte of a segment."""

    spans: tuple[Span, ...]
    """Valid records up to the first flaw, cut into spans; times are estimates."""
    end: Offset
    """End of the last valid record, even after damage."""
    flaw: str | None
    """Fault at `end` that a crash can explain; None if there is none."""
    damage: tuple[Damage, ...]
    """Faults that a crash can not explain, by offset."""
    last_id: MessageId
    """Largest id found, -1 for none."""


def damage_in_spans(
    file: ReadFile, segment: Segment, spans: Iterable[Span]
) -> tuple[Damage, ...]:
    """Verify every byte of some spans; return the damaged ranges, merged and sorted.

    Args:
        file: The segment's file.
        segment: The segment, with its actual or expected size.
        spans: Valid entries of its index, in order.
    """
    damage: list[Damage] = []
    size = Position(min(file.size(), segment.size_bytes))
    for span in damaged_spans(file, segment.base_offset, spans):
        damage += _damage_in_span(file, segment, span, size)
        if segment.offset_at(size) < span.end_offset:
            break
    return merge_damage(damage)


def _damage_in_span(
    file: ReadFile, segment: Segment, span: Span, size: Position
) -> list[Damage]:
    """Find the damaged ranges of a span with a wrong checksum, record by record.

    If bad records do not explain that checksum, another fault is in headers, which
    checksums of records do not cover. Then the whole span is damaged, except in a span
    that the end of the file cuts off: what is left of it has no other checksum.
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
    """Return the possible checksums after damaged records, with one bad field in each.

    Either a payload is damaged, and its header has the original checksum (31 bits of
    it); or the payload is good, and the length or checksum in its header is damaged.

    Args:
        reader: Reads the segment.
        start: Start of the damaged bytes.
        end: End of the damaged bytes.
        before: Possible checksums of all bytes before `start`.

    Returns:
        The empty set if that does not explain these bytes.
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
    """Spans made from bytes that the index does not cover; times are estimates."""
    miscounted: tuple[Span, ...] = ()
    """Entries of the index with a wrong number of records."""


def check_part(
    file: ReadFile,
    segment: Segment,
    index: SpanIndex,
    start: Offset,
    *,
    bytes_max: int,
    span_bytes_min: int,
) -> Part:
    """Check about `bytes_max` durable bytes of a segment, from `start` on.

    Bytes that the index covers are checked against it and record by record; others
    record by record only. None of them may be torn: every flaw is damage, and so are
    unreadable bytes.

    Args:
        file: The segment's file.
        segment: The segment; its size is the extent of bytes that are durable, or
            should be.
        index: The valid part of its index.
        start: `end` of the previous part, or the base offset; below the segment's end.
        bytes_max: The part ends with the span that reaches this many bytes.
        span_bytes_min: Minimum size of new spans.
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

    If the segment ends before `end`, the last part has the missing bytes as damage.
    For the arguments see `check_part`.
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
            # Stored as it was put: the span agrees, the records do not.
            offset = segment.offset_at(walk.end)
            damage.append(Damage(segment.path, offset, span.end_offset, walk.flaw))
        elif found != span.record_count:
            miscounted.append(span)
    end = max(min(spans[-1].end_offset, segment.end_offset), start)
    if damage and damage[-1].next_good_offset in {None, segment.end_offset}:
        end = segment.end_offset
    return Part(end, merge_damage(damage), count, (), tuple(miscounted))


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
        segment: The segment, with the size of its file.
        start: End of the covered bytes, a record boundary.
        unsynced_bytes_max: A flaw is a torn tail unless a whole record begins this
            far after it; None: it always is.
        span_bytes_min: Minimum size of new spans.
        time_ms: Latest possible time of the last append.
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
            # Cheap after a crash: the file ends before that position.
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


def merge_damage(damage: Iterable[Damage]) -> tuple[Damage, ...]:
    """Sort damaged ranges and merge those that touch, so that good offsets are good.

    Empty ranges, which name a file but cover no offset, are kept. At most
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
    """Return whether two damaged ranges, in order, have no good byte between them."""
    return one.next_good_offset is None or two.offset <= one.next_good_offset


def _later(one: Damage, two: Damage) -> Offset | None:
    """Return the larger next good offset; None if one range has none."""
    first, second = one.next_good_offset, two.next_good_offset
    return None if first is None or second is None else max(first, second)
