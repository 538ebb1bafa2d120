"""Open files and held locks: who has one owns it, and closes it.

Not thread-safe, except `ReadFile` until it is closed.
"""

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from metaq.errors import DiskError
from metaq.fs.calls import Buffer, SystemCalls, Translated, write_fully
from metaq.fs.kernel_syncs import Syncs
from metaq.model import Millis, Position, SizeBytes


def _is_named(calls: SystemCalls, path: Path, fd: int) -> bool:
    """Tell whether `path` leads to the file that is open as `fd`."""
    with Translated("stat", path):
        opened = calls.fstat(fd)
        try:
            named = calls.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


class _OpenFile:
    """Base of all open files; the owner closes it."""

    def __init__(self, calls: SystemCalls, path: Path, fd: int) -> None:
        self.path: Final = path
        """The path the file was opened with."""
        self._calls = calls
        self._fd = fd

    def size(self) -> SizeBytes:
        """Return the size in bytes at this moment, unsynced bytes included."""
        with Translated("stat", self.path):
            return SizeBytes(self._calls.fstat(self._fd).st_size)

    def is_in_place(self) -> bool:
        """Tell whether its path still leads to it.

        It does not where the file was removed or replaced, a directory above it was
        renamed or removed, or another disk was mounted over one.
        """
        return _is_named(self._calls, self.path, self._fd)

    def close(self) -> None:
        """Close without syncing; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with Translated("close", self.path):
                self._calls.close(fd)


class AppendFile(_OpenFile):
    """A file that grows at its end; it has one writer, who owns and closes it."""

    def __init__(self, calls: SystemCalls, path: Path, fd: int) -> None:
        super().__init__(calls, path, fd)
        self._failed_sync: str | None = None

    def write(self, data: Buffer) -> None:
        """Append all bytes of one buffer; see `write_all`."""
        self.write_all((data,))

    def write_all(self, buffers: Sequence[Buffer]) -> None:
        """Append all bytes of all buffers, in order, without joining them.

        Args:
            buffers: Any number of byte buffers, empty ones too; not copied, must not
                change during the call.

        Raises:
            NoSpaceError: The disk or quota is full.
            DiskError: Any other refusal, or an earlier sync failed.

        Durability: nothing is promised before `sync`. After an error *any prefix* of
        the bytes may be in the file; the caller truncates to the last size it knows.
        """
        self._refuse_after_failed_sync("write")
        try:
            write_fully(self._calls, self._fd, buffers)
        except OSError:
            with Translated("write", self.path):
                raise

    def sync(self) -> None:
        """Wait until every byte written so far, and the size, are on disk.

        Raises:
            DiskError: The sync failed, now or earlier. It is final: unsynced bytes may
                be lost although reads still show them. Never call it again to retry.
        """
        self._refuse_after_failed_sync("sync")
        try:
            with Translated("sync", self.path):
                self._calls.fdatasync(self._fd)
        except DiskError as error:
            self._failed_sync = error.errno_name
            raise

    def begin_sync(
        self, syncs: Syncs, on_done: Callable[[DiskError | None], None]
    ) -> bool:
        """Begin what `sync` waits for.

        Args:
            syncs: carries it out.
            on_done: called later with the error, as final as those of `sync`; the file
                is not written or closed before.

        Returns:
            False where it was not begun: then it takes `sync`.

        Raises:
            DiskError: an earlier sync failed.
        """
        self._refuse_after_failed_sync("sync")
        return syncs.begin(self._fd, partial(self._on_synced, on_done))

    def _on_synced(
        self, on_done: Callable[[DiskError | None], None], number: int
    ) -> None:
        if not number:
            on_done(None)
            return
        try:
            with Translated("sync", self.path):
                raise OSError(number, os.strerror(number))
        except DiskError as error:
            self._failed_sync = error.errno_name
            on_done(error)

    def truncate(self, size: SizeBytes) -> None:
        """Cut the file to `size` bytes, at most its size; durable after `sync`."""
        self._refuse_after_failed_sync("truncate")
        with Translated("truncate", self.path):
            self._calls.ftruncate(self._fd, size)

    def _refuse_after_failed_sync(self, operation: str) -> None:
        if self._failed_sync is not None:
            raise DiskError(operation, str(self.path), self._failed_sync)


class UpdateFile(_OpenFile):
    """A small file whose last bytes change in place; one writer owns and closes it.

    For side files that can be made again: a crash may leave the old bytes of a write,
    the new ones, or some of each, so the content carries its own checksum. After a
    failed sync the file is of no further use, as with `AppendFile`.
    """

    def write_at(self, position: Position, data: bytes) -> None:
        """Write all bytes at `position`, at most the file's size."""
        done = 0
        with Translated("write", self.path):
            while done < len(data):
                taken = self._calls.pwrite(self._fd, data[done:], position + done)
                if taken <= 0:
                    raise OSError(errno.EIO, "the device took no bytes")
                done += taken

    def sync(self) -> None:
        """Wait until every byte written so far, and the size, are on disk."""
        with Translated("sync", self.path):
            self._calls.fdatasync(self._fd)


class ReadFile(_OpenFile):
    """A file open for reading at any position; stays readable when it is removed."""

    def read_at(self, position: Position, size: SizeBytes) -> bytes:
        """Return `size` bytes from `position`; fewer only where the file ends."""
        with Translated("read", self.path):
            data = self._calls.pread(self._fd, size, position)
            if len(data) == size or not data:
                return data
            parts = [data]
            got = len(data)
            while got < size:
                data = self._calls.pread(self._fd, size - got, position + got)
                if not data:
                    break
                parts.append(data)
                got += len(data)
        return b"".join(parts)

    def read_into(self, position: Position, target: bytearray | memoryview) -> int:
        """Fill `target` from `position`; return the count, short only at the end."""
        view = memoryview(target)
        got = 0
        with Translated("read", self.path):
            while got < len(view):
                count = self._calls.preadv(self._fd, (view[got:],), position + got)
                if not count:
                    break
                got += count
        return got

    def is_cached(self, position: Position, size: SizeBytes) -> bool:
        """Tell whether a range, of 1 byte or more, is in the page cache.

        Only its ends are looked at. It is not, when the file ends before the range.
        """
        return self._calls.is_cached(self._fd, position, size)

    def warm(self, position: Position, size: SizeBytes) -> None:
        """Read a range into the page cache, as far as the file goes; blocks.

        Raises:
            DiskError: The disk does not give it.
        """
        with Translated("read", self.path):
            self._calls.warm(self._fd, position, size)

    def mtime_ms(self) -> Millis:
        """Return the time of the last change, in milliseconds since 1970."""
        with Translated("stat", self.path):
            return Millis(self._calls.fstat(self._fd).st_mtime_ns // 1_000_000)

    def fileno(self) -> int:
        """Return a descriptor for sendfile; valid until `close`."""
        return self._calls.descriptor(self._fd)


class DirLock:
    """Ownership of a directory or a file: flock on a file with the owner's pid.

    The kernel ends the ownership when the process dies, however it dies. The file is
    never removed: a process that opened it just before would lock a nameless file
    while another one locks a new file of the same name.
    """

    def __init__(self, calls: SystemCalls, path: Path, fd: int) -> None:
        self._calls = calls
        self._path = path
        self._fd = fd

    def is_in_place(self) -> bool:
        """Tell whether another process would meet this lock; see `_OpenFile`."""
        return _is_named(self._calls, self._path, self._fd)

    def release(self) -> None:
        """Give it up; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with Translated("unlock", self._path):
                self._calls.close(fd)
