"""System calls, answered from memory, counted, and failed on request.

Calls are counted from 1, in the order of `log`. `close` and `descriptor` are not
counted, because they do not fail here. A failed sync drops the bytes that it should
have written, a failed write has written a part, other failed calls had no effect.

Keep in step: `metaq/fs/calls.py` (`SystemCalls`); `tests/fs/test_calls_contract.py`
checks that both behave the same.
"""

import errno
import fcntl
import os
import stat as stat_bits
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, RLock, current_thread, main_thread
from typing import Final, NamedTuple

from metaq.fs import Buffer
from tests.rigs.disk import (
    CAPACITY_BYTES,
    Disk,
    DiskDirectory,
    DiskFile,
    NameChange,
    Node,
)

_FIRST_DESCRIPTOR: Final = 1 << 20  # never a descriptor of the real kernel


class Operation(NamedTuple):
    """An entry of the operation log."""

    number: int
    """Number of the call, from 1, as in `fail_at`."""
    name: str
    """open, create, read, write, sync, sync_directory, truncate, rename, unlink,
    mkdir, rmdir, list, stat, statvfs or lock."""
    path: Path
    """File or directory of the call; the source of a rename."""
    size: int
    """Bytes to write or read, or the size to truncate to; else 0."""
    error: str
    """Symbol of the injected error; "" without one."""


@dataclass(slots=True, eq=False)
class _Open:
    """An open descriptor."""

    path: Path
    node: Node
    flags: int
    position: int = 0
    mirror: int = -1
    """Descriptor of a memory file with the same bytes, for real calls; -1: none."""
    mirrored: int = -1
    """`DiskFile.changed` when the mirror was last filled."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Injected failure of a call."""

    number: int
    """Errno of the failure."""
    taken: int | None
    """Bytes that a write takes before it fails; None: half of them."""


