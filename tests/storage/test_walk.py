"""Walks over segments: files that get shorter end them with a flaw."""

from metaq.model import Millis, Offset, Position
from metaq.storage.walk import RangeReader, walk_records
from tests.storage.logs import SPAN, disk_with_directory, put_file, record


def test_a_file_that_gets_shorter_ends_the_walk_with_a_flaw() -> None:
    """The walk neither hangs nor invents records."""
    disk = disk_with_directory()
    data = record(1, 100) + record(2, 10)
    for size in range(len(data)):
        path = put_file(disk, f"{size}.bin", data[:size])
        file = disk.open_read(path)
        walk = walk_records(
            file,
            Offset(0),
            Position(0),
            Position(len(data)),
            span_bytes_min=SPAN,
            time_ms=Millis(0),
        )
        file.close()
        assert walk.end == (120 if size >= 120 else 0)
        assert walk.flaw is not None


def test_a_checksum_of_a_range_that_is_not_there_is_none() -> None:
    """A short file never gives the checksum of fewer bytes."""
    disk = disk_with_directory()
    file = disk.open_read(put_file(disk, "x", b"0123456789"))
    reader = RangeReader(file, Position(0), Position(100))
    assert reader.checksum(Position(0), 10) is not None
    assert reader.checksum(Position(0), 11) is None
    file.close()
