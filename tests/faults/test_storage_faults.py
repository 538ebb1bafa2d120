"""Every I/O call of a life of appends, rolls and closes fails once."""

import errno
from contextlib import suppress

import pytest

from metaq.errors import StorageError
from metaq.model import LogId
from metaq.storage.log_state import LogState
from tests.rigs.fs import FaultyFileSystem, keep_all, keep_none, keep_random
from tests.sampling import failures
from tests.storage.offline import offline
from tests.storage.support import (
    LOG,
    OTHER,
    Ledger,
    check_kept,
    content_of,
    log_of,
    opened,
)

SEGMENT = 120
ERRORS = (errno.EIO, errno.ENOSPC, errno.EMFILE)


def new_disk(number: int = 0) -> FaultyFileSystem:
    """Return a disk; by turns the kernel syncs for the loop, or nothing does."""
    return FaultyFileSystem(has_syncs=number % 2 == 0)


def live_once(
    fs: FaultyFileSystem,
    ledger: Ledger,
    readable: dict[LogId, bytes] | None = None,
    **system: int,
) -> None:
    """One start with appends to two logs, in groups, over several rolls.

    What can be read before the end is put into `readable`.
    """
    bench = opened(fs, is_late=True, segment_bytes_max=SEGMENT, **system)
    for round_number in range(4):
        ledger.append(bench, LOG, 10, 20)
        ledger.append(bench, OTHER, 5)
        ledger.append(bench, LOG, 30)
        if round_number % 2:
            bench.run()
    ledger.append(bench, OTHER, 150)
    bench.run()
    for log_id, log in bench.manager.logs().items():
        if readable is not None and log.state is LogState.OPEN:
            with suppress(StorageError):
                readable[log_id] = content_of(log)
    bench.close()


def live(fs: FaultyFileSystem, ledger: Ledger) -> FaultyFileSystem:
    """Live twice; return the disk that the second life left.

    After a failed sync of a *directory* the second start is on the disk that a reboot
    finds: Linux ends the journal then, and takes nothing before a mount.
    """
    for _ in range(2):
        # A start may fail, with one sentence.
        with suppress(StorageError):
            live_once(fs, ledger)
        assert fs.open_paths() == []
        if any(call.name == "sync_directory" and call.error for call in fs.log):
            fs = fs.crash(keep_random(len(fs.log)))
    return fs


def fail_call(
    number: int, error: int, **system: int
) -> tuple[FaultyFileSystem, Ledger]:
    fs, ledger = new_disk(number), Ledger()
    fs.fail_at(number, error)
    return live(fs, ledger), ledger


def calls_of() -> int:
    fs = new_disk()
    live(fs, Ledger())
    return fs.calls


@pytest.mark.slow
def test_whichever_call_fails_what_was_acknowledged_is_kept() -> None:
    """For every n: after the n-th call failed every put was answered, and every put
    that was answered with success is there, after a restart and after a power cut.
    """
    failed = 0
    for number, error in failures(calls_of(), ERRORS):
        fs, ledger = fail_call(number, error)
        ledger.check_answered()
        failed += any(p.ticket.error for p in ledger.promises)
        for choose in (keep_none, keep_all, keep_random(number)):
            check_kept(fs.crash(choose), ledger.stored(), segment_bytes_max=SEGMENT)
        check_kept(fs.snapshot(), ledger.stored(), segment_bytes_max=SEGMENT)
    assert failed


@pytest.mark.slow
def test_interrupted_calls_are_invisible() -> None:
    """For every n: an interrupted n-th call changes nothing."""
    for number, error in failures(calls_of(), (errno.EINTR,)):
        fs, ledger = fail_call(number, error)
        assert len(ledger.stored()) == len(ledger.promises) == 26
        check_kept(fs.snapshot(), ledger.stored(), segment_bytes_max=SEGMENT)


def test_a_failed_sync_takes_the_directory_offline_for_good() -> None:
    """After one failed sync every log of the directory refuses everything."""
    fs, ledger = new_disk(), Ledger()
    bench = opened(fs)
    ledger.append(bench, LOG, 10)
    ledger.append(bench, OTHER, 10)
    bench.run()
    ledger.append(bench, LOG, 10)
    ledger.append(bench, OTHER, 10)
    fs.fail_at(fs.calls + 2, errno.EIO)
    bench.run()
    assert fs.log[fs.calls - 1].name == "sync", fs.log[-3:]
    assert [p.ticket.is_stored for p in ledger.promises] == [True, True, False, False]
    ledger.append(bench, LOG, 10)
    assert ledger.refused == 1
    assert [*offline(bench.manager)] == ["/data"]
    with pytest.raises(StorageError, match="offline until a restart"):
        log_of(bench, OTHER).read(log_of(bench, OTHER).log_start_offset, 10)
    bench.close()
    assert fs.open_paths() == []


@pytest.mark.slow
def test_in_threshold_mode_what_was_readable_is_kept() -> None:
    """For every n: every put is answered; what could be read survives a power cut; a
    put that was acknowledged survives a kill unless a sync failed.
    """
    mode = {"unflush_threshold": 3}
    trial = new_disk()
    live_once(trial, Ledger(), **mode)
    for number, error in failures(trial.calls, (errno.EIO, errno.ENOSPC)):
        fs, ledger = new_disk(number), Ledger()
        fs.fail_at(number, error)
        readable: dict[LogId, bytes] = {}
        try:
            live_once(fs, ledger, readable=readable, **mode)
        except StorageError:
            assert fs.open_paths() == []
        ledger.check_answered()
        bench = opened(
            fs.crash(keep_none), is_late=True, segment_bytes_max=SEGMENT, **mode
        )
        for log_id, data in readable.items():
            assert content_of(log_of(bench, log_id)).startswith(data)
        bench.close()
        if not any(call.name == "sync" and call.error for call in fs.log):
            check_kept(fs.snapshot(), ledger.stored(), segment_bytes_max=SEGMENT)
