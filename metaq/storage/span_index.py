"""The span index: facts that a segment's bytes do not show, in a small file beside it.

Theory of operation. A *span* is a run of whole records that one or a few group commits
made durable. The spans of a segment are contiguous from its base offset on. An entry is
written *after* the sync of its bytes, so an entry on disk proves that its bytes were on
disk, and only bytes without an entry can be torn by a crash. While the last span is
shorter than `span_bytes_min` the next commit grows its entry in place; so acknowledged
bytes get an entry, without one entry per tiny commit. The entry is written once
`span_bytes_min` bytes have none, or when the storage thread is idle (after a kill
before that, recovery keeps the whole records without an entry). The file is synced only
when the segment is sealed or closed cleanly: after a power cut the index may be short,
or its last entry torn. That costs time, not data.

    name: <base offset, 20 digits>.spans, beside <base offset>.meta

    header, 32 bytes
    byte  0          8         12            20                   28      32
          +----------+---------+-------------+--------------------+-------+
          | MQ-SPANS | version | base offset | last id before     | crc   |
          | 8 bytes  | u32 = 1 | i64         | i64                | u32   |
          +----------+---------+-------------+--------------------+-------+
    entry, 32 bytes each
    byte  0             8        12             16            24     28     32
          +-------------+--------+--------------+-------------+------+------+
          | base offset | length | record count | append time | span | crc  |
          | i64         | u32    | u32          | i64, ms     | u32  | u32  |
          +-------------+--------+--------------+-------------+------+------+
    seal, 32 bytes after the last entry of a sealed segment
    byte  0             8        12             16            24     28     32
          +-------------+--------+--------------+-------------+------+------+
          | end offset  | 0      | 0            | all records | 0    | crc  |
          | i64         | u32    | u32          | i64         | u32  | u32  |
          +-------------+--------+--------------+-------------+------+------+

Big-endian. `span` is the full CRC-32 of all bytes of the span, record headers included;
`crc` is that of the 28 bytes before it. `last id before` is the id of the newest record
in earlier segments, -1 if unknown. `append time` is the wall clock of the newest commit
in the span and may decrease from one entry to the next. With the seal a start can add
up ten thousand segments without reading their entries; with its length of 0 it is never
taken for a span, and an index without it is as good, only slower.

Read defensively: entries are trusted from the front as long as each has its checksum
and begins where the previous one ended. A damaged bit only shortens the valid part, and
the index is never trusted over the log. Keep in step: docs/storage.md.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple, TypeVar

from metaq.errors import DiskError, NoSpaceError, StorageError
from metaq.fs import Buffer, FileSystem, UpdateFile
from metaq.model import MessageId, Millis, Offset, Position, SizeBytes
from metaq.record.checksum import CRC_BYTES, crc32, has_crc, with_crc
from metaq.record.pieces import CHECKSUM_STEP_BYTES, in_steps

_log = logging.getLogger(__name__)

T = TypeVar("T")

SPANS_SUFFIX: Final = ".spans"
"""Suffix of span index files; MetaQ ignores such names."""

MAGIC: Final = b"MQ-SPANS"
VERSION: Final = 1
HEADER: Final = Struct(">8sIqqI")
"""Magic, version, base offset, last id before, crc."""
ENTRY: Final = Struct(">qIIqII")
"""Base offset, length, record count, append time, span checksum, crc."""
ENTRY_BYTES: Final = ENTRY.size
"""32; the header has the same size."""

NO_ID: Final = MessageId(-1)
"""Value for an unknown message id."""

SPAN_BYTES_MAX: Final = 2**32 - 1
"""Maximum of the length field; also bounds the record count."""

INDEX_BYTES_MAX: Final = SizeBytes(1 << 30)
"""A larger file is not read at all: our indexes are far smaller."""

_CRC_FROM: Final = ENTRY_BYTES - CRC_BYTES

_UNREADABLE: Final = frozenset({"EIO", "EACCES", "EPERM", "EISDIR", "ELOOP", "ENXIO"})
"""Errors of one file; a lack of descriptors or memory is none of these."""


class Span(NamedTuple):
    """One entry. A tuple, because a segment may have a quarter of a million."""

    base_offset: Offset
    """Offset of the first byte, a record boundary."""
    size_bytes: SizeBytes
    record_count: int
    append_time_ms: Millis
    """Wall clock of the newest commit; an estimate in a rebuilt index."""
    checksum: int
    """CRC-32 of all bytes."""

    @property
    def end_offset(self) -> Offset:
        """Return the offset after the last byte."""
        return Offset(self.base_offset + self.size_bytes)


@dataclass(frozen=True, slots=True)
class SpanIndex:
    """The valid entries of one segment, in order and without a gap."""

    base_offset: Offset
    """Base offset of the segment, and of the first span."""
    last_id_before: MessageId = NO_ID
    """Id of the newest record in earlier segments; -1 when unknown."""
    spans: tuple[Span, ...] = ()
    """Each begins where the previous one ends."""

    @property
    def end_offset(self) -> Offset:
        """Return the offset after the last covered byte."""
        return self.spans[-1].end_offset if self.spans else self.base_offset

    @property
    def record_count(self) -> int:
        """Return the number of covered records."""
        return sum(span.record_count for span in self.spans)

    @property
    def newest_append_ms(self) -> Millis | None:
        """Return the time of the last append; None without spans."""
        return self.spans[-1].append_time_ms if self.spans else None

    def until(self, end: Offset) -> "SpanIndex":
        """Return the index without the spans that end after `end`."""
        whole = bisect_right(self.spans, end, key=lambda span: span.end_offset)
        return replace(self, spans=self.spans[:whole])

    def index_of(self, offset: Offset) -> int:
        """Return the index in `spans` of the span that contains `offset`.

        0 for an offset before all spans; their number for one after them.
        """
        return bisect_right(self.spans, offset, key=lambda s: s.end_offset)


@dataclass(frozen=True, slots=True)
class SpanTotals:
    """Sums over the entries of an index."""

    end_offset: Offset
    record_count: int
    newest_append_ms: Millis | None
    """Time of the last append; None without spans."""


# -- bytes ----------------------------------------------------------------------------


def spans_path(segment_path: Path, base_offset: Offset) -> Path:
    """Return the path of a segment's span index, named by its padded base offset."""
    return segment_path.with_name(f"{base_offset:020d}{SPANS_SUFFIX}")


