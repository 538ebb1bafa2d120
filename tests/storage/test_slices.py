"""Open files: few of them, and never closed under a slice."""

from pathlib import Path

import pytest

from metaq.errors import DiskError
from metaq.model import Position, SizeBytes
from metaq.storage.slices import OpenFiles, Slice
from metaq.testing.fs import FaultyFileSystem


@pytest.fixture
def fs() -> FaultyFileSystem:
    fs = FaultyFileSystem()
    for name in "abcd":
        file = fs.open_append(Path("/") / name, create=True)
        file.write(name.encode() * 10)
        file.close()
    return fs


def cut(files: OpenFiles, name: str) -> Slice:
    open_file = files.acquire(Path("/") / name)
    return Slice(open_file, Position(2), SizeBytes(3))


def test_a_file_is_opened_once_and_kept(fs: FaultyFileSystem) -> None:
    """Two slices of one file share a descriptor, which stays open behind them."""
    files = OpenFiles(fs)
    one, two = cut(files, "a"), cut(files, "a")
    assert one.fileno() == two.fileno()
    assert one.read() == b"aaa"
    one.release()
    two.release()
    assert fs.open_paths() == [Path("/a")]
    files.close()
    assert fs.open_paths() == []


def test_the_least_recently_used_files_are_closed(fs: FaultyFileSystem) -> None:
    """No more files stay open than the limit says."""
    files = OpenFiles(fs, files_max=2)
    for name in "abacad":
        cut(files, name).release()
    assert fs.open_paths() == [Path("/a"), Path("/d")]
    assert len(files) == 2
    files.close()


def test_a_file_in_use_outlives_its_place_in_the_list(fs: FaultyFileSystem) -> None:
    """A slice reads on while its file is pushed out, removed and forgotten."""
    files = OpenFiles(fs, files_max=1)
    held = cut(files, "a")
    cut(files, "b").release()
    assert held.read() == b"aaa"
    second = cut(files, "c")
    fs.unlink(Path("/c"))
    files.forget(Path("/c"))
    assert second.read() == b"ccc"
    held.release()
    second.release()
    assert fs.open_paths() == []


def test_a_file_that_is_missing_is_not_kept(fs: FaultyFileSystem) -> None:
    """A failed open leaves no entry behind."""
    files = OpenFiles(fs)
    with pytest.raises(DiskError, match="ENOENT"):
        files.acquire(Path("/nothing"))
    assert len(files) == 0
    files.forget(Path("/nothing"))


def test_a_slice_is_released_once(fs: FaultyFileSystem) -> None:
    """Giving back more than was taken is a bug."""
    files = OpenFiles(fs)
    held = cut(files, "a")
    held.release()
    with pytest.raises(AssertionError):
        held.release()
    files.close()


def test_closing_waits_for_slices_in_flight(fs: FaultyFileSystem) -> None:
    """After `close` the last release closes the file."""
    files = OpenFiles(fs)
    held = cut(files, "a")
    files.close()
    assert held.read() == b"aaa"
    held.release()
    assert fs.open_paths() == []
