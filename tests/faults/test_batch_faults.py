"""Every I/O call fails once, or stops half-way, while a producer sends what it must."""

import errno

import pytest

from metaq.errors import ClosedError, StorageError
from tests.rigs.fs import FaultyFileSystem, keep_random
from tests.rigs.storage import StorageBench, Ticket
from tests.sampling import failures
from tests.storage.support import log_of, opened
from tests.storage.test_partition_log_batches import payloads, send

SEGMENT = 120
BATCHES = 8
RECORDS = 3
STARTS_MAX = 4
"""One failure costs one restart; a start that fails costs one more."""


def open_again(fs: FaultyFileSystem) -> tuple[FaultyFileSystem, StorageBench]:
    """Start on what a kill leaves, or a reboot where a directory sync has failed."""
    for _ in range(STARTS_MAX):
        has_lost_names = any(
            call.name == "sync_directory" and call.error for call in fs.log
        )
        fs = fs.crash(keep_random(len(fs.log))) if has_lost_names else fs.snapshot()
        try:
            return fs, opened(fs, is_late=True, segment_bytes_max=SEGMENT)
        except StorageError:
            assert fs.open_paths() == []
    raise AssertionError("no start succeeded")


def store(bench: StorageBench, sequence: int) -> bool:
    """Send a batch once; return whether it is stored, the first time it came or now."""
    log = log_of(bench)
    known = log.producers.find("p", sequence, RECORDS, -1)
    if known is not None:
        repeat = Ticket()
        log.join(known, repeat)
        bench.run()
        return repeat.is_stored
    try:
        _batch, ticket = send(bench, sequence, RECORDS)
    except (StorageError, ClosedError):
        return False
    bench.run()
    return ticket.is_stored


def live(fs: FaultyFileSystem) -> tuple[FaultyFileSystem, int]:
    """Send every batch until it is stored; return the last disk, and the restarts."""
    restarts = 0
    try:
        bench = opened(fs, is_late=True, segment_bytes_max=SEGMENT)
    except StorageError:
        fs, bench = open_again(fs)
    for number in range(BATCHES):
        sequence = number * RECORDS
        # A lack of room passes by itself.
        while not (store(bench, sequence) or store(bench, sequence)):
            assert restarts < STARTS_MAX
            restarts += 1
            fs, bench = open_again(fs)
    bench.close()
    return fs, restarts


def calls_of() -> int:
    fs = FaultyFileSystem()
    live(fs)
    return fs.calls


@pytest.mark.slow
@pytest.mark.parametrize("taken", [None, 30], ids=lambda taken: f"taken={taken}")
def test_whichever_call_fails_every_record_is_stored_exactly_once(
    taken: int | None,
) -> None:
    """For every n: what a write left half done is neither kept nor counted twice."""
    restarts = 0
    errors = (errno.EIO, errno.ENOSPC, errno.EMFILE)
    for number, error in failures(calls_of(), errors):
        # By turns the kernel syncs for the loop, or nothing does.
        fs = FaultyFileSystem(has_syncs=number % 2 == 0)
        fs.fail_at(number, error, taken=taken)
        fs, count = live(fs)
        restarts += count
        _fs, bench = open_again(fs)
        log = log_of(bench)
        assert payloads(log) == list(range(BATCHES * RECORDS)), number
        assert not log.damage
        bench.close()
    assert restarts
