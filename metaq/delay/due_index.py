"""Index of a tier's waiting records by due time, partly in memory, partly in files.

    <segment>.due, beside each sealed segment of a tier; all numbers big-endian:

    +--------------------------------------------------------+
    | "mqdue002" | base i64 | end i64 | entries u32 | n u32  |  of the segment
    +--------------------------------------------------------+
    | n x  first key 20 | messages i64 | bytes i64 | crc u32 |  for each block: its
    +--------------------------------------------------------+  first key, messages and
    | crc u32 of all of the above                            |  bytes from there on,
    +--------------------------------------------------------+  its CRC-32
    | n blocks of BLOCK_ENTRIES, the last one of fewer       |
    +--------------------------------------------------------+

    entry    due i64 | offset i64 | count i32 | size u32 | topic u32      28 bytes

The fields of an entry are those of `DueEntry`. Entries are sorted as bytes: by due
time, then by offset. A cancelling entry (count below 0) has the due time and offset of
the record whose message it cancels, and follows its entry. The first 20 bytes are the
*key*.

An index is a set of sorted *runs*, merged while they are read: one file for each sealed
segment, with at most one block in memory, and runs in memory for the active segment. A
file is derived from its segment alone, and has all records of it; readers skip those
that are done. A file with a wrong checksum, or of other offsets than its segment, is
built again.
"""

import heapq
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from metaq.delay.plan import DueEntry, Progress
from metaq.delay.records import DelayKind, cancelled_at, decode_head
from metaq.errors import CorruptRecordError, DiskError
from metaq.fs import FileSystem, ReadFile
from metaq.model import Offset, Position, SizeBytes
from metaq.record.checksum import CRC_BYTES, crc32, has_crc, with_crc
from metaq.record.layout import Record
from metaq.record.scan import Corrupt, Incomplete, iter_records

DUE_SUFFIX: Final = ".due"
ENTRY: Final = Struct(">qqiII")
KEY_BYTES: Final = 20
BLOCK_ENTRIES: Final = 1024
FRESH_MAX: Final = 4096
"""Maximum number of entries in memory that are not sorted into a run yet."""

_HEAD: Final = Struct(">8sqqII")
_BLOCK: Final = Struct(f">{KEY_BYTES}sqqI")
_MAGIC: Final = b"mqdue002"
_KEY: Final = Struct(">qq")
BLOCK_BYTES: Final = BLOCK_ENTRIES * ENTRY.size


def due_path(segment_path: Path, base: Offset) -> Path:
    """Return the path of a segment's index file."""
    return segment_path.with_name(f"{base:020d}{DUE_SUFFIX}")


def discard_old(fs: FileSystem, directory: Path, start: Offset) -> None:
    """Delete the index files of segments below the log start; blocks."""
    if fs.is_directory(directory):
        for name in fs.list_directory(directory):
            base = name.removesuffix(DUE_SUFFIX)
            if base != name and base.isdigit() and int(base) < start:
                fs.discard(directory / name)


def topic_hash(topic: str) -> int:
    """Return the CRC-32 of a topic's name, as an entry has it."""
    return zlib.crc32(topic.encode())


def entry_of(offset: Offset, record: Record) -> bytes:
    """Return the index entry of a record of a tier.

    Raises:
        CorruptRecordError: the payload is not that of such a record.
    """
    head, size, number = decode_head(record.payload), int(record.size_bytes), 0
    if head.kind is DelayKind.CANCELLED:
        number = ~head.messages
        offset, size = cancelled_at(record.payload, head)
    else:
        number = head.messages
    return ENTRY.pack(head.due_ms, offset, number, size, topic_hash(head.topic))


def decode_entries(data: bytes) -> Iterator[DueEntry]:
    """Yield the decoded entries of some bytes."""
    return map(DueEntry._make, ENTRY.iter_unpack(data))


def split_entries(data: bytes) -> list[bytes]:
    """Return the encoded entries of some bytes, one by one."""
    return [data[at : at + ENTRY.size] for at in range(0, len(data), ENTRY.size)]


