"""Logs that get their first append together are created together."""

import errno

import pytest

from metaq.model import LogId
from tests.rigs.fs import FaultyFileSystem, crash_points, keep_all, keep_none
from tests.storage.support import DATA, Ledger, check_kept, log_of, opened, put

COUNT = 12
NEW = [LogId("new", number) for number in range(COUNT)]


def test_logs_that_begin_together_share_syncs(fs: FaultyFileSystem) -> None:
    """One sync of the data directory, and one of each log's own."""
    bench = opened(fs)
    before = fs.calls
    tickets = [put(bench, log_of(bench, log_id)) for log_id in NEW]
    bench.run()
    assert all(ticket.is_stored for ticket in tickets)
    log = fs.log[before:]
    synced = [each.path for each in log if each.name == "sync_directory"]
    assert sorted(synced) == sorted([DATA, *(DATA / str(each) for each in NEW)])
    assert sum(each.name == "sync" for each in log) == COUNT
    bench.close()


@pytest.mark.slow
def test_a_power_cut_takes_no_first_put_that_was_acknowledged() -> None:
    """Whatever of the names and of the indexes the disk has kept."""
    fs, ledger = FaultyFileSystem(), Ledger()

    def begin() -> None:
        bench = opened(fs)
        for log_id in NEW[:3]:
            ledger.append(bench, log_id, 100)
        bench.run()
        ledger.append(bench, NEW[0], 100)
        bench.run()

    points = crash_points(fs, begin, ledger.stored)
    assert len(points[-1].progress) == 4
    for point in points:
        for choose in (keep_none, keep_all):
            check_kept(point.disk.crash(choose), point.progress)


def test_a_log_that_finds_no_descriptor_harms_no_other() -> None:
    """Its put is refused or stored, those beside it are stored; nothing stays open."""
    trial = FaultyFileSystem()
    bench = opened(trial)
    opening = trial.calls
    for log_id in NEW[:3]:
        put(bench, log_of(bench, log_id))
    bench.run()
    calls = trial.calls
    bench.close()
    for number in range(opening + 1, calls + 1):
        if trial.log[number - 1].name not in {"open", "create"}:
            continue
        fs = FaultyFileSystem()
        bench = opened(fs)
        fs.fail_at(number, errno.EMFILE)
        tickets = [put(bench, log_of(bench, log_id)) for log_id in NEW[:3]]
        bench.run()
        assert sum(ticket.is_stored for ticket in tickets) >= 2, trial.log[number - 1]
        again = [put(bench, log_of(bench, log_id)) for log_id in NEW[:3]]
        bench.run()
        assert all(ticket.is_stored for ticket in again), trial.log[number - 1]
        bench.close()
        assert not fs.open_paths()


def test_a_log_that_had_a_turn_does_not_wait_for_all_that_begin(
    fs: FaultyFileSystem,
) -> None:
    """They come after it in turn, though they were never served."""
    bench = opened(fs)
    old = log_of(bench, LogId("old", 0))
    put(bench, old)
    bench.run()
    news = [put(bench, log_of(bench, log_id)) for log_id in NEW]
    ticket = put(bench, old)
    bench.loop.run()  # ends the turn
    bench.workers[0].turn()
    bench.loop.run()
    assert ticket.is_stored
    assert not any(each.is_stored for each in news)
    bench.run()
    bench.close()


def test_a_new_log_is_no_barrier(fs: FaultyFileSystem) -> None:
    """Appends to other logs, before and after its first, are one group each."""
    bench = opened(fs)
    old = log_of(bench, LogId("old", 0))
    put(bench, old)
    bench.run()
    before = fs.calls
    for log_id in NEW:
        put(bench, old)
        put(bench, log_of(bench, log_id))
    bench.run()
    path = old.segments.active.path
    writes = [e for e in fs.log[before:] if e.path == path and e.name == "write"]
    assert len(writes) == 1
    bench.close()
