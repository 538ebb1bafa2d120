"""The bytes of a segment file, plain or out of a zip."""

import io
import zipfile

import pytest

from metaq.errors import CorruptRecordError
from metaq.model import Position, SizeBytes
from metaq.storage.segment_source import open_source, unpacked_size
from tests.storage.logs import disk_with_directory, put_file

DATA = bytes(range(256)) * 1000


def zipped(*names: str) -> bytes:
    """Return a zip with the same data under each name."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, DATA)
    return target.getvalue()


@pytest.mark.parametrize("is_zip", [False, True])
def test_the_bytes_are_the_same_plain_and_zipped(is_zip: bool) -> None:
    """Read forwards, in overlapping pieces of any size."""
    disk = disk_with_directory()
    content = zipped("0.meta") if is_zip else DATA
    path = put_file(disk, "0.meta.zip", content)
    assert unpacked_size(disk, path, is_zip=is_zip) == len(DATA)
    source = open_source(disk, path, is_zip=is_zip)
    for start in range(0, len(DATA), 700):
        piece = source.read_at(Position(start), SizeBytes(1000))
        assert piece == DATA[start : start + 1000]
    source.close()


@pytest.mark.parametrize("content", [b"no zip", zipped(), zipped("a", "b")])
def test_a_file_that_is_not_an_archive_of_one_segment_is_refused(
    content: bytes,
) -> None:
    """No zip, and zips without exactly one entry."""
    disk = disk_with_directory()
    path = put_file(disk, "0.meta.zip", content)
    with pytest.raises(CorruptRecordError):
        open_source(disk, path, is_zip=True)