def totals_of(data: bytes) -> tuple[int, int]:
    """Return the number of messages that wait by some entries, and their bytes."""
    messages = size = 0
    for _due_ms, _offset, number, more, _topic in ENTRY.iter_unpack(data):
        if number < 0:  # as in `DueEntry.totals`
            number, more = -1, -more
        messages, size = messages + number, size + more
    return messages, size


class DueRun:
    """Cursor over sorted entries, in memory or in a file that is read by blocks."""

    def __init__(
        self,
        segment: Offset,
        blocks: Sequence[bytes],
        data: bytes | None = None,
        path: Path | None = None,
        totals: tuple[int, int] = (0, 0),
    ) -> None:
        """Begin at the first entry.

        Args:
            segment: base offset of the segment.
            blocks: rows of the file's directory; of a run in memory, its first key.
            data: entries of a run in memory; None for a file.
            path: path of the file; None for a run in memory.
            totals: messages and bytes from the first entry on, see `totals_of`.
        """
        self.segment: Final = segment
        self.path: Final = path
        self.totals = totals
        self._blocks = blocks
        self._block = 0
        self._data = data
        self._at = 0
        self.key = blocks[0][:KEY_BYTES] if blocks else None
        """Key of the next entry; None at the end."""

    @property
    def entry(self) -> bytes | None:
        """Return the next entry; None at the end, or if its block is not in memory."""
        data, at = self._data, self._at
        return None if data is None else data[at : at + ENTRY.size]

    @property
    def rest(self) -> bytes:
        """Return the entries in memory from the next one on."""
        return b"" if self._data is None else self._data[self._at :]

    def advance(self) -> None:
        """Go to the next entry."""
        assert self._data is not None, "its block is in memory"
        self._at += ENTRY.size
        if self._at < len(self._data):
            self.key = self._data[self._at : self._at + KEY_BYTES]
            return
        self._block, self._at, self._data = self._block + 1, 0, None
        more = self._block < len(self._blocks)
        self.key = self._blocks[self._block][:KEY_BYTES] if more else None

    # -- of files; these calls block

    def load(self, fs: FileSystem) -> None:
        """Read the block of the next entry."""
        if self._data is None and self.key is not None:
            self._data = self._read(fs, self._block)

    def unread_blocks(self, fs: FileSystem) -> Iterator[bytes]:
        """Yield the entries from the next one on, one block at a time."""
        if self.path is None or self.key is None:
            yield self.rest
            return
        start = self._at
        for number in range(self._block, len(self._blocks)):
            yield self._read(fs, number)[start:]
            start = 0

    def seek_after(self, fs: FileSystem, end: Offset, done: Progress) -> list[bytes]:
        """Go to the first entry after the progress; return late entries before it.

        Args:
            fs: file system of the file.
            end: end offset of the segment.
            done: progress of the tier.
        """
        key = b"" if done.due_ms < 0 else _KEY.pack(*done[:2])
        late, first = list[bytes](), 0
        if end <= done.seen:
            # No entry is late: skip the blocks that are done as a whole.
            first = bisect_right(self._blocks, key, key=lambda row: row[: _KEY.size])
        for number in range(max(0, first - 1), len(self._blocks)):
            data = self._read(fs, number)
            entries = split_entries(data)
            passed = bisect_right(entries, key, key=lambda each: each[: _KEY.size])
            late += [each for each in entries[:passed] if _is_late(each, done)]
            if passed < len(entries):
                self._block, self._at = number, passed * ENTRY.size
                self.key = entries[passed][:KEY_BYTES]
                messages, size = totals_of(data[: self._at])
                _key, all_messages, all_bytes, _crc = _BLOCK.unpack(
                    self._blocks[number]
                )
                self.totals = all_messages - messages, all_bytes - size
                return late
        self._block, self.key, self.totals = len(self._blocks), None, (0, 0)
        return late

    def _read(self, fs: FileSystem, number: int) -> bytes:
        assert self.path is not None, "of a file"
        start = _HEAD.size + len(self._blocks) * _BLOCK.size + CRC_BYTES
        with fs.open_read(self.path) as file:
            data = file.read_at(
                Position(start + number * BLOCK_BYTES), SizeBytes(BLOCK_BYTES)
            )
        *_, crc = _BLOCK.unpack(self._blocks[number])
        if crc32(data) != crc:
            raise CorruptRecordError(f"{self.path}: block {number} is damaged")
        return data


