"""Following a file: every line once, whole and in order, through any rotation."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.cli.follow import ROTATED_S, UNOPENED, Bookmark, FileFollower
from metaq.errors import ClientError

EMPTY_MAX = 200
"""Reads without a line before nothing more is expected: two per rotation."""


class Time:
    """Moves on demand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """One log file, its writer, and who follows it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "app.log"
        self.time = Time()
        self.file_ns = 10**18
        self.follower: FileFollower | None = None

    def follow(self, bookmark: Bookmark | None = None, **options: Any) -> FileFollower:
        if self.follower is not None:
            self.follower.close()
        self.follower = FileFollower(
            self.path,
            bookmark=bookmark,
            monotonic_s=self.time,
            **{"from_start": True, **options},
        )
        return self.follower

    def write(self, data: bytes, path: Path | None = None) -> None:
        with (path or self.path).open("ab") as file:
            file.write(data)
        self.stamp(path or self.path)

    def stamp(self, path: Path) -> None:
        """Give a file a time of its own: the system's are some milliseconds apart."""
        self.file_ns += 1
        os.utime(path, ns=(self.file_ns, self.file_ns))

    def read(self) -> list[bytes]:
        """Return all lines there are, with time enough for every rotation."""
        assert self.follower is not None
        lines: list[bytes] = []
        empty_count = 0
        while empty_count < EMPTY_MAX:
            more = self.follower.read()
            lines += more
            empty_count = 0 if more else empty_count + 1
            self.time.now_s += 0 if more else ROTATED_S
        return lines

    def rename(self, suffix: str = ".1") -> Path:
        target = self.path.with_name(self.path.name + suffix)
        os.rename(self.path, target)
        return target

    def copy_and_cut(self, suffix: str = ".1") -> None:
        copy = self.path.with_name(self.path.name + suffix)
        copy.write_bytes(self.path.read_bytes())
        self.stamp(copy)
        os.truncate(self.path, 0)
        self.stamp(self.path)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    if made.follower is not None:
        made.follower.close()


def test_a_growing_file_gives_whole_lines(world: World) -> None:
    """The rest of a line is waited for; CR, NUL and empty lines are kept."""
    world.write(b"one\n\nt\0wo\r\nhal")
    world.follow()
    assert world.read() == [b"one", b"", b"t\0wo\r"]
    world.write(b"f\n")
    assert world.read() == [b"half"]


def test_without_from_start_new_lines_come_alone(world: World) -> None:
    """A line that is half written at the start comes whole."""
    world.write(b"old\nhal")
    world.follow(from_start=False)
    assert world.read() == []
    world.write(b"f\nnew\n")
    assert world.read() == [b"half", b"new"]


def test_a_file_may_come_later(world: World) -> None:
    """Then all of it is new."""
    follower = world.follow(from_start=False)
    assert follower.read() == []
    assert follower.bookmark == UNOPENED
    world.write(b"first\n")
    assert world.read() == [b"first"]


def test_a_file_that_came_before_the_restart_is_new(world: World) -> None:
    """It did not exist when it was first followed, so no gap is counted either."""
    bookmark = world.follow(from_start=False).bookmark
    world.write(b"first\n")
    follower = world.follow(bookmark, from_start=False)
    assert world.read() == [b"first"]
    assert follower.lost_count == 0


def test_a_renamed_file_is_read_to_its_end_first(world: World) -> None:
    """Its writer may go on with it for a moment; its last line has its end now."""
    world.write(b"1\n")
    follower = world.follow()
    assert world.read() == [b"1"]
    old = world.rename()
    world.write(b"3\n")
    assert follower.read() == []
    world.write(b"2\nlast of old", old)
    assert follower.read() == [b"2"]
    assert follower.read() == []
    assert world.read() == [b"last of old", b"3"]


def test_a_renamed_file_without_a_new_one_goes_on(world: World) -> None:
    """Until there is one, the old one is the file."""
    world.write(b"1\n")
    world.follow()
    old = world.rename()
    assert world.read() == [b"1"]
    world.write(b"2\n", old)
    assert world.read() == [b"2"]
    world.write(b"3\n")
    assert world.read() == [b"3"]


def test_files_that_were_rotated_twice_meanwhile_are_read_in_order(
    world: World,
) -> None:
    """The one between is not passed over."""
    world.write(b"1\n")
    world.follow()
    assert world.read() == [b"1"]
    world.write(b"2\n")
    os.rename(world.rename(), world.path.with_name("app.log.2"))
    world.write(b"3\n")
    world.rename()
    world.write(b"4\n")
    world.write(b"no log\n", world.path.with_name("app.log.err"))
    assert world.read() == [b"2", b"3", b"4"]


def test_a_copied_and_cut_file_loses_nothing(world: World) -> None:
    """Unread lines are read from the copy; then the file from its start."""
    world.write(b"1\nhal")
    world.follow()
    assert world.read() == [b"1"]
    world.write(b"f\n2\n")
    world.copy_and_cut()
    world.write(b"3\n")
    assert world.read() == [b"half", b"2", b"3"]
    assert world.follower is not None
    assert world.follower.lost_count == 0


def test_a_file_that_was_cut_and_grew_beyond_is_noticed(world: World) -> None:
    """Its size says nothing; the bytes before the place do."""
    world.write(b"1\n")
    world.follow()
    assert world.read() == [b"1"]
    world.path.write_bytes(b"other\nlines\n")
    assert world.read() == [b"other", b"lines"]
    assert world.follower is not None
    assert world.follower.lost_count == 1


