"""Open files and held locks. The holder of one owns it and closes it.

Not thread-safe, except `ReadFile` until it is closed.
"""

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Self

from metaq.errors import DiskError, StorageError
from metaq.fs.calls import Buffer, SystemCalls, Translated, write_fully
from metaq.fs.kernel_syncs import Syncs
from metaq.model import Millis, Position, SizeBytes


class _OpenFile:
    """Base of all open files; the owner closes it, or uses it as a context."""

    def __init__(self, calls: SystemCalls, path: Path, fd: int) -> None:
        self.path: Final = path
        self._calls = calls
        self._fd = fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def size(self) -> SizeBytes:
        """Return the size in bytes at this moment, unsynced bytes included."""
        with Translated("stat", self.path):
            return SizeBytes(self._calls.fstat(self._fd).st_size)

    def is_in_place(self) -> bool:
        """Return whether the path still names this file.

        It does not if the file was removed or replaced, a directory above it was
        renamed or removed, or another disk was mounted over one.
        """
        with Translated("stat", self.path):
            opened = self._calls.fstat(self._fd)
            try:
                named = self._calls.stat(self.path)
            except (FileNotFoundError, NotADirectoryError):
                return False
        return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)

    def close(self) -> None:
        """Close without syncing; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with Translated("close", self.path):
                self._calls.close(fd)

    def abandon(self) -> None:
        """Close as `close` does, on a disk that may have failed; never raises."""
        with suppress(StorageError):
            self.close()


class AppendFile(_OpenFile):
    """A file that grows at its end; it has one writer, who owns and closes it."""

    def __init__(self, calls: SystemCalls, path: Path, fd: int) -> None:
        super().__init__(calls, path, fd)
        self._failed_sync: str | None = None

    def write(self, data: Buffer) -> None:
        """Append all bytes of one buffer; see `write_all`."""
        self.write_all((data,))

    def write_all(self, buffers: Sequence[Buffer]) -> None:
        """Append all bytes of all buffers, in order, without joining or copying them.

        Durability: nothing is promised before `sync`. After an error *any prefix* of
        the bytes may be in the file; the caller truncates to the last known size.
        """
        self._refuse_after_failed_sync("write")
        try:
            write_fully(self._calls, self._fd, buffers)
        except OSError:
            with Translated("write", self.path):
                raise

    def sync(self) -> None:
        """Wait until every byte written so far, and the size, are on disk.

        A failure is final: unsynced bytes may be lost although reads still show them.
        Every later call raises `DiskError`, too.
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
        """Begin a sync; return False if it could not begin, so that `sync` is needed.

        `on_done` is called later with the error or None; an error is as final as that
        of `sync`. Until then the file must not be written or closed.
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
        """Truncate to `size` bytes, at most the file's size; durable after `sync`."""
        self._refuse_after_failed_sync("truncate")
        with Translated("truncate", self.path):
            self._calls.ftruncate(self._fd, size)

    def _refuse_after_failed_sync(self, operation: str) -> None:
        if self._failed_sync is not None:
            raise DiskError(operation, str(self.path), self._failed_sync)


class UpdateFile(_OpenFile):
    """A file whose bytes change in place; one writer owns and closes it.

    A crash may leave the old bytes of a write, the new ones, or some of each, so the
    content must have its own checksum, and be writable again. Do not use the file after
    a failed sync.
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
    """A file open for reading at any position; stays readable after its removal."""

    def read_at(self, position: Position, size: SizeBytes) -> bytes:
        """Return `size` bytes from `position`; fewer only at the end of the file."""
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
        """Return whether the ends of a range, of 1 byte or more, are in the page cache.

        False if the file ends before the range does.
        """
        return self._calls.is_cached(self._fd, position, size)

    def warm(self, position: Position, size: SizeBytes) -> None:
        """Read a range into the page cache, as far as the file goes; blocks."""
        with Translated("read", self.path):
            self._calls.warm(self._fd, position, size)

    def mtime_ms(self) -> Millis:
        """Return the time of the last change, in milliseconds since 1970."""
        with Translated("stat", self.path):
            return Millis(self._calls.fstat(self._fd).st_mtime_ns // 1_000_000)

    def fileno(self) -> int:
        """Return a descriptor for sendfile; valid until `close`."""
        return self._calls.descriptor(self._fd)


class DirLock(_OpenFile):
    """Ownership of a directory or a file: flock on a file with the owner's pid.

    The kernel ends the ownership when the process dies, however it dies. The file is
    never removed: a process that opened it just before would lock a file without a name
    while another one locks a new file of the same name.
    """

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        self.close()
