"""Verification: every flipped bit is found, healthy and busy directories are not."""

import errno
import random

import pytest

from metaq.errors import DiskError
from metaq.model import LogId, Offset, SizeBytes
from metaq.storage.segment import segment_file_name
from metaq.storage.span_index import read_index, write_index
from metaq.storage.verify import (
    PART_BYTES,
    FindingKind,
    VerifyReport,
    verify_directory,
)
from tests.rigs.fs import FaultyFileSystem, Operation
from tests.sampling import quarter
from tests.storage.logs import (
    DIRECTORY,
    disk_with_directory,
    everything,
    put_file,
    put_segment,
    record,
)
from tests.storage.recovering import (
    BYTES,
    META,
    SPANS,
    UNCOVERED,
    disk_with_log,
    recover,
)

LOG = LogId("test", 0)
ACTIVE = segment_file_name(Offset(len(BYTES)))


def check(disk: FaultyFileSystem, *, in_use: bool = False) -> VerifyReport:
    """Verify the data directory; nothing may change and nothing stays open."""
    before = everything(disk)
    report = verify_directory(
        disk, DIRECTORY.parent, in_use=in_use, unsynced_bytes_max=SizeBytes(200)
    )
    assert everything(disk) == before
    assert disk.open_paths() == []
    return report


def kinds(report: VerifyReport) -> list[FindingKind]:
    return [finding.kind for finding in report.findings]


def small(*, indexed: bool = True) -> FaultyFileSystem:
    """Return a disk with one sealed and one active segment."""
    disk = disk_with_log(indexed=indexed)
    put_segment(disk, len(BYTES), [[record(6), record(7)]], indexed=indexed)
    return disk


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("in_use", [True, False])
def test_a_healthy_directory_has_no_findings(indexed: bool, in_use: bool) -> None:
    """Everything is counted; a Java broker's directory is as healthy as ours."""
    report = check(small(indexed=indexed), in_use=in_use)
    seen = indexed or not in_use
    assert report == VerifyReport(
        1, 2, SizeBytes(len(BYTES) + 60 * seen), 5 + 2 * seen, ()
    )


@pytest.mark.slow
def test_every_flipped_bit_of_a_segment_is_found(rng: random.Random) -> None:
    """With an index not one bit escapes, and the damage named covers the bit."""
    disk = small()
    for name, base in [(META, 0), (ACTIVE, len(BYTES))]:
        for bit in quarter(range(disk.size_of(DIRECTORY / name) * 8), rng):
            damaged = disk.snapshot()
            damaged.flip_bit(DIRECTORY / name, bit)
            (found,) = check(damaged).findings
            assert found.kind is FindingKind.DAMAGE
            assert found.path.name == name
            assert found.offset is not None
            assert found.next_good_offset is not None
            assert found.offset <= base + bit // 8 < found.next_good_offset


@pytest.mark.slow
def test_every_flipped_bit_of_an_index_is_found(rng: random.Random) -> None:
    """The index is reported, the log is not."""
    disk = small()
    for bit in quarter(range(disk.size_of(DIRECTORY / SPANS) * 8), rng):
        damaged = disk.snapshot()
        damaged.flip_bit(DIRECTORY / SPANS, bit)
        (found,) = check(damaged).findings
        assert (found.kind, found.path.name) == (FindingKind.INDEX, SPANS)