def encode_index(index: SpanIndex, *, is_sealed: bool = False) -> bytes:
    """Return the bytes of a whole index file."""
    parts = [_encode_header(index.base_offset, index.last_id_before)]
    parts += map(encode_entry, index.spans)
    if is_sealed:
        parts.append(_encode_seal(index.end_offset, index.record_count))
    return b"".join(parts)


def encode_entry(span: Span) -> bytes:
    """Return the 32 bytes of one entry; a field out of range is a bug."""
    return with_crc(ENTRY.pack(*span, 0))


def decode_index(data: Buffer, base_offset: Offset) -> SpanIndex | None:
    """Return the valid part of an index file.

    Args:
        data: The bytes of the file, read and not kept.
        base_offset: Base offset of its segment.

    Returns:
        The longest prefix of valid, contiguous entries; None if the header is not that
        of an index for this segment, so that nothing can be trusted.
    """
    if len(data) < HEADER.size:
        return None
    magic, version, base, last_id, _crc = HEADER.unpack_from(data)
    known = (magic, version, base) == (MAGIC, VERSION, base_offset)
    if not known or not has_crc(bytes(data[: HEADER.size])):
        return None
    spans: list[Span] = []
    position, end, expected = HEADER.size, len(data), base_offset
    view = memoryview(data)
    while position + ENTRY_BYTES <= end:
        start, size, count, time_ms, checksum, crc = ENTRY.unpack_from(view, position)
        if crc != crc32(view[position : position + _CRC_FROM]):
            break
        if start != expected or not size or not count:
            break
        spans.append(Span(start, size, count, time_ms, checksum))
        expected = Offset(start + size)
        position += ENTRY_BYTES
    return SpanIndex(base_offset, MessageId(last_id), tuple(spans))


def read_index(
    fs: FileSystem,
    segment_path: Path,
    base_offset: Offset,
    bytes_max: int = INDEX_BYTES_MAX,
) -> SpanIndex | None:
    """Read the index of a segment.

    Returns:
        The valid part; None if there is no file or no valid header.
    """
    file = fs.try_open_read(spans_path(segment_path, base_offset))
    if file is None:
        return None
    with file:
        size = file.size()
        if size > bytes_max:
            return None
        return decode_index(file.read_at(Position(0), size), base_offset)


def read_totals(fs: FileSystem, segment_path: Path, base_offset: Offset) -> SpanTotals:
    """Return the sums of a sealed segment's index, from its seal if possible.

    An unreadable index counts as empty.
    """
    read = partial(_read_totals, fs, segment_path, base_offset)
    return _without_index(read, SpanTotals(base_offset, 0, None))


def _read_totals(fs: FileSystem, segment_path: Path, base_offset: Offset) -> SpanTotals:
    file = fs.try_open_read(spans_path(segment_path, base_offset))
    if file is None:
        return SpanTotals(base_offset, 0, None)
    with file:
        size = file.size()
        if size >= HEADER.size + 2 * ENTRY_BYTES:
            last_two = Position(size - 2 * ENTRY_BYTES)
            header = file.read_at(Position(0), SizeBytes(HEADER.size))
            ends = file.read_at(last_two, SizeBytes(2 * ENTRY_BYTES))
            sealed = decode_seal(header, ends, base_offset)
            if sealed is not None:
                return sealed
    index = read_index(fs, segment_path, base_offset) or SpanIndex(base_offset)
    return SpanTotals(index.end_offset, index.record_count, index.newest_append_ms)


