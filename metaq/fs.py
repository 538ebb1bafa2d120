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

Files are not mapped into memory on purpose: a read error under a mapping, or a file
that gets shorter, kills the whole process with SIGBUS instead of failing one read.
Scans of large files reuse one buffer through `ReadFile.read_into`.

All calls block and may take seconds on a bad disk; they belong on a storage thread.
Files are not thread-safe, except `read_at`, `read_into` and `size` of a `ReadFile`.

Keep in step: `metaq/testing/fs.py` (the same protocol in memory, with faults) and
`tests/fs_contract.py`, which both file systems pass.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
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

Buffer = bytes | bytearray | memoryview
"""Bytes to write; a memoryview has items of one byte each."""


class AppendFile(Protocol):
    """A file that grows at its end; it has one writer, who owns and closes it."""

    @property
    def path(self) -> Path:
        """Return the path the file was opened with."""
        ...

    @property
    def fd(self) -> int:
        """Return the descriptor, open for reading too; owned by this file."""
        ...

    def write(self, data: Buffer) -> None:
        """Append all bytes of one buffer; see `write_all`."""
        ...

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
        ...

    def sync(self) -> None:
        """Wait until every byte written so far, and the size, are on disk.

        Raises:
            DiskError: The sync failed, now or earlier. It is final: unsynced bytes may
                be lost although reads still show them. Never call it again to retry.
        """
        ...

    def truncate(self, size: SizeBytes) -> None:
        """Cut the file to `size` bytes (at most its size); durable after `sync`."""
        ...

    def size(self) -> SizeBytes:
        """Return the size in bytes, unsynced bytes included."""
        ...

    def close(self) -> None:
        """Close without syncing; a second call does nothing."""
        ...


class ReadFile(Protocol):
    """A file open for reading at any position; stays readable when it is removed."""

    @property
    def path(self) -> Path:
        """Return the path the file was opened with."""
        ...

    def read_at(self, position: Position, size: SizeBytes) -> bytes:
        """Return `size` bytes from `position`; fewer only where the file ends."""
        ...

    def read_into(self, position: Position, target: bytearray | memoryview) -> int:
        """Fill `target` from `position`; return the count, short only at the end."""
        ...

    def size(self) -> SizeBytes:
        """Return the size in bytes at this moment."""
        ...

    def mtime_ms(self) -> Millis:
        """Return the time of the last change, in milliseconds since 1970."""
        ...

    def fileno(self) -> int:
        """Return a descriptor for sendfile; valid until `close`."""
        ...

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        ...


class DirLock(Protocol):
    """Ownership of one data directory; the kernel ends it when the process dies."""

    def release(self) -> None:
        """Give the directory up; a second call does nothing."""
        ...


class FileSystem(Protocol):
    """What the code may ask of a disk.

    Every method raises `NoSpaceError` when there is no room and `DiskError` for any
    other refusal (a missing file is "ENOENT"); any other exception is a bug.
    """

    def open_append(self, path: Path, *, create: bool) -> AppendFile:
        """Open a file for appending.

        Args:
            path: The file; its directory exists.
            create: Create it, with its name durable, when it is missing. Without it
                a missing file is an error. An existing file keeps its bytes.
        """
        ...

    def open_read(self, path: Path) -> ReadFile:
        """Open an existing file for reading."""
        ...

    def read_file(self, path: Path, size_max: SizeBytes) -> bytes:
        """Return a whole small file.

        Raises:
            StorageError: The file is larger than `size_max`; nothing is returned.
        """
        ...

    def write_atomically(self, path: Path, data: Buffer) -> None:
        """Replace or create a small file: after a crash it is the old or the new one.

        The new content is durable on return. One writer per path: a neighbour named
        `<name>.tmp` is used and, after a crash, may be left behind.
        """
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing `target`; durable on return.

        Content is not synced: a file that must arrive whole is synced first.
        """
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file's name, durable on return; open readers go on."""
        ...

    def make_directory(self, path: Path) -> None:
        """Create one directory level, durable on return; an existing one is kept."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on disk; errors are final."""
        ...

    def list_directory(self, path: Path) -> tuple[str, ...]:
        """Return the names in a directory, sorted; empty for an empty one."""
        ...

    def exists(self, path: Path) -> bool:
        """Tell whether anything has this name."""
        ...

    def is_directory(self, path: Path) -> bool:
        """Tell whether the name is a directory."""
        ...

    def size_of(self, path: Path) -> SizeBytes:
        """Return the size of a file in bytes, unsynced bytes included."""
        ...

    def free_bytes(self, path: Path) -> SizeBytes:
        """Return the room an unprivileged writer has on the disk of this path."""
        ...

    def lock_directory(self, path: Path) -> DirLock:
        """Become the only owner of a data directory, without waiting.

        Raises:
            LogDirLockedError: Another owner has it; the message names the directory
                and the owner's process id.
        """
        ...


