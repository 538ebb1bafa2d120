"""Queries about a whole log that the span indexes answer: counts, times, boundaries.

All queries block: they read indexes, and records where an index ends or the range cuts
a span. A segment without an index is walked, so the results are the same, only slower.
Queries are about durable bytes without known damage: an index is trusted without
reading the bytes it covers. Known damage before or after those bytes is passed as
`damage`, and no walk crosses it. Unknown damage may be crossed: after a broken length,
records up to the next span are missed, and other bytes may be taken for records.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from metaq.fs import FileSystem
from metaq.model import Millis, Offset
from metaq.storage.segment import Damage, Segment
from metaq.storage.span_index import Span
from metaq.storage.span_lookup import MadeIndexes, SpanLookup, open_spans
from metaq.storage.walk import MTIME_LAG_MS, estimated_time_ms, walk_headers

SPLIT_WALK_BYTES_MAX: Final = 16 << 20
"""Maximum size of a range that is split at any record; a larger one is split at spans,
unless it is inside one of them."""


@dataclass(frozen=True, slots=True)
class SpanQueries:
    """Queries about one log in its state of one moment."""

    fs: FileSystem
    segments: Sequence[Segment]
    """Segments of the log, in order, one or more; the sizes are those of durable
    bytes."""
    made: MadeIndexes | None = None
    """Cache of indexes for sealed segments without one; None: they are walked."""
    damage: Sequence[Damage] = ()
    """Known damage of the log."""

    def is_boundary(self, offset: Offset) -> bool:
        """Return whether a record begins, or the log or known damage ends, at `offset`.

        Damage begins where a record should, so its offset is a boundary, too.

        Args:
            offset: Any offset outside known damage.
        """
        if offset == self.segments[-1].end_offset:
            return True
        if any(offset in {one.offset, one.next_good_offset} for one in self.damage):
            return True
        for segment in self._within(offset, Offset(offset + 1)):
            if offset == segment.base_offset:
                return True
            with self._spans_of(segment) as spans:
                first = next(spans.pieces(offset, Offset(offset + 1))).base_offset
            if first == offset:
                return True
            return any(
                at == offset
                for at, _size, _id in walk_headers(self.fs, segment, first, offset + 1)
            )
        return False

    def count_records(self, start: Offset, end: Offset) -> int:
        """Return the number of records that begin within [start, end): the lag.

        Args:
            start: Any offset; a record that begins before it is not counted.
            end: Any offset, with no known damage in the range; if not after `start`,
                the result is 0.
        """
        total = 0
        for segment in self._within(start, end):
            low = max(start, segment.base_offset)
            high = min(end, segment.end_offset)
            with self._spans_of(segment) as spans:
                whole = spans.record_count
                if whole is None or 2 * (high - low) < segment.size_bytes:
                    total += self._count_pieces(segment, spans, low, high)
                else:
                    # Count the shorter rest, and subtract it.
                    total += whole
                    for ends in (
                        (segment.base_offset, low),
                        (high, segment.end_offset),
                    ):
                        total -= self._count_pieces(segment, spans, *ends)
        return total

    def offset_for_time(
        self,
        time_ms: Millis,
        *,
        start: Offset = Offset(0),  # noqa: B008  # a NewType is its number
    ) -> Offset:
        """Return where to begin to see everything appended at `time_ms` or later.

        A record's time is the one in its id, but at most that of its span. Ids of a
        Java broker have none: there it is that of the span, and a reader that begins at
        the result may see a few older records. After the end of an index the file's
        mtime counts.

        Args:
            time_ms: Wall clock, milliseconds since 1970.
            start: First offset to consider; there must be no known damage after it.

        Returns:
            A record boundary at `start` or after it; the log end if all records from
            there are older.
        """
        end = self.segments[-1].end_offset
        for segment in self._within(start, end):
            low = max(start, segment.base_offset)
            with open_spans(self.fs, segment, damage=self.damage) as spans:
                # Times need not ascend, because clocks jump: the first span that is new
                # enough is right in any order. Its records may be older: those of a
                # transaction, and all where the index has been made again.
                for span in self._spans_since(segment, spans, low, time_ms):
                    at = self._first_since(segment, span, start, time_ms)
                    if at is not None:
                        return at
        return end

    def split_range(
        self,
        start: Offset,
        end: Offset,
        count_max: int,
        *,
        walk_bytes_max: int = SPLIT_WALK_BYTES_MAX,
    ) -> tuple[Offset, ...]:
        """Return record boundaries that divide [start, end) into ranges of equal size.

        Args:
            start: A record boundary of the log.
            end: A record boundary at `start` or after it, with no known damage between.
            count_max: Maximum number of offsets, 2 or more.
            walk_bytes_max: Maximum size of a range that is split at records.

        Returns:
            Ascending offsets, the first `start` and the last `end`; only `start` for an
            empty range. Fewer than wanted if a record is longer than a part, or a span
            in a range of more than `walk_bytes_max` with several spans.
        """
        size, parts = end - start, count_max - 1
        wanted = [Offset(start + size * part // parts) for part in range(1, parts)]
        if not wanted:
            return tuple(dict.fromkeys((start, end)))
        found: tuple[Offset, ...] = ()
        if size > walk_bytes_max:
            found = _within_range(self._split_at_spans(wanted, end), start, end)
        if not found:
            split = self._split_at_records(wanted, start, end)
            found = _within_range(split, start, end)
        return tuple(dict.fromkeys((start, *found, end)))

    def _split_at_records(
        self, wanted: Sequence[Offset], start: Offset, end: Offset
    ) -> Iterator[Offset]:
        """Yield the first record boundary at or after each wanted offset.

        Walks only the spans and index gaps with these offsets, each once.
        """
        left = iter(wanted)
        target = next(left, None)
        for segment in self._within(wanted[0], end):
            high = min(end, segment.end_offset)
            with self._spans_of(segment) as spans:
                while target is not None and target < high:
                    piece = next(spans.pieces(target, high, is_merged=False))
                    after = min(high, piece.end_offset)
                    first = max(start, piece.base_offset)
                    walk = walk_headers(self.fs, segment, first, after)
                    while target is not None and target < after:
                        wish = target
                        found = next((at for at, *_ in walk if at >= wish), after)
                        yield found
                        while target is not None and target <= found:
                            target = next(left, None)

    def _split_at_spans(
        self, wanted: Sequence[Offset], end: Offset
    ) -> Iterator[Offset]:
        """Yield the end of a span or segment that is nearest to each offset."""
        left = iter(wanted)
        target = next(left, None)
        for segment in self._within(wanted[0], end):
            high = segment.end_offset
            with self._spans_of(segment) as spans:
                while target is not None and target < high:
                    piece = next(spans.pieces(target, high, is_merged=False))
                    before, after = piece.base_offset, min(high, piece.end_offset)
                    yield before if target - before <= after - target else after
                    target = next(left, None)

    def _within(self, start: Offset, end: Offset) -> Iterator[Segment]:
        """Yield the segments that have bytes within [start, end)."""
        for segment in self.segments:
            if segment.end_offset > start and segment.base_offset < end:
                yield segment

    def _spans_of(self, segment: Segment) -> AbstractContextManager[SpanLookup]:
        """Open the index of a segment; none is made for the last one, which changes."""
        made = None if segment is self.segments[-1] else self.made
        return open_spans(self.fs, segment, made, self.damage)

    def _spans_since(
        self, segment: Segment, spans: SpanLookup, start: Offset, time_ms: Millis
    ) -> Iterator[Span]:
        """Yield the spans that end after `start` and are new enough.

        A gap of the index gets the latest time that the file's mtime allows.
        """
        for piece in spans.pieces(start, segment.end_offset):
            if not piece.record_count:
                latest_ms = Millis(self.fs.mtime_ms(segment.path) + MTIME_LAG_MS)
                piece = piece._replace(append_time_ms=latest_ms)
            if piece.append_time_ms < time_ms:
                continue
            each = spans.pieces(piece.base_offset, piece.end_offset, is_merged=False)
            within = [one for one in each if one.append_time_ms >= time_ms]
            yield from within or [piece]

    def _first_since(
        self, segment: Segment, span: Span, start: Offset, time_ms: Millis
    ) -> Offset | None:
        """Return the first record of a span that is new enough; None without any."""
        end = min(span.end_offset, segment.end_offset)
        walk = walk_headers(self.fs, segment, span.base_offset, end)
        for at, _size, message_id in walk:
            if at < start:
                continue
            if estimated_time_ms(message_id, span.append_time_ms) >= time_ms:
                return at
        return None

    def _count_pieces(
        self, segment: Segment, spans: SpanLookup, start: Offset, end: Offset
    ) -> int:
        """Count the records of one segment that begin within [start, end)."""
        total = 0
        for piece in spans.pieces(start, end) if start < end else ():
            first, after = piece.base_offset, min(end, piece.end_offset)
            if piece.record_count and start <= first and piece.end_offset <= end:
                total += piece.record_count
            else:
                walk = walk_headers(self.fs, segment, first, after)
                total += sum(at >= start for at, _size, _id in walk)
        return total


def _within_range(
    found: Iterable[Offset], start: Offset, end: Offset
) -> tuple[Offset, ...]:
    return tuple(at for at in found if start < at < end)
