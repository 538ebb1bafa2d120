"""The only door to the disk: open, write, sync, rename, truncate, remove and lock.

Theory of operation. Everything above this module promises durability with three
facts, and this module is where they are made true:

* A byte is on disk when `AppendFile.sync` has returned after it was written. A write
  alone promises nothing, not even an order among writes.
* A name is in its directory when the *directory* has been synced. Every function here
  that creates, renames or removes a name syncs the directory before it returns, so no
  caller has to remember it, and names removed one after the other also disappear in
  that order (a crash between two of them leaves no gap in a list of segments).
* A sync that failed is final. Linux marks the pages clean although they never reached
  the disk, so the next sync would report success for bytes that are lost. A file whose
  sync failed refuses every later write and sync; only recovery, which reads the disk
  again, may believe the directory.

`OSError` does not leave this module. No room (ENOSPC, EDQUOT) is `NoSpaceError`, which
may pass by itself; everything else is `DiskError`. A failed *sync* is always a
`DiskError`, whatever its number: room that comes back does not bring back the pages
that a sync has dropped. EINTR and short writes are invisible to callers.

The seam for tests is one step below: `SystemCalls`. The order of syncs, the loops over
short writes and the translation of errors are the same lines of code on the real disk
and on the faulty one in memory, so a power cut in a test judges what really runs.

Files are not mapped into memory on purpose: a read error under a mapping, or a file
that gets shorter, kills the whole process with SIGBUS instead of failing one read.
Scans of large files reuse one buffer through `ReadFile.read_into`.

All calls block and may take seconds on a bad disk; they belong on a storage thread.
Objects are not thread-safe, except `ReadFile` until it is closed and `FileSystem`.

Keep in step: `metaq/testing/fs.py` implements `SystemCalls` in memory.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

from metaq.errors import DiskError, LogDirLockedError, NoSpaceError, StorageError
from metaq.model import Millis, Position, SizeBytes

LOCK_FILE: Final = ".lock"
"""Name of the lock file in a data directory; it is never removed (see `DirLock`)."""

BUFFERS_PER_CALL_MAX: Final = 1024
"""Buffers handed to one writev: IOV_MAX of Linux, which refuses more."""

FILE_MODE: Final = 0o644
DIRECTORY_MODE: Final = 0o755

_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_TEMPORARY_SUFFIX: Final = ".tmp"
_PID_DIGITS_MAX: Final = 32

Buffer = bytes | bytearray | memoryview
"""Bytes to write; a memoryview has items of one byte each."""


# -- the seam: what we ask of the kernel ----------------------------------------------


class FileStatus(Protocol):
    """The part of `os.stat_result` that is used."""

    @property
    def st_mode(self) -> int:
        """Return type and permissions."""
        ...

    @property
    def st_size(self) -> int:
        """Return the size in bytes."""
        ...

    @property
    def st_mtime_ns(self) -> int:
        """Return the time of the last change in nanoseconds since 1970."""
        ...


class DiskStatus(Protocol):
    """The part of `os.statvfs_result` that is used."""

    @property
    def f_bavail(self) -> int:
        """Return the free blocks an unprivileged writer may take."""
        ...

    @property
    def f_frsize(self) -> int:
        """Return the bytes per block."""
        ...


class SystemCalls(Protocol):
    """The calls of the kernel, as `os` has them: they raise `OSError`."""

    def open(self, path: Path, flags: int, mode: int, /) -> int:
        """Open or create a file; the descriptor is not inherited."""
        ...

    def close(self, fd: int, /) -> None:
        """Give a descriptor back, and the lock it holds."""
        ...

    def writev(self, fd: int, buffers: Sequence[Buffer], /) -> int:
        """Write some of the bytes, in order; return how many, short when cut."""
        ...

    def pwrite(self, fd: int, data: Buffer, position: int, /) -> int:
        """Write some of the bytes at `position`; return how many, short when cut."""
        ...

    def pread(self, fd: int, size: int, position: int, /) -> bytes:
        """Return up to `size` bytes from `position`; none at the end."""
        ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], position: int, /) -> int:
        """Fill some of the buffers from `position`; return the count of bytes."""
        ...

    def fdatasync(self, fd: int, /) -> None:
        """Wait until the bytes and the size of a file are on the device."""
        ...

    def fsync(self, fd: int, /) -> None:
        """Wait until the names in a directory are on the device."""
        ...

    def ftruncate(self, fd: int, size: int, /) -> None:
        """Set the size of a file; new bytes are zero."""
        ...

    def fstat(self, fd: int, /) -> FileStatus:
        """Return the status of an open file."""
        ...

    def stat(self, path: Path, /) -> FileStatus:
        """Return the status of what has this name."""
        ...

    def statvfs(self, path: Path, /) -> DiskStatus:
        """Return the room on the disk of this path."""
        ...

    def listdir(self, path: Path, /) -> list[str]:
        """Return the names in a directory, in no order."""
        ...

    def rename(self, source: Path, target: Path, /) -> None:
        """Give a file another name, replacing what had it."""
        ...

    def unlink(self, path: Path, /) -> None:
        """Remove a file's name."""
        ...

    def mkdir(self, path: Path, mode: int, /) -> None:
        """Create a directory."""
        ...

    def flock(self, fd: int, operation: int, /) -> None:
        """Lock an open file, or raise `BlockingIOError`."""
        ...

    def descriptor(self, fd: int, /) -> int:
        """Return a descriptor that other calls of this process understand."""
        ...


