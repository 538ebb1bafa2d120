"""Find the records of a log that have a key or header, newest first.

    log start ... | segment, blocks of its index ... | bytes without one | ... below
                             <-- entries, each compared    <-- searched, span by span

Blocks are looked up (`key_index.py`); bytes without a block are read backwards, in
pieces that begin with a span: a piece without the bytes of the field is not walked.
Both ways give the same records. A search ends at a limit or at the end of its time, and
returns the offset to continue at.

Everything here blocks. As for `span_queries.py`, known damage is not crossed; some
records with unknown damage may be missed.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from metaq.errors import CorruptRecordError
from metaq.fs import ReadFile
from metaq.model import ID_MS_SHIFT, ID_ZERO_MS, Millis, Offset, SizeBytes
from metaq.record.checksum import checksum, crc32
from metaq.record.flags import has_field
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.runs import RecordRun
from metaq.storage.key_index import (
    BlockLists,
    DamagedIndexError,
    HashOf,
    KeyBlock,
    keys_path,
    newest_offsets,
)
from metaq.storage.segment import DamagedSegmentError, Segment
from metaq.storage.span_lookup import open_spans
from metaq.storage.span_queries import SpanQueries

PIECE_BYTES: Final = 1 << 20
"""Bytes without an index that are read at once, plus the rest of a span."""

RECORD_BYTES: Final = 4096
"""Bytes read at once for a record that the index names; most records are shorter."""

NO_MORE: Final = Offset(0)
"""`next_offset` of a search that is complete."""

_Step = tuple[Offset, bytes | None]
"""Offset and record found there; record None: all from the offset on was searched."""


@dataclass(frozen=True, slots=True)
class KeyQuestion:
    """Field, times and limits of a search."""

    field: bytes
    """Key or header, as encoded in a payload."""
    below: Offset
    """Only records before it: a record boundary, or any offset after the log end."""
    since_ms: int
    """Minimum time of the records, inclusive. Records of a Java broker have no time,
    and always match."""
    until_ms: int
    """Maximum time of the records, inclusive."""
    limit: int
    """Maximum number of records, 1 or more."""
    bytes_max: int
    """Maximum size of the records together, except that the first may be larger."""


class FoundRecords(NamedTuple):
    """Result of one search."""

    records: list[RecordRun]
    """The records, one per run, newest first."""
    next_offset: Offset
    """`below` for the next search; NO_MORE: there are no more."""
    read_bytes: int
    """Number of bytes of the log that were searched because they have no index."""


@dataclass(slots=True)
class KeySearch:
    """One search. Used on one thread."""

    log: SpanQueries
    """The log in its state of one moment."""
    question: KeyQuestion
    names: tuple[bytes, ...] = ()
    """Prefixes of the indexed fields."""
    hash_of: HashOf = crc32
    piece_bytes: int = PIECE_BYTES
    lists: BlockLists = field(default_factory=BlockLists)
    """Cache of the blocks of indexes."""
    _read_bytes: int = 0
    _segment: Segment = field(init=False)
    """Segment that is being searched."""
    _files: ExitStack = field(init=False)
    """Its open files."""
    _file: ReadFile | None = None
    """Its file of records; opened when needed, as most indexes have no matching
    entry."""
    _broken: CorruptRecordError | None = None
    """Error of the newest damaged record in the bytes searched last."""
    damaged: set[Offset] = field(default_factory=set)
    """Base offsets of segments whose index is damaged."""

    def run(self, is_over: Callable[[], bool]) -> FoundRecords:
        """Search until the end, a limit, or `is_over()` after some progress.

        Raises:
            DamagedSegmentError: the first bytes to search have known damage.
            CorruptRecordError: a record is damaged that was not known to be, and no
                record was found before.
            StorageError: the disk refuses.
        """
        question, records, size = self.question, list[RecordRun](), 0
        low, last = self._bounds()
        at = question.below
        try:
            for at, record in self._steps(low):
                if record is not None:
                    size += len(record)
                    if records and size > question.bytes_max:
                        at = records[-1].offset
                        break
                    records.append(RecordRun(at, record))
                if len(records) >= question.limit or is_over():
                    break
            else:
                at = last
        except CorruptRecordError:
            if not records:
                raise
            at = records[-1].offset
        return FoundRecords(records, at, self._read_bytes)

    def _bounds(self) -> tuple[Offset, Offset]:
        """Return the first offset to search, and the final `next_offset`."""
        start, below = self.log.segments[0].base_offset, self.question.below
        floor = start
        for damage in self.log.damage:
            if damage.overlaps(start, below):
                good = damage.next_good_offset
                if good is None or good >= below:
                    raise DamagedSegmentError(damage)
                floor = max(floor, good)
        low, since_ms = floor, Millis(self.question.since_ms)
        if since_ms > 0:
            low = self.log.offset_for_time(since_ms, start=floor)
        return low, floor if start < low == floor else NO_MORE

    def _steps(self, low: Offset) -> Iterator[_Step]:
        for segment in reversed(self.log.segments):
            high = min(self.question.below, segment.end_offset)
            start = max(low, segment.base_offset)
            if start < high:
                yield from self._in_segment(segment, start, high)

    def _in_segment(
        self, segment: Segment, low: Offset, high: Offset
    ) -> Iterator[_Step]:
        base, fs = segment.base_offset, self.log.fs
        with ExitStack() as files:
            self._segment, self._files, self._file = segment, files, None
            index = None
            if self.question.field.startswith(self.names):
                index = fs.try_open_read(keys_path(segment.path, base))
            if index is not None:
                files.enter_context(index)
                end = segment.end_offset
                blocks = self.lists.blocks_of(index, base, end, self.names)
                for block in reversed(blocks):
                    start, end = max(low, block.base), min(high, block.end)
                    if start < end:
                        yield from self._read_back(block.end, high)
                        yield from self._in_block(index, block, start, end)
                        high = start
            yield from self._read_back(low, high)

    def _read_at(self, offset: Offset, size: int) -> bytes:
        segment, file = self._segment, self._file
        if file is None:
            opened = self.log.fs.open_read(segment.path)
            file = self._file = self._files.enter_context(opened)
        return file.read_at(segment.position_of(offset), SizeBytes(size))

    # -- with an index

    def _in_block(
        self, index: ReadFile, block: KeyBlock, low: Offset, high: Offset
    ) -> Iterator[_Step]:
        if block.least_id < 0 or self._is_in_time(block.least_id, block.greatest_id):
            hashed, left = self.hash_of(self.question.field), high
            try:
                for offset in newest_offsets(index, block, hashed, low, high):
                    yield offset, self._read_record(offset, high)
                    left = offset
            except DamagedIndexError:
                self.damaged.add(self._segment.base_offset)
                yield from self._read_back(low, left)
                return
        yield low, None

    def _read_record(self, offset: Offset, high: Offset) -> bytes | None:
        """Return the record at an offset if it matches, or None."""
        data = self._read_at(offset, min(RECORD_BYTES, high - offset))
        if len(data) < HEADER_BYTES:
            return None
        size = HEADER_BYTES + HEADER.unpack_from(data)[0]
        if not HEADER_BYTES <= size <= high - offset:
            return None
        if size > len(data):
            data = self._read_at(offset, size)
        return data[:size] if self._is_wanted(data[:size], offset) else None

    # -- without

    def _read_back(self, low: Offset, high: Offset) -> Iterator[_Step]:
        if low >= high:
            return
        segment, log = self._segment, self.log
        made = None if segment is log.segments[-1] else log.made
        with open_spans(log.fs, segment, made, log.damage) as spans:
            while low < high:
                wanted = max(low, Offset(high - self.piece_bytes))
                piece = next(spans.pieces(wanted, high, is_merged=False))
                start = max(low, piece.base_offset)
                self._read_bytes += high - start
                for run in reversed(self._search(start, high)):
                    yield run.offset, run.data
                if self._broken is not None:
                    raise self._broken
                yield start, None
                high = start

    def _search(self, start: Offset, end: Offset) -> list[RecordRun]:
        """Return the newest records with the field in a range, in log order."""
        found, at, size = list[RecordRun](), start, 2 * self.piece_bytes
        while at < end:
            size = min(size, end - at)
            data = self._read_at(at, size)
            is_last = at + len(data) >= end
            used = self._search_piece(data, at, found, is_last=is_last)
            del found[: -self.question.limit]
            if not used and (is_last or len(data) < size):
                break
            # A record may be longer than the bytes read.
            size = 2 * self.piece_bytes if used else 2 * size
            at = Offset(at + used)
        return found

    def _search_piece(
        self, data: bytes, offset: Offset, found: list[RecordRun], *, is_last: bool
    ) -> int:
        """Add matching records in some bytes; return the size of the whole records."""
        unpack, wanted = HEADER.unpack_from, self.question.field
        at, size, hit = 0, len(data), data.find(wanted)
        while at + HEADER_BYTES <= size and (hit >= 0 or not is_last):
            length = unpack(data, at)[0]
            after = at + HEADER_BYTES + length
            if length < 0:
                raise self._damage(f"no record at offset {offset + at}", offset + at)
            if after > size:
                break
            if at <= hit < after:
                record = RecordRun(Offset(offset + at), data[at:after])
                try:
                    if self._is_wanted(record.data, record.offset):
                        found.append(record)
                except CorruptRecordError as error:
                    # Drop older ones, which are beyond the damage; go on with newer.
                    found.clear()
                    self._broken = error
                hit = data.find(wanted, after)
            at = after
        return size if is_last and hit < 0 else at

    # -- both

    def _is_wanted(self, record: bytes, offset: Offset) -> bool:
        _length, stored, message_id, flag = HEADER.unpack_from(record)
        payload = record[HEADER_BYTES:]
        if not has_field(payload, flag, self.question.field):
            return False
        if checksum(payload) != stored:
            raise self._damage(f"the record at offset {offset} is damaged", offset)
        return message_id < 0 or self._is_in_time(message_id, message_id)

    def _damage(self, text: str, offset: int) -> CorruptRecordError:
        path = str(self._segment.path)
        return CorruptRecordError(text, offset=Offset(offset), path=path)

    def _is_in_time(self, least_id: int, greatest_id: int) -> bool:
        question = self.question
        return (greatest_id >> ID_MS_SHIFT) + ID_ZERO_MS >= question.since_ms and (
            least_id >> ID_MS_SHIFT
        ) + ID_ZERO_MS <= question.until_ms
