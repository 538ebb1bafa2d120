"""Tests for a real disk only: locks of processes, kernel errors, translation."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from metaq.errors import DiskError, LogDirLockedError, NoSpaceError, StorageError
from metaq.fs import LOCK_FILE, FileSystem, SystemFileSystem
from metaq.fs.calls import BUFFERS_PER_CALL_MAX, LinuxCalls
from metaq.model import Position, SizeBytes

DISK = SystemFileSystem()

HOLDER = """
import signal, sys
from pathlib import Path
from metaq.fs import SystemFileSystem
lock = SystemFileSystem().lock_directory(Path(sys.argv[1]))
sys.stdout.write("locked\\n"); sys.stdout.flush()
signal.pause()
"""


def disk_with(**replaced) -> FileSystem:
    """Return the real disk with some calls of the kernel replaced."""
    calls = LinuxCalls()
    for name, call in replaced.items():
        setattr(calls, name, call)
    return FileSystem(calls)


def failing(number: int):
    def call(*_args: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.crash
def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    """The refusal names directory and owner; kill -9 of the owner frees the lock."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(LogDirLockedError) as refusal:
            DISK.lock_directory(tmp_path)
        assert str(tmp_path) in str(refusal.value)
        assert f"pid={holder.pid}" in str(refusal.value)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        DISK.lock_directory(tmp_path).release()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_the_lock_file_holds_our_process_id_and_stays(tmp_path: Path) -> None:
    """An operator reads the owner from the file; release keeps the file."""
    lock = DISK.lock_directory(tmp_path)
    assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"
    lock.release()
    lock.release()
    assert (tmp_path / LOCK_FILE).exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_without_room_is_no_space(tmp_path: Path, number: int) -> None:
    """Full disk and full quota are the error that may pass by itself."""
    file = disk_with(writev=failing(number)).open_append(tmp_path / "a", create=True)
    with pytest.raises(NoSpaceError, match=errno.errorcode[number]) as refusal:
        file.write(b"x")
    assert refusal.value.retriable
    assert isinstance(refusal.value.__cause__, OSError)
    file.close()


def test_a_failed_sync_is_final_and_never_no_space(tmp_path: Path) -> None:
    """Room that comes back does not bring back pages that the sync has dropped."""
    answers = [errno.ENOSPC]

    def fdatasync(fd: int) -> None:
        if answers:
            raise OSError(answers.pop(), "once")
        os.fdatasync(fd)

    file = disk_with(fdatasync=fdatasync).open_append(tmp_path / "a", create=True)
    file.write(b"x")
    for call in (
        file.sync,
        file.sync,
        lambda: file.write(b"y"),
        lambda: file.truncate(SizeBytes(0)),
    ):
        with pytest.raises(DiskError) as refusal:
            call()
        assert refusal.value.errno_name == "ENOSPC"
    assert file.size() == 1
    file.close()


def test_a_refusal_names_operation_path_and_number(tmp_path: Path) -> None:
    """A disk error says what was tried on which file and what the kernel answered."""
    with pytest.raises(DiskError) as refusal:
        DISK.open_read(tmp_path / "absent")
    error = refusal.value
    assert (error.operation, error.path, error.errno_name) == (
        "open",
        str(tmp_path / "absent"),
        "ENOENT",
    )


def test_a_failed_atomic_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    """When the sync fails, the target is untouched and the temporary is gone."""
    target = tmp_path / "checkpoint"
    DISK.write_atomically(target, b"old")
    with pytest.raises(DiskError):
        disk_with(fdatasync=failing(errno.EIO)).write_atomically(target, b"new")
    assert DISK.list_directory(tmp_path) == ("checkpoint",)
    assert target.read_bytes() == b"old"


def test_names_are_synced_where_they_change(tmp_path: Path) -> None:
    """Create, rename, remove and mkdir each sync the directories they changed."""
    synced: set[Path] = set()

    def fsync(fd: int) -> None:
        synced.add(Path(f"/proc/self/fd/{fd}").readlink())
        os.fsync(fd)

    disk = disk_with(fsync=fsync)
    sub = tmp_path / "sub"

    def changed() -> set[Path]:
        seen = set(synced)
        synced.clear()
        return seen

    disk.make_directory(sub)
    assert changed() == {tmp_path}
    disk.open_append(sub / "a", create=True).close()
    assert changed() == {sub}
    disk.open_append(sub / "a", create=False).close()
    assert changed() == set()
    disk.rename(sub / "a", tmp_path / "b")
    assert changed() == {sub, tmp_path}
    disk.discard(tmp_path / "b")
    assert changed() == {tmp_path}
    disk.discard(tmp_path / "b")
    assert changed() == set()
    disk.open_append(tmp_path / "b", create=True).close()
    disk.unlink(tmp_path / "b")
    assert changed() == {tmp_path}
    disk.write_atomically(tmp_path / "c", b"x")
    assert changed() == {tmp_path}
    disk.remove_directory(sub)
    assert changed() == {tmp_path}


