"""One contract for the real file system and the faulty one in memory."""

import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.errors import DiskError, LogDirLockedError, MissingFileError, StorageError
from metaq.fs import LOCK_FILE, FileSystem, SystemFileSystem
from metaq.fs.calls import LinuxCalls
from metaq.fs.files import UpdateFile
from metaq.model import Position, SizeBytes
from tests.rigs.fs import FaultyFileSystem

ALL = SizeBytes(1 << 20)


@dataclass(frozen=True, slots=True)
class Place:
    """A file system and an empty directory on it."""

    disk: FileSystem
    directory: Path

    def put(self, name: str, data: bytes) -> Path:
        path = self.directory / name
        file = self.disk.open_append(path, create=True)
        file.write(data)
        file.close()
        return path

    def read(self, name: str) -> bytes:
        return self.disk.read_file(self.directory / name, ALL)


@pytest.fixture(params=["real", "faulty"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "real":
        yield Place(SystemFileSystem(), tmp_path)
        return
    disk = FaultyFileSystem()
    disk.make_directory(Path("/data"))
    yield Place(disk, Path("/data"))
    assert disk.open_paths() == [], "a file was left open"


def errno_name(call) -> str:
    with pytest.raises(DiskError) as refusal:
        call()
    return refusal.value.errno_name


def test_appended_bytes_are_read_back_in_order(place: Place) -> None:
    """Writes and gathered writes land at the end, one after the other."""
    path = place.directory / "a"
    file = place.disk.open_append(path, create=True)
    file.write(b"one")
    file.write_all([b"two", memoryview(b"-three-")[1:6], bytearray(b"four")])
    file.sync()
    assert file.size() == place.disk.size_of(path) == 15
    assert file.path == path
    file.close()
    file.close()
    assert place.read("a") == b"onetwothreefour"


def test_an_existing_file_keeps_its_bytes_when_it_is_opened(place: Place) -> None:
    """Opening to append never cuts, with or without create."""
    place.put("a", b"old")
    place.put("a", b"new")
    file = place.disk.open_append(place.directory / "a", create=False)
    file.write(b"er")
    file.close()
    assert place.read("a") == b"oldnewer"


def test_a_missing_file_is_an_error_unless_it_may_be_created(place: Place) -> None:
    """Without create a missing file is ENOENT, and is still missing afterwards."""
    absent = place.directory / "absent"
    for call in (
        lambda: place.disk.open_append(absent, create=False),
        lambda: place.disk.open_append(absent / "below", create=True),
        lambda: place.disk.open_read(absent),
        lambda: place.disk.unlink(absent),
        lambda: place.disk.rename(absent, place.directory / "b"),
        lambda: place.disk.size_of(absent),
        lambda: place.disk.list_directory(absent),
        lambda: place.disk.sync_directory(absent),
        lambda: place.disk.make_directory(absent / "below"),
    ):
        with pytest.raises(MissingFileError, match="ENOENT"):
            call()
    assert not place.disk.exists(absent)


def test_reads_are_short_only_where_the_file_ends(place: Place) -> None:
    """read_at and read_into return what there is, and nothing after the end."""
    path = place.put("a", b"0123456789")
    file = place.disk.open_read(path)
    target = bytearray(b"........")
    assert file.read_at(Position(3), SizeBytes(4)) == b"3456"
    assert file.read_at(Position(8), SizeBytes(9)) == b"89"
    assert file.read_at(Position(10), SizeBytes(9)) == b""
    assert file.read_into(Position(7), target) == 3
    assert target == b"789....."
    assert file.read_into(Position(99), target) == 0
    assert file.size() == 10
    file.close()
    file.close()


def test_an_open_reader_sees_appends_and_survives_removal(place: Place) -> None:
    """Readers follow the file, not its name."""
    path = place.put("a", b"one")
    reader = place.disk.open_read(path)
    place.put("a", b"two")
    place.disk.unlink(path)
    assert not place.disk.exists(path)
    assert reader.read_at(Position(0), SizeBytes(9)) == b"onetwo"
    reader.close()


def test_sendfile_takes_bytes_from_the_descriptor(place: Place) -> None:
    """The descriptor of a reader feeds a socket, later appends included."""
    path = place.put("a", b"0123")
    reader = place.disk.open_read(path)
    here, there = socket.socketpair()
    with here, there:
        assert os.sendfile(here.fileno(), reader.fileno(), 1, 3) == 3
        place.put("a", b"4567")
        assert os.sendfile(here.fileno(), reader.fileno(), 4, 99) == 4
        assert there.recv(99) == b"1234567"
    reader.close()


def test_truncate_cuts_the_tail_and_appends_go_on_there(place: Place) -> None:
    """After a cut the next write lands at the new end."""
    file = place.disk.open_append(place.directory / "a", create=True)
    file.write(b"0123456789")
    file.truncate(SizeBytes(4))
    file.write(b"x")
    file.sync()
    file.close()
    assert place.read("a") == b"0123x"


def test_an_atomic_write_replaces_the_whole_file(place: Place) -> None:
    """The target has the new bytes, and no other name is left."""
    target = place.directory / "checkpoint"
    place.disk.write_atomically(target, b"a long first version")
    place.disk.write_atomically(target, b"short")
    assert place.read("checkpoint") == b"short"
    assert place.disk.list_directory(place.directory) == ("checkpoint",)


def test_an_atomic_write_overwrites_a_leftover(place: Place) -> None:
    """The temporary file of a crashed attempt does not shine through."""
    place.put("checkpoint.tmp", b"a long leftover of a crash")
    place.disk.write_atomically(place.directory / "checkpoint", b"new")
    assert place.read("checkpoint") == b"new"


def test_rename_moves_and_replaces(place: Place) -> None:
    """Within a directory and across directories, the target is replaced."""
    place.disk.make_directory(place.directory / "d")
    place.put("a", b"A")
    place.put("b", b"B")
    place.disk.rename(place.directory / "a", place.directory / "b")
    place.disk.rename(place.directory / "b", place.directory / "d" / "c")
    assert place.read("d/c") == b"A"
    assert place.disk.list_directory(place.directory) == ("d",)


def test_directories_are_made_once_and_listed_sorted(place: Place) -> None:
    """An existing directory is kept; a file of that name is an error."""
    for name in ("b", "a", "c"):
        place.disk.make_directory(place.directory / name)
    place.put("a/x", b"")
    place.disk.make_directory(place.directory / "a")
    assert place.disk.list_directory(place.directory) == ("a", "b", "c")
    assert place.disk.list_directory(place.directory / "a") == ("x",)
    assert place.disk.list_directory(place.directory / "b") == ()
    call = lambda: place.disk.make_directory(place.directory / "a" / "x")  # noqa: E731
    assert errno_name(call) == "EEXIST"


def test_directories_are_moved_whole_and_removed_empty(place: Place) -> None:
    """Its contents go along; one that is not empty stays."""
    for name in ("a", "a/b", "c"):
        place.disk.make_directory(place.directory / name)
    place.put("a/b/x", b"X")
    place.disk.rename(place.directory / "a" / "b", place.directory / "c" / "d")
    assert place.read("c/d/x") == b"X"
    for full in ("c", "c/d"):
        call = lambda at=full: place.disk.remove_directory(place.directory / at)  # noqa: E731
        assert errno_name(call) == "ENOTEMPTY"
    place.disk.remove_directory(place.directory / "a")
    place.disk.unlink(place.directory / "c" / "d" / "x")
    place.disk.remove_directory(place.directory / "c" / "d")
    assert place.disk.list_directory(place.directory) == ("c",)
    assert place.disk.list_directory(place.directory / "c") == ()
    file = place.put("f", b"")
    assert errno_name(lambda: place.disk.remove_directory(file)) == "ENOTDIR"
    gone = place.directory / "gone"
    assert errno_name(lambda: place.disk.remove_directory(gone)) == "ENOENT"


def test_names_are_told_apart(place: Place) -> None:
    """exists and is_directory answer for files, directories and nothing."""
    file = place.put("a", b"")
    assert place.disk.exists(file)
    assert not place.disk.is_directory(file)
    assert place.disk.exists(place.directory)
    assert place.disk.is_directory(place.directory)
    for absent in (place.directory / "no", file / "below"):
        assert not place.disk.exists(absent)
        assert not place.disk.is_directory(absent)


def test_wrong_kinds_are_refused(place: Place) -> None:
    """A directory is not a file and a file is not a directory."""
    file = place.put("a", b"")
    directory = place.directory / "d"
    place.disk.make_directory(directory)
    assert errno_name(lambda: place.disk.list_directory(file)) == "ENOTDIR"
    assert errno_name(lambda: place.disk.sync_directory(file)) == "ENOTDIR"
    assert errno_name(lambda: place.disk.unlink(directory)) == "EISDIR"
    assert errno_name(lambda: place.disk.rename(file, directory)) == "EISDIR"
    refused = errno_name(lambda: place.disk.open_append(directory, create=False))
    assert refused == "EISDIR"


def test_a_closed_file_is_refused(place: Place) -> None:
    """Using a file after close is an error, not another file's bytes."""
    path = place.put("a", b"x")
    reader = place.disk.open_read(path)
    reader.close()
    call = lambda: reader.read_at(Position(0), SizeBytes(1))  # noqa: E731
    assert errno_name(call) == "EBADF"


def test_a_file_over_its_limit_is_not_returned(place: Place) -> None:
    """read_file never brings more than the limit into memory."""
    path = place.put("a", b"12345")
    assert place.disk.read_file(path, SizeBytes(5)) == b"12345"
    with pytest.raises(StorageError, match="at most 4 bytes"):
        place.disk.read_file(path, SizeBytes(4))


def test_a_directory_has_one_owner_at_a_time(place: Place) -> None:
    """A second lock is refused with directory and pid until the first is released."""
    lock = place.disk.lock_directory(place.directory)
    with pytest.raises(LogDirLockedError) as refusal:
        place.disk.lock_directory(place.directory)
    assert f"directory={place.directory} pid={os.getpid()}" in str(refusal.value)
    lock.release()
    lock.release()
    place.disk.lock_directory(place.directory).release()
    assert place.read(LOCK_FILE) == b"%d\n" % os.getpid()


def test_a_file_knows_whether_its_name_leads_to_it(place: Place) -> None:
    """Removed, replaced or moved away with its directory: it is not in place."""
    path = place.directory / "a"
    for move in (
        lambda: place.disk.unlink(path),
        lambda: place.disk.write_atomically(path, b"x"),
        lambda: place.disk.rename(path, path.with_name("b")),
    ):
        file = place.disk.open_append(path, create=True)
        assert file.is_in_place()
        move()
        assert not file.is_in_place()
        file.close()
    lock = place.disk.lock_directory(place.directory)
    assert lock.is_in_place()
    place.disk.unlink(place.directory / LOCK_FILE)
    assert not lock.is_in_place()
    lock.release()


def test_room_and_age_are_numbers(place: Place) -> None:
    """Free bytes are positive; the time of change is since 1970."""
    assert place.disk.free_bytes(place.directory) > 0
    reader = place.disk.open_read(place.put("a", b"x"))
    assert reader.mtime_ms() >= 0
    reader.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.lists(st.binary(max_size=5000), max_size=3)),
        st.tuples(st.just("truncate"), st.integers(0, 9000)),
        st.tuples(st.just("sync"), st.none()),
    ),
    max_size=8,
)


