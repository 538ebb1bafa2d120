"""Threshold mode: acknowledged first, synced after n records or an interval."""

import pytest

from metaq.errors import OffsetOutOfRangeError
from metaq.model import LogId, Offset
from metaq.storage.partition_log import PartitionLog
from metaq.testing.clock import ManualClock
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.support import DATA, LOG, config, content_of, log_of

RECORD = 21
PATH = DATA / "test-0" / "00000000000000000000.meta"


def opened(
    fs: FaultyFileSystem, threshold: int, **system: int
) -> tuple[StorageBench, PartitionLog, ManualClock]:
    clock = ManualClock()
    settings = config(unflush_threshold=threshold, **system)
    bench = StorageBench(fs, settings, clock)
    bench.open()
    return bench, log_of(bench), clock


def put(bench: StorageBench, log: PartitionLog) -> Ticket:
    ticket = Ticket()
    bench.append(log, [b"x"], ticket)
    bench.run()
    return ticket


@pytest.mark.parametrize(("threshold", "sync_at"), [(1, 2), (3, 4), (10, 11)])
def test_the_sync_comes_when_more_than_n_records_are_unsynced(
    threshold: int, sync_at: int
) -> None:
    """Threshold 3 syncs on the 4th record, threshold 1 on every 2nd."""
    fs = FaultyFileSystem()
    bench, log, _clock = opened(fs, threshold)
    for number in range(1, 3 * sync_at + 1):
        assert put(bench, log).is_stored
        synced = number // sync_at * sync_at * RECORD
        assert log.high_watermark == synced
        assert len(fs.synced_bytes(PATH)) == synced
    bench.close()


def test_an_acknowledged_record_is_not_readable_before_its_sync() -> None:
    """A consumer never reads what a power cut could take back."""
    bench, log, _clock = opened(FaultyFileSystem(), 5)
    assert put(bench, log).is_stored
    with pytest.raises(OffsetOutOfRangeError):
        log.read(Offset(0), 10)
    shown = log.statistics()
    assert not shown.is_group_commit
    assert (shown.high_watermark, shown.log_end) == (0, RECORD)
    bench.close()


def test_the_interval_syncs_what_the_threshold_left() -> None:
    """`tick` syncs once the last sync is an interval ago, and only when needed."""
    fs = FaultyFileSystem()
    bench, log, clock = opened(fs, 100, unflush_interval_ms=10_000)
    put(bench, log)
    clock.advance_s(9.9)
    bench.manager.tick(clock.monotonic_s())
    bench.run()
    assert log.high_watermark == 0
    clock.advance_s(0.1)
    bench.manager.tick(clock.monotonic_s())
    bench.manager.tick(clock.monotonic_s())
    assert sum(len(worker.queue) for worker in bench.workers) == 1
    bench.run()
    assert log.high_watermark == RECORD
    syncs = log.statistics().sync_count
    clock.advance_s(100)
    bench.manager.tick(clock.monotonic_s())
    bench.run()
    assert log.statistics().sync_count == syncs
    bench.close()


def test_a_put_after_the_interval_syncs_by_itself() -> None:
    """As in MetaQ: the age is looked at with every write, not only by the timer."""
    bench, log, clock = opened(FaultyFileSystem(), 100, unflush_interval_ms=10_000)
    put(bench, log)
    clock.advance_s(10.1)
    put(bench, log)
    assert log.high_watermark == 2 * RECORD
    bench.close()


@pytest.mark.parametrize("interval_ms", [0, -5])
def test_without_an_interval_every_write_syncs(interval_ms: int) -> None:
    """As in MetaQ: the last sync is always longer ago than no time."""
    bench, log, _clock = opened(
        FaultyFileSystem(), 100, unflush_interval_ms=interval_ms
    )
    for count in (1, 2, 3):
        put(bench, log)
        assert log.high_watermark == count * RECORD
    bench.close()


def test_a_reload_changes_the_interval_of_open_logs() -> None:
    """The mode of an open log does not change, its interval does."""
    bench, log, clock = opened(FaultyFileSystem(), 100, unflush_interval_ms=10**6)
    put(bench, log)
    clock.advance_s(1)
    bench.manager.tick(clock.monotonic_s())
    bench.run()
    assert log.high_watermark == 0
    bench.manager.apply_settings(config(unflush_threshold=0, unflush_interval_ms=1_000))
    clock.advance_s(1)
    bench.manager.tick(clock.monotonic_s())
    bench.run()
    assert log.high_watermark == RECORD
    assert not log.is_group_commit
    bench.close()


def test_a_roll_syncs_the_sealed_segment() -> None:
    """Sealed bytes are durable and readable in every mode."""
    bench, log, _clock = opened(FaultyFileSystem(), 100, segment_bytes_max=2 * RECORD)
    put(bench, log)
    assert log.high_watermark == 0
    put(bench, log)
    assert log.high_watermark == 2 * RECORD
    assert len(log.segments) == 2
    bench.close()


def test_closing_syncs_what_is_unsynced() -> None:
    """After an orderly stop every acknowledged record is on disk."""
    fs = FaultyFileSystem()
    bench, log, _clock = opened(fs, 100)
    put(bench, log)
    bench.close()
    assert len(fs.synced_bytes(PATH)) == RECORD
    assert log.high_watermark == RECORD


def test_without_room_acknowledged_records_stay() -> None:
    """A refused put is cut off; unsynced records before it are not."""
    fs = FaultyFileSystem()
    bench, log, _clock = opened(fs, 100)
    put(bench, log)
    fs.set_capacity(fs.size_of(PATH) + 100)
    ticket = Ticket()
    bench.append(log, [b"y" * 1000], ticket)
    bench.run()
    assert ticket.error is not None
    assert fs.size_of(PATH) == RECORD
    fs.set_capacity(1 << 30)
    put(bench, log)
    bench.close()
    again = StorageBench(fs, config())
    again.open()
    log = again.manager.logs()[LogId("test", 0)]
    assert len(content_of(log)) == 2 * RECORD
    assert log.log_id == LOG
    again.close()