def is_unreadable(error: DiskError) -> bool:
    """Return whether one file exists but can not be read."""
    return error.operation == "read" or error.errno_name in _UNREADABLE


def try_read_index(
    fs: FileSystem, segment_path: Path, base_offset: Offset, *, is_logged: bool = True
) -> SpanIndex | None:
    """Read the index of a segment; None also if it is unreadable.

    `is_logged` is False if the caller asks repeatedly, to log an error only once.
    """
    read = partial(read_index, fs, segment_path, base_offset)
    return _without_index(read, None, is_logged=is_logged)


def _without_index(read: Callable[[], T], otherwise: T, *, is_logged: bool = True) -> T:
    """Return the result of `read`, or `otherwise` if the index is unreadable.

    That is safe, because an index can be rebuilt from the bytes of its segment.
    """
    try:
        return read()
    except DiskError as error:
        if not is_unreadable(error):
            raise
        if is_logged:
            _log.error("going on without a span index: %s", error)
        return otherwise


def write_index(
    fs: FileSystem, segment_path: Path, index: SpanIndex, *, is_sealed: bool = False
) -> None:
    """Replace the index of a segment; durable and complete on return."""
    path = spans_path(segment_path, index.base_offset)
    fs.write_atomically(path, encode_index(index, is_sealed=is_sealed))


def _encode_header(base_offset: Offset, last_id_before: MessageId) -> bytes:
    return with_crc(HEADER.pack(MAGIC, VERSION, base_offset, last_id_before, 0))


def _encode_seal(end_offset: Offset, record_count: int) -> bytes:
    return with_crc(ENTRY.pack(end_offset, 0, 0, record_count, 0, 0))


def decode_seal(header: bytes, ends: bytes, base_offset: Offset) -> SpanTotals | None:
    """Return the sums in a seal; None if it is not valid.

    Args:
        header: The first 32 bytes of the index.
        ends: The last 64 bytes, two entries: a span and the seal.
        base_offset: Base offset of the segment.
    """
    if decode_index(header, base_offset) is None:
        return None
    start, size, count, time_ms, _span, _crc = ENTRY.unpack_from(ends)
    end, no_size, no_count, records, no_span, _crc = ENTRY.unpack_from(
        ends, ENTRY_BYTES
    )
    is_span = size and count and has_crc(ends[:ENTRY_BYTES])
    is_seal = not (no_size or no_count or no_span) and has_crc(ends[ENTRY_BYTES:])
    if not (is_span and is_seal and start + size == end):
        return None
    return SpanTotals(Offset(end), records, Millis(time_ms))


# -- writer ---------------------------------------------------------------------------


