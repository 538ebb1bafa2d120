"""Retention carried out: from a run's job to the log start of a live log."""

import errno
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from metaq.config.settings import (
    BrokerConfig,
    DeleteKind,
    DeletePolicy,
    LimitsConfig,
    SystemConfig,
    TopicConfig,
)
from metaq.errors import LogDirLockedError, OffsetOutOfRangeError
from metaq.fs import AppendFile
from metaq.model import Millis, Offset, SizeBytes
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.retention_run import RetentionReport
from metaq.storage.segment import Damage
from metaq.testing.clock import ManualClock
from tests.rigs.fs import FaultyFileSystem, Operation
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.offline import offline
from tests.storage.support import DATA, LOG, OTHER, content_of, log_of

HOUR_S = 3600
SEGMENT = 100


def opened(
    fs: FaultyFileSystem, clock: ManualClock, policy: DeletePolicy, **limits: int
) -> StorageBench:
    settings = BrokerConfig(
        system=SystemConfig(data_path=str(DATA), segment_bytes_max=SEGMENT),
        limits=LimitsConfig(**{"free_bytes_min": 0, **limits}),
        topics={
            "test": TopicConfig(name="test", data_path=str(DATA), delete_policy=policy)
        },
    )
    bench = StorageBench(fs, settings, clock)
    bench.open()
    return bench


def fill(bench: StorageBench, log: PartitionLog, segments: int) -> None:
    for _ in range(segments):
        bench.append(log, [b"x" * 80], Ticket())
        bench.run()


def run(bench: StorageBench, *topics: str) -> RetentionReport:
    job = bench.manager.begin_retention(topics)
    assert job is not None
    report = job()
    bench.run()
    return report


def hours(count: int) -> DeletePolicy:
    return DeletePolicy(DeleteKind.DELETE, count * HOUR_S * 1000)