@pytest.mark.slow
def test_without_an_index_every_bit_that_a_checksum_covers_is_found(
    rng: random.Random,
) -> None:
    """Only ids and flags, which MetaQ's format leaves uncovered, escape."""
    disk = small(indexed=False)
    for bit in quarter(range(len(BYTES) * 8), rng):
        damaged = disk.snapshot()
        damaged.flip_bit(DIRECTORY / META, bit)
        findings = check(damaged).findings
        assert (not findings) is (bit // 8 in UNCOVERED), bit
        assert all(found.kind is FindingKind.DAMAGE for found in findings)


def test_a_torn_tail_is_told_from_damage() -> None:
    """Half a record at the end is a torn tail; with a record far later, it is not."""
    disk = small()
    put_file(disk, ACTIVE, record(8) + b"torn")
    report = check(disk)
    assert kinds(report) == [FindingKind.TORN_TAIL]
    assert report.findings[0].offset == len(BYTES) + 90
    assert "4 bytes will be cut" in report.findings[0].detail
    put_file(disk, ACTIVE, b"".join(record(number) for number in range(9, 30)))
    assert kinds(check(disk)) == [FindingKind.DAMAGE]


def test_in_use_the_bytes_behind_the_index_are_not_looked_at() -> None:
    """They are being written, and so may the last entry of the index be."""
    disk = small()
    put_file(disk, ACTIVE, record(8)[:30])
    put_file(disk, f"{len(BYTES):020d}.spans", b"half an entry")
    report = check(disk, in_use=True)
    assert report.findings == ()
    assert report.record_count == 7
    disk.flip_bit(DIRECTORY / ACTIVE, 8 * 25)
    assert kinds(check(disk, in_use=True)) == [FindingKind.DAMAGE]


def test_a_segment_that_goes_away_meanwhile_is_skipped() -> None:
    """Retention works in a directory that is in use; elsewhere it is an error."""
    disk = small()

    def remove(operation: Operation) -> None:
        if operation.name == "open" and operation.path.name == META:
            disk.on_call(None)
            disk.unlink(DIRECTORY / META)

    def run(*, in_use: bool) -> VerifyReport:
        disk.on_call(remove)
        return verify_directory(
            disk, DIRECTORY, in_use=in_use, unsynced_bytes_max=SizeBytes(200)
        )

    assert run(in_use=True).record_count == 2
    put_file(disk, META, BYTES)
    with pytest.raises(DiskError, match="ENOENT"):
        run(in_use=False)
    assert disk.open_paths() == []


def test_a_read_that_the_disk_refuses_is_a_finding() -> None:
    """The rest is checked all the same; other refusals are errors, with no leak."""
    disk = small()
    size = SizeBytes(200)
    calls = disk.calls
    verify_directory(disk, DIRECTORY.parent, in_use=False, unsynced_bytes_max=size)
    for number in range(calls, disk.calls):
        operation = disk.log[number]
        is_checked = operation.name == "read" or (
            operation.name == "open" and operation.path.suffix in {".meta", ".spans"}
        )
        trial = small()
        trial.fail_at(number + 1, errno.EIO)
        refused = None
        try:
            report = verify_directory(
                trial, DIRECTORY.parent, in_use=False, unsynced_bytes_max=size
            )
        except DiskError as error:
            refused = error.operation
        assert trial.open_paths() == []
        if is_checked and refused is None:
            assert "EIO" in str(report.findings)
            assert {found.path for found in report.findings} == {operation.path}
            is_index = operation.path.suffix == ".spans"
            if is_index:
                assert kinds(report) == [FindingKind.INDEX]
                assert report.segment_count == 2
        else:
            assert not is_checked


def test_names_and_holes_are_findings() -> None:
    """A misnamed segment, a missing one, a truncated one, an index too many."""
    disk = small()
    put_file(disk, "copy.meta", b"")
    assert kinds(check(disk)) == [FindingKind.NAME]
    disk.unlink(DIRECTORY / "copy.meta")
    file = disk.open_append(DIRECTORY / META, create=False)
    file.truncate(SizeBytes(100))
    file.close()
    report = check(disk)
    (found,) = report.findings
    assert found.kind is FindingKind.DAMAGE
    assert (found.offset, found.next_good_offset) == (60, len(BYTES))
    missing = small()
    missing.unlink(DIRECTORY / ACTIVE)
    assert "is missing" in str(check(missing).findings[0])


@pytest.mark.slow
@pytest.mark.parametrize("in_use", [True, False])
def test_an_active_segment_that_is_shorter_than_its_index_is_named_as_at_a_start(
    in_use: bool,
) -> None:
    """At every length: the check ends, with the ranges at which a start stops the log.

    Inside a span, at the end of one, and with nothing left.
    """
    for size in range(len(BYTES)):
        disk = disk_with_log()
        file = disk.open_append(DIRECTORY / META, create=False)
        file.truncate(SizeBytes(size))
        file.close()
        report = check(disk, in_use=in_use)
        assert set(kinds(report)) == {FindingKind.DAMAGE}
        assert f"got {size}" in str(report.findings[-1])
        stopped = recover(disk.snapshot())
        assert [
            (found.path, found.offset, found.next_good_offset, found.detail)
            for found in report.findings
        ] == [
            (each.path, each.offset, each.next_good_offset, each.detail)
            for each in stopped.damage
        ]


def test_an_entry_that_counts_wrongly_is_a_finding() -> None:
    """The index is held against the records, not only against their bytes."""
    disk = small()
    index = read_index(disk, DIRECTORY / META, Offset(0))
    assert index is not None
    first, *rest = index.spans
    wrong = first._replace(record_count=first.record_count + 1)
    write_index(
        disk,
        DIRECTORY / META,
        type(index)(index.base_offset, index.last_id_before, (wrong, *rest)),
    )
    (found,) = check(disk).findings
    assert found.kind is FindingKind.INDEX
    assert "record count is wrong" in str(found)


def test_bytes_that_were_never_records_are_damage_though_covered() -> None:
    """The span has the right checksum of the wrong bytes."""
    disk = disk_with_directory()
    put_segment(disk, 0, [[record(1), b"no record at all"], [record(2, 80)]])
    (found,) = check(disk).findings
    assert found.kind is FindingKind.DAMAGE
    assert (found.offset, found.next_good_offset) == (30, 146)


def test_a_partition_directory_can_be_checked_alone() -> None:
    """Naming the partition checks just that; strangers beside it are ignored."""
    disk = small()
    disk.make_directory(DIRECTORY.parent / "lost+found")
    disk.make_directory(DIRECTORY.parent / "not-a-log")
    report = verify_directory(
        disk, DIRECTORY, in_use=False, unsynced_bytes_max=SizeBytes(200)
    )
    assert (report.log_count, report.record_count) == (1, 7)
    assert check(disk) == report


def test_progress_is_told_as_the_work_goes_on() -> None:
    """In parts of a bounded size."""
    disk = disk_with_directory()
    large = record(1, PART_BYTES // 3)
    put_segment(disk, 0, [[large]] * 4)
    put_segment(disk, 4 * len(large), [[record(2)]])
    seen: list[int] = []
    verify_directory(
        disk,
        DIRECTORY.parent,
        in_use=False,
        unsynced_bytes_max=SizeBytes(200),
        on_progress=seen.append,
    )
    ends = [3 * len(large), 4 * len(large), 4 * len(large) + 30]
    assert seen == [*ends, ends[-1]]
