"""The CRC-32 that is used is zlib's in value, whichever library computes it."""

import runpy
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.record import checksum
from metaq.record.checksum import BytesLike, crc32

DATA = bytes(number * number % 251 for number in range(1 << 16)) * 20
LENGTHS = [*range(600), *(size + more for size in (4096, 1 << 20) for more in (-1, 3))]


def chosen(monkeypatch: pytest.MonkeyPatch, module: object) -> object:
    """Return what the module of checksums chooses where zlib-ng is `module`."""
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", module)
    return runpy.run_path(str(Path(checksum.__file__)))["crc32"]


@pytest.mark.parametrize("start", [0, 1, 7, 13])
def test_it_is_zlibs_at_every_length(start: int) -> None:
    """The computation differs by length, and by where the bytes lie."""
    view = memoryview(DATA)[start:]
    found = [crc32(view[:size]) for size in LENGTHS]
    assert found == [zlib.crc32(view[:size]) for size in LENGTHS]


@given(st.binary(), st.binary(max_size=2000))
def test_it_goes_on_behind_other_bytes(before: bytes, behind: bytes) -> None:
    """The checksum of some bytes is a start for that of those after."""
    assert crc32(behind, crc32(before)) == zlib.crc32(before + behind)


def test_zlibs_is_taken_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package is not there on all platforms, nor in all tasks of Spark."""
    assert chosen(monkeypatch, None) is zlib.crc32


@pytest.mark.parametrize("size", [0, 1, 15, 128, 255, 4096, 1 << 20])
def test_one_that_is_wrong_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Nor where it is wrong at one length alone."""

    def wrong(data: BytesLike, value: int = 0) -> int:
        return zlib.crc32(data, value) ^ (len(data) == size)

    assert chosen(monkeypatch, SimpleNamespace(crc32=wrong)) is zlib.crc32


def test_the_faster_one_is_taken_where_it_is_right() -> None:
    """It is, on the machines that these tests run on."""
    zlib_ng = pytest.importorskip("zlib_ng.zlib_ng")
    assert crc32 is zlib_ng.crc32