class WatchedDisk(FaultyFileSystem):
    """Tells when a zip is begun."""

    def __init__(self) -> None:
        super().__init__()
        self.on_zip: Callable[[], None] = lambda: None

    def open_append(
        self, path: Path, *, create: bool, is_synced: bool = True
    ) -> AppendFile:
        if create and path.name.endswith(".zip.tmp"):
            self.on_zip()
        return super().open_append(path, create=create, is_synced=is_synced)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_old_segments_go_and_the_active_one_stays(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """Log start, files and counts follow; a get below is out of range."""
    bench = opened(fs, clock, hours(10))
    log = log_of(bench)
    fill(bench, log, 3)
    clock.advance_s(8 * HOUR_S)
    fill(bench, log, 1)
    clock.advance_s(4 * HOUR_S)
    report = run(bench, "test")
    assert report == RetentionReport(3, report.size_bytes, (), None)
    assert report.size_bytes == 300
    assert log.log_start_offset == 300
    assert log.record_count == 1
    assert bench.manager.directories()[0].size_bytes == 100
    names = [n for n in fs.list_directory(DATA / "test-0") if n.endswith(".meta")]
    assert names == [f"{300:020d}.meta", f"{400:020d}.meta"]
    with pytest.raises(OffsetOutOfRangeError):
        log.read(Offset(0), 10)
    assert len(content_of(log)) == 100
    clock.advance_s(1000 * HOUR_S)
    assert run(bench, "test").segment_count == 1
    assert log.log_start_offset == log.high_watermark == 400
    fill(bench, log, 1)
    bench.close()


def test_a_topic_that_is_made_anew_ages_from_then_on(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """Its segments have the names and sizes of those that were deleted."""
    bench = opened(fs, clock, hours(10))
    fill(bench, log_of(bench), 3)
    assert run(bench, "test").segment_count == 0
    clock.advance_s(8 * HOUR_S)
    bench.manager.delete_topic("test", lambda error: None)
    bench.run()
    fill(bench, log_of(bench), 3)
    clock.advance_s(4 * HOUR_S)
    assert run(bench, "test").segment_count == 0
    clock.advance_s(8 * HOUR_S)
    assert run(bench, "test").segment_count == 3
    bench.close()


def test_what_goes_while_its_topic_is_deleted_is_counted_once(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """A run that was begun before ends after the log."""
    bench = opened(fs, clock, hours(10))
    fill(bench, log_of(bench), 3)
    clock.advance_s(12 * HOUR_S)
    job = bench.manager.begin_retention(["test"])
    assert job is not None
    reported: list[Exception | None] = []
    bench.manager.delete_topic("test", reported.append)
    bench.run()
    assert reported == []
    assert job().segment_count == 3
    bench.run()
    assert reported == [None]
    assert bench.manager.directories()[0].size_bytes == 0
    bench.close()


def test_only_the_topics_that_are_due_lose_segments_by_age(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """A run for another topic's schedule leaves this one alone."""
    bench = opened(fs, clock, hours(1))
    log = log_of(bench)
    fill(bench, log, 2)
    clock.advance_s(5 * HOUR_S)
    assert run(bench, "other").segment_count == 0
    assert run(bench).segment_count == 0
    assert run(bench, "other", "test").segment_count == 2
    bench.close()


@pytest.mark.parametrize(
    ("limit", "left"), [("log_bytes_max", 2), ("data_dir_bytes_max", 1)]
)
def test_segments_above_a_size_limit_go_without_a_schedule(
    fs: FaultyFileSystem, clock: ManualClock, limit: str, left: int
) -> None:
    """A run without topics keeps to the limits, the oldest segments first."""
    bench = opened(fs, clock, hours(1000), **{limit: 250})
    for _ in range(5):
        for log_id in (LOG, OTHER):
            if not bench.manager.is_over_size_limit:
                fill(bench, log_of(bench, log_id), 1)
                clock.advance_s(1)
    assert bench.manager.is_over_size_limit
    run(bench)
    assert not bench.manager.is_over_size_limit
    assert len(log_of(bench).segments) - 1 <= left
    bench.close()


def test_a_stopped_log_is_not_touched(fs: FaultyFileSystem, clock: ManualClock) -> None:
    """Evidence stays: nothing of a damaged log is deleted."""
    bench = opened(fs, clock, hours(1))
    log = log_of(bench)
    fill(bench, log, 2)
    log.on_damage(Damage(log.segments.first.path, Offset(0), None, "rot"))
    clock.advance_s(5 * HOUR_S)
    assert run(bench, "test").segment_count == 0
    bench.close()


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_log_that_is_stopped_meanwhile_keeps_the_rest(
    clock: ManualClock, is_compressed: bool
) -> None:
    """Damage that the scrub found during a run is left for an operator."""
    fs = WatchedDisk()
    fs.make_directory(DATA.parent)
    kind = DeleteKind.ARCHIVE if is_compressed else DeleteKind.DELETE
    policy = replace(hours(1), kind=kind, is_compressed=is_compressed)
    bench = opened(fs, clock, policy)
    log = log_of(bench)
    fill(bench, log, 3)
    clock.advance_s(5 * HOUR_S)
    second = log.segments.sealed[1].path
    damage = Damage(second, Offset(100), None, "rot")

    def stop(operation: Operation) -> None:
        # Behind the first segment; or, where a copy is made, in the middle of it.
        if operation.path.name.startswith(second.stem if is_compressed else "0" * 20):
            bench.manager.on_damage(LOG, damage)
            fs.on_call(None)

    job = bench.manager.begin_retention(["test"])
    assert job is not None
    fs.on_call(lambda each: stop(each) if each.name in {"write", "unlink"} else None)
    report = job()
    bench.run()
    assert report.segment_count == 1
    assert "was stopped, its segments stay" in report.failures[0]
    assert fs.exists(second)
    assert fs.exists(log.segments.sealed[-1].path)
    assert not [n for n in fs.list_directory(DATA / "test-0") if n.endswith(".tmp")]
    assert log.log_start_offset == 100
    bench.close()


def test_an_index_that_the_disk_cannot_read_costs_a_start_and_retention_nothing(
    fs: FaultyFileSystem, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The age of its segment is that of the file; the other segments do not notice."""
    bench = opened(fs, clock, hours(1))
    fill(bench, log_of(bench), 3)
    bench.close()
    lost = DATA / "test-0" / f"{100:020d}.spans"

    def refuse(operation: Operation) -> None:
        if operation.path == lost and operation.name == "read":
            raise OSError(errno.EIO, "bad sector")

    fs.on_call(refuse)
    bench = opened(fs, clock, hours(1))
    assert log_of(bench).state is LogState.OPEN
    assert log_of(bench).record_count == 2
    assert f"{lost} error=EIO" in caplog.text
    clock.advance_s(5 * HOUR_S)
    fs.set_wall_ms(clock.wall_ms())
    report = run(bench, "test")
    assert (report.segment_count, report.failures) == (3, ())
    bench.close()


def test_a_clock_that_jumped_deletes_nothing(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """Ten years ahead within a second: the report says why nothing went."""
    bench = opened(fs, clock, hours(1))
    fill(bench, log_of(bench), 2)
    run(bench, "test")
    clock.advance_s(1)
    clock.jump_wall_ms(10 * 365 * 24 * HOUR_S * 1000)
    report = run(bench, "test")
    assert report.segment_count == 0
    assert report.clock_fault is not None
    assert "not trusted" in report.clock_fault
    bench.close()


def test_a_restart_with_a_clock_far_ahead_deletes_nothing(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """The newest stored record says what time it was, also after a fresh roll."""
    bench = opened(fs, clock, hours(1))
    fill(bench, log_of(bench), 2)
    bench.close()
    late = ManualClock(Millis(clock.wall_ms() + 10 * 365 * 24 * HOUR_S * 1000))
    again = opened(fs, late, hours(1))
    assert log_of(again).segments.active.size_bytes == 0
    report = run(again, "test")
    assert report.segment_count == 0
    assert report.clock_fault is not None
    again.close()


def test_an_absence_is_no_reason_to_doubt_the_clock(
    fs: FaultyFileSystem, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that was down, stopped or suspended says so once, without an error."""
    caplog.set_level(logging.INFO)
    bench = opened(fs, clock, hours(10))
    fill(bench, log_of(bench), 2)
    bench.close()
    clock.advance_s(HOUR_S)
    again = opened(fs, clock, hours(10))
    for be_absent in (clock.advance_s, clock.suspend_s):
        be_absent(300)
        assert run(again, "test").clock_fault is None
    again.close()
    reported = [each for each in caplog.records if "retention" in each.getMessage()]
    assert [each.levelname for each in reported] == ["INFO"]
    assert "absent_s=3600" in reported[0].getMessage()


def test_a_suspended_machine_ages_its_segments(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """The clocks agree about the time that it slept: what became too old goes."""
    bench = opened(fs, clock, hours(1))
    fill(bench, log_of(bench), 2)
    assert run(bench, "test").segment_count == 0
    clock.suspend_s(2 * HOUR_S)
    report = run(bench, "test")
    assert (report.segment_count, report.clock_fault) == (2, None)
    bench.close()


def test_a_compressed_archive_replaces_its_segment(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """The segment's bytes are in the zip before the segment goes."""
    policy = replace(hours(1), kind=DeleteKind.ARCHIVE, is_compressed=True)
    bench = opened(fs, clock, policy)
    fill(bench, log_of(bench), 1)
    clock.advance_s(2 * HOUR_S)
    assert run(bench, "test").segment_count == 1
    names = fs.list_directory(DATA / "test-0")
    assert f"{0:020d}.meta.zip" in names
    assert f"{0:020d}.meta" not in names
    bench.close()


def test_runs_never_overlap(fs: FaultyFileSystem, clock: ManualClock) -> None:
    """A second run is refused until the first one's end has reached the loop."""
    bench = opened(fs, clock, hours(1))
    job = bench.manager.begin_retention(["test"])
    assert job is not None
    assert bench.manager.begin_retention(["test"]) is None
    job()
    assert bench.manager.begin_retention(["test"]) is None
    bench.run()
    again = bench.manager.begin_retention(["test"])
    assert again is not None
    again()
    bench.run()
    bench.close()


def test_closing_waits_for_a_run(fs: FaultyFileSystem, clock: ManualClock) -> None:
    """The run stops before its next segment; then the directory is given up."""
    bench = opened(fs, clock, hours(1))
    fill(bench, log_of(bench), 2)
    clock.advance_s(5 * HOUR_S)
    job = bench.manager.begin_retention(["test"])
    assert job is not None
    closed: list[bool] = []
    bench.manager.close(lambda: closed.append(True))
    bench.run()
    assert closed == []
    # No other process may have the directory while files in it come and go.
    with pytest.raises(LogDirLockedError):
        opened(fs, clock, hours(1))
    assert job().segment_count == 0
    bench.run()
    assert closed == [True]
    opened(fs, clock, hours(1)).close()
    assert bench.manager.begin_retention(["test"]) is None


def test_closing_does_not_wait_until_a_segment_is_compressed(
    clock: ManualClock,
) -> None:
    """That may take minutes: it is given up, and the segment stays as it was."""
    fs = WatchedDisk()
    fs.make_directory(DATA.parent)
    policy = replace(hours(1), kind=DeleteKind.ARCHIVE, is_compressed=True)
    bench = opened(fs, clock, policy)
    fill(bench, log_of(bench), 2)
    clock.advance_s(2 * HOUR_S)
    job = bench.manager.begin_retention(["test"])
    assert job is not None
    fs.on_zip = bench.close
    names = fs.list_directory(DATA / "test-0")
    assert job() == RetentionReport(0, SizeBytes(0), (), None)
    bench.run()
    assert fs.list_directory(DATA / "test-0") == names
    assert fs.open_paths() == []


@pytest.mark.parametrize("error", [errno.EPERM, errno.EACCES])
def test_a_segment_that_may_not_be_removed_stays_and_stops_nothing(
    fs: FaultyFileSystem, clock: ManualClock, error: int
) -> None:
    """A file that was protected against removal took its data directory offline."""
    bench = opened(fs, clock, hours(1))
    log = log_of(bench)
    fill(bench, log, 3)
    clock.advance_s(5 * HOUR_S)

    def forbid(operation: Operation) -> None:
        if operation.name == "unlink":
            raise OSError(error, "forbidden", str(operation.path))

    fs.on_call(forbid)
    report = run(bench, "test")
    assert (report.segment_count, len(report.failures)) == (0, 1)
    assert f"test-0/{0:020d}.meta" in report.failures[0]
    assert not offline(bench.manager)
    fill(bench, log, 1)
    assert len(content_of(log)) == 400
    fs.on_call(None)
    assert not run(bench, "test").failures
    assert log.log_start_offset == 300
    bench.close()


@pytest.mark.slow
def test_a_failed_removal_is_reported_and_loses_nothing(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """Whichever call of a run fails: what is in the log can be read, and a failed
    change of the directory takes the directory offline.
    """
    bench = opened(fs, clock, hours(1))
    fill(bench, log_of(bench), 3)
    bench.close()
    trial = fs.snapshot()
    counting = opened(trial, clock, hours(1))
    before = trial.calls
    clock.advance_s(5 * HOUR_S)
    run(counting, "test")
    calls = trial.calls
    counting.close()
    reported = 0
    for number in range(before + 1, calls + 1):
        disk, fresh = fs.snapshot(), ManualClock()
        bench = opened(disk, fresh, hours(1))
        fresh.advance_s(5 * HOUR_S)
        disk.fail_at(number, errno.EIO)
        report = run(bench, "test")
        log = log_of(bench)
        reported += bool(report.failures)
        if log.state is LogState.OPEN:
            assert len(content_of(log)) == log.size_bytes
        else:
            assert offline(bench.manager)
        bench.close()
        assert disk.open_paths() == []
        again = opened(disk.crash(), fresh, hours(1))
        assert not log_of(again).damage
        again.close()
    assert reported > 5
