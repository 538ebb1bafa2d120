"""The faulty file system fails as told and forgets exactly what was not synced."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from metaq.errors import DiskError, NoSpaceError, StorageError
from metaq.fs import AppendFile
from metaq.model import Position, SizeBytes
from tests.rigs.disk import PAGE_BYTES
from tests.rigs.faulty_calls import Operation
from tests.rigs.fs import (
    FaultyFileSystem,
    crash_points,
    keep_all,
    keep_none,
    keep_random,
)

A = Path("/a")
B = Path("/b")
ALL = SizeBytes(1 << 20)


def disk_with(durable: bytes = b"") -> tuple[FaultyFileSystem, AppendFile]:
    """Return a disk with one open file whose bytes are synced."""
    disk = FaultyFileSystem()
    file = disk.open_append(A, create=True)
    file.write(durable)
    file.sync()
    return disk, file


def content(disk: FaultyFileSystem, path: Path = A) -> bytes | None:
    return disk.read_file(path, ALL) if disk.exists(path) else None


# -- failing calls


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_leaves_a_part(error: int) -> None:
    """Half of the bytes are there unless told otherwise, and the log names the call."""
    disk, file = disk_with(b"old")
    disk.fail_at(disk.calls + 1, error)
    with pytest.raises(NoSpaceError if error == errno.ENOSPC else DiskError):
        file.write(b"123456")
    assert content(disk) == b"old123"
    failed = next(line for line in disk.log if line.error)
    assert (failed.name, failed.path, failed.size) == ("write", A, 6)
    assert failed.error == errno.errorcode[error]
    disk.fail_at(disk.calls + 1, error, taken=1)
    with pytest.raises(StorageError):
        file.write(b"xyz")
    assert content(disk) == b"old123x"
    file.close()


def test_interruptions_are_invisible() -> None:
    """EINTR and short transfers never reach the caller, whichever call they hit."""

    def work(disk: FaultyFileSystem) -> None:
        disk.make_directory(Path("/d"))
        file = disk.open_append(Path("/d/a"), create=True)
        file.write_all([b"abc", b"defg"])
        file.sync()
        file.close()
        disk.rename(Path("/d/a"), B)
        assert content(disk, B) == b"abcdefg"
        assert disk.list_directory(Path("/d")) == ()
        assert disk.crash(keep_none).read_file(B, ALL) == b"abcdefg"

    calm = FaultyFileSystem()
    work(calm)
    for number in range(1, calm.calls + 1):
        disk = FaultyFileSystem()
        disk.fail_at(number, errno.EINTR, taken=1)
        work(disk)


def test_every_failed_call_is_an_error_of_ours_and_leaks_nothing() -> None:
    """Whichever call fails, a StorageError comes out and no descriptor stays open."""

    def work(disk: FaultyFileSystem) -> None:
        disk.make_directory(Path("/d"))
        disk.write_atomically(Path("/d/a"), b"abc")
        disk.rename(Path("/d/a"), B)
        disk.read_file(B, ALL)
        disk.lock_directory(Path("/d")).release()
        disk.free_bytes(B)
        disk.unlink(B)

    calm = FaultyFileSystem()
    work(calm)
    assert calm.calls > 15
    for number in range(1, calm.calls + 1):
        disk = FaultyFileSystem()
        disk.fail_at(number, errno.EIO)
        with pytest.raises(StorageError):
            work(disk)
        assert disk.open_paths() == [], f"call {number}"


def test_a_full_disk_takes_what_fits() -> None:
    """Behind the capacity a write is cut and refused; room that comes back is used."""
    disk, file = disk_with(b"12345")
    disk.set_capacity(8)
    assert disk.free_bytes(A) == 3
    with pytest.raises(NoSpaceError):
        file.write(b"abcdef")
    assert content(disk) == b"12345abc"
    with pytest.raises(NoSpaceError):
        disk.open_append(B, create=True)
    file.truncate(SizeBytes(5))
    disk.set_capacity(100)
    file.write(b"abcdef")
    assert content(disk) == b"12345abcdef"
    file.close()


def test_a_failed_sync_loses_what_reads_still_show() -> None:
    """Neither a crash nor a later sync of another file brings the pages back."""
    disk, file = disk_with(b"old")
    file.write(b"lost" * 2000)
    disk.fail_at(disk.calls + 1, errno.EIO)
    with pytest.raises(DiskError):
        file.sync()
    with pytest.raises(DiskError):
        file.sync()
    file.close()
    assert content(disk) == b"old" + b"lost" * 2000
    assert content(disk.crash(keep_none)) == b"old"
    again = disk.open_append(A, create=False)
    again.sync()
    again.close()
    left = content(disk.crash(keep_all))
    assert left == b"old" + bytes(8000), "the size came, the pages did not"


# -- power cuts


def test_synced_bytes_survive_every_outcome() -> None:
    """No outcome touches what was synced, whatever was appended behind it."""
    disk, file = disk_with(b"s" * 5000)
    file.write(b"u" * 6000)
    for seed in range(200):
        left = content(disk.crash(keep_random(seed)))
        assert left is not None
        assert left[:5000] == b"s" * 5000, f"seed {seed}"
        assert len(left) <= 11000
    file.close()


def test_nothing_and_everything_are_the_extremes() -> None:
    """keep_none is the last sync; keep_all is what a killed process leaves."""
    disk, file = disk_with(b"old")
    file.write(b"new" * 3000)
    assert content(disk.crash(keep_none)) == b"old"
    assert content(disk.crash(keep_all)) == b"old" + b"new" * 3000
    assert content(disk) == b"old" + b"new" * 3000, "crash does not change the disk"
    file.close()


def test_a_seed_repeats_its_crash() -> None:
    """The same seed leaves the same disk, and seeds differ."""
    disk, file = disk_with(b"old")
    file.write(bytes(range(256)) * 64)
    first = [content(disk.crash(keep_random(seed))) for seed in range(20)]
    assert first == [content(disk.crash(keep_random(seed))) for seed in range(20)]
    assert len(set(first)) > 10
    file.close()


def test_every_subset_of_pages_is_enumerated() -> None:
    """Three unsynced pages: each kept, zero or stale, at each size, and no others."""
    disk, file = disk_with()
    pages = [bytes([65 + i]) * PAGE_BYTES for i in range(3)]
    file.write_all(pages)
    seen = {content(crashed) for crashed in disk.crashes(torn=False)}
    shapes = set()
    for left in seen:
        assert left is not None
        assert len(left) % PAGE_BYTES == 0
        shape = ""
        for i in range(len(left) // PAGE_BYTES):
            page = left[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]
            shape += "K" if page == pages[i] else "0" if not any(page) else "S"
        shapes.add(shape)
    assert len(shapes) == 1 + 3 + 9 + 27
    file.close()


def test_every_torn_byte_is_enumerated() -> None:
    """An append of four bytes may be cut at each, by size or by zeros."""
    disk, file = disk_with(b"old")
    file.write(b"1234")
    seen = {content(crashed) for crashed in disk.crashes(torn=True)}
    for size in range(5):
        for kept in range(size + 1):
            zeros = bytes(size - kept)
            assert b"old" + b"1234"[:kept] + zeros in seen
    assert all(left is not None and left[:3] == b"old" for left in seen)
    file.close()


def test_too_many_outcomes_are_refused() -> None:
    """Enumeration says that it is incomplete instead of stopping silently."""
    disk, file = disk_with()
    file.write(b"x" * 10)
    with pytest.raises(ValueError, match="more than 10"):
        list(disk.crashes(torn=True, count_max=10))
    file.close()


def test_a_cut_tail_may_come_back() -> None:
    """A truncate that was not synced is lost or kept; bytes before it stay."""
    disk, file = disk_with(b"0123456789")
    file.truncate(SizeBytes(4))
    file.write(b"xy")
    seen = {content(crashed) for crashed in disk.crashes(torn=False)}
    assert b"0123456789" in seen
    assert b"0123xy" in seen
    assert all(left is not None and left[:4] == b"0123" for left in seen)
    file.sync()
    assert content(disk.crash(keep_none)) == b"0123xy"
    file.close()


# -- names


def names_after(disk: FaultyFileSystem) -> set[tuple[str, ...]]:
    return {c.list_directory(Path("/")) for c in disk.crashes(torn=False)}


def stopped_before_sync(
    disk: FaultyFileSystem, work: Callable[[], object], skip: int = 0
) -> None:
    """Run `work` with its directory sync number `skip` + 1 prevented."""
    seen = 0

    class PowerCut(BaseException):
        pass

    def on_call(operation: Operation) -> None:
        nonlocal seen
        if operation.name == "sync_directory":
            seen += 1
            if seen > skip:
                raise PowerCut

    disk.on_call(on_call)
    with pytest.raises(PowerCut):
        work()
    disk.on_call(None)


def test_a_name_is_kept_or_lost_until_its_directory_is_synced() -> None:
    """Create, unlink and mkdir are each undecided before the sync and fixed after."""
    disk = FaultyFileSystem()
    stopped_before_sync(disk, lambda: disk.open_append(A, create=True))
    assert names_after(disk) == {(), ("a",)}
    disk.sync_directory(Path("/"))
    assert names_after(disk) == {("a",)}
    stopped_before_sync(disk, lambda: disk.unlink(A))
    stopped_before_sync(disk, lambda: disk.make_directory(B))
    assert names_after(disk) == {("a",), ("b",), (), ("a", "b")}


def test_a_rename_never_loses_the_file() -> None:
    """Before the syncs the file has its old name, its new one, or both."""
    disk, file = disk_with(b"x")
    file.close()
    disk.make_directory(Path("/d"))
    stopped_before_sync(disk, lambda: disk.rename(A, Path("/d/a")))
    outcomes = {
        (crashed.exists(A), crashed.exists(Path("/d/a")))
        for crashed in disk.crashes(torn=False)
    }
    assert outcomes == {(True, False), (True, True), (False, True)}


def test_syncing_only_the_source_of_a_rename_brings_the_target_too() -> None:
    """The old name is not gone from the device before the new one is there."""
    disk, file = disk_with(b"x")
    file.close()
    disk.make_directory(Path("/d"))
    stopped_before_sync(disk, lambda: disk.rename(A, Path("/d/a")))
    disk.sync_directory(Path("/"))
    left = disk.crash(keep_none)
    assert content(left, Path("/d/a")) == b"x"
    assert not left.exists(A)


def test_a_rename_whose_target_sync_failed_keeps_the_old_name() -> None:
    """Names dropped by a failed directory sync, and dependent ones, are lost."""
    disk, file = disk_with(b"x")
    file.close()
    disk.make_directory(Path("/d"))
    rename = disk.calls + 1
    disk.fail_at(rename + 2, errno.EIO)
    with pytest.raises(DiskError):
        disk.rename(A, Path("/d/a"))
    assert disk.log[rename + 1].name == "sync_directory"
    assert disk.exists(Path("/d/a"))
    assert not disk.exists(A)
    left = disk.crash(keep_all)
    assert left.exists(A)
    assert not left.exists(Path("/d/a"))


def test_an_atomic_write_is_old_or_new_at_every_crash() -> None:
    """At each sync, for every outcome, the file is whole; afterwards it is new."""
    disk = FaultyFileSystem()
    disk.write_atomically(A, b"old" * 10)
    done: list[bool] = []

    def scenario() -> None:
        disk.write_atomically(A, b"new" * 3000)
        done.append(True)

    points = crash_points(disk, scenario, lambda: bool(done))
    assert [p.operation.name if p.operation else "" for p in points] == [
        "sync",
        "sync_directory",
        "",
    ]
    for point in points:
        allowed = {b"new" * 3000} if point.progress else {b"old" * 10, b"new" * 3000}
        seen = {content(crashed) for crashed in point.disk.crashes(torn=False)}
        assert seen <= allowed
    assert points[-1].progress


def test_a_crash_gives_the_lock_and_the_descriptors_back() -> None:
    """The crashed disk is unlocked, has nothing open, and starts to count anew."""
    disk = FaultyFileSystem()
    disk.make_directory(Path("/d"))
    lock = disk.lock_directory(Path("/d"))
    crashed = disk.crash(keep_all)
    assert crashed.calls == 0
    assert crashed.open_paths() == []
    crashed.lock_directory(Path("/d")).release()
    lock.release()


def test_a_crash_of_a_crash_changes_nothing() -> None:
    """The contents found after a power cut are on the device."""
    disk, file = disk_with(b"old")
    file.write(b"new")
    once = disk.crash(keep_all)
    assert [content(twice) for twice in once.crashes(torn=True)] == [b"oldnew"]
    file.close()


def test_a_flipped_bit_is_on_the_device_and_in_reads() -> None:
    """One bit differs, for readers and after a crash; flipping again restores it."""
    disk, file = disk_with(b"\x00\x00\x00")
    disk.flip_bit(A, 9)
    assert content(disk) == b"\x00\x02\x00"
    assert content(disk.crash(keep_none)) == b"\x00\x02\x00"
    disk.flip_bit(A, 9)
    assert content(disk) == b"\x00\x00\x00"
    file.close()


def test_files_carry_the_time_they_were_told() -> None:
    """The time of change is the wall time set on the disk, also after a crash."""
    disk = FaultyFileSystem()
    disk.set_wall_ms(1_700_000_000_123)
    file = disk.open_append(A, create=True)
    file.write(b"x")
    file.sync()
    file.close()
    reader = disk.crash(keep_none).open_read(A)
    assert reader.mtime_ms() == 1_700_000_000_123
    assert reader.read_at(Position(0), SizeBytes(1)) == b"x"
    reader.close()