class FaultyCalls:
    """`metaq.fs.calls.SystemCalls` in memory; thread-safe."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.log: list[Operation] = []
        self.faults: dict[int, Fault] = {}
        self.wall_ms = 0
        self.is_read_only = False
        """As the disk says of itself."""
        self.before_call: Callable[[Operation], None] | None = None
        self.goes_on = Event()
        """While clear, the disk hangs: writes and syncs off the main thread block."""
        self.goes_on.set()
        self.descriptors: dict[int, _Open] = {}
        self._next_descriptor = _FIRST_DESCRIPTOR
        self.lock = RLock()
        """Held by each call."""

    def _hang(self) -> None:
        """Wait while the disk hangs; not on the main thread, where a loop runs."""
        if current_thread() is not main_thread():
            self.goes_on.wait()

    def _enter(self, name: str, path: Path, size: int = 0) -> Fault | None:
        """Log a call; raise its fault, or return it if the call must act on it."""
        number = len(self.log) + 1
        fault = self.faults.get(number)
        symbol = "" if fault is None else errno.errorcode[fault.number]
        operation = Operation(number, name, path, size, symbol)
        if self.before_call is not None:
            self.before_call(operation)
        self.log.append(operation)
        if fault is None or name in {"write", "read"}:
            return fault
        if fault.number == errno.EINTR:
            return None  # The interpreter retries the call (PEP 475).
        if name in {"sync", "sync_directory"}:
            return fault
        raise _os_error(fault.number, path)

    # -- names

    def _directory(self, path: Path) -> DiskDirectory:
        node = self._node(path)
        if not isinstance(node, DiskDirectory):
            raise _os_error(errno.ENOTDIR, path)
        return node

    def _node(self, path: Path) -> Node:
        node: Node = self.disk.root
        for name in path.parts[1:] if path.is_absolute() else path.parts:
            if not isinstance(node, DiskDirectory):
                raise _os_error(errno.ENOTDIR, path)
            if name not in node.names:
                raise _os_error(errno.ENOENT, path)
            node = node.names[name]
        return node

    def open(self, path: Path, flags: int, mode: int, /) -> int:
        """Open or create a file, or open a directory to sync it."""
        del mode
        with self.lock:
            parent = self._directory(path.parent)
            missing = path.name != "" and path.name not in parent.names
            self._enter("create" if missing and flags & os.O_CREAT else "open", path)
            if missing and flags & os.O_CREAT:
                self._check_room(path, 1)
                file = DiskFile(mtime_ns=self.wall_ms * 1_000_000)
                self.disk.change(NameChange(parent, added=path.name, node=file))
            node = self._node(path)
            if isinstance(node, DiskDirectory) != bool(flags & os.O_DIRECTORY):
                wrong = errno.ENOTDIR if flags & os.O_DIRECTORY else errno.EISDIR
                if wrong == errno.ENOTDIR or flags & (os.O_WRONLY | os.O_RDWR):
                    raise _os_error(wrong, path)
            if flags & os.O_TRUNC and isinstance(node, DiskFile):
                node.resize(0)
            fd = self._next_descriptor
            self._next_descriptor += 1
            self.descriptors[fd] = _Open(path, node, flags)
            return fd

    def close(self, fd: int, /) -> None:
        """Close a descriptor, and release its lock."""
        with self.lock:
            opened = self._opened(fd)
            del self.descriptors[fd]
            if isinstance(opened.node, DiskFile) and opened.node.locked_by == fd:
                opened.node.locked_by = None
            if opened.mirror >= 0:
                os.close(opened.mirror)

    def stat(self, path: Path, /) -> os.stat_result:
        """Return the status of a file or directory."""
        with self.lock:
            self._enter("stat", path)
            return _status(self._node(path))

    def statvfs(self, path: Path, /) -> os.statvfs_result:
        """Return the status of the file system, with its free bytes."""
        with self.lock:
            self._enter("statvfs", path)
            self._node(path)
            free = max(0, self.disk.capacity - self.disk.used())
            flags = os.ST_RDONLY * self.is_read_only
            return os.statvfs_result((1, 1, free, free, free, 0, 0, 0, flags, 255))

    def listdir(self, path: Path, /) -> list[str]:
        """Return the names in a directory, in arbitrary order."""
        with self.lock:
            self._enter("list", path)
            return sorted(self._directory(path).names, reverse=True)

    def rename(self, source: Path, target: Path, /) -> None:
        """Rename a file, replacing a file of the new name."""
        with self.lock:
            self._enter("rename", source)
            node = self._node(source)
            old, new = self._directory(source.parent), self._directory(target.parent)
            if isinstance(new.names.get(target.name), DiskDirectory):
                raise _os_error(errno.EISDIR, target)
            if new.names.get(target.name) is node:
                return
            if old is new:
                self.disk.change(NameChange(old, source.name, target.name, node))
                return
            added = self.disk.change(NameChange(new, added=target.name, node=node))
            self.disk.change(NameChange(old, removed=source.name, after=added))

    def unlink(self, path: Path, /) -> None:
        """Remove a file's name."""
        with self.lock:
            self._enter("unlink", path)
            if isinstance(self._node(path), DiskDirectory):
                raise _os_error(errno.EISDIR, path)
            parent = self._directory(path.parent)
            self.disk.change(NameChange(parent, removed=path.name))

    def mkdir(self, path: Path, mode: int, /) -> None:
        """Create a directory."""
        del mode
        with self.lock:
            self._enter("mkdir", path)
            parent = self._directory(path.parent)
            if path.name in parent.names or path.name == "":
                raise _os_error(errno.EEXIST, path)
            self.disk.change(NameChange(parent, added=path.name, node=DiskDirectory()))

    def rmdir(self, path: Path, /) -> None:
        """Remove an empty directory."""
        with self.lock:
            self._enter("rmdir", path)
            if self._directory(path).names:
                raise _os_error(errno.ENOTEMPTY, path)
            parent = self._directory(path.parent)
            self.disk.change(NameChange(parent, removed=path.name))

    def fsync(self, fd: int, /) -> None:
        """Make the names in a directory durable."""
        self._hang()
        with self.lock:
            opened = self._opened(fd)
            assert isinstance(opened.node, DiskDirectory), "fsync is for directories"
            fault = self._enter("sync_directory", opened.path)
            if fault is not None:
                self.disk.drop_changes(opened.node)
                raise _os_error(fault.number, opened.path)
            self.disk.sync_names(opened.node)

    # -- bytes

    def writev(self, fd: int, buffers: Sequence[Buffer], /) -> int:
        """Write at the descriptor's position; if opened with O_APPEND, at the end."""
        self._hang()
        with self.lock:
            opened, file = self._file(fd)
            is_append = opened.flags & os.O_APPEND
            position = len(file.content) if is_append else opened.position
            taken = self._write(opened, file, position, b"".join(buffers))
            opened.position = position + taken
            return taken

    def pwrite(self, fd: int, data: Buffer, position: int, /) -> int:
        """Write at a position of a file that was opened without O_APPEND."""
        self._hang()
        with self.lock:
            opened, file = self._file(fd)
            assert not opened.flags & os.O_APPEND, "Linux would append: not modelled"
            return self._write(opened, file, position, bytes(data))

    def _write(self, opened: _Open, file: DiskFile, position: int, data: bytes) -> int:
        fault = self._enter("write", opened.path, len(data))
        if not opened.flags & (os.O_WRONLY | os.O_RDWR):
            raise _os_error(errno.EBADF, opened.path)
        taken = len(data)
        if fault is not None:
            half = len(data) // 2 if fault.taken is None else fault.taken
            taken = min(half, len(data))
            if fault.number == errno.EINTR:
                taken = max(taken, 1)  # With no byte taken it is retried (PEP 475).
        else:
            growth = max(0, position + taken - len(file.content))
            taken -= max(0, growth - self._room())
            if data and taken <= 0:
                raise _os_error(errno.ENOSPC, opened.path)
        file.write(position, data[:taken])
        file.mtime_ns = self.wall_ms * 1_000_000
        if fault is not None and fault.number != errno.EINTR:
            raise _os_error(fault.number, opened.path)
        return taken

    def pread(self, fd: int, size: int, position: int, /) -> bytes:
        """Return up to `size` bytes from `position`."""
        with self.lock:
            opened, file = self._file(fd)
            fault = self._enter("read", opened.path, size)
            if fault is not None:
                if fault.number != errno.EINTR:
                    raise _os_error(fault.number, opened.path)
                half = size // 2 if fault.taken is None else fault.taken
                size = min(size, max(1, half))
            return bytes(file.content[position : position + size])

    def preadv(self, fd: int, buffers: Sequence[memoryview], position: int, /) -> int:
        """Fill the buffers from `position`."""
        got = 0
        for buffer in buffers:
            data = self.pread(fd, len(buffer), position + got)
            buffer[: len(data)] = data
            got += len(data)
            if len(data) < len(buffer):
                break
        return got

    def is_cached(self, fd: int, position: int, size: int, /) -> bool:
        """Return whether the range is in the file: all of it is in memory."""
        with self.lock:
            _opened, file = self._file(fd)
            return position + size <= len(file.content)

    def warm(self, fd: int, position: int, size: int, /) -> None:
        """Do nothing, because the file is in memory."""

    def fdatasync(self, fd: int, /) -> None:
        """Make the bytes and size of a file durable."""
        self._hang()
        with self.lock:
            opened, file = self._file(fd)
            fault = self._enter("sync", opened.path)
            if fault is not None:
                file.dirty.clear()
                raise _os_error(fault.number, opened.path)
            file.sync()

    def ftruncate(self, fd: int, size: int, /) -> None:
        """Set the size of a file."""
        with self.lock:
            opened, file = self._file(fd)
            self._enter("truncate", opened.path, size)
            if not opened.flags & (os.O_WRONLY | os.O_RDWR):
                raise _os_error(errno.EINVAL, opened.path)
            file.resize(size)
            file.mtime_ns = self.wall_ms * 1_000_000

    def fstat(self, fd: int, /) -> os.stat_result:
        """Return the status of an open file."""
        with self.lock:
            opened = self._opened(fd)
            self._enter("stat", opened.path)
            return _status(opened.node)

    def flock(self, fd: int, operation: int, /) -> None:
        """Lock an open file for this descriptor, without waiting."""
        assert operation == fcntl.LOCK_EX | fcntl.LOCK_NB
        with self.lock:
            opened, file = self._file(fd)
            self._enter("lock", opened.path)
            if file.locked_by not in (None, fd):
                raise BlockingIOError(errno.EAGAIN, "locked", str(opened.path))
            file.locked_by = fd

    def descriptor(self, fd: int, /) -> int:
        """Return a real descriptor of a memory file with the present bytes."""
        with self.lock:
            opened, file = self._file(fd)
            if opened.mirror < 0:
                opened.mirror = os.memfd_create(opened.path.name, os.MFD_CLOEXEC)
            if opened.mirrored != file.changed:
                os.ftruncate(opened.mirror, 0)
                os.pwrite(opened.mirror, file.content, 0)
                opened.mirrored = file.changed
            return opened.mirror

    def file_named(self, path: Path) -> DiskFile:
        """Return the file of a name, without logging a call."""
        node = self._node(path)
        if not isinstance(node, DiskFile):
            raise _os_error(errno.EISDIR, path)
        return node

    def names_in(self, path: Path) -> list[str]:
        """Return the names in a directory, [] without it, without logging a call."""
        try:
            return sorted(self._directory(path).names)
        except FileNotFoundError:
            return []

    def _opened(self, fd: int) -> _Open:
        opened = self.descriptors.get(fd)
        if opened is None:
            raise OSError(errno.EBADF, "no such descriptor")
        return opened

    def _file(self, fd: int) -> tuple[_Open, DiskFile]:
        opened = self._opened(fd)
        if not isinstance(opened.node, DiskFile):
            raise _os_error(errno.EISDIR, opened.path)
        return opened, opened.node

    def _room(self) -> int:
        if self.disk.capacity >= CAPACITY_BYTES:
            return CAPACITY_BYTES  # no test fills it, so usage need not be summed
        return max(0, self.disk.capacity - self.disk.used())

    def _check_room(self, path: Path, size: int) -> None:
        if self._room() < size:
            raise _os_error(errno.ENOSPC, path)


def _os_error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def _status(node: Node) -> os.stat_result:
    mode, size, mtime_ns = stat_bits.S_IFDIR | 0o750, 0, 0
    if isinstance(node, DiskFile):
        mode, size = stat_bits.S_IFREG | 0o640, len(node.content)
        mtime_ns = node.mtime_ns
    # Fields: mode, inode, device, links, owner, group, size, three times in seconds.
    fields = (mode, id(node), 1, 1, 0, 0, size, 0, mtime_ns // 10**9, 0)
    return os.stat_result(fields, {"st_mtime_ns": mtime_ns})
