"""Deleting and archiving one segment: whole, or as before, with any failure."""

import errno
import io
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from metaq.config.settings import DeleteKind, DeletePolicy
from metaq.errors import CorruptRecordError, StorageError
from metaq.fs import SystemFileSystem
from metaq.model import Offset, SizeBytes
from metaq.storage.retention_run import facts_of, remove_segment
from metaq.storage.segment import Segment
from tests.rigs.fs import FaultyFileSystem, crash_points, keep_all, keep_none
from tests.storage.logs import (
    DIRECTORY,
    content,
    everything,
    put_file,
    put_segment,
    record,
)
from tests.storage.test_recovery import BYTES, META, SPANS, disk_with_log, recover

DELETE = DeletePolicy(DeleteKind.DELETE)
ARCHIVE = DeletePolicy(DeleteKind.ARCHIVE)
ZIP = DeletePolicy(DeleteKind.ARCHIVE, is_compressed=True)
POLICIES = [DELETE, ARCHIVE, ZIP]
LEFT = {ARCHIVE: f"{META}.arc", ZIP: f"{META}.zip"}
SEALED = Segment(DIRECTORY / META, Offset(0), SizeBytes(len(BYTES)))


def disk_with_two_segments(*, indexed: bool = True) -> FaultyFileSystem:
    disk = disk_with_log(indexed=indexed)
    put_segment(disk, len(BYTES), [[record(6)]], last_id_before=5)
    return disk


def unzipped(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def archived(disk: FaultyFileSystem, policy: DeletePolicy) -> bytes | None:
    """Return the bytes that the archive holds, None where there is none."""
    if policy not in LEFT or LEFT[policy] not in disk.list_directory(DIRECTORY):
        return None
    data = content(disk, LEFT[policy])
    return unzipped(data)[META] if policy is ZIP else data


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("indexed", [True, False])
def test_a_removed_segment_is_gone_with_its_index(policy, indexed: bool) -> None:
    """Only the archive remains, with all bytes; the log starts later and is whole."""
    disk = disk_with_two_segments(indexed=indexed)
    remove_segment(disk, SEALED, policy)
    names = set(disk.list_directory(DIRECTORY))
    assert META not in names
    assert SPANS not in names
    if policy in LEFT:
        assert archived(disk, policy) == BYTES
    assert disk.open_paths() == []
    result = recover(disk.crash(keep_none))
    assert [s.base_offset for s in result.segments] == [len(BYTES)]
    assert (result.damage, result.last_id) == ((), 6)


def test_a_zip_is_readable_everywhere(tmp_path: Path) -> None:
    """One entry named like the segment, dated by the file, checked by its reader."""
    path = tmp_path / META
    path.write_bytes(BYTES * 9000)
    segment = Segment(path, Offset(0), SizeBytes(len(BYTES) * 9000))
    remove_segment(SystemFileSystem(), segment, ZIP)
    (archive,) = tmp_path.iterdir()
    with zipfile.ZipFile(archive) as opened:
        (entry,) = opened.infolist()
    assert entry.filename == META
    assert entry.compress_size < entry.file_size == len(BYTES) * 9000
    assert entry.date_time > (2000, 1, 1, 0, 0, 0)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_any_call_may_fail_once(policy, error: int) -> None:
    """The source is whole until its archive is; a second try finishes the work."""
    disk = disk_with_two_segments()
    calls = disk.calls
    remove_segment(disk, SEALED, policy)
    for number in range(1, disk.calls - calls + 1):
        trial = disk_with_two_segments()
        trial.fail_at(trial.calls + number, error)
        try:
            remove_segment(trial, SEALED, policy)
        except StorageError:
            assert trial.open_paths() == []
        is_there = META in trial.list_directory(DIRECTORY)
        if is_there:
            assert content(trial, META) == BYTES
        elif policy is not DELETE:
            assert archived(trial, policy) == BYTES
        result = recover(trial)
        assert result.damage == ()
        assert (result.segments[0].base_offset == 0) == is_there
        if is_there:
            remove_segment(trial, SEALED, policy)
        assert META not in trial.list_directory(DIRECTORY)
        assert SPANS not in trial.list_directory(DIRECTORY)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_after_a_power_cut_it_is_fully_there_or_fully_gone(policy) -> None:
    """At every sync: the log has no gap, and the records are in it or archived."""
    disk = disk_with_two_segments()
    points = crash_points(
        disk, lambda: remove_segment(disk, SEALED, policy), lambda: None
    )
    for point in points:
        for choose in (keep_none, keep_all):
            found = point.disk.crash(choose)
            result = recover(found)
            assert result.damage == ()
            if result.segments[0].base_offset == 0:
                assert content(found, META) == BYTES
                remove_segment(found, SEALED, policy)
            elif policy is not DELETE:
                assert archived(found, policy) == BYTES
            names = found.list_directory(DIRECTORY)
            assert not any(name.endswith(".tmp") for name in names)
            assert SPANS not in names


def test_damage_is_not_archived_away() -> None:
    """A compressed copy would look whole; the source stays, nothing is left over."""
    disk = disk_with_two_segments()
    disk.flip_bit(SEALED.path, 8 * 90)
    put_file(disk, f"{META}.zip.tmp", b"of an earlier try")
    before = everything(disk)
    del before[f"{META}.zip.tmp"]
    with pytest.raises(CorruptRecordError, match="offset=60 next_good_offset=130"):
        remove_segment(disk, SEALED, ZIP)
    assert everything(disk) == before


def test_the_age_comes_from_a_whole_index_only() -> None:
    """An index that ends early knows too old a time; then the file's time counts."""
    disk = disk_with_log()
    disk.set_wall_ms(7_000)
    whole = facts_of(disk, SEALED)
    assert (whole.newest_append_ms, whole.mtime_ms, whole.record_count) == (1003, 0, 5)
    put_file(disk, META, record(6))
    longer = Segment(SEALED.path, Offset(0), SizeBytes(len(BYTES + record(6))))
    short = facts_of(disk, longer)
    assert (short.newest_append_ms, short.mtime_ms, short.record_count) == (
        None,
        7000,
        5,
    )
    disk.unlink(DIRECTORY / SPANS)
    assert facts_of(disk, SEALED) == replace(
        short, size_bytes=SEALED.size_bytes, record_count=0
    )
