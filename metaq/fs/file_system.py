"""Names and files on a disk: opened, listed, renamed, removed, locked, all durably."""

import errno
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from metaq.errors import LogDirLockedError, MissingFileError, NoSpaceError, StorageError
from metaq.fs.calls import (
    LOCK_OR_REFUSE,
    Buffer,
    LinuxCalls,
    SystemCalls,
    Translated,
    write_fully,
)
from metaq.fs.files import AppendFile, DirLock, ReadFile, UpdateFile
from metaq.fs.kernel_syncs import KernelSyncs
from metaq.model import Millis, Position, SizeBytes

LOCK_FILE: Final = ".lock"
"""Name of the lock file in a data directory; it is never removed (see `DirLock`)."""

FILE_MODE: Final = 0o640
DIRECTORY_MODE: Final = 0o750
"""Mode of new directories: only the broker's user writes, its group may read."""

_log = logging.getLogger(__name__)

_TEMPORARY_SUFFIX: Final = ".tmp"
_PID_DIGITS_MAX: Final = 32


class FileSystem:
    """Disk operations.

    Every method raises `NoSpaceError` when the disk is full and `DiskError` for any
    other failure (`MissingFileError` for a missing file); any other exception is a bug.
    """

    def __init__(self, calls: SystemCalls) -> None:
        self._calls = calls

    def open_syncs(self) -> KernelSyncs | None:
        """Return asynchronous syncs for one thread, which closes them, or None."""
        return None

    def open_append(
        self, path: Path, *, create: bool, is_synced: bool = True
    ) -> AppendFile:
        """Open a file for appending; an existing one keeps its bytes.

        Args:
            path: The file; its directory exists.
            create: Create a missing file, with its name durable.
            is_synced: If false, only `sync_directory` makes the name durable.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        with Translated("open", path):
            try:
                fd = self._calls.open(path, flags, FILE_MODE)
            except FileNotFoundError:
                if not create:
                    raise
                fd = self._calls.open(path, flags | os.O_CREAT, FILE_MODE)
        file = AppendFile(self._calls, path, fd)
        if create and is_synced:
            # For an existing file, too: the process that created it may have been
            # killed before this sync.
            try:
                self.sync_directory(path.parent)
            except StorageError:
                file.close()
                raise
        return file

    def open_update(self, path: Path, *, create: bool = False) -> UpdateFile:
        """Open a file for writing at any position.

        `create` creates it, or empties an existing one; its name is durable after
        `sync_directory`.
        """
        flags = os.O_RDWR | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT | os.O_TRUNC
        with Translated("open", path):
            fd = self._calls.open(path, flags, FILE_MODE)
        return UpdateFile(self._calls, path, fd)

    def open_read(self, path: Path) -> ReadFile:
        """Open an existing file for reading; does not block on a pipe."""
        # Without O_NONBLOCK a pipe would block until it has a writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with Translated("open", path):
            fd = self._calls.open(path, flags, FILE_MODE)
        return ReadFile(self._calls, path, fd)

    def try_open_read(self, path: Path) -> ReadFile | None:
        """Open a file as `open_read` does; return None if there is none."""
        try:
            return self.open_read(path)
        except MissingFileError:
            return None

    def mtime_ms(self, path: Path) -> Millis:
        """Return when a file was last changed, in milliseconds since 1970."""
        with self.open_read(path) as file:
            return file.mtime_ms()

    def read_file(self, path: Path, size_max: SizeBytes) -> bytes:
        """Return a whole file; raise `StorageError` if it is larger than `size_max`."""
        with self.open_read(path) as file:
            data = file.read_at(Position(0), SizeBytes(size_max + 1))
        if len(data) > size_max:
            raise StorageError(
                f"file is too large: path={path} expected at most {size_max} bytes,"
                f" got at least {len(data)}"
            )
        return data

    def write_atomically(self, path: Path, data: Buffer) -> None:
        """Replace or create a small file: after a crash it is the old or the new one.

        The new content is durable on return. One writer per path: a neighbour named
        `<name>.tmp` is used and may remain after a crash.
        """
        temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with Translated("open", temporary):
            fd = self._calls.open(temporary, flags, FILE_MODE)
        try:
            with AppendFile(self._calls, temporary, fd) as file:
                file.write(data)
                file.sync()
            self.rename(temporary, path)
        except StorageError:
            # Raise the first error; a file that is left over does no harm.
            with suppress(OSError):
                self._calls.unlink(temporary)
            raise

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing `target`, or a directory; durable on return.

        The content is not synced: sync a file first that must arrive whole. After an
        error the file has one of the two names, or both after a crash.
        """
        with Translated("rename", source):
            self._calls.rename(source, target)
        self.sync_directory(target.parent)
        if source.parent != target.parent:
            self.sync_directory(source.parent)

    def unlink(self, path: Path) -> None:
        """Remove a file's name, durable on return; open files stay readable."""
        with Translated("unlink", path):
            self._calls.unlink(path)
        self.sync_directory(path.parent)

    def discard(self, path: Path) -> None:
        """Remove a file's name as `unlink` does, if there is such a file."""
        if self.exists(path):
            self.unlink(path)

    def make_directory(self, path: Path, *, is_synced: bool = True) -> None:
        """Create one directory level, durable on return; an existing one is kept.

        Without `is_synced` only `sync_directory` of its parent makes it durable.
        """
        with Translated("mkdir", path):
            try:
                self._calls.mkdir(path, DIRECTORY_MODE)
            except FileExistsError:
                if not self.is_directory(path):
                    raise
        if is_synced:
            # For an existing one, too; see `open_append`.
            self.sync_directory(path.parent)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory, durable on return."""
        with Translated("rmdir", path):
            self._calls.rmdir(path)
        self.sync_directory(path.parent)

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on disk; an error is final."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with Translated("open", path):
            fd = self._calls.open(path, flags, 0)
        with Translated("sync", path):
            try:
                self._calls.fsync(fd)
            finally:
                self._calls.close(fd)

    def list_directory(self, path: Path) -> tuple[str, ...]:
        """Return the names in a directory, sorted; empty for an empty one."""
        with Translated("list", path):
            return tuple(sorted(self._calls.listdir(path)))

    def exists(self, path: Path) -> bool:
        """Return whether a file or directory has this name."""
        return self._status(path) is not None

    def is_directory(self, path: Path) -> bool:
        """Return whether a directory has this name."""
        status = self._status(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def size_of(self, path: Path) -> SizeBytes:
        """Return the size of a file in bytes, unsynced bytes included."""
        with Translated("stat", path):
            return SizeBytes(self._calls.stat(path).st_size)

    def size_of_file(self, path: Path) -> SizeBytes:
        """Return the size of a regular file; `DiskError` (EINVAL) for anything else."""
        with Translated("stat", path):
            status = self._calls.stat(path)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
        return SizeBytes(status.st_size)

    def free_bytes(self, path: Path) -> SizeBytes:
        """Return the free space for an unprivileged writer on the disk of this path.

        0 for a read-only disk.
        """
        return self.try_free_bytes(path) or SizeBytes(0)

    def try_free_bytes(self, path: Path) -> SizeBytes | None:
        """Return the free space as `free_bytes` does; None if the disk is read-only."""
        with Translated("statvfs", path):
            disk = self._calls.statvfs(path)
        if disk.f_flag & os.ST_RDONLY:
            return None
        return SizeBytes(disk.f_bavail * disk.f_frsize)

    def lock_directory(self, path: Path) -> DirLock:
        """Become the only owner of a data directory, without waiting.

        Raises:
            LogDirLockedError: Another process has locked it; the message has the
                directory and the pid.
        """
        return self._lock(
            path / LOCK_FILE, f"data directory is in use: directory={path}"
        )

    def lock_file(self, path: Path) -> DirLock:
        """Lock a file as `lock_directory` does; make it if missing, never remove it."""
        return self._lock(path, f"lock is taken: file={path}")

    def _lock(self, file: Path, refusal: str) -> DirLock:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with Translated("lock", file):
            fd = self._calls.open(file, flags, FILE_MODE)
            try:
                self._calls.flock(fd, LOCK_OR_REFUSE)
                # The pid is only for people, so it is not needed on a full disk.
                with suppress(NoSpaceError), Translated("lock", file):
                    self._calls.ftruncate(fd, 0)
                    write_fully(self._calls, fd, (b"%d\n" % os.getpid(),))
            except BlockingIOError as error:
                text = self._calls.pread(fd, _PID_DIGITS_MAX, 0).strip()
                self._calls.close(fd)
                raise LogDirLockedError(
                    f"{refusal} pid={text.decode('ascii', 'replace') or 'unknown'}"
                ) from error
            except (OSError, StorageError):
                self._calls.close(fd)
                raise
        return DirLock(self._calls, file, fd)

    def _status(self, path: Path) -> os.stat_result | None:
        with Translated("stat", path):
            try:
                return self._calls.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None


class SystemFileSystem(FileSystem):
    """The disk of this machine."""

    def __init__(self) -> None:
        super().__init__(LinuxCalls())

    def open_syncs(self) -> KernelSyncs | None:
        """Return syncs by the kernel; None if the machine does not support them."""
        try:
            return KernelSyncs()
        except OSError as error:
            _log.info("a thread syncs instead of the kernel: error=%s", error)
            return None
