"""Slices: readable byte ranges for the wire, and the open files they are of.

A slice names a file, a position and a length; the broker hands these to sendfile and
never copies the payload of a get. The file stays open until the last slice of it is
released: a deleted segment is readable through the
descriptor, and a descriptor that was closed too early could be given to another file
and send its bytes to a consumer.

`OpenFiles` keeps recently read files open, at most `OPEN_FILES_MAX` that no slice
uses, so that ten thousand segments do not exhaust the descriptors of the process. A
file is opened by the first slice of it that is read, on a thread that may wait: the
directory may lie on a disk that hangs.

Owner: the event loop's thread. Only `open` of a slice or file may be called elsewhere.
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
from metaq.storage.damage import apart, check_parts, damage_in_spans
from metaq.storage.listing import find_lost
from metaq.storage.segment import Damage, DamagedSegmentError, Segment
from metaq.storage.span_index import SpanIndex
from metaq.storage.span_lookup import open_spans

T = TypeVar("T")

OPEN_FILES_MAX: Final = 512
"""Read files kept open without use: half of the usual soft limit of 1024 descriptors,
which leaves the rest to connections and active segments."""


def damage_in(
    fs: FileSystem,
    file: ReadFile,
    segment: Segment,
    start: Offset,
    end: Offset,
    *,
    walks: bool,
) -> tuple[Damage, ...]:
    """Check the spans, and the records without one, that hold bytes of a range; blocks.

    Args:
        fs: the disk, for the index.
        file: the file of `segment`.
        segment: with the size that it should have.
        start: a record begins there, or a span that the index has holds it.
        end: in the segment.
        walks: check records without a span too; where a segment has no index, that
            begins at its base offset.

    Returns:
        What is damaged in the range, in order.

    Raises:
        DiskError: the disk does not give the bytes.
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
    return tuple(each for each in apart(damage) if each.overlaps(start, end))


def checksum_in(
    fs: FileSystem, segment: Segment, start: Offset, end: Offset
) -> int | None:
    """Return the CRC-32 of a range as the span index has it; blocks.

    No byte of the range is read. None: the index does not cover it, or its spans have
    other ends.

    Raises:
        DiskError: the disk does not give the index.
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
    """A file that is opened when it is read first, with the number of its users."""

    __slots__ = (
        "_closers", "_lock", "_path", "file", "fs", "is_forgotten", "user_count"
    )  # fmt: skip

    def __init__(self, fs: FileSystem, path: Path) -> None:
        self.fs: Final = fs
        """The disk."""
        self._path = path
        self._lock = Lock()
        self._closers: HelperThreads | None = None
        self.file: ReadFile | None = None
        """The file; None until it is open."""
        self.user_count = 0
        """Slices that were handed out and not released."""
        self.is_forgotten = False
        """No longer kept: it is closed by its last user."""

    def open(self) -> ReadFile:
        """Return the file, opened now if it is not yet; blocks, on any thread.

        Only for registered users, so that it stays open. The next user
        repeats a failed attempt.

        Raises:
            StorageError: the file cannot be opened.
        """
        with self._lock:
            if self.file is None:
                self.file = self.fs.open_read(self._path)
            return self.file

    def open_for(self, segment: Segment, end: Offset, *, is_sealed: bool) -> None:
        """Open the file, and see that it has the bytes of `segment` up to `end`.

        Raises:
            DamagedSegmentError: it does not, or there is none; the whole range that is
                lost is named.
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
        """Give one use back."""
        self.user_count -= 1
        assert self.user_count >= 0, self._path
        self._close_if_unused()

    def forget(self, closers: HelperThreads | None = None) -> None:
        """Close it now, or when its last user is done.

        Args:
            closers: close it while they run: the last close of a file that was removed
                frees its blocks, which takes a quarter of a second for half a gigabyte.
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
    """Files that are read, by path; the least recently used go first."""

    def __init__(self, fs: FileSystem, files_max: int = OPEN_FILES_MAX) -> None:
        self._fs = fs
        self._files_max = files_max
        self._files: OrderedDict[Path, OpenFile] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    def acquire(self, path: Path) -> OpenFile:
        """Return the file of `path` with one use added; it may not be open yet."""
        found = self._files.get(path)
        if found is None:
            found = self._files[path] = OpenFile(self._fs, path)
            while len(self._files) > self._files_max:
                # Also when it is in use: its last slice closes it.
                self._files.popitem(last=False)[1].forget()
        else:
            self._files.move_to_end(path)
        found.user_count += 1
        return found

    def forget(self, path: Path, closers: HelperThreads) -> None:
        """Stop keeping a file, because its segment is gone; `closers` close it."""
        found = self._files.pop(path, None)
        if found is not None:
            found.forget(closers)

    def close(self) -> None:
        """Forget everything; files with users are closed by the last of them."""
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
        """Threads for calls that may wait for the disk."""
        self.position = position
        """Position of its first byte in the file."""
        self.size_bytes = size_bytes
        """Its length, bytes, 1 or more; these bytes do not change any more."""

    @property
    def is_open(self) -> bool:
        """Return whether there is a descriptor."""
        return self._open_file.file is not None

    def open(self) -> None:
        """Open the file unless it is open; blocks, on any thread, before `release`.

        Raises:
            DamagedSegmentError: the file does not have the bytes any more.
            DiskError: the file cannot be opened.
        """
        end = self._segment.offset_at(Position(self.position + self.size_bytes))
        self._open_file.open_for(self._segment, end, is_sealed=self._is_sealed)

    def fileno(self) -> int:
        """Return the descriptor for sendfile, of a file that is open."""
        return self._file().fileno()

    def is_cached(self, position: int, size_bytes: int) -> bool:
        """Return whether a part of the open file is in the page cache."""
        return self._file().is_cached(Position(position), SizeBytes(size_bytes))

    def warm(self, position: int, size_bytes: int) -> None:
        """Read a part of the open file into the page cache; blocks.

        Raises:
            DiskError: the disk does not give it.
        """
        self._file().warm(Position(position), SizeBytes(size_bytes))

    def _file(self) -> ReadFile:
        file = self._open_file.file
        assert file is not None, "a slice is opened before it is sent"
        return file

    def read(self) -> bytes:
        """Return a copy of the bytes, for tests, tools and the replay check; blocks.

        Raises:
            DamagedSegmentError: the file does not have them any more.
            DiskError: the disk does not give them.
        """
        self.open()
        return self._open_file.open().read_at(self.position, self.size_bytes)

    def checksum(self) -> int | None:
        """Return the CRC-32 of its bytes by the span index alone; see `checksum_in`."""
        start = self._segment.offset_at(self.position)
        end = Offset(start + self.size_bytes)
        return checksum_in(self._open_file.fs, self._segment, start, end)

    def damage(self, until: Offset, *, walks: bool = True) -> tuple[Damage, ...]:
        """Check its bytes by span index and records; blocks.

        Args:
            until: synced end of the log.
            walks: check records without a span too.

        Returns:
            The damaged ranges that its bytes are in, in order.

        Raises:
            DiskError: the disk does not give them.
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
        """Run something with it where it may wait for the disk, and release it then.

        Raises:
            ClosedError: the log is closed; and as `work`.

        Cancellation: what has begun goes on, and has the file until it ends.
        """
        try:
            running = asyncio.get_running_loop().run_in_executor(self.reader, work)
        except RuntimeError as error:
            self.release()
            raise ClosedError(f"{self._segment.path}: {error}") from error
        running.add_done_callback(lambda _: self.release())
        return await asyncio.shield(running)

    def release(self) -> None:
        """Give the file back."""
        self._open_file.release()
