"""Names in a partition directory: segments, holes, overlaps, leftovers."""

import errno

import pytest

from metaq.errors import DiskError
from metaq.model import Offset, SizeBytes
from metaq.storage.listing import check_names, find_lost, parse_base_offset
from metaq.storage.segment import Segment, segment_file_name
from tests.storage.logs import (
    DIRECTORY,
    disk_with_directory,
    everything,
    put_file,
    put_segment,
    record,
)
from tests.storage.recovering import BYTES, COMMITS, META, SPANS, disk_with_log, recover


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000000000000000", 0),
        ("100", 100),
        (str(2**63 - 1), 2**63 - 1),
        (str(2**63), None),
        ("", None),
        ("-5", None),
        ("+5", None),
        ("5 ", None),
        ("\u0661", None),
        ("0x10", None),
    ],
)
def test_names_are_decimal_numbers(text: str, expected: int | None) -> None:
    """Padded or not; nothing that only looks like a number."""
    assert parse_base_offset(text) == expected


def test_unpadded_names_are_read() -> None:
    """`0.meta` is the segment at 0; its index is named by twenty digits."""
    disk = disk_with_directory()
    put_file(disk, "0.meta", BYTES)
    result = recover(disk)
    assert result.segments[0].path == DIRECTORY / "0.meta"
    assert (result.record_count, result.damage) == (5, ())
    assert sorted(everything(disk)) == ["0.meta", SPANS]


@pytest.mark.parametrize(
    ("name", "text"),
    [("copy.meta", "is not a number"), ("0.meta", "one base offset")],
)
def test_a_misnamed_segment_refuses_the_partition(name: str, text: str) -> None:
    """The message names it; nothing in the directory is touched."""
    disk = disk_with_log(b"torn")
    put_file(disk, name, b"anything")
    put_file(disk, f"{SPANS}.tmp", b"")
    before = everything(disk)
    result = recover(disk)
    (found,) = result.damage
    assert result.segments == ()
    assert text in found.detail
    assert name in found.detail
    assert everything(disk) == before


def test_foreign_files_are_left_alone() -> None:
    """Archives, kept tails, directories and strangers are not touched."""
    disk = disk_with_log()
    disk.make_directory(DIRECTORY / "old.meta")
    for name in (f"{META}.arc", f"{META}.zip", "README", "x.spans", "x.tmp"):
        put_file(disk, name, b"mine")
    assert recover(disk).damage == ()
    names = disk.list_directory(DIRECTORY)
    assert {f"{META}.arc", f"{META}.zip", "README", "x.spans", "x.tmp"} <= set(names)


def test_leftovers_of_a_crash_are_removed() -> None:
    """Temporary files, and indexes whose segment was deleted before them."""
    disk = disk_with_directory()
    put_segment(disk, 1000, COMMITS)
    expected = everything(disk)
    put_segment(disk, 0, COMMITS)
    disk.unlink(DIRECTORY / META)
    put_segment(disk, 5000, [])
    disk.unlink(DIRECTORY / segment_file_name(Offset(5000)))
    put_file(disk, f"{7000:020d}.spans", b"not believed")
    for name in (
        "1000.spans.tmp",
        "1000.keys.tmp",
        "0.meta.zip.tmp",
        "0.meta.torn-5.tmp",
    ):
        put_file(disk, name, b"half")
    result = recover(disk)
    assert everything(disk) == expected
    assert (result.record_count, result.damage) == (5, ())


def test_a_missing_active_segment_is_noticed() -> None:
    """Its index says that there were bytes: the log stops and does not begin again."""
    disk = disk_with_log()
    put_segment(disk, len(BYTES), [[record(6)]])
    disk.unlink(DIRECTORY / segment_file_name(Offset(len(BYTES))))
    (found,) = recover(disk).damage
    assert (found.offset, found.next_good_offset) == (len(BYTES), None)
    assert "missing" in found.detail
    disk.unlink(DIRECTORY / META)
    result = recover(disk)
    assert result.segments == ()
    assert result.damage[0].offset == 0