@settings(max_examples=20, deadline=None)
@given(STEPS)
def test_any_mix_of_writes_cuts_and_syncs_reads_the_same(steps) -> None:
    """The faulty file system, left alone, is a plain file."""
    disk = FaultyFileSystem()
    file = disk.open_append(Path("/a"), create=True)
    expected = bytearray()
    for kind, value in steps:
        if kind == "write":
            file.write_all(value)
            expected += b"".join(value)
        elif kind == "truncate" and value <= len(expected):
            file.truncate(SizeBytes(value))
            del expected[value:]
        elif kind == "sync":
            file.sync()
            assert disk.synced_bytes(Path("/a")) == expected
    file.close()
    assert disk.read_file(Path("/a"), ALL) == expected


def test_an_update_changes_bytes_in_place_and_grows_at_the_end(place: Place) -> None:
    """write_at replaces what is there; the sync makes it durable."""
    path = place.put("a", b"0123456789")
    file = place.disk.open_update(path)
    file.write_at(Position(2), b"xy")
    file.write_at(Position(9), b"END")
    file.sync()
    assert place.read("a") == b"01xy45678END"
    file.close()
    file.close()
    assert errno_name(lambda: place.disk.open_update(place.directory / "b")) == "ENOENT"


class RefusesToClose(LinuxCalls):
    """A disk that is lost when its files are closed."""

    def close(self, _fd: int, /) -> None:
        raise OSError(errno.EIO, "refused")


def test_a_file_is_abandoned_though_the_disk_refuses() -> None:
    """`close` raises; `abandon` does not, and leaves nothing to be closed."""
    first, second = (UpdateFile(RefusesToClose(), Path("/a"), 3) for _ in range(2))
    assert errno_name(first.close) == "EIO"
    second.abandon()
    second.close()


def test_a_short_write_in_place_is_finished() -> None:
    """EINTR in the middle of a write is invisible; other errors are raised."""
    disk = FaultyFileSystem()
    disk.open_append(Path("/a"), create=True).close()
    file = disk.open_update(Path("/a"))
    disk.fail_at(disk.calls + 1, errno.EINTR, taken=3)
    file.write_at(Position(0), b"abcdef")
    assert disk.read_file(Path("/a"), ALL) == b"abcdef"
    disk.fail_at(disk.calls + 1, errno.EIO)
    assert errno_name(lambda: file.write_at(Position(0), b"12")) == "EIO"
    disk.fail_at(disk.calls + 1, errno.EIO)
    assert errno_name(file.sync) == "EIO"
    file.close()
