"""Look up spans in the index of one segment, without reading all of it.

An index has 65,000 entries per GiB, and most lookups need a few of them: those are
found by bisection, in blocks that are read when needed. Sums are computed over whole
blocks. Each entry is trusted by its own checksum, so a damaged one hides one span only
(`span_index.decode_index` trusts only the entries before it, because recovery must know
the last one). Bytes without an entry are a gap; callers that need its records walk it.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import add
from struct import Struct
from sys import byteorder
from threading import Lock
from typing import Final

from metaq.fs import FileSystem, ReadFile
from metaq.model import Millis, Offset, Position, SizeBytes
from metaq.record.checksum import crc32
from metaq.storage.segment import Damage, Segment
from metaq.storage.span_index import (
    ENTRY,
    ENTRY_BYTES,
    HEADER,
    INDEX_BYTES_MAX,
    Span,
    SpanIndex,
    decode_index,
    decode_seal,
    encode_index,
    spans_path,
)
from metaq.storage.walk import walk_headers

BLOCK_ENTRIES: Final = 512
"""Number of entries read and summed at once: 16 KiB."""
BLOCKS_MAX: Final = 128
"""Size of the cache of blocks of one index; a full cache is emptied."""

MADE_SPAN_BYTES: Final = 128 << 10
"""Size at which a span of a made index ends with a record: 256 KiB of index per GiB."""
MADE_BYTES_MAX: Final = 16 << 20
"""Size of the cache of made indexes; the least recently used go first, and the newest
one is kept however large it is."""

_BLOCK_BYTES: Final = BLOCK_ENTRIES * ENTRY_BYTES
_CHECKED_BYTES: Final = ENTRY_BYTES - 4
_CHECKED: Final = Struct(f"{_CHECKED_BYTES}s4x")
_WORDS: Final = ENTRY_BYTES // 4
_LONGS: Final = ENTRY_BYTES // 8


class _InMemory:
    """An index with the two methods of a `ReadFile` that a lookup needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> SizeBytes:
        return SizeBytes(len(self._data))

    def read_at(self, position: Position, size: SizeBytes) -> bytes:
        return self._data[position : position + size]