def _is_late(entry: bytes, progress: Progress) -> bool:
    # A cancelling entry has the offset of the record, so it is late with it.
    offset: int = ENTRY.unpack(entry)[1]
    return offset >= progress.seen


class OpenedRun(NamedTuple):
    """An index file that was opened or built, and its late entries."""

    run: DueRun
    late: list[bytes]


def open_run(
    fs: FileSystem, segment: Path, base: Offset, end: Offset, progress: Progress
) -> OpenedRun:
    """Open the index of a sealed segment; build it if missing or damaged; blocks.

    Raises:
        CorruptRecordError: the segment is damaged.
        StorageError: the disk refused.
    """
    path = due_path(segment, base)

    def read() -> OpenedRun:
        run = DueRun(base, _read_directory(fs, path, base, end), path=path)
        return OpenedRun(run, run.seek_after(fs, end, progress))

    try:
        return read()
    except (CorruptRecordError, DiskError):
        make_run(fs, segment, base, end)
    return read()


def _read_directory(
    fs: FileSystem, path: Path, base: Offset, end: Offset
) -> list[bytes]:
    with fs.open_read(path) as file:
        head = file.read_at(Position(0), SizeBytes(_HEAD.size))
        if len(head) < _HEAD.size:
            raise CorruptRecordError(f"{path}: {len(head)} bytes")
        magic, *bounds, entries, number = _HEAD.unpack(head)
        size = _HEAD.size + number * _BLOCK.size + CRC_BYTES
        if (magic, *bounds) != (_MAGIC, base, end) or number > entries:
            raise CorruptRecordError(f"{path} is of other bytes")
        data = file.read_at(Position(0), SizeBytes(size))
        if len(data) != size or not has_crc(data):
            raise CorruptRecordError(f"{path}: its directory is damaged")
    rows = range(_HEAD.size, size - CRC_BYTES, _BLOCK.size)
    return [data[at : at + _BLOCK.size] for at in rows]


def make_run(
    fs: FileSystem, segment: Path, base: Offset, end: Offset, data: bytes | None = None
) -> None:
    """Write the index of a sealed segment; raises as `open_run`.

    `data` has its entries, in any order; if None, they are read from the segment.
    """
    if data is not None:
        entries = sorted(split_entries(data))
    else:
        with fs.open_read(segment) as file:
            entries = sorted(_scan(file, segment, base, end))
    fs.write_atomically(due_path(segment, base), encode_file(base, end, entries))


def encode_file(base: Offset, end: Offset, entries: Sequence[bytes]) -> bytes:
    """Return the content of an index file with these sorted entries."""
    blocks = [
        b"".join(entries[at : at + BLOCK_ENTRIES])
        for at in range(0, len(entries), BLOCK_ENTRIES)
    ]
    rows, messages, size = list[bytes](), 0, 0
    for block in reversed(blocks):
        more = totals_of(block)
        messages, size = messages + more[0], size + more[1]
        rows.append(_BLOCK.pack(block[:KEY_BYTES], messages, size, crc32(block)))
    head = _HEAD.pack(_MAGIC, base, end, len(entries), len(blocks))
    directory = b"".join((head, *reversed(rows), bytes(CRC_BYTES)))
    return b"".join((with_crc(directory), *blocks))


