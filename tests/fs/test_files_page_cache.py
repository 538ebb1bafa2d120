"""Asking the page cache, and filling it without copying."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from metaq.fs.calls import LinuxCalls

CALLS = LinuxCalls()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def fd() -> Iterator[int]:
    """Open a file beside the sources: a file system in memory drops nothing."""
    with TemporaryFile(dir=ROOT, buffering=0) as file:
        file.write(b"x" * 1_000_000)
        os.fsync(file)
        yield file.fileno()


def test_what_was_just_written_is_cached(fd: int) -> None:
    """The tail of a log is never taken for cold."""
    assert CALLS.is_cached(fd, 0, 1_000_000)
    assert CALLS.is_cached(fd, 999_999, 1)


def test_a_dropped_file_is_cold_until_it_was_warmed(fd: int) -> None:
    """Warming brings in what the cache had dropped."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if CALLS.is_cached(fd, 0, 1_000_000):
        pytest.skip("this file system keeps its pages, or cannot say")
    CALLS.warm(fd, 0, 1_000_000)
    assert CALLS.is_cached(fd, 0, 1_000_000)


@pytest.mark.parametrize(
    ("size_bytes", "expected"), [(100_000, True), (100_001, False)]
)
def test_where_it_cannot_be_asked_what_lies_in_the_file_is_cached(
    fd: int, size_bytes: int, expected: bool
) -> None:
    """As on tmpfs. What a file has lost is found before its reply has begun."""

    class Refusing(LinuxCalls):
        @staticmethod
        def preadv(*_arguments: object) -> int:
            raise OSError(errno.EOPNOTSUPP, "cannot say")

    assert Refusing().is_cached(fd, 900_000, size_bytes) is expected


def test_warming_behind_the_end_of_a_file_ends(fd: int) -> None:
    """A file that got shorter is no endless loop."""
    CALLS.warm(fd, 900_000, 500_000)