def test_what_is_made_is_for_the_user_and_its_group(tmp_path: Path) -> None:
    """Messages are not for all users of the machine."""
    before = os.umask(0)
    try:
        DISK.make_directory(tmp_path / "d")
        DISK.open_append(tmp_path / "d/a", create=True).close()
        DISK.write_atomically(tmp_path / "d/b", b"x")
        DISK.lock_directory(tmp_path / "d").release()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"d": 0o750, "a": 0o640, "b": 0o640, LOCK_FILE: 0o640}


@pytest.mark.parametrize("step", [1, 2, 3, 7, 4096])
def test_short_writes_and_reads_are_invisible(tmp_path: Path, step: int) -> None:
    """However few bytes a call moves, all arrive once and in order."""

    def writev(fd: int, buffers) -> int:
        return os.write(fd, b"".join(buffers)[:step])

    def preadv(fd: int, buffers, position: int) -> int:
        return os.preadv(fd, [buffers[0][:step]], position)

    def pread(fd: int, size: int, position: int) -> bytes:
        return os.pread(fd, min(size, step), position)

    disk = disk_with(writev=writev, pread=pread, preadv=preadv)
    file = disk.open_append(tmp_path / "a", create=True)
    file.write_all([b"", b"abc", memoryview(b"defgh"), b"", bytearray(b"i"), b"jk"])
    file.close()
    reader = disk.open_read(tmp_path / "a")
    target = bytearray(6)
    assert reader.read_at(Position(2), SizeBytes(100)) == b"cdefghijk"
    assert reader.read_into(Position(1), target) == 6
    assert target == b"bcdefg"
    reader.close()


def test_many_buffers_are_split_at_the_limit_of_the_kernel(tmp_path: Path) -> None:
    """No call gets more buffers than IOV_MAX, and a call without bytes is not made."""
    groups: list[int] = []

    def writev(fd: int, buffers) -> int:
        groups.append(len(buffers))
        return os.writev(fd, buffers)

    file = disk_with(writev=writev).open_append(tmp_path / "a", create=True)
    file.write_all([b"x"] * (2 * BUFFERS_PER_CALL_MAX + 1))
    file.write_all([b"", b""])
    assert groups == [BUFFERS_PER_CALL_MAX, BUFFERS_PER_CALL_MAX, 1]
    assert os.sysconf("SC_IOV_MAX") >= BUFFERS_PER_CALL_MAX
    file.close()


def test_a_device_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    """A write that returns 0 does not loop for ever."""
    disk = disk_with(writev=lambda _fd, _buffers: 0)
    file = disk.open_append(tmp_path / "a", create=True)
    with pytest.raises(DiskError, match="EIO"):
        file.write(b"x")
    file.close()


def test_no_refusal_of_the_kernel_leaves_as_an_oserror(tmp_path: Path) -> None:
    """Whichever call is refused, the error is one of ours."""
    DISK.open_append(tmp_path / "a", create=True).close()
    no = failing(errno.EACCES)
    refused = [
        lambda: disk_with(open=no).open_append(tmp_path / "a", create=True),
        lambda: disk_with(open=no).open_read(tmp_path / "a"),
        lambda: disk_with(pread=no).read_file(tmp_path / "a", SizeBytes(9)),
        lambda: disk_with(rename=no).rename(tmp_path / "a", tmp_path / "b"),
        lambda: disk_with(unlink=no).unlink(tmp_path / "a"),
        lambda: disk_with(mkdir=no).make_directory(tmp_path / "d"),
        lambda: disk_with(rmdir=no).remove_directory(tmp_path),
        lambda: disk_with(fsync=no).sync_directory(tmp_path),
        lambda: disk_with(listdir=no).list_directory(tmp_path),
        lambda: disk_with(stat=no).exists(tmp_path),
        lambda: disk_with(stat=no).size_of(tmp_path),
        lambda: disk_with(statvfs=no).free_bytes(tmp_path),
        lambda: disk_with(flock=no).lock_directory(tmp_path),
    ]
    for call in refused:
        with pytest.raises(DiskError) as refusal:
            call()
        assert refusal.value.errno_name == "EACCES"


def test_a_file_over_its_limit_is_not_returned(tmp_path: Path) -> None:
    """read_file never brings more than the limit into memory."""
    (tmp_path / "big").write_bytes(b"12345")
    assert DISK.read_file(tmp_path / "big", SizeBytes(5)) == b"12345"
    with pytest.raises(StorageError, match="at most 4 bytes"):
        DISK.read_file(tmp_path / "big", SizeBytes(4))