@pytest.mark.parametrize("rotation", ["none", "rename", "copy"])
def test_a_restart_goes_on_where_it_was(world: World, rotation: str) -> None:
    """Also when the file was rotated while it was not followed."""
    world.write(b"1\n2\nhal")
    follower = world.follow()
    assert world.read() == [b"1", b"2"]
    bookmark = follower.bookmark
    assert bookmark is not None
    assert bookmark.position == 4
    world.write(b"f\n")
    if rotation == "rename":
        world.rename("-20260131")
    elif rotation == "copy":
        world.copy_and_cut()
    world.write(b"3\n")
    follower = world.follow(bookmark, from_start=False)
    assert world.read() == [b"half", b"3"]
    assert follower.lost_count == 0


def test_a_directory_with_the_name_of_a_rotated_file_is_none(world: World) -> None:
    """It is not looked into, and does not end the following."""
    world.path.with_name("app.log.1").mkdir()
    world.write(b"1\n")
    world.follow()
    assert world.read() == [b"1"]
    os.truncate(world.path, 0)
    world.write(b"2\n3\n")
    assert world.read() == [b"2", b"3"]
    world.rename(".2")
    world.write(b"4\n")
    assert world.read() == [b"4"]


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Files that cannot be opened: permissions do not bind root."""
    paths: set[Path] = set()
    os_open, path_open = os.open, Path.open

    def refuse(path: Path) -> None:
        if path in paths:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def open_fd(path: Path, flags: int) -> int:
        refuse(path)
        return os_open(path, flags)

    def open_file(path: Path, mode: str) -> Any:
        refuse(path)
        return path_open(path, mode)

    monkeypatch.setattr(os, "open", open_fd)
    monkeypatch.setattr(Path, "open", open_file)
    return paths


def test_a_rotated_file_that_may_not_be_read_is_told_and_passed_over(
    world: World, forbidden: set[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Its lines are missing; those of the next file come."""
    world.write(b"1\n")
    follower = world.follow()
    assert world.read() == [b"1"]
    world.rename(".2")
    world.write(b"2\n")
    forbidden.add(world.rename(".1"))
    world.write(b"3\n")
    assert world.read() == [b"3"]
    assert follower.lost_count == 1
    assert [r.message for r in caplog.records] == [
        f"rotated file may not be read: path={world.path}.1; its lines are missing"
    ]


def test_a_copy_that_may_not_be_read_is_told(
    world: World, forbidden: set[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The file was copied and cut: what comes after the cut is read."""
    world.write(b"1\n")
    follower = world.follow()
    assert world.read() == [b"1"]
    world.write(b"2\n")
    world.copy_and_cut()
    forbidden.add(world.path.with_name("app.log.1"))
    world.write(b"three\n")
    assert world.read() == [b"three"]
    assert follower.lost_count == 1
    logged = [record.message for record in caplog.records]
    assert logged[0].startswith("no permission to read rotated files: names=app.log.1;")
    assert logged[1].startswith("file was truncated: ")


def test_a_restart_passes_over_what_may_not_be_read(
    world: World, forbidden: set[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A file that was rotated away in between is missing; the new one is read."""
    world.write(b"1\n")
    follower = world.follow()
    assert world.read() == [b"1"]
    bookmark = follower.bookmark
    forbidden.add(world.rename(".1"))
    world.write(b"2\n")
    follower = world.follow(bookmark)
    assert world.read() == [b"2"]
    assert follower.lost_count == 1
    assert "no permission to read rotated files: names=app.log.1;" in caplog.text


def test_the_file_itself_has_to_be_readable(world: World, forbidden: set[Path]) -> None:
    """There is nothing else to follow."""
    world.write(b"1\n")
    forbidden.add(world.path)
    with pytest.raises(PermissionError):
        world.follow()


def test_an_inode_that_was_given_away_is_not_the_file(world: World) -> None:
    """A new file with the old number has other bytes, and is read from its start."""
    world.write(b"1\n2\n")
    world.follow()
    world.read()
    assert world.follower is not None
    bookmark = world.follower.bookmark
    world.path.write_bytes(b"a\nb\nc\n")
    follower = world.follow(bookmark)
    assert world.read() == [b"a", b"b", b"c"]
    assert follower.lost_count == 1


def test_a_line_without_end_is_refused(world: World) -> None:
    """Input without lines does not fill the memory."""
    world.write(b"ok\n" + b"x" * 20)
    follower = world.follow(line_bytes_max=10)
    assert follower.read() == [b"ok"]
    world.write(b"x")
    with pytest.raises(ClientError, match="longer than 10 bytes"):
        follower.read()


@pytest.mark.slow
@pytest.mark.parametrize("does_copy", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 20])
def test_whatever_happens_every_line_comes_once(
    world: World,
    rng: random.Random,
    *,
    chunk_bytes: int,
    does_copy: bool,
) -> None:
    """Any order of writing, reading, rotating and restarting; any size of reads."""
    world.write(b"")
    follower = world.follow(chunk_bytes=chunk_bytes)
    written: list[bytes] = []
    got: list[bytes] = []
    for step in range(200):
        action = rng.choice(["write", "write", "read", "rotate", "restart"])
        if action == "write":
            line = b"%d %s" % (step, b"y" * rng.randrange(400))
            written.append(line)
            world.write(line + b"\n")
        elif action == "read":
            got += follower.read()
        elif action == "rotate" and does_copy:
            # One copy is found again; what was cut twice unread is gone.
            got += world.read()
            world.copy_and_cut(f".{step}")
        elif action == "rotate":
            world.rename(f".{step}")
            world.write(b"")
        elif follower.bookmark != UNOPENED:
            follower = world.follow(follower.bookmark, chunk_bytes=chunk_bytes)
    got += world.read()
    assert got == written
    assert follower.lost_count == 0
