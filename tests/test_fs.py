"""What only a real disk can show: locks of processes, kernel errors, translation."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from metaq import fs
from metaq.errors import DiskError, LogDirLockedError, NoSpaceError, StorageError
from metaq.fs import BUFFERS_PER_CALL_MAX, LOCK_FILE, SystemFileSystem, write_fully
from metaq.model import SizeBytes

DISK = SystemFileSystem()

HOLDER = """
import signal, sys
from pathlib import Path
from metaq.fs import SystemFileSystem
lock = SystemFileSystem().lock_directory(Path(sys.argv[1]))
sys.stdout.write("locked\\n"); sys.stdout.flush()
signal.pause()
"""


def failing(number: int):
    def call(*_args: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.slow
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
def test_a_write_without_room_is_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Full disk and full quota are the error that may pass by itself."""
    file = DISK.open_append(tmp_path / "a", create=True)
    monkeypatch.setattr(fs.os, "writev", failing(number))
    with pytest.raises(NoSpaceError, match=errno.errorcode[number]) as refusal:
        file.write(b"x")
    assert refusal.value.retriable
    assert isinstance(refusal.value.__cause__, OSError)
    file.close()


def test_a_failed_sync_is_final_and_never_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that comes back does not bring back pages that the sync has dropped."""
    file = DISK.open_append(tmp_path / "a", create=True)
    file.write(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(fs.os, "fdatasync", failing(errno.ENOSPC))
        with pytest.raises(DiskError, match="ENOSPC"):
            file.sync()
    for call in (file.sync, lambda: file.write(b"y"), lambda: file.truncate(0)):
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


def test_a_failed_atomic_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the sync fails, the target is untouched and the temporary is gone."""
    target = tmp_path / "checkpoint"
    DISK.write_atomically(target, b"old")
    monkeypatch.setattr(fs.os, "fdatasync", failing(errno.EIO))
    with pytest.raises(DiskError):
        DISK.write_atomically(target, b"new")
    assert DISK.list_directory(tmp_path) == ("checkpoint",)
    assert target.read_bytes() == b"old"


def test_names_are_synced_where_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Create, rename, remove and mkdir each sync the directories they changed."""
    synced: list[Path] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    monkeypatch.setattr(fs.os, "fsync", fsync)
    sub = tmp_path / "sub"

    def changed() -> set[Path]:
        seen = set(synced)
        synced.clear()
        return seen

    DISK.make_directory(sub)
    assert changed() == {tmp_path}
    DISK.open_append(sub / "a", create=True).close()
    assert changed() == {sub}
    DISK.open_append(sub / "a", create=True).close()
    assert changed() == set()
    DISK.rename(sub / "a", tmp_path / "b")
    assert changed() == {sub, tmp_path}
    DISK.unlink(tmp_path / "b")
    assert changed() == {tmp_path}


@pytest.mark.parametrize("step", [1, 2, 3, 7, 4096])
def test_short_writes_lose_and_double_nothing(step: int) -> None:
    """Whatever a call takes, all bytes of all buffers arrive once and in order."""
    buffers = [b"", b"abc", memoryview(b"defgh"), b"", bytearray(b"i"), b"jk"]
    taken = bytearray()

    def write_some(group: object) -> int:
        data = b"".join(group)[:step]  # type: ignore[call-overload]
        taken.extend(data)
        return len(data)

    write_fully(write_some, buffers)
    assert taken == b"abcdefghijk"


def test_many_buffers_are_split_at_the_limit_of_the_kernel() -> None:
    """No call gets more buffers than IOV_MAX, and a call without bytes is not made."""
    groups: list[int] = []

    def write_some(group: object) -> int:
        groups.append(len(group))  # type: ignore[arg-type]
        return sum(map(len, group))  # type: ignore[call-overload]

    write_fully(write_some, [b"x"] * (2 * BUFFERS_PER_CALL_MAX + 1))
    write_fully(write_some, [b"", b""])
    assert groups == [BUFFERS_PER_CALL_MAX, BUFFERS_PER_CALL_MAX, 1]
    assert os.sysconf("SC_IOV_MAX") >= BUFFERS_PER_CALL_MAX


def test_a_device_that_takes_nothing_is_an_error() -> None:
    """A write that returns 0 does not loop for ever."""
    with pytest.raises(OSError, match="took no bytes"):
        write_fully(lambda _group: 0, [b"x"])


def test_a_file_over_its_limit_is_not_returned(tmp_path: Path) -> None:
    """read_file never brings more than the limit into memory."""
    (tmp_path / "big").write_bytes(b"12345")
    assert DISK.read_file(tmp_path / "big", SizeBytes(5)) == b"12345"
    with pytest.raises(StorageError, match="at most 4 bytes"):
        DISK.read_file(tmp_path / "big", SizeBytes(4))