# -- what both file systems share -----------------------------------------------------


def storage_error(operation: str, path: Path, error: OSError) -> StorageError:
    """Return the error of our tree for a refusal of the operating system."""
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    if number in _NO_SPACE and operation != "sync":
        return NoSpaceError(f"{operation} found no room: path={path} error={name}")
    return DiskError(operation, str(path), name)


def write_fully(
    write_some: Callable[[Sequence[Buffer]], int], buffers: Sequence[Buffer]
) -> None:
    """Write all bytes through a writev-like call that may write fewer.

    Args:
        write_some: Takes 1..`BUFFERS_PER_CALL_MAX` buffers, at least one byte in all,
            and returns how many bytes it took, in order.
        buffers: What to write; not copied.

    Raises:
        OSError: From `write_some`, or EIO when it takes nothing.
    """
    for first in range(0, len(buffers), BUFFERS_PER_CALL_MAX):
        group = buffers[first : first + BUFFERS_PER_CALL_MAX]
        missing = sum(map(len, group))
        while missing:
            taken = write_some(group)
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


@contextmanager
def _translated(operation: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(operation, path, error) from error


# -- the real disk --------------------------------------------------------------------


class SystemFileSystem:
    """The disk of this machine."""

    def open_append(self, path: Path, *, create: bool) -> AppendFile:
        """Open a file for appending; a created name is durable on return."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        with _translated("open", path):
            try:
                return _SystemAppendFile(path, os.open(path, flags))
            except FileNotFoundError:
                if not create:
                    raise
            fd = os.open(path, flags | os.O_CREAT, FILE_MODE)
        try:
            self.sync_directory(path.parent)
        except BaseException:
            os.close(fd)
            raise
        return _SystemAppendFile(path, fd)

    def open_read(self, path: Path) -> ReadFile:
        """Open an existing file for reading."""
        with _translated("open", path):
            return _SystemReadFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def read_file(self, path: Path, size_max: SizeBytes) -> bytes:
        """Return a whole small file; a larger one is an error."""
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
        """Replace or create a small file; after a crash it is the old or new one."""
        temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with _translated("open", temporary):
            file = _SystemAppendFile(temporary, os.open(temporary, flags, FILE_MODE))
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
                os.unlink(temporary)
            raise

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing `target`; both directories are synced."""
        with _translated("rename", source):
            os.rename(source, target)
        self.sync_directory(target.parent)
        if source.parent != target.parent:
            self.sync_directory(source.parent)

    def unlink(self, path: Path) -> None:
        """Remove a file's name and sync its directory."""
        with _translated("unlink", path):
            os.unlink(path)
        self.sync_directory(path.parent)

    def make_directory(self, path: Path) -> None:
        """Create one directory level and sync its parent; an existing one is kept."""
        with _translated("mkdir", path):
            try:
                os.mkdir(path, DIRECTORY_MODE)
            except FileExistsError:
                if not os.path.isdir(path):
                    raise
        # Also for an existing one: a crash may have come before the first sync.
        self.sync_directory(path.parent)

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on disk; errors are final."""
        with _translated("sync", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def list_directory(self, path: Path) -> tuple[str, ...]:
        """Return the names in a directory, sorted."""
        with _translated("list", path):
            return tuple(sorted(os.listdir(path)))

    def exists(self, path: Path) -> bool:
        """Tell whether anything has this name."""
        with _translated("stat", path):
            try:
                os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def is_directory(self, path: Path) -> bool:
        """Tell whether the name is a directory."""
        return os.path.isdir(path)

    def size_of(self, path: Path) -> SizeBytes:
        """Return the size of a file in bytes."""
        with _translated("stat", path):
            return SizeBytes(os.stat(path).st_size)

    def free_bytes(self, path: Path) -> SizeBytes:
        """Return the room an unprivileged writer has on the disk of this path."""
        with _translated("statvfs", path):
            disk = os.statvfs(path)
        return SizeBytes(disk.f_bavail * disk.f_frsize)

    def lock_directory(self, path: Path) -> DirLock:
        """Become the only owner of a data directory, without waiting."""
        return _SystemDirLock(path)


class _SystemAppendFile:
    """An `AppendFile` over a descriptor."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._sync_error: str | None = None

    @property
    def path(self) -> Path:
        return self._path

    @property
    def fd(self) -> int:
        return self._fd

    def write(self, data: Buffer) -> None:
        self.write_all((data,))

    def write_all(self, buffers: Sequence[Buffer]) -> None:
        self._refuse_after_failed_sync("write")
        with _translated("write", self._path):
            write_fully(self._write_some, buffers)

    def _write_some(self, buffers: Sequence[Buffer]) -> int:
        return os.writev(self._fd, buffers)

    def sync(self) -> None:
        self._refuse_after_failed_sync("sync")
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            failure = storage_error("sync", self._path, error)
            self._sync_error = errno.errorcode.get(error.errno or 0, "unknown")
            raise failure from error

    def truncate(self, size: SizeBytes) -> None:
        self._refuse_after_failed_sync("truncate")
        with _translated("truncate", self._path):
            os.ftruncate(self._fd, size)

    def size(self) -> SizeBytes:
        with _translated("stat", self._path):
            return SizeBytes(os.fstat(self._fd).st_size)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with _translated("close", self._path):
                os.close(fd)

    def _refuse_after_failed_sync(self, operation: str) -> None:
        if self._sync_error is not None:
            raise DiskError(operation, str(self._path), self._sync_error)


class _SystemReadFile:
    """A `ReadFile` over a descriptor."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @property
    def path(self) -> Path:
        return self._path

    def read_at(self, position: Position, size: SizeBytes) -> bytes:
        with _translated("read", self._path):
            data = os.pread(self._fd, size, position)
            if len(data) == size or not data:
                return data
            parts = [data]
            got = len(data)
            while got < size:
                data = os.pread(self._fd, size - got, position + got)
                if not data:
                    break
                parts.append(data)
                got += len(data)
        return b"".join(parts)

    def read_into(self, position: Position, target: bytearray | memoryview) -> int:
        view = memoryview(target)
        got = 0
        with _translated("read", self._path):
            while got < len(view):
                count = os.preadv(self._fd, (view[got:],), position + got)
                if not count:
                    break
                got += count
        return got

    def size(self) -> SizeBytes:
        with _translated("stat", self._path):
            return SizeBytes(os.fstat(self._fd).st_size)

    def mtime_ms(self) -> Millis:
        with _translated("stat", self._path):
            return Millis(os.fstat(self._fd).st_mtime_ns // 1_000_000)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with _translated("close", self._path):
                os.close(fd)


class _SystemDirLock:
    """flock on `.lock`; the file holds the owner's process id as decimal text.

    The file is never removed: a process that opened it just before would hold the lock
    of a nameless file while another one locks a new file of the same name.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / LOCK_FILE
        with _translated("lock", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, 0)
                os.pwrite(fd, b"%d\n" % os.getpid(), 0)
            except BlockingIOError as error:
                holder = os.pread(fd, 32, 0).strip().decode("ascii", "replace")
                os.close(fd)
                raise LogDirLockedError(
                    f"data directory is in use: directory={directory}"
                    f" pid={holder or 'unknown'}"
                ) from error
            except BaseException:
                os.close(fd)
                raise
        self._fd = fd

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
