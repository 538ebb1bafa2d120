"""Checks of segment files: everything counted, every damage named."""

from pathlib import Path

import pytest

from metaq.errors import DiskError
from metaq.fs import FileSystem
from metaq.fs.calls import LinuxCalls
from metaq.model import SizeBytes
from metaq.record.layout import HEADER_BYTES
from metaq.spark.record_bounds import PushedFilters
from metaq.spark.segments.checks import CheckedSplit, check_split, find_holes
from metaq.spark.segments.segment_plan import find_segments, plan_query
from tests.spark.segment_dirs import (
    ARCHIVE,
    FS,
    OTHER,
    ZIP,
    archive,
    flip,
    options,
    payloads,
    segments_of,
    write_java_log,
    write_log,
)

STRIDE = 60


def check(path: Path, size: int = 300, fs: FileSystem = FS) -> list[CheckedSplit]:
    """Check all splits of a path here, without Spark."""
    asked = options(path, bytes_per_partition=SizeBytes(size))
    plan = plan_query(FS, asked, PushedFilters())
    return [check_split(fs, each) for task in plan.tasks for each in task]


def record_count(found: list[CheckedSplit]) -> int:
    return sum(item.record_count for item in found)


@pytest.mark.parametrize("policies", [(), (ARCHIVE, ZIP), (ZIP,) * 9])
@pytest.mark.parametrize("size", [1, 300, 10**6])
def test_a_healthy_directory_is_counted_once(
    data_dir: Path, policies: tuple[object, ...], size: int
) -> None:
    """Each byte is checked by one split."""
    directory = write_log(data_dir, payloads(100))
    archive(directory, *policies)  # type: ignore[arg-type]
    found = check(directory, size)
    assert record_count(found) == 100
    assert sum(item.checked_bytes for item in found) == 100 * STRIDE
    assert not any(item.damage or item.torn_bytes for item in found)


def test_a_torn_tail_is_no_damage(data_dir: Path) -> None:
    """Bytes that the next start will cut are no damage."""
    directory = write_log(data_dir, payloads(100))
    with segments_of(directory)[-1].path.open("ab") as file:
        file.write(b"torn")
    found = check(directory)
    assert (record_count(found), sum(i.torn_bytes for i in found)) == (100, 4)
    assert not any(item.damage for item in found)


def test_damaged_headers_are_found_where_an_index_covers_them(data_dir: Path) -> None:
    """A record's checksum does not cover its id; the span's does."""
    directory = write_log(data_dir, payloads(100))
    first = segments_of(directory)[0]
    flip(first.path, 10)
    (damage,) = (d for item in check(directory) for d in item.damage)
    assert (damage.path, damage.offset) == (first.path, 0)
    assert "span checksum differs" in damage.detail


@pytest.mark.parametrize("is_zip", [False, True])
def test_damage_in_an_archive_is_named(data_dir: Path, is_zip: bool) -> None:
    """Records of an archive are compared with their own checksums."""
    directory = write_log(data_dir, payloads(100))
    first = segments_of(directory)[0]
    flip(first.path, 2 * STRIDE + HEADER_BYTES)
    for index in directory.glob("*.spans"):
        index.unlink()
    archive(directory, ZIP if is_zip else ARCHIVE)
    found = check(directory)
    (damage,) = (d for item in found for d in item.damage)
    assert (damage.offset, damage.next_good_offset) == (2 * STRIDE, 3 * STRIDE)
    assert record_count(found) == 99


def test_a_bad_sector_is_damage(data_dir: Path) -> None:
    """A read that the disk refuses takes one split, not the whole check."""

    class BadSector(LinuxCalls):
        @staticmethod
        def preadv(fd: int, buffers: object, position: int, /) -> int:
            raise OSError(5, "input/output error")

        @staticmethod
        def pread(fd: int, size: int, position: int, /) -> bytes:
            raise OSError(5, "input/output error")

    write_java_log(data_dir, [payloads(5), payloads(5)])
    archive(data_dir / "test-0", ZIP)
    disk = FileSystem(BadSector())
    plan = plan_query(disk, options(data_dir), PushedFilters())
    assert [flaw.offset for flaw in plan.unreadable] == [0]
    plan = plan_query(FS, options(data_dir), PushedFilters())
    for split in plan.tasks[0]:
        (bad,) = check_split(disk, split).damage
        assert (bad.offset, bad.path) == (split.start, split.file.path)
        assert "EIO" in bad.detail


def test_a_missing_file_is_an_error(data_dir: Path) -> None:
    """A segment that is gone was not checked, and the report says so."""
    directory = write_log(data_dir, payloads(5))
    plan = plan_query(FS, options(directory), PushedFilters())
    segments_of(directory)[0].path.unlink()
    with pytest.raises(DiskError, match="ENOENT"):
        check_split(FS, plan.tasks[0][0])


def test_holes_and_overlaps_are_named(data_dir: Path) -> None:
    """Neighbours of one directory meet; directories have nothing to do with another."""
    directory = write_log(data_dir, payloads(100))
    write_log(data_dir, payloads(100), OTHER)
    assert find_holes(FS, find_segments(FS, [str(data_dir)])) == []
    one, two, three = segments_of(directory)[:3]
    two.path.unlink()
    (hole,) = find_holes(FS, find_segments(FS, [str(data_dir)]))
    assert (hole.path, hole.offset) == (one.path, one.end_offset)
    assert hole.next_good_offset == three.base_offset
    with one.path.open("ab") as file:
        file.write(b"x" * 5000)
    (overlap,) = find_holes(FS, find_segments(FS, [str(data_dir)]))
    assert overlap.offset == three.base_offset
