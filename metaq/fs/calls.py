"""The system calls that this package uses, and their failures as our own errors.

ENOSPC and EDQUOT become `NoSpaceError`, which may pass by itself; everything else is
`DiskError`. A failed *sync* is always a `DiskError`: space that is freed later does not
restore the pages that a failed sync dropped.

Keep in step: `tests/rigs/faulty_calls.py` implements `SystemCalls` in memory.
"""

import errno
import fcntl
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from metaq.errors import DiskError, MissingFileError, NoSpaceError

BUFFERS_PER_CALL_MAX: Final = 1024
"""Maximum number of buffers of one writev: IOV_MAX of Linux, which refuses more."""

LOCK_OR_REFUSE: Final = fcntl.LOCK_EX | fcntl.LOCK_NB
"""Operation of flock: an exclusive lock, without blocking."""

_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

WARM_CALL_BYTES: Final = 4 * 1024 * 1024
"""Maximum number of bytes of one sendfile while warming."""

_PROBE: Final = (memoryview(bytearray(1)),)

Buffer = bytes | bytearray | memoryview
"""Bytes to write; a memoryview has items of one byte each."""


class SystemCalls(Protocol):
    """System calls with the signatures of `os`; they raise `OSError`."""

    def open(self, path: Path, flags: int, mode: int, /) -> int:
        """Open or create a file; the descriptor is not inherited."""

    def close(self, fd: int, /) -> None:
        """Close a descriptor and release the lock it holds."""

    def writev(self, fd: int, buffers: Sequence[Buffer], /) -> int:
        """Write bytes in order; return the count, which may be short."""

    def pwrite(self, fd: int, data: Buffer, position: int, /) -> int:
        """Write bytes at `position`; return the count, which may be short."""

    def pread(self, fd: int, size: int, position: int, /) -> bytes:
        """Return up to `size` bytes from `position`; empty at the end."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], position: int, /) -> int:
        """Fill some of the buffers from `position`; return the count of bytes."""

    def is_cached(self, fd: int, position: int, size: int, /) -> bool:
        """Return whether `size` bytes, 1 or more, can be read without the device."""

    def warm(self, fd: int, position: int, size: int, /) -> None:
        """Read bytes into the page cache, not into this process; blocks."""

    def fdatasync(self, fd: int, /) -> None:
        """Wait until the bytes and the size of a file are on the device."""

    def fsync(self, fd: int, /) -> None:
        """Wait until the names in a directory are on the device."""

    def ftruncate(self, fd: int, size: int, /) -> None:
        """Set the size of a file; added bytes are zero."""

    def fstat(self, fd: int, /) -> os.stat_result:
        """Return the status of an open file."""

    def stat(self, path: Path, /) -> os.stat_result:
        """Return the status of the file or directory of this name."""

    def statvfs(self, path: Path, /) -> os.statvfs_result:
        """Return the free space of the disk of this path."""

    def listdir(self, path: Path, /) -> list[str]:
        """Return the names in a directory, in no order."""

    def rename(self, source: Path, target: Path, /) -> None:
        """Give a file another name, replacing any file that has it."""

    def unlink(self, path: Path, /) -> None:
        """Remove a file's name."""

    def mkdir(self, path: Path, mode: int, /) -> None:
        """Create a directory."""

    def rmdir(self, path: Path, /) -> None:
        """Remove an empty directory."""

    def flock(self, fd: int, operation: int, /) -> None:
        """Lock an open file, or raise `BlockingIOError`."""

    def descriptor(self, fd: int, /) -> int:
        """Return a descriptor that is valid in other calls of this process."""


class LinuxCalls:
    """The system calls of the Linux kernel."""

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
    listdir = staticmethod(os.listdir)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    flock = staticmethod(fcntl.flock)

    def is_cached(self, fd: int, position: int, size: int, /) -> bool:
        """Return whether the first and the last page of a range are in the page cache.

        A page between them may be missing; that costs the caller one disk read. If the
        file system can not answer (tmpfs), the result is whether the file has the
        range, because warming would not help.
        """
        try:
            for at in (position, position + size - 1):
                if not self.preadv(fd, _PROBE, at, os.RWF_NOWAIT):
                    return False
        except BlockingIOError:
            return False
        except OSError:
            return self.fstat(fd).st_size >= position + size
        return True

    def warm(self, fd: int, position: int, size: int, /) -> None:
        """Send a range to the null device, so that the kernel reads its pages."""
        end = position + size
        while position < end:
            count = min(end - position, WARM_CALL_BYTES)
            sent = os.sendfile(_null_device(), fd, position, count)
            if not sent:
                return
            position += sent

    @staticmethod
    def descriptor(fd: int) -> int:
        """Return the descriptor itself."""
        return fd


@functools.cache
def _null_device() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class Translated:
    """Turns an `OSError` in the block into one of our errors.

    It is a class because a generator would cost more than some of the calls.
    """

    __slots__ = ("_operation", "_path")

    def __init__(self, operation: str, path: Path) -> None:
        self._operation = operation
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if not isinstance(error, OSError):
            return
        operation, number = self._operation, error.errno or 0
        name = errno.errorcode.get(number, str(number))
        if number in _NO_SPACE and operation != "sync":
            raise NoSpaceError(
                f"{operation} found no free space: path={self._path} error={name}"
            ) from error
        kind = MissingFileError if number == errno.ENOENT else DiskError
        raise kind(operation, str(self._path), name) from error


def write_fully(calls: SystemCalls, fd: int, buffers: Sequence[Buffer]) -> None:
    """Write all bytes, with as many calls as necessary."""
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
    """Return the buffers that remain after the first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [memoryview(buffer)[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