class LinuxCalls:
    """The kernel under this process."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    writev = staticmethod(os.writev)
    pwrite = staticmethod(os.pwrite)
    pread = staticmethod(os.pread)
    preadv = staticmethod(os.preadv)
    fdatasync = staticmethod(os.fdatasync)
    fsync = staticmethod(os.fsync)
    ftruncate = staticmethod(os.ftruncate)
    fstat = staticmethod(os.fstat)
    stat = staticmethod(os.stat)
    statvfs = staticmethod(os.statvfs)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)
    flock = staticmethod(fcntl.flock)

    @staticmethod
    def listdir(path: Path) -> list[str]:
        """Return the names in a directory, in no order."""
        return os.listdir(path)

    @staticmethod
    def descriptor(fd: int) -> int:
        """Return the descriptor itself: it is a real one."""
        return fd


# -- files ----------------------------------------------------------------------------


class AppendFile:
    """A file that grows at its end; it has one writer, who owns and closes it."""

    def __init__(self, calls: SystemCalls, path: Path, fd: int) -> None:
        self.path: Final = path
        """The path the file was opened with."""
        self._calls = calls
        self._fd = fd
        self._failed_sync: str | None = None

    @property
    def fd(self) -> int:
        """Return the descriptor, open for reading too; owned by this file."""
        return self._calls.descriptor(self._fd)

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
        with _Translated("write", self.path):
            _write_fully(self._calls, self._fd, buffers)

    def sync(self) -> None:
        """Wait until every byte written so far, and the size, are on disk.

        Raises:
            DiskError: The sync failed, now or earlier. It is final: unsynced bytes may
                be lost although reads still show them. Never call it again to retry.
        """
        self._refuse_after_failed_sync("sync")
        try:
            with _Translated("sync", self.path):
                self._calls.fdatasync(self._fd)
        except DiskError as error:
            self._failed_sync = error.errno_name
            raise

    def truncate(self, size: SizeBytes) -> None:
        """Cut the file to `size` bytes, at most its size; durable after `sync`."""
        self._refuse_after_failed_sync("truncate")
        with _Translated("truncate", self.path):
            self._calls.ftruncate(self._fd, size)

    def size(self) -> SizeBytes:
        """Return the size in bytes, unsynced bytes included."""
        with _Translated("stat", self.path):
            return SizeBytes(self._calls.fstat(self._fd).st_size)

    def close(self) -> None:
        """Close without syncing; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with _Translated("close", self.path):
                self._calls.close(fd)

    def _refuse_after_failed_sync(self, operation: str) -> None:
        if self._failed_sync is not None:
            raise DiskError(operation, str(self.path), self._failed_sync)