class SpanLookup:
    """The valid entries of one index file. Not thread-safe; blocks.

    A *place* is the number of an entry in the file. All methods raise `StorageError`
    if the disk refuses a read.
    """

    def __init__(
        self,
        file: ReadFile | _InMemory | None,
        segment: Segment,
        blocks_max: int = BLOCKS_MAX,
        damage: Sequence[Damage] = (),
    ) -> None:
        """Read the header and the last entries of an index.

        Args:
            file: the index, owned by the caller; None if there is none.
            segment: the segment of the index.
            blocks_max: maximum number of blocks kept in memory.
            damage: damaged ranges of the segment.
        """
        self._file = file
        self._segment = segment
        self._blocks_max = blocks_max
        self._good_offsets = [
            one.next_good_offset for one in damage if one.next_good_offset is not None
        ]
        self._blocks: dict[int, bytes] = {}
        self._count = 0
        self.record_count: int | None = None
        """Number of records of the segment, if it is sealed, without damage and fully
        indexed; else None."""
        size = 0 if file is None else file.size()
        if file is None or not HEADER.size <= size <= INDEX_BYTES_MAX:
            return
        header = file.read_at(Position(0), SizeBytes(HEADER.size))
        if decode_index(header, segment.base_offset) is None:
            return
        self._count = (size - HEADER.size) // ENTRY_BYTES
        if self._count >= 2 and not damage:
            ends = file.read_at(
                Position(size - 2 * ENTRY_BYTES), SizeBytes(2 * ENTRY_BYTES)
            )
            totals = decode_seal(header, ends, segment.base_offset)
            if totals is not None and totals.end_offset == segment.end_offset:
                self.record_count = totals.record_count

    def pieces(
        self, start: Offset, end: Offset, *, is_merged: bool = True
    ) -> Iterator[Span]:
        """Yield spans that cover [start, end) of the segment, in order, without a gap.

        The rest of a span after damage is yielded as a gap, because a walk from the
        start of the span would cross the damage.

        Args:
            start: any offset of the segment; the first piece may begin before it.
            end: any offset; the last piece may end after it.
            is_merged: spans that are whole in the range are merged, many into one with
                the sum of their records and the latest of their times.

        Yields:
            Spans; those without records are gaps. Each begins at a record boundary.
        """
        before = self._place_before(start)
        first, at = max(0, before), self._segment.base_offset
        if before >= 0 and (span := self._span(before)) is not None:
            is_inside = start < span.end_offset
            at = span.base_offset if is_inside else span.end_offset
        at = max([at, *(good for good in self._good_offsets if good <= start)])
        last = self._place_before(Offset(end - 1)) if is_merged else self._count - 1
        place = first
        while place <= last and at < end:
            # Spans that the range may cut are not merged: the first and the last.
            after = min(last, (place // BLOCK_ENTRIES + 1) * BLOCK_ENTRIES)
            is_many = is_merged and first < place < after
            span = self._merged(place, after) if is_many else None
            if span is None:
                span, after = self._span(place), place + 1
            place = after
            if span is None or span.base_offset < at:
                continue
            if at < span.base_offset:
                yield _gap(at, min(span.base_offset, end))
            if span.base_offset < end:
                yield span
            at = span.end_offset
        if at < end:
            yield _gap(at, end)

    def _place_before(self, offset: Offset) -> int:
        """Return the last place of a span that begins at or before `offset`, or -1."""
        best, left, right = -1, 0, self._count
        while left < right:
            middle = place = (left + right) // 2
            span = self._span(place)
            while span is None and place > left:
                place -= 1
                span = self._span(place)
            if span is None:
                left = middle + 1
            elif span.base_offset <= offset:
                best, left = place, middle + 1
            else:
                right = place
        return best

    def _span(self, place: int) -> Span | None:
        """Return the span of an entry; None if it is damaged, torn, or the seal."""
        number, within = divmod(place, BLOCK_ENTRIES)
        block, at = self._block(number), within * ENTRY_BYTES
        if len(block) < at + ENTRY_BYTES:
            # The file was truncated.
            return None
        start, size, count, time_ms, checksum, crc = ENTRY.unpack_from(block, at)
        is_whole = crc == crc32(block[at : at + _CHECKED_BYTES])
        if not (is_whole and size and count and start >= self._segment.base_offset):
            return None
        return Span(start, size, count, time_ms, checksum)

    def _merged(self, place: int, after: int) -> Span | None:
        """Return entries of one block as one span; None if they can not be merged.

        They can if each is valid and begins where the previous one ends.
        """
        number, within = divmod(place, BLOCK_ENTRIES)
        until = (within + after - place) * ENTRY_BYTES
        part = self._block(number)[within * ENTRY_BYTES : until]
        words, longs = array("I", part), array("q", part)
        if byteorder == "little":
            words.byteswap()
            longs.byteswap()
        bases, times = longs[::_LONGS], longs[2::_LONGS]
        sizes, counts = words[2::_WORDS], words[3::_WORDS]
        checksums = array("I", (crc32(data) for (data,) in _CHECKED.iter_unpack(part)))
        ends = array("q", map(add, bases, sizes))
        is_whole = (
            len(bases) == after - place
            and checksums == words[_WORDS - 1 :: _WORDS]
            and bases[1:] == ends[:-1]
            and min(sizes) > 0
            and min(counts) > 0
        )
        if not is_whole:
            return None
        size = SizeBytes(ends[-1] - bases[0])
        return Span(Offset(bases[0]), size, sum(counts), Millis(max(times)), 0)

    def _block(self, number: int) -> bytes:
        block = self._blocks.get(number)
        if block is None:
            assert self._file is not None
            position = HEADER.size + number * _BLOCK_BYTES
            block = self._file.read_at(Position(position), SizeBytes(_BLOCK_BYTES))
            if len(self._blocks) >= self._blocks_max:
                self._blocks.clear()
            self._blocks[number] = block
        return block


class MadeIndexes:
    """Indexes made in memory for sealed segments that have none.

    A directory that a Java broker wrote has no indexes until the scrub has checked it,
    which may take days. The first lookup in such a segment walks its record headers;
    later ones use the result. Thread-safe: one thread walks, others that need an index
    wait for it.
    """

    def __init__(
        self, bytes_max: int = MADE_BYTES_MAX, *, span_bytes: int = MADE_SPAN_BYTES
    ) -> None:
        """Create a cache of up to `bytes_max` bytes, with spans of `span_bytes`."""
        self._bytes_max = bytes_max
        self._span_bytes = span_bytes
        self._lock = Lock()
        self._made: dict[tuple[Segment, Millis], bytes] = {}
        self.made_count = 0
        """Number of walks; more than there are segments if the cache is too small."""

    def index_of(self, fs: FileSystem, segment: Segment) -> bytes:
        """Return the bytes of a sealed segment's index, made if necessary; blocks.

        Checksums of records are not verified, and those of the spans are 0. All spans
        have the file's mtime.
        """
        time_ms = fs.mtime_ms(segment.path)
        # A topic that was created again may have a segment of the same name and size.
        key = (segment, time_ms)
        with self._lock:
            data = self._made.pop(key, None)
            if data is None:
                spans = tuple(_spans_in(fs, segment, time_ms, self._span_bytes))
                index = SpanIndex(segment.base_offset, spans=spans)
                data = encode_index(index, is_sealed=True)
                self.made_count += 1
            self._made[key] = data
            size = sum(map(len, self._made.values()))
            while size > self._bytes_max and len(self._made) > 1:
                size -= len(self._made.pop(next(iter(self._made))))
        return data


@contextmanager
def open_spans(
    fs: FileSystem,
    segment: Segment,
    made: MadeIndexes | None = None,
    damage: Sequence[Damage] = (),
) -> Iterator[SpanLookup]:
    """Open the index of a segment.

    Args:
        fs: The disk.
        segment: The segment of the index.
        made: Makes an index for a segment without one; not where damage overlaps it,
            because an index is made by a walk over the lengths of records. None: such a
            segment has no spans.
        damage: Damaged ranges of the log.
    """
    start, end = segment.base_offset, segment.end_offset
    here = [one for one in damage if one.overlaps(start, end)]
    file = fs.try_open_read(spans_path(segment.path, start))
    if file is not None:
        with file:
            yield SpanLookup(file, segment, damage=here)
    elif made is not None and not here:
        index = _InMemory(made.index_of(fs, segment))
        yield SpanLookup(index, segment, damage=here)
    else:
        yield SpanLookup(None, segment, damage=here)


def _gap(start: Offset, end: Offset) -> Span:
    return Span(start, SizeBytes(end - start), 0, Millis(0), 0)


def _spans_in(
    fs: FileSystem, segment: Segment, time_ms: Millis, span_bytes: int
) -> Iterator[Span]:
    """Yield spans of the records, up to the first bytes that are no record."""
    start, end, count = segment.base_offset, segment.end_offset, 0
    for at, size, _id in walk_headers(fs, segment, start, end):
        count += 1
        after = at + size
        if after - start >= span_bytes or after >= end:
            if after > end:
                return
            yield Span(start, SizeBytes(after - start), count, time_ms, 0)
            start, count = Offset(after), 0
