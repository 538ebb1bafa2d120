"""Ranges of damage: apart, in order, bounded; walks over files that get shorter."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from metaq.model import Millis, Offset, Position
from metaq.storage.damage import DAMAGES_MAX, apart
from metaq.storage.segment import Damage
from metaq.storage.walk import RangeReader, walk_records
from tests.storage.logs import SPAN, disk_with_directory, put_file, record

RANGES = st.lists(
    st.tuples(st.integers(0, 400), st.one_of(st.none(), st.integers(1, 20)))
)


@given(RANGES)
def test_merged_ranges_cover_the_same_offsets_and_do_not_touch(ranges) -> None:
    """And every next good offset is outside all damage."""
    damage = [
        Damage(
            Path("f"), Offset(at), None if size is None else Offset(at + size), "bad"
        )
        for at, size in ranges
    ]
    merged = apart(damage)
    assert len(merged) <= DAMAGES_MAX
    for offset in range(430):
        covered = any(d.covers(Offset(offset)) for d in damage)
        assert any(d.covers(Offset(offset)) for d in merged) == covered
    for one, two in pairwise(merged):
        assert one.next_good_offset is not None
        assert one.next_good_offset < two.offset


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
