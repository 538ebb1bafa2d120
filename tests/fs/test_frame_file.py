"""A file of frames: its bytes, what a crash leaves of it, what is refused."""

import contextlib
import errno
from pathlib import Path
from zlib import crc32

import pytest

from metaq.errors import (
    CorruptRecordError,
    LogDirOfflineError,
    NoSpaceError,
    StorageError,
)
from metaq.fs import FileSystem
from metaq.fs.frame_file import FRAME, HEADER, FrameFile, StoredFrame, read_frames
from metaq.model import SizeBytes
from tests.rigs.fs import FaultyFileSystem, crash_points, keep_random

DIRECTORY = Path("/journals")
PATH = DIRECTORY / "j"
MAGIC = b"MQ-TESTS"
SAMPLES = 6


def disk() -> FaultyFileSystem:
    fs = FaultyFileSystem()
    fs.make_directory(DIRECTORY)
    return fs


def opened(fs: FileSystem) -> tuple[FrameFile, list[bytes]]:
    """Return the file, and the bodies in it."""
    file, found = FrameFile(fs, PATH, MAGIC), list[bytes]()
    try:
        file.open(lambda frame: found.append(frame.body))
    except StorageError:
        file.close()
        raise
    return file, found


def bodies(fs: FileSystem) -> list[bytes]:
    return [each.body for each in read_frames(fs, PATH, MAGIC)]


def test_the_bytes_of_a_file() -> None:
    """Pinned: a header and a frame."""
    fs = disk()
    file, _ = opened(fs)
    frame = file.append(3, 7, b"body")
    header = b"MQ-TESTS\0\0\0\1"
    rest = b"\3\0\0\0\4" + bytes(7) + b"\7body"
    assert fs.read_file(PATH, SizeBytes(99)) == (
        header
        + crc32(header).to_bytes(4, "big")
        + b"\xd7MqE"
        + crc32(rest).to_bytes(4, "big")
        + rest
    )
    assert frame == StoredFrame(HEADER.size, FRAME.size + 4, 3, 7, b"body")
    assert file.read(frame.position, frame.size) == frame
    file.close()


def test_frames_are_there_over_a_restart_in_their_order() -> None:
    """And after they were written anew, without those that were left out."""
    fs = disk()
    file, _ = opened(fs)
    frames = [file.append(1, number, b"%d" % number) for number in range(4)]
    file.close()
    file, found = opened(fs)
    assert found == [b"0", b"1", b"2", b"3"]
    file.replace((each.kind, each.number, each.body) for each in frames[2:])
    assert file.end == fs.size_of(PATH)
    file.append(1, 4, b"4")
    file.close()
    assert bodies(fs) == [b"2", b"3", b"4"]
    assert fs.open_paths() == []


def test_reading_changes_nothing() -> None:
    """Another process may be the owner: a torn tail is its own to cut."""
    fs = disk()
    file, _ = opened(fs)
    file.append(1, 0, b"whole")
    file.append(1, 1, b"torn")
    file.close()
    size = fs.size_of(PATH)
    writer = fs.open_append(PATH, create=False)
    writer.truncate(SizeBytes(size - 1))
    writer.close()
    assert bodies(fs) == [b"whole"]
    assert fs.size_of(PATH) == size - 1
    file, found = opened(fs)
    assert found == [b"whole"]
    assert fs.size_of(PATH) == file.end
    file.close()


@pytest.mark.slow
def test_every_damaged_bit_is_seen() -> None:
    """The last frame is taken for a torn tail; damage of any other refuses the file."""
    fs = disk()
    file, _ = opened(fs)
    ends = [file.append(1, n, b"12345").position + FRAME.size + 5 for n in range(3)]
    file.close()
    for bit in range(8 * ends[-1]):
        found = fs.snapshot()
        found.flip_bit(PATH, bit)
        if bit // 8 >= ends[1]:
            assert len(bodies(found)) == 2
            continue
        with pytest.raises(CorruptRecordError, match=r"header|damaged at position"):
            bodies(found)
        with pytest.raises(CorruptRecordError):
            opened(found)
        assert found.size_of(PATH) == ends[-1]
        assert found.open_paths() == []


def test_a_full_disk_takes_nothing_and_harms_nothing() -> None:
    """Neither a frame nor a new file; a later try succeeds."""
    fs = disk()
    file, _ = opened(fs)
    file.append(1, 0, b"0")
    fs.set_capacity(fs.size_of(PATH) + 5)
    with pytest.raises(NoSpaceError):
        file.append(1, 1, b"1")
    with pytest.raises(NoSpaceError):
        file.replace([(1, 1, bytes(99))])
    fs.set_capacity(1 << 20)
    file.append(1, 2, b"2")
    file.replace([(1, 2, b"2")])
    file.close()
    assert bodies(fs) == [b"2"]


def test_after_a_failure_nothing_is_written() -> None:
    """Only the next start can find out if the frame is on the disk."""
    fs = disk()
    file, _ = opened(fs)
    fs.fail_at(fs.calls + 2, errno.EIO)  # the write, then the sync
    with pytest.raises(StorageError, match="EIO"):
        file.append(1, 0, b"0")
    with pytest.raises(LogDirOfflineError, match="EIO"):
        file.append(1, 1, b"1")
    file.close()
    with pytest.raises(LogDirOfflineError, match="j is closed: directory=/journals"):
        file.read(HEADER.size, 30)


class Life:
    """A life of a file, and what it was promised."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.in_doubt: set[int] = set()

    def run(self, fs: FileSystem) -> None:
        file, _ = opened(fs)
        try:
            for number in range(9):
                self.in_doubt.add(number)
                file.append(1, number, b"%d" % number)
                self.in_doubt.discard(number)
                self.kept.append(number)
                if number % 3 == 2:
                    gone, self.kept = self.kept[:2], self.kept[2:]
                    self.in_doubt.update(gone)
                    file.replace([(1, each, b"%d" % each) for each in self.kept])
                    self.in_doubt.difference_update(gone)
        finally:
            file.close()

    def check(self, fs: FileSystem) -> None:
        file, found = opened(fs)
        numbers = [int(each) for each in found]
        assert numbers == sorted(numbers)
        assert set(self.kept) <= set(numbers) <= set(self.kept) | self.in_doubt
        file.append(1, 99, b"99")
        file.close()
        assert bodies(fs) == [*found, b"99"]
        assert fs.list_directory(DIRECTORY) == ("j",)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_whichever_call_fails_nothing_promised_is_lost(number: int, seed: int) -> None:
    """Of one that fails in the midst of a change, all or nothing is there."""
    whole = disk()
    before = whole.calls
    Life().run(whole)
    for call in range(before + 1, whole.calls + 1):
        fs, life = disk(), Life()
        fs.fail_at(call, number)
        with contextlib.suppress(StorageError):
            life.run(fs)
        assert fs.open_paths() == []
        life.check(fs.crash(keep_random(seed + call)))


def test_whenever_the_power_goes_nothing_promised_is_lost(seed: int) -> None:
    """Whatever is left of what was not synced."""
    fs, life = disk(), Life()
    points = crash_points(
        fs, lambda: life.run(fs), lambda: (list(life.kept), set(life.in_doubt))
    )
    assert len(points) > 15
    for number, point in enumerate(points):
        after = Life()
        after.kept, after.in_doubt = point.progress
        for sample in range(SAMPLES):
            choose = keep_random(seed + number * 100 + sample)
            after.check(point.disk.crash(choose, torn=True))