def test_a_missing_middle_segment_is_a_hole() -> None:
    """Reads before and after it are served; its index stays as evidence."""
    disk = disk_with_log()
    size = len(BYTES)
    put_segment(disk, size, [[record(6)]])
    put_segment(disk, size + 30, [[record(7)]])
    disk.unlink(DIRECTORY / segment_file_name(Offset(size)))
    before = everything(disk)
    result = recover(disk)
    (found,) = result.damage
    assert (found.offset, found.next_good_offset) == (size, size + 30)
    assert [s.base_offset for s in result.segments] == [0, size + 30]
    assert everything(disk) == before


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("left", [0, 1, 30, 45, 129, 130, 150, 269])
def test_a_truncated_sealed_segment_is_a_hole(left: int, indexed: bool) -> None:
    """It begins at the last whole record, so that no reader meets half a record."""
    disk = disk_with_log(indexed=indexed)
    put_segment(disk, len(BYTES), [[record(6)]])
    file = disk.open_append(DIRECTORY / META, create=False)
    file.truncate(SizeBytes(left))
    file.close()
    (found,) = recover(disk).damage
    assert found.offset == max(b for b in (0, 30, 60, 130, 160) if b <= left)
    assert found.next_good_offset == len(BYTES)
    assert f"ends at offset {left}" in found.detail


def test_an_overlap_disbelieves_the_later_segment() -> None:
    """Two files claim the same offsets: neither the log nor a guess decides."""
    disk = disk_with_log()
    put_segment(disk, 130, [[record(6)]])
    put_segment(disk, 160, [[record(7)]])
    result = recover(disk)
    (found,) = result.damage
    assert (found.offset, found.next_good_offset) == (130, 160)
    disk.unlink(DIRECTORY / segment_file_name(Offset(160)))
    disk.unlink(DIRECTORY / f"{160:020d}.spans")
    (found,) = recover(disk).damage
    assert (found.offset, found.next_good_offset) == (130, None)


SIZE_CALL = 3
"""The list of names, then for a segment: whether it is a directory, and its size."""


def test_a_segment_that_retention_takes_at_that_moment_is_passed_over() -> None:
    """It was in the list of names, and is gone at the next call."""
    disk = disk_with_log()
    disk.fail_at(disk.calls + SIZE_CALL, errno.ENOENT)
    assert check_names(disk, DIRECTORY).segments == ()
    assert len(check_names(disk, DIRECTORY).segments) == 1


def test_a_segment_that_is_no_file_refuses_the_partition() -> None:
    """A pipe, say: to open it would wait for ever."""
    disk = disk_with_log()
    disk.fail_at(disk.calls + SIZE_CALL, errno.EINVAL)
    assert (
        check_names(disk, DIRECTORY).bad_name == f"segment is not a file: name={META}"
    )


def test_a_size_that_the_disk_refuses_is_its_error() -> None:
    """A log of which a part is unknown is not served."""
    disk = disk_with_log()
    disk.fail_at(disk.calls + SIZE_CALL, errno.EIO)
    with pytest.raises(DiskError, match="EIO"):
        check_names(disk, DIRECTORY)


@pytest.mark.parametrize(("more", "lost"), [(-1, False), (0, False), (1, True)])
def test_an_active_file_may_be_longer_than_its_reader_wants(
    more: int, lost: bool
) -> None:
    """Puts go on; one that is shorter has lost the rest, from a record's end on."""
    disk = disk_with_log()
    segment = Segment(DIRECTORY / META, Offset(0), SizeBytes(len(BYTES)))
    end = Offset(len(BYTES) + more)
    found = find_lost(disk, segment, end, is_sealed=False)
    if not lost:
        assert found is None
        return
    assert found is not None
    assert (found.offset, found.next_good_offset) == (len(BYTES), None)
    assert found.detail.endswith(f"expected {end} bytes, got {len(BYTES)}")


def test_of_a_sealed_segment_names_say_what_is_lost() -> None:
    """A hole before the next segment; without one retention may have taken it."""
    disk = disk_with_log()
    sealed = Segment(DIRECTORY / META, Offset(0), SizeBytes(len(BYTES)))
    assert find_lost(disk, sealed, Offset(999), is_sealed=True) is None
    put_segment(disk, len(BYTES) + 1, [[record(6)]], last_id_before=5)
    found = find_lost(disk, sealed, Offset(len(BYTES) + 1), is_sealed=True)
    assert found is not None
    assert (found.offset, found.next_good_offset) == (len(BYTES), len(BYTES) + 1)
