"""Name the damage in a segment: where it starts, and where a reader can go on.

Recovery, the scrub and `metaq verify` share these questions. Bytes that the span index
covers were once on disk, so any contradiction there is corruption. Behind the index the
records themselves are all there is, and a crash may have torn the last of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from metaq.fs import ReadFile
from metaq.model import MessageId, Millis, Offset, Position, SizeBytes
from metaq.storage.segment import Damage, Segment
from metaq.storage.span_index import NO_ID, Span, SpanIndex
from metaq.storage.walk import damaged_spans, search_record, walk_records

DAMAGES_MAX: Final = 100
"""Damaged ranges named per log; the last one then reaches to the end of the log."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What lies behind the last covered byte of a segment."""

    spans: tuple[Span, ...]
    """Valid records up to the first flaw, cut into spans; times are estimates."""
    end: Offset
    """End of the last valid record, behind damage too."""
    flaw: str | None
    """What is wrong with the bytes at `end`, which a crash explains; None: none."""
    damage: tuple[Damage, ...]
    """What no crash explains, in order."""
    last_id: MessageId
    """Largest id that was seen, -1 for none."""


def damage_in_spans(
    file: ReadFile, segment: Segment, spans: Iterable[Span]
) -> tuple[Damage, ...]:
    """Verify every byte of some spans; return the damaged ranges, apart and in order.

    Args:
        file: The segment's file.
        segment: Its base offset and the size it has.
        spans: Believed entries of its index, in order.
    """
    damage: list[Damage] = []
    for span in damaged_spans(file, segment.base_offset, spans):
        damage += _damage_in_span(file, segment, span)
        if damage[-1].next_good_offset is None:
            break
    return apart(damage)


def _damage_in_span(file: ReadFile, segment: Segment, span: Span) -> list[Damage]:
    """Walk the records of a span whose checksum is wrong, to name the bytes."""
    whole = segment.position_of(span.end_offset)
    end = min(whole, Position(segment.size_bytes))
    position = min(segment.position_of(span.base_offset), end)
    damage: list[Damage] = []
    while True:
        walk = walk_records(
            file,
            segment.base_offset,
            position,
            end,
            span_bytes_min=span.size_bytes,
            time_ms=span.append_time_ms,
        )
        if walk.flaw is None or end < whole:
            break
        good = search_record(file, Position(walk.end + 1), end)
        position = end if good is None else good
        offset, next_good = segment.offset_at(walk.end), segment.offset_at(position)
        damage.append(Damage(segment.path, offset, next_good, walk.flaw))
    if end < whole:
        detail = f"file is too short: expected {whole} bytes, got {end}"
        damage.append(Damage(segment.path, segment.offset_at(walk.end), None, detail))
    elif not damage:
        # The records' own checksums do not cover their headers; the span's does.
        detail = "header or index: span checksum differs, payload checksums do not"
        found = Damage(segment.path, span.base_offset, span.end_offset, detail)
        damage.append(found)
    return damage


@dataclass(frozen=True, slots=True)
class Part:
    """What a check found in one part of a segment."""

    end: Offset
    """Where the next part begins: a record boundary, or the end of the segment."""
    damage: tuple[Damage, ...]
    """Damaged ranges, apart and in order."""
    record_count: int
    """Records that are good."""
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
    record by record only. Nothing here may be torn: every flaw is damage.

    Args:
        file: The segment's file.
        segment: Its base offset, and as size how far its bytes are durable.
        index: What is believed of its index.
        start: `end` of the part before, or the base offset; below the segment's end.
        bytes_max: The part ends with the span that reaches this many bytes.
        span_bytes_min: Size of the spans that are made.
    """
    if start < index.end_offset:
        return _check_covered(file, segment, index, start, bytes_max)
    walk = walk_records(
        file,
        segment.base_offset,
        segment.position_of(start),
        Position(segment.size_bytes),
        span_bytes_min=span_bytes_min,
        time_ms=file.mtime_ms(),
        bytes_max=bytes_max,
    )
    count = sum(span.record_count for span in walk.spans)
    end = segment.offset_at(walk.end)
    if walk.flaw is None:
        return Part(end, (), count, walk.spans)
    size = Position(segment.size_bytes)
    good = search_record(file, Position(walk.end + 1), size)
    next_good = segment.offset_at(size if good is None else good)
    damage = Damage(segment.path, end, next_good, walk.flaw)
    return Part(next_good, (damage,), count, walk.spans)


def _check_covered(
    file: ReadFile, segment: Segment, index: SpanIndex, start: Offset, bytes_max: int
) -> Part:
    spans: list[Span] = []
    for span in index.spans[index.place_of(start) :]:
        spans.append(span)
        if span.end_offset - start >= bytes_max:
            break
    damage = list(damage_in_spans(file, segment, spans))
    bad = tuple(damage)
    count, miscounted = 0, []
    for span in spans:
        if any(_overlap(found, span) for found in bad):
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
    if damage and damage[-1].next_good_offset is None:
        end = segment.end_offset
    return Part(end, apart(damage), count, (), tuple(miscounted))


def _overlap(damage: Damage, span: Span) -> bool:
    good = damage.next_good_offset
    starts_before = damage.offset < span.end_offset
    return starts_before and (good is None or good > span.base_offset)


def check_tail(
    file: ReadFile,
    segment: Segment,
    start: Offset,
    *,
    unsynced_bytes_max: SizeBytes | None,
    span_bytes_min: int,
    time_ms: Millis,
) -> Tail:
    """Walk the records behind the covered bytes; tell a torn tail from corruption.

    Args:
        file: The segment's file.
        segment: Its base offset and the size it has.
        start: End of the covered bytes, a record boundary.
        unsynced_bytes_max: A flaw is a torn tail unless a whole record lies this far
            behind it; None: it always is.
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
            # Cheap for what a crash leaves: nothing lies that far behind it.
            behind = Position(walk.end + max(1, unsynced_bytes_max))
            far = search_record(file, behind, size)
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

    At most `DAMAGES_MAX` are returned; the last one then has no good offset behind it.
    """
    merged: list[Damage] = []
    for found in sorted(damage, key=lambda item: item.offset):
        last = merged[-1] if merged else None
        if last is None or not _touch(last, found):
            merged.append(found)
            continue
        merged[-1] = replace(last, next_good_offset=_later(last, found))
    if len(merged) > DAMAGES_MAX:
        merged = merged[:DAMAGES_MAX]
        merged[-1] = replace(merged[-1], next_good_offset=None)
    return tuple(merged)


def _touch(one: Damage, two: Damage) -> bool:
    """Tell whether two damaged ranges, in order, leave nothing good between them."""
    return one.next_good_offset is None or two.offset <= one.next_good_offset


def _later(one: Damage, two: Damage) -> Offset | None:
    """Return the good offset behind both; None where one has none."""
    first, second = one.next_good_offset, two.next_good_offset
    return None if first is None or second is None else max(first, second)