def _scan(file: ReadFile, segment: Path, base: Offset, end: Offset) -> Iterator[bytes]:
    """Yield the entries of a segment in log order."""
    done, length = Position(0), Position(end - base)
    for item in iter_records(file.read_at, done, length):
        if isinstance(item, Corrupt | Incomplete):
            raise CorruptRecordError(f"{segment}: no record at {done}: {item}")
        position, record = item
        yield entry_of(Offset(base + position), record)
        done = Position(position + record.size_bytes)
    if done < length:
        raise CorruptRecordError(f"{segment}: expected {length} bytes, got {done}")


class DueIndex:
    """Index of a tier without late records. Owned by the tier; loop's thread only."""

    def __init__(self) -> None:
        self._segment = Offset(0)
        self._fresh: list[bytes] = []
        self._runs: list[tuple[bytes, int, DueRun]] = []
        self._numbers = count()
        self._head: DueEntry | None = None
        self.messages = 0
        """Number of waiting messages, without cancelled ones."""
        self.size_bytes = 0
        """Bytes of the records of these messages."""

    def add(self, data: bytes, segment: Offset) -> None:
        """Add entries, in any order, of records in the active segment."""
        if segment != self._segment or len(self._fresh) >= FRESH_MAX:
            self._flush()
            self._segment = segment
        for entry in split_entries(data):
            heapq.heappush(self._fresh, entry)
        self._count(data, 1)
        self._head = None

    def add_run(self, run: DueRun) -> None:
        """Add the file of a segment; it replaces the segment's runs in memory."""
        if self._segment == run.segment:
            self._flush()
        gone = [each for _, _, each in self._runs if each.segment == run.segment]
        for each in gone:
            self._count(each.rest, -1)
        self._runs = [each for each in self._runs if each[2] not in gone]
        heapq.heapify(self._runs)
        self.messages += run.totals[0]
        self.size_bytes += run.totals[1]
        self._push(run)

    def _flush(self) -> None:
        if self._fresh:
            data = b"".join(sorted(self._fresh))
            self._fresh = []
            self._push(DueRun(self._segment, (data[:KEY_BYTES],), data))

    def _push(self, run: DueRun) -> None:
        if run.key is not None:
            heapq.heappush(self._runs, (run.key, next(self._numbers), run))
        self._head = None

    def _count(self, data: bytes, sign: int) -> None:
        messages, size = totals_of(data)
        self.messages += sign * messages
        self.size_bytes += sign * size

    @property
    def segments(self) -> set[Offset]:
        """Return the base offsets of segments with waiting records."""
        return {run.segment for _, _, run in self._runs} | (
            {self._segment} if self._fresh else set()
        )

    @property
    def runs(self) -> list[DueRun]:
        """Return all waiting records, as runs."""
        self._flush()
        return [run for _, _, run in self._runs]

    def peek(self) -> DueEntry | None:
        """Return the next entry; None: no entry, or its block is not in memory."""
        if self._head is None:
            entry = self._next()
            self._head = None if entry is None else DueEntry._make(ENTRY.unpack(entry))
        return self._head

    def _next(self) -> bytes | None:
        fresh = self._fresh[0] if self._fresh else None
        if self._runs and (fresh is None or self._runs[0][0] < fresh):
            return self._runs[0][2].entry
        return fresh

    def pop(self) -> DueEntry:
        """Remove and return the entry that `peek` returns."""
        head = self.peek()
        assert head is not None, "peek has one"
        if self._runs and (not self._fresh or self._runs[0][0] < self._fresh[0]):
            _, number, run = self._runs[0]
            run.advance()
            if run.key is None:
                heapq.heappop(self._runs)
            else:
                heapq.heapreplace(self._runs, (run.key, number, run))
        else:
            heapq.heappop(self._fresh)
        self._head = None
        messages, size = head.totals
        self.messages, self.size_bytes = (
            self.messages - messages,
            self.size_bytes - size,
        )
        return head

    def wanted(self, until_ms: int) -> list[DueRun]:
        """Return the runs whose next block must be loaded to read up to a due time."""
        limit = _KEY.pack(until_ms + 1, 0)
        return [run for key, _, run in self._runs if key < limit and run.entry is None]