class SpanIndexWriter:
    """Adds spans to the index of the active segment.

    Owner: the storage thread of the partition. It keeps one entry in memory, plus those
    not yet written because the disk is full. Not usable after `seal`, `close` or
    `abandon`.
    """

    def __init__(
        self, file: UpdateFile, index: SpanIndex, *, span_bytes_min: int
    ) -> None:
        self._file = file
        self._span_bytes_min = span_bytes_min
        self._settled = len(index.spans)
        """Entries in the file that will not change."""
        self._open: list[Span] = []
        """The entries after those: unwritten ones, and the one that may grow."""
        if index.spans and index.spans[-1].size_bytes < span_bytes_min:
            self._settled -= 1
            self._open = [index.spans[-1]]
        self._unsynced: list[Span] = []
        """Replaces the tail of `_open` at the next commit."""
        self._regrown = 0
        """Entries at the end of `_open` that `_unsynced` replaces: 0 or 1."""
        self.end_offset = index.end_offset
        """Offset after the last byte covered by a commit."""
        self.record_count = index.record_count
        """Records covered by a commit so far."""
        self.newest_append_ms = index.newest_append_ms
        """Time of the last commit; None before the first."""

    @classmethod
    def create(
        cls,
        fs: FileSystem,
        segment_path: Path,
        base_offset: Offset,
        last_id_before: MessageId,
        *,
        span_bytes_min: int,
    ) -> "SpanIndexWriter":
        """Start the index of an empty segment; an existing file is emptied.

        Nothing is durable before a sync: a crash may leave an index without a valid
        header, which counts as none.

        Args:
            fs: The disk.
            segment_path: The `.meta` file, which exists already.
            base_offset: The segment's base offset.
            last_id_before: Id of the newest record in earlier segments, -1 for none.
            span_bytes_min: A shorter span grows with the next append.

        Raises:
            StorageError: The file could not be created.
        """
        index = SpanIndex(base_offset, last_id_before)
        file = fs.open_update(spans_path(segment_path, base_offset), create=True)
        try:
            file.write_at(Position(0), encode_index(index))
        except StorageError:
            file.close()
            raise
        return cls(file, index, span_bytes_min=span_bytes_min)

    @classmethod
    def resume(
        cls,
        fs: FileSystem,
        segment_path: Path,
        index: SpanIndex,
        *,
        span_bytes_min: int,
    ) -> "SpanIndexWriter":
        """Continue after `index`, which must equal the file."""
        file = fs.open_update(spans_path(segment_path, index.base_offset))
        return cls(file, index, span_bytes_min=span_bytes_min)

    @property
    def taken_end(self) -> Offset:
        """Return the offset after the last byte passed to `extend`."""
        return self._unsynced[-1].end_offset if self._unsynced else self.end_offset

    def extend(self, pieces: Sequence[Buffer], *, record_count: int) -> Iterator[None]:
        """Add the bytes written after the previous ones, in memory only.

        In steps of CHECKSUM_STEP_BYTES; call no other method between two of them.

        Args:
            pieces: The bytes, whole records, cut anywhere; not kept.
            record_count: Records in them, 1 or more.
        """
        size = sum(map(len, pieces))
        base, old_size, old_count, time_ms, checksum = self._take_growing(size)
        for number, step in enumerate(in_steps(pieces, CHECKSUM_STEP_BYTES)):
            if number:
                yield
            for piece in step:
                checksum = crc32(piece, checksum)
        self._unsynced.append(
            Span(
                base,
                SizeBytes(old_size + size),
                old_count + record_count,
                time_ms,
                checksum,
            )
        )

    def commit(self, append_time_ms: Millis) -> None:
        """Write entries for all bytes added so far, which must be synced.

        Args:
            append_time_ms: Wall clock of the sync.

        Raises:
            DiskError: The disk failed. A full disk is not an error: the entry stays in
                memory and is written with a later one.
        """
        if not self._unsynced:
            return
        kept = len(self._open) - self._regrown
        added = [
            span._replace(append_time_ms=append_time_ms) for span in self._unsynced
        ]
        self.record_count += sum(span.record_count for span in added)
        self.record_count -= sum(span.record_count for span in self._open[kept:])
        self._open[kept:] = added
        self._unsynced, self._regrown = [], 0
        self.end_offset = added[-1].end_offset
        self.newest_append_ms = append_time_ms
        with suppress(NoSpaceError):
            self._write_open()

    def seal(self) -> None:
        """Write remaining entries and the seal, sync and close.

        All added bytes must be committed. On a full disk the index stays short;
        recovery and the scrub complete it.

        Raises:
            DiskError: The disk failed; the file is closed all the same.
        """
        self._finish(_encode_seal(self.end_offset, self.record_count))

    def close(self, *, is_synced: bool = True) -> None:
        """Write remaining entries, sync if `is_synced`, and close; for a clean stop."""
        self._finish(b"", is_synced=is_synced)

    def abandon(self) -> None:
        """Close without writing or syncing; never raises. For an offline directory."""
        self._file.abandon()

    def _finish(self, seal: bytes, *, is_synced: bool = True) -> None:
        try:
            with suppress(NoSpaceError):
                self._write_open()
                count = self._settled + len(self._open)
                position = HEADER.size + count * ENTRY_BYTES
                self._file.write_at(Position(position), seal)
            if is_synced:
                self._file.sync()
        finally:
            self.abandon()

    def _take_growing(self, size: int) -> Span:
        """Return the span that grows by `size` bytes, or a new one.

        The caller adds the grown span to `_unsynced`.
        """
        if self._unsynced:
            if self._may_grow(self._unsynced[-1], size):
                return self._unsynced.pop()
            end = self._unsynced[-1].end_offset
        else:
            if self._open and self._may_grow(self._open[-1], size):
                self._regrown = 1
                return self._open[-1]
            end = self.end_offset
        return Span(end, SizeBytes(0), 0, Millis(0), crc32(b""))

    def _may_grow(self, span: Span, size: int) -> bool:
        is_short = span.size_bytes < self._span_bytes_min
        return is_short and span.size_bytes + size <= SPAN_BYTES_MAX

    def _write_open(self) -> None:
        """Write the changed entries; all but a growing one are then settled."""
        if not self._open:
            return
        position = HEADER.size + self._settled * ENTRY_BYTES
        self._file.write_at(Position(position), b"".join(map(encode_entry, self._open)))
        full = len(self._open)
        if self._open[-1].size_bytes < self._span_bytes_min:
            full -= 1
        self._settled += full
        del self._open[:full]
