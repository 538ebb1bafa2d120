"""Open files: few of them, and never closed under a slice."""

import errno
from concurrent.futures import Executor
from pathlib import Path
from threading import Barrier, Event, Semaphore, Thread

import pytest

from metaq.errors import DiskError
from metaq.fs.helper_threads import HelperThreads
from metaq.model import Offset, Position, SizeBytes
from metaq.storage.segment import Segment
from metaq.storage.slices import OpenFiles, Slice
from tests.rigs.fs import FaultyFileSystem, Operation

IDLE = HelperThreads(1, "idle")


@pytest.fixture
def fs() -> FaultyFileSystem:
    fs = FaultyFileSystem()
    for name in "abcd":
        file = fs.open_append(Path("/") / name, create=True)
        file.write(name.encode() * 10)
        file.close()
    return fs


def closed(files: OpenFiles, name: str) -> Slice:
    segment = Segment(Path("/") / name, Offset(0), SizeBytes(10))
    open_file = files.acquire(segment.path)
    return Slice(
        open_file, segment, Position(2), SizeBytes(3), Executor(), is_sealed=True
    )


def cut(files: OpenFiles, name: str) -> Slice:
    found = closed(files, name)
    found.open()
    return found


def test_a_file_is_opened_once_and_kept(fs: FaultyFileSystem) -> None:
    """Two slices of one file share a descriptor, which stays open after them."""
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
    files.forget(Path("/c"), IDLE)
    assert second.read() == b"ccc"
    held.release()
    second.release()
    assert fs.open_paths() == []


def test_a_file_is_opened_by_who_reads_it(fs: FaultyFileSystem) -> None:
    """A look-up asks the disk for nothing; what failed once is tried again."""
    files = OpenFiles(fs)
    calls = fs.calls
    one = closed(files, "a")
    assert (fs.calls, one.is_open) == (calls, False)
    fs.fail_at(calls + 1, errno.EMFILE)
    with pytest.raises(DiskError, match="EMFILE"):
        one.open()
    assert not one.is_open
    assert one.read() == b"aaa"
    assert one.is_open
    one.release()
    files.close()
    assert fs.open_paths() == []


def test_two_threads_open_a_file_once(fs: FaultyFileSystem) -> None:
    """Both wait for one open, and neither descriptor is lost."""
    files = OpenFiles(fs)
    slices = [closed(files, "a") for _ in range(2)]
    both = Barrier(2)
    entered = Semaphore(0)

    def linger(operation: Operation) -> None:
        if operation.name == "stat":
            return  # its size is looked at after that
        assert operation.name == "open"
        entered.release()
        # The other thread is on its way here, or waits until this one is through.
        entered.acquire(timeout=0.05)

    def open_one(one: Slice) -> None:
        both.wait(60)
        one.open()

    fs.on_call(linger)
    threads = [Thread(target=open_one, args=(one,)) for one in slices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert slices[0].fileno() == slices[1].fileno()
    for one in slices:
        one.release()
    fs.on_call(None)
    files.close()
    assert fs.open_paths() == []


def test_a_file_that_nobody_could_open_is_forgotten(fs: FaultyFileSystem) -> None:
    """There is nothing to close."""
    files = OpenFiles(fs)
    missing = files.acquire(Path("/nothing"))
    with pytest.raises(DiskError, match="ENOENT"):
        missing.open()
    files.forget(Path("/nothing"), IDLE)
    missing.release()
    assert (len(files), fs.open_paths()) == (0, [])


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


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_removed_file_is_closed_on_a_thread(
    fs: FaultyFileSystem, is_in_use: bool
) -> None:
    """The last close of it frees its blocks; the loop has no time for that."""
    files = OpenFiles(fs)
    held = cut(files, "a")
    if not is_in_use:
        held.release()
    fs.unlink(Path("/a"))
    with HelperThreads(1, "closer").begin() as closers:
        go_on = Event()
        closers.submit(go_on.wait, 30)
        files.forget(Path("/a"), closers)
        if is_in_use:
            assert held.read() == b"aaa"
            held.release()
        assert fs.open_paths() == [Path("/a")]
        go_on.set()
    assert fs.open_paths() == []


def test_a_removed_file_is_closed_also_when_no_thread_runs_any_more(
    fs: FaultyFileSystem,
) -> None:
    """A get that ends after the stop of the readers leaks nothing."""
    files = OpenFiles(fs)
    held = cut(files, "a")
    closers = HelperThreads(1, "closer").begin()
    files.forget(Path("/a"), closers)
    closers.shutdown()
    held.release()
    assert fs.open_paths() == []