class UpdateFile:
    """A small file whose last bytes change in place; one writer owns and closes it.

    For side files that can be made again: a crash may leave the old bytes of a write,
    the new ones, or some of each, so what is written carries its own checksum. After a
    failed sync the file is of no further use, as with `AppendFile`.
    """

    def __init__(self, calls: SystemCalls, path: Path, fd: int) -> None:
        self.path: Final = path
        """The path the file was opened with."""
        self._calls = calls
        self._fd = fd

    def write_at(self, position: Position, data: bytes) -> None:
        """Write all bytes at `position`, at most the file's size."""
        done = 0
        with _Translated("write", self.path):
            while done < len(data):
                taken = self._calls.pwrite(self._fd, data[done:], position + done)
                if taken <= 0:
                    raise OSError(errno.EIO, "the device took no bytes")
                done += taken

    def sync(self) -> None:
        """Wait until every byte written so far, and the size, are on disk."""
        with _Translated("sync", self.path):
            self._calls.fdatasync(self._fd)

    def close(self) -> None:
        """Close without syncing; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with _Translated("close", self.path):
                self._calls.close(fd)


class ReadFile:
    """A file open for reading at any position; stays readable when it is removed."""

    def __init__(self, calls: SystemCalls, path: Path, fd: int) -> None:
        self.path: Final = path
        """The path the file was opened with."""
        self._calls = calls
        self._fd = fd

    def read_at(self, position: Position, size: SizeBytes) -> bytes:
        """Return `size` bytes from `position`; fewer only where the file ends."""
        with _Translated("read", self.path):
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
        with _Translated("read", self.path):
            while got < len(view):
                count = self._calls.preadv(self._fd, (view[got:],), position + got)
                if not count:
                    break
                got += count
        return got

    def size(self) -> SizeBytes:
        """Return the size in bytes at this moment."""
        with _Translated("stat", self.path):
            return SizeBytes(self._calls.fstat(self._fd).st_size)

    def mtime_ms(self) -> Millis:
        """Return the time of the last change, in milliseconds since 1970."""
        with _Translated("stat", self.path):
            return Millis(self._calls.fstat(self._fd).st_mtime_ns // 1_000_000)

    def fileno(self) -> int:
        """Return a descriptor for sendfile; valid until `close`."""
        return self._calls.descriptor(self._fd)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with _Translated("close", self.path):
                self._calls.close(fd)


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

    def release(self) -> None:
        """Give it up; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with _Translated("unlock", self._path):
                self._calls.close(fd)


# -- the file system ------------------------------------------------------------------


