"""Walks over segments: files that get shorter end them with a flaw."""

from metaq.model import Millis, Offset, Position, SizeBytes
from metaq.storage.segment import Segment
from metaq.storage.walk import WINDOW_BYTES, RangeReader, walk_headers, walk_records
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


def test_headers_of_many_windows_follow_each_other() -> None:
    """A record that begins in one window ends in a later one; none comes twice."""
    disk = disk_with_directory()
    sizes = (WINDOW_BYTES - 30, 10, 3 * WINDOW_BYTES, 5)
    records = [record(number, size) for number, size in enumerate(sizes, 1)]
    path = put_file(disk, "0.meta", b"".join(records))
    segment = Segment(path, Offset(0), SizeBytes(sum(map(len, records))))
    found = list(walk_headers(disk, segment, Offset(0), segment.end_offset))
    starts = [sum(map(len, records[:n])) for n in range(len(records))]
    assert found == [
        (start, len(data), number)
        for number, (start, data) in enumerate(zip(starts, records, strict=True), 1)
    ]
