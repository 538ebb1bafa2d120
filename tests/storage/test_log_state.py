"""Requests that a log accepts in each of its states, and its statistics."""

import errno
import itertools
from pathlib import Path

import pytest

from metaq.errors import (
    ClosedError,
    CorruptRecordError,
    LogDirOfflineError,
    LogOfflineError,
    MayBeStoredError,
    StorageError,
)
from metaq.model import Offset, SizeBytes
from metaq.storage.log_state import TRANSITIONS, LogEvent, LogState, LogWaiters
from metaq.storage.segment import Damage
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import Ticket
from tests.storage.offline import offline
from tests.storage.support import LOG, OTHER, RECORD, filled, log_of, opened, put


def test_a_stopped_log_refuses_puts_and_serves_what_is_not_damaged(
    fs: FaultyFileSystem,
) -> None:
    """Gets around the damage work; a get inside learns the next good offset."""
    bench, log = filled(fs)
    path = log.segments.first.path
    in_flight = put(bench, log)
    log.on_damage(Damage(path, Offset(512), Offset(1024), "checksum mismatch"))
    log.on_damage(Damage(path, Offset(100), Offset(200), "checksum mismatch"))
    log.on_damage(Damage(path, Offset(512), Offset(1024), "checksum mismatch"))
    assert log.state is LogState.STOPPED
    assert [damage.offset for damage in log.damage] == [100, 512]
    with pytest.raises(LogOfflineError, match=r"offset=100 next_good_offset=200"):
        put(bench, log)
    assert log.statistics().refused_count == 1
    bench.run()
    assert in_flight.is_stored
    assert log.read(Offset(0), 4096).size_bytes == 100
    assert log.read(Offset(200), 4096).size_bytes == 312
    assert log.read(Offset(1024), 4096).size_bytes == 1024
    with pytest.raises(CorruptRecordError) as caught:
        log.read(Offset(1000), 10)
    assert caught.value.next_good_offset == 1024
    assert len(log.statistics().damage) == 2
    bench.close()


def test_an_offline_log_refuses_everything(fs: FaultyFileSystem) -> None:
    """After a disk error nothing in the directory is believed."""
    bench, log = filled(fs)
    ticket = put(bench, log)
    fs.fail_at(fs.calls + 1, errno.EIO)
    bench.run()
    assert isinstance(ticket.error, MayBeStoredError)
    assert log.state is LogState.OFFLINE
    with pytest.raises(LogDirOfflineError):
        put(bench, log)
    with pytest.raises(LogDirOfflineError):
        log.read(Offset(0), 10)
    assert log.nearest_offset(Offset(0)) == 0
    bench.close()
    assert fs.open_paths() == []


def test_a_closed_log_refuses_everything(fs: FaultyFileSystem) -> None:
    """Closing answers what is in flight first."""
    bench, log = filled(fs)
    ticket = put(bench, log)
    bench.manager.close(lambda: None)
    assert log.state is LogState.CLOSING
    with pytest.raises(ClosedError):
        put(bench, log)
    log.read(Offset(0), 10).release()
    bench.run()
    assert ticket.is_stored
    with pytest.raises(ClosedError):
        log.read(Offset(0), 10)
    assert log.state.value == "closed"


def test_every_state_answers_every_event_or_calls_it_a_bug() -> None:
    """The table is closed: targets are states, and CLOSED is the end."""
    for state, event in itertools.product(LogState, LogEvent):
        target = TRANSITIONS.get((state, event))
        if state is LogState.CLOSED:
            assert target is None
        if event is LogEvent.CLOSED:
            assert (target is not None) == (state is LogState.CLOSING)


def test_a_late_report_changes_nothing_in_an_offline_log(fs: FaultyFileSystem) -> None:
    """Reports posted before the disk error count, later ones do not."""
    bench = opened(fs)
    log, other = log_of(bench), log_of(bench, OTHER)
    one, two = put(bench, log), put(bench, other)
    fs.fail_at(fs.calls + 40, errno.EIO)
    for _ in range(40):
        put(bench, log)
        put(bench, other)
        bench.run()
        if offline(bench.manager):
            break
    assert one.is_stored
    assert two.is_stored
    assert log.state is other.state is LogState.OFFLINE
    assert log.statistics().in_flight_count == 0
    bench.close()


def test_statistics_are_one_value(fs: FaultyFileSystem) -> None:
    """Everything about a log in one snapshot."""
    bench, log = filled(fs)
    put(bench, log)
    shown = log.statistics()
    assert shown.log_id == LOG
    assert shown.is_group_commit
    assert (shown.log_start, shown.high_watermark, shown.log_end) == (0, 4096, 4096)
    assert shown.next_offset == 4096 + RECORD
    assert shown.size_bytes == SizeBytes(4096)
    assert shown.segment_count == 5
    assert shown.record_count == 8
    assert shown.in_flight_count == 1
    assert shown.sync_count == 4
    assert shown.damage == ()
    bench.close()


def test_a_refusal_queues_nothing(fs: FaultyFileSystem) -> None:
    """After an append raised, its ticket is never called and no offset is taken."""
    bench, log = filled(fs, 1)
    log.on_damage(Damage(Path("x"), Offset(0), None, "rot"))
    ticket = Ticket()
    with pytest.raises(StorageError):
        bench.append(log, [b"x"], ticket)
    bench.run()
    assert not ticket.is_answered
    assert log.next_offset == 1024
    bench.close()


def test_a_waiter_is_forgotten_when_it_is_woken_or_cancelled() -> None:
    """Thousands come and go while a log stands still."""
    waiters, called = LogWaiters(), []
    woken, cancelled, kept = (
        waiters.add(Offset(n), lambda n=n: called.append(n)) for n in range(3)
    )
    woken.wake()
    cancelled.cancel()
    assert len(waiters) == 1
    for _ in range(2):
        woken.wake()
        cancelled.wake()
        kept.cancel()
    assert (called, len(waiters)) == ([0], 0)
