"""Slices: readable byte ranges for the wire, and the open files that they use.

A slice names a file, a position and a length; the broker passes these to sendfile and
never copies the payload of a get. The file stays open until its last slice is released:
a deleted segment is still readable through the descriptor, and a descriptor that was
closed too early could be reused for another file, whose bytes a consumer would get.

`OpenFiles` keeps recently read files open, at most `OPEN_FILES_MAX` that no slice uses,
so that ten thousand segments do not exhaust the descriptors of the process. A file is
opened when its first slice is read, on a thread that may block, because the disk may
hang.

Owner: the event loop's thread. Only `open` of a slice or file may run on other threads.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Final, TypeVar

from metaq.errors import ClosedError, DiskError, MissingFileError
from metaq.fs import FileSystem, ReadFile
from metaq.fs.helper_threads import HelperThreads
from metaq.model import Offset, Position, SizeBytes
from metaq.record.checksum import checksum_of_joined
from metaq.storage.damage import check_parts, damage_in_spans, merge_damage
from metaq.storage.listing import find_lost
from metaq.storage.segment import Damage, DamagedSegmentError, Segment
from metaq.storage.span_index import SpanIndex
from metaq.storage.span_lookup import open_spans

T = TypeVar("T")

OPEN_FILES_MAX: Final = 512
"""Maximum number of unused read files kept open: half of the usual soft limit of 1024
descriptors, so that connections and active segments have the rest."""


def damage_in(
    fs: FileSystem,
    file: ReadFile,
    segment: Segment,
    start: Offset,
    end: Offset,
    *,
    walks: bool,
) -> tuple[Damage, ...]:
    """Check spans, and records without a span, that have bytes of a range; blocks.

    Args:
        fs: the disk, for the index.
        file: the file of `segment`.
        segment: the segment, with its expected size.
        start: a record begins there, or an indexed span contains it.
        end: end of the range, in the segment.
        walks: check records without a span too; a segment without an index is then
            checked from its base offset on.

    Returns:
        Damaged ranges that overlap the range, in order.

    Raises:
        DiskError: the file or its index can not be read.
    """
    with open_spans(fs, segment) as lookup:
        pieces = list(lookup.pieces(start, end, is_merged=False))
    size = segment.end_offset
    spans = [each for each in pieces if each.record_count and each.end_offset <= size]
    damage = list(damage_in_spans(file, segment, spans))
    for gap in pieces if walks else ():
        if gap.record_count and gap.end_offset <= size:
            continue
        parts = check_parts(
            file,
            segment,
            SpanIndex(segment.base_offset),
            gap.base_offset,
            min(gap.end_offset, size),
            bytes_max=gap.size_bytes,
        )
        damage += [each for part in parts for each in part.damage]
    return tuple(each for each in merge_damage(damage) if each.overlaps(start, end))


def checksum_in(
    fs: FileSystem, segment: Segment, start: Offset, end: Offset
) -> int | None:
    """Return the CRC-32 of a range, computed from the span index; blocks.

    No byte of the range is read. None if the index does not cover the range, or its
    spans have other ends.

    Raises:
        DiskError: the index can not be read.
    """
    value, at = 0, start
    with open_spans(fs, segment) as lookup:
        for span in lookup.pieces(start, end, is_merged=False):
            if not span.record_count or span.base_offset != at or span.end_offset > end:
                return None
            value = checksum_of_joined(value, span.checksum, span.size_bytes)
            at = span.end_offset
    return value if at == end else None


class OpenFile:
    """A file opened at its first read, with the number of its users."""

    __slots__ = (
        "_closers", "_lock", "_path", "file", "fs", "is_forgotten", "user_count"
    )  # fmt: skip

    def __init__(self, fs: FileSystem, path: Path) -> None:
        self.fs: Final = fs
        """The file system."""
        self._path = path
        self._lock = Lock()
        self._closers: HelperThreads | None = None
        self.file: ReadFile | None = None
        """The file; None until it is open."""
        self.user_count = 0
        """Number of slices that were handed out and not released."""
        self.is_forgotten = False
        """Whether it is no longer kept: its last user closes it."""

    def open(self) -> ReadFile:
        """Return the file, and open it first if necessary; blocks, on any thread.

        The caller must hold a use of it, so that it stays open. After a failure the
        next call tries again.

        Raises:
            StorageError: the file cannot be opened.
        """
        with self._lock:
            if self.file is None:
                self.file = self.fs.open_read(self._path)
            return self.file

    def open_for(self, segment: Segment, end: Offset, *, is_sealed: bool) -> None:
        """Open the file, and check that it has the bytes of `segment` up to `end`.

        Raises:
            DamagedSegmentError: the file is missing or too short; the error has the
                whole lost range.
            DiskError: it cannot be opened, or retention may have removed it.
        """
        cause: DiskError | None = None
        try:
            if self.open().size() >= segment.position_of(end):
                return
        except MissingFileError as error:
            cause = error
        damage = find_lost(self.fs, segment, end, is_sealed=is_sealed)
        if damage is not None:
            raise DamagedSegmentError(damage) from cause
        if cause is not None:
            raise cause

    def release(self) -> None:
        """Release one use."""
        self.user_count -= 1
        assert self.user_count >= 0, self._path
        self._close_if_unused()

    def forget(self, closers: HelperThreads | None = None) -> None:
        """Close the file now, or when its last user has released it.

        Args:
            closers: threads to close it on while they run: the last close of a removed
                file frees its blocks, which takes 0.25 s for half a gigabyte.
        """
        self.is_forgotten = True
        self._closers = closers
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        file, closers = self.file, self._closers
        if not self.is_forgotten or self.user_count or file is None:
            return
        if closers is not None and closers.is_running:
            closers.submit(file.close)
        else:
            file.close()


class OpenFiles:
    """Cache of files opened for reading, by path; the least recently used go first."""

    def __init__(self, fs: FileSystem, files_max: int = OPEN_FILES_MAX) -> None:
        self._fs = fs
        self._files_max = files_max
        self._files: OrderedDict[Path, OpenFile] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    def acquire(self, path: Path) -> OpenFile:
        """Return the file of `path` with one more use; it may not be open yet."""
        found = self._files.get(path)
        if found is None:
            found = self._files[path] = OpenFile(self._fs, path)
            while len(self._files) > self._files_max:
                # Even if it is in use: its last slice closes it.
                self._files.popitem(last=False)[1].forget()
        else:
            self._files.move_to_end(path)
        found.user_count += 1
        return found

    def forget(self, path: Path, closers: HelperThreads) -> None:
        """Remove the file of a removed segment; `closers` close it."""
        found = self._files.pop(path, None)
        if found is not None:
            found.forget(closers)

    def close(self) -> None:
        """Forget all files; the last user of a file closes it."""
        while self._files:
            self._files.popitem()[1].forget()


class Slice:
    """A readable range of one segment; the holder calls `release` exactly once."""

    __slots__ = (
        "_is_sealed", "_open_file", "_segment", "position", "reader", "size_bytes"
    )  # fmt: skip

    def __init__(
        self,
        open_file: OpenFile,
        segment: Segment,
        position: Position,
        size_bytes: SizeBytes,
        reader: Executor,
        *,
        is_sealed: bool,
    ) -> None:
        """Take over one use of `open_file`, the file of `segment`."""
        self._open_file = open_file
        self._segment = segment
        self._is_sealed = is_sealed
        self.reader = reader
        """Threads for calls that may block on the disk."""
        self.position = position
        """Position of the first byte in the file."""
        self.size_bytes = size_bytes
        """Length in bytes, 1 or more; these bytes do not change any more."""

    @property
    def is_open(self) -> bool:
        """Return whether the file is open."""
        return self._open_file.file is not None

    def open(self) -> None:
        """Open the file if necessary; blocks, on any thread, before `release`.

        Raises:
            DamagedSegmentError: the file no longer has the bytes.
            DiskError: the file cannot be opened.
        """
        end = self._segment.offset_at(Position(self.position + self.size_bytes))
        self._open_file.open_for(self._segment, end, is_sealed=self._is_sealed)

    def fileno(self) -> int:
        """Return the descriptor for sendfile; the file must be open."""
        return self._file().fileno()

    def is_cached(self, position: int, size_bytes: int) -> bool:
        """Return whether a range of the open file is in the page cache."""
        return self._file().is_cached(Position(position), SizeBytes(size_bytes))

    def warm(self, position: int, size_bytes: int) -> None:
        """Read a range of the open file into the page cache; blocks.

        Raises:
            DiskError: the range can not be read.
        """
        self._file().warm(Position(position), SizeBytes(size_bytes))

    def _file(self) -> ReadFile:
        file = self._open_file.file
        assert file is not None, "a slice is opened before it is sent"
        return file

    def read(self) -> bytes:
        """Return a copy of the bytes, for tests, tools and the replay check; blocks.

        Raises:
            DamagedSegmentError: the file no longer has the bytes.
            DiskError: they can not be read.
        """
        self.open()
        return self._open_file.open().read_at(self.position, self.size_bytes)

    def checksum(self) -> int | None:
        """Return the CRC-32 of the bytes from the span index; see `checksum_in`."""
        start = self._segment.offset_at(self.position)
        end = Offset(start + self.size_bytes)
        return checksum_in(self._open_file.fs, self._segment, start, end)

    def damage(self, until: Offset, *, walks: bool = True) -> tuple[Damage, ...]:
        """Check the bytes against span index and records; blocks.

        Args:
            until: synced end of the log.
            walks: check records without a span too.

        Returns:
            Damaged ranges that overlap the slice, in order.

        Raises:
            DiskError: the file or its index can not be read.
        """
        segment = self._segment
        if not self._is_sealed:
            size = SizeBytes(until - segment.base_offset)
            segment = replace(segment, size_bytes=size)
        start = segment.offset_at(self.position)
        end = Offset(start + self.size_bytes)
        file = self._open_file
        return damage_in(file.fs, file.open(), segment, start, end, walks=walks)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on a reader thread, where it may block, and release the slice.

        Raises:
            ClosedError: the log is closed. Also any error of `work`.

        Cancellation: work that has begun goes on, and keeps the file until it ends.
        """
        try:
            running = asyncio.get_running_loop().run_in_executor(self.reader, work)
        except RuntimeError as error:
            self.release()
            raise ClosedError(f"{self._segment.path}: {error}") from error
        running.add_done_callback(lambda _: self.release())
        return await asyncio.shield(running)

    def release(self) -> None:
        """Release the use of the file."""
        self._open_file.release()