class FileSystem:
    """What the code may ask of a disk.

    Every method raises `NoSpaceError` when there is no room and `DiskError` for any
    other refusal (a missing file is "ENOENT"); any other exception is a bug.
    """

    def __init__(self, calls: SystemCalls) -> None:
        self._calls = calls

    def open_append(self, path: Path, *, create: bool) -> AppendFile:
        """Open a file for appending.

        Args:
            path: The file; its directory exists.
            create: Create it, with its name durable, when it is missing. Without it
                a missing file is an error. An existing file keeps its bytes.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        with _Translated("open", path):
            try:
                fd = self._calls.open(path, flags, FILE_MODE)
            except FileNotFoundError:
                if not create:
                    raise
                fd = self._calls.open(path, flags | os.O_CREAT, FILE_MODE)
        file = AppendFile(self._calls, path, fd)
        if create:
            # Also for an existing file: the process that created it may have been
            # killed before it came to this line.
            try:
                self.sync_directory(path.parent)
            except StorageError:
                file.close()
                raise
        return file

    def open_update(self, path: Path) -> UpdateFile:
        """Open an existing file for writing at any position."""
        with _Translated("open", path):
            fd = self._calls.open(path, os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
        return UpdateFile(self._calls, path, fd)

    def open_read(self, path: Path) -> ReadFile:
        """Open an existing file for reading."""
        with _Translated("open", path):
            fd = self._calls.open(path, os.O_RDONLY | os.O_CLOEXEC, FILE_MODE)
        return ReadFile(self._calls, path, fd)

    def read_file(self, path: Path, size_max: SizeBytes) -> bytes:
        """Return a whole small file.

        Raises:
            StorageError: The file is larger than `size_max`; nothing is returned.
        """
        file = self.open_read(path)
        try:
            data = file.read_at(Position(0), SizeBytes(size_max + 1))
        finally:
            file.close()
        if len(data) > size_max:
            raise StorageError(
                f"file is too large: path={path} expected at most {size_max} bytes,"
                f" got at least {len(data)}"
            )
        return data

    def write_atomically(self, path: Path, data: Buffer) -> None:
        """Replace or create a small file: after a crash it is the old or the new one.

        The new content is durable on return. One writer per path: a neighbour named
        `<name>.tmp` is used and, after a crash, may be left behind.
        """
        temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with _Translated("open", temporary):
            fd = self._calls.open(temporary, flags, FILE_MODE)
        file = AppendFile(self._calls, temporary, fd)
        try:
            try:
                file.write(data)
                file.sync()
            finally:
                file.close()
            self.rename(temporary, path)
        except StorageError:
            # The error that matters is on its way; a leftover harms nobody.
            with suppress(OSError):
                self._calls.unlink(temporary)
            raise

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing `target`; durable on return.

        Content is not synced: a file that must arrive whole is synced first. After an
        error the file has one of the two names, or both after a crash.
        """
        with _Translated("rename", source):
            self._calls.rename(source, target)
        self.sync_directory(target.parent)
        if source.parent != target.parent:
            self.sync_directory(source.parent)

    def unlink(self, path: Path) -> None:
        """Remove a file's name, durable on return; open readers go on."""
        with _Translated("unlink", path):
            self._calls.unlink(path)
        self.sync_directory(path.parent)

    def make_directory(self, path: Path) -> None:
        """Create one directory level, durable on return; an existing one is kept."""
        with _Translated("mkdir", path):
            try:
                self._calls.mkdir(path, DIRECTORY_MODE)
            except FileExistsError:
                if not self.is_directory(path):
                    raise
        # Also for an existing one, for the reason given in `open_append`.
        self.sync_directory(path.parent)

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on disk; errors are final."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with _Translated("open", path):
            fd = self._calls.open(path, flags, 0)
        with _Translated("sync", path):
            try:
                self._calls.fsync(fd)
            finally:
                self._calls.close(fd)

    def list_directory(self, path: Path) -> tuple[str, ...]:
        """Return the names in a directory, sorted; empty for an empty one."""
        with _Translated("list", path):
            return tuple(sorted(self._calls.listdir(path)))

    def exists(self, path: Path) -> bool:
        """Tell whether a file or directory has this name."""
        return self._status(path) is not None

    def is_directory(self, path: Path) -> bool:
        """Tell whether the name is a directory; False when nothing has it."""
        status = self._status(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def size_of(self, path: Path) -> SizeBytes:
        """Return the size of a file in bytes, unsynced bytes included."""
        with _Translated("stat", path):
            return SizeBytes(self._calls.stat(path).st_size)

    def free_bytes(self, path: Path) -> SizeBytes:
        """Return the room an unprivileged writer has on the disk of this path."""
        with _Translated("statvfs", path):
            disk = self._calls.statvfs(path)
        return SizeBytes(disk.f_bavail * disk.f_frsize)

    def lock_directory(self, path: Path) -> DirLock:
        """Become the only owner of a data directory, without waiting.

        Raises:
            LogDirLockedError: Another owner has it; the message names the directory
                and the owner's process id.
        """
        return self._lock(
            path / LOCK_FILE, f"data directory is in use: directory={path}"
        )

    def lock_file(self, path: Path) -> DirLock:
        """Lock whatever a lock file stands for, without waiting; as `lock_directory`.

        Args:
            path: The lock file; made if it is missing, and never removed.
        """
        return self._lock(path, f"lock is taken: file={path}")

    def _lock(self, file: Path, refusal: str) -> DirLock:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with _Translated("lock", file):
            fd = self._calls.open(file, flags, FILE_MODE)
            try:
                self._calls.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._calls.ftruncate(fd, 0)
                _write_fully(self._calls, fd, (b"%d\n" % os.getpid(),))
            except BlockingIOError as error:
                text = self._calls.pread(fd, _PID_DIGITS_MAX, 0).strip()
                self._calls.close(fd)
                raise LogDirLockedError(
                    f"{refusal} pid={text.decode('ascii', 'replace') or 'unknown'}"
                ) from error
            except OSError:
                self._calls.close(fd)
                raise
        return DirLock(self._calls, file, fd)

    def _status(self, path: Path) -> FileStatus | None:
        with _Translated("stat", path):
            try:
                return self._calls.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None


class SystemFileSystem(FileSystem):
    """The disk of this machine."""

    def __init__(self) -> None:
        super().__init__(LinuxCalls())


# -- helpers --------------------------------------------------------------------------


class _Translated:
    """Turn the kernel's refusal inside the block into an error of our tree.

    A class: a generator would cost more than some of the calls in it.
    """

    __slots__ = ("_operation", "_path")

    def __init__(self, operation: str, path: Path) -> None:
        self._operation = operation
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, OSError):
            return
        operation, number = self._operation, error.errno or 0
        name = errno.errorcode.get(number, str(number))
        if number in _NO_SPACE and operation != "sync":
            raise NoSpaceError(
                f"{operation} found no room: path={self._path} error={name}"
            ) from error
        raise DiskError(operation, str(self._path), name) from error


def _write_fully(calls: SystemCalls, fd: int, buffers: Sequence[Buffer]) -> None:
    """Write all bytes, however few the kernel takes at a time."""
    for first in range(0, len(buffers), BUFFERS_PER_CALL_MAX):
        group = buffers[first : first + BUFFERS_PER_CALL_MAX]
        missing = sum(map(len, group))
        while missing:
            taken = calls.writev(fd, group)
            if taken <= 0:
                raise OSError(errno.EIO, "the device took no bytes")
            missing -= taken
            if missing:
                group = _without_prefix(group, taken)


def _without_prefix(buffers: Sequence[Buffer], count: int) -> list[Buffer]:
    """Return the buffers that remain behind the first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [memoryview(buffer)[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
