"""One redo file of the journal, its checksums, and the offsets rewritten in it.

    redo.N   records, appended; offsets in commit records are overwritten
    sums.N   checksums of the redo file (`sums.py`), written after its bytes

A failure of `sums.N` costs only the checksums of later bytes of that redo file.

A commit record is written with bounds as offsets, which are overwritten when its
batches are about to be written (`applier.py`). Records of one group of the journal have
their batches in one group of their partition, too. So a *block* has the bytes of the
redo file from the first offset of such records to the last. All offsets noted in it are
written by one call, together with the bytes between them, which do not change.

    redo file   … puts | commit: offset | puts | commit: offset, offset | puts | …
    block                       [---------------------------------]
    written                     [------------------------] from the first offset noted
                                                           since the last write, to the
                                                           last one

    Invariant: no byte of a file is in two blocks, and only its block rewrites a byte.
    Partitions of two directories have two threads; the lock of the file is held while
    a block of it changes, or is written.

Source: docs/metaq-1.4/broker.md 5.6.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Final, TypeAlias

from metaq.errors import StorageError
from metaq.fs import AppendFile, Buffer, FileSystem, UpdateFile
from metaq.model import Offset, Position, SizeBytes
from metaq.txn.records import OFFSET
from metaq.txn.sums import BESIDE, BOUND, SYNCED, encode_entry, encode_head, encode_span

FILE_NAME: Final = re.compile(r"(redo|sums)\.([1-9][0-9]{0,8})")

BLOCK_BYTES_MAX: Final = 16 * 1024
"""Maximum size of a block of several records: more bytes cost as much as a write."""

Bounds: TypeAlias = Sequence[tuple[int, Offset]]
"""Position in an entry, and first value, of each offset that may be overwritten."""

_log = logging.getLogger(__name__)


class OffsetsFile:
    """A redo file, open for its offsets. Thread-safe."""

    __slots__ = ("_file", "lock")

    def __init__(self, file: UpdateFile) -> None:
        self._file: UpdateFile | None = file
        self.lock: Final = Lock()
        """Guards blocks, and the descriptor, whose number may be reused after
        `close`."""

    def write_at(self, position: int, data: bytes) -> None:
        """Write bytes of a block, unless the file is closed; call with the lock held.

        Raises:
            StorageError: the disk refuses.
        """
        if self._file is not None:
            self._file.write_at(Position(position), data)

    def close(self) -> None:
        """Close; later writes do nothing."""
        with self.lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()


class OffsetBlock:
    """Bytes of a redo file with offsets that may be overwritten. Thread-safe."""

    __slots__ = ("_data", "_file", "_high", "_low", "_start")

    def __init__(self, file: OffsetsFile, start: int) -> None:
        """Create an empty block at a position of a file."""
        self._file = file
        self._start = start
        self._data = bytearray()
        self._low = self._high = 0
        """Range of bytes to write."""

    def extend(self, data: Buffer) -> None:
        """Add the next bytes of the file; only before the first `note`."""
        self._data += data

    def note(self, position: int, offset: Offset) -> None:
        """Set the offset at a position of the file; call `write` next."""
        at = position - self._start
        with self._file.lock:
            OFFSET.pack_into(self._data, at, offset)
            is_first = self._low == self._high
            self._low = at if is_first else min(self._low, at)
            self._high = max(self._high, at + OFFSET.size)

    def write(self) -> None:
        """Write the noted offsets, unless another thread has done so.

        After a failure a Java broker does not find the batches, and appends them again.
        """
        with self._file.lock:
            low, high, self._low, self._high = self._low, self._high, 0, 0
            if low == high:
                return
            try:
                self._file.write_at(self._start + low, bytes(self._data[low:high]))
            except StorageError as error:
                _log.warning("offsets of batches not written: error=%s", error)


def make_blocks(
    file: OffsetsFile, start: int, data: Buffer, ranges: Iterable[tuple[int, int]]
) -> list[OffsetBlock]:
    """Return the block of each record; records close together share one.

    Args:
        file: the file with the records.
        start: position of the data.
        data: the records, and the bytes between them.
        ranges: start and end of each record's offsets in the data, in order.
    """
    blocks: list[OffsetBlock] = []
    first = done = 0
    for low, high in ranges:
        if not blocks or high - first > BLOCK_BYTES_MAX:
            first = done = low
            block = OffsetBlock(file, start + first)
        block.extend(data[done:high])
        done = high
        blocks.append(block)
    return blocks


class RedoFile:
    """One redo file and its checksums. Owner: the journal's thread."""

    __slots__ = (
        "_places", "_redo", "_sums", "end", "is_dirty", "number", "path", "references"
    )  # fmt: skip

    def __init__(
        self, number: int, redo: AppendFile, places: UpdateFile, sums: AppendFile
    ) -> None:
        """Take over new files; see `create_redo_file`."""
        self.number: Final = number
        self.path: Final = redo.path
        self.end = 0
        self.references = 0
        self.is_dirty = False
        """Whether it has decisions that are not synced."""
        self._redo = redo
        self._sums: AppendFile | None = sums
        self._places = OffsetsFile(places)
        self._sum(encode_head(number))

    def write(self, data: Buffer) -> None:
        """Write records after the last one; call `note_written` next.

        Raises:
            NoSpaceError: a part may have been written; call `cut_back` next.
            DiskError: the state of the file is unknown.
        """
        self._redo.write(data)

    def cut_back(self) -> None:
        """Cut off bytes that were written and not noted, and sync.

        Raises:
            StorageError: the state of the file is unknown.
        """
        self._redo.truncate(SizeBytes(self.end))
        # A refused record must not come back after a power cut.
        self._redo.sync()

    def sync(self) -> None:
        """Wait until all written bytes are on disk.

        Raises:
            DiskError: final, see `AppendFile.sync`.
        """
        self._redo.sync()
        self.is_dirty = False

    def note_synced(self) -> None:
        """Write to `sums.N` that all noted bytes are on disk."""
        self._sum(encode_entry(SYNCED, 0, self.end))

    def note_beside(self) -> None:
        """Write to `sums.N` that all other files of ours are in the directory."""
        self._sum(encode_entry(BESIDE, 0, 0))

    def note_written(
        self, data: Buffer, commits: Sequence[tuple[int, Bounds]], *, is_synced: bool
    ) -> Sequence[OffsetBlock]:
        """Note the written bytes: their checksum, and the offsets in them.

        Args:
            data: the bytes; the end of the file moves after them.
            commits: start in the data, and bounds, of each entry with offsets, in
                order.
            is_synced: whether the bytes are on disk.

        Returns:
            The block of each of these entries.
        """
        bounds = [
            encode_entry(BOUND, 0, self.end + start + at, value)
            for start, offsets in commits
            for at, value in offsets
        ]
        span = encode_span(self.end, data, is_synced=is_synced)
        self._sum(b"".join((*bounds, span)))
        ranges = [
            (start + offsets[0][0], start + offsets[-1][0] + OFFSET.size)
            for start, offsets in commits
        ]
        blocks = make_blocks(self._places, self.end, data, ranges)
        self.end += len(data)
        return blocks

    def close(self) -> None:
        """Close all files."""
        for file in (self._redo, self._sums, self._places):
            if file is not None:
                file.close()

    def _sum(self, entries: bytes) -> None:
        if self._sums is None:
            return
        try:
            self._sums.write(entries)
        except StorageError as error:
            _log.warning(
                "journal goes on without checksums: file=%s error=%s",
                self._sums.path,
                error,
            )
            sums, self._sums = self._sums, None
            sums.close()


def create_redo_file(fs: FileSystem, directory: Path, number: int) -> RedoFile:
    """Create a redo file and its checksums.

    Raises:
        StorageError: the disk refuses; nothing is left open.
    """
    path = directory / f"redo.{number}"
    with ExitStack() as opened:
        redo = fs.open_append(path, create=True)
        opened.callback(redo.close)
        places = fs.open_update(path)
        opened.callback(places.close)
        sums = fs.open_append(directory / f"sums.{number}", create=True)
        opened.pop_all()
    return RedoFile(number, redo, places, sums)


def remove_files(fs: FileSystem, directory: Path, numbers: Iterable[int]) -> None:
    """Remove redo files and their checksums, oldest last.

    A newer one may be a copy of an older one, torn by a power cut: until it is gone,
    replay must read the synced bytes first. A redo file and its checksums are removed
    by one rename, because checksums without the file are damage, and without checksums
    a torn tail counts.

    Raises:
        StorageError: the disk refuses; newer ones may be gone.
    """
    for number in sorted(numbers, reverse=True):
        redo, sums = directory / f"redo.{number}", directory / f"sums.{number}"
        if fs.exists(redo) and fs.exists(sums):
            fs.rename(redo, sums)
        fs.discard(redo)
        fs.discard(sums)
