"""The power goes at every sync, with any subset of what was not synced kept."""

import errno
import random

import pytest

from metaq.errors import StorageError
from tests.rigs.fs import (
    FaultyFileSystem,
    crash_points,
    keep_all,
    keep_none,
    keep_random,
)
from tests.sampling import failures, quarter
from tests.storage.support import LOG, OTHER, Ledger, Promise, check_kept, opened

SEGMENT = 120
SAMPLES = 12
"""Random outcomes tried at each point in which bytes may be torn anywhere."""
OUTCOMES_MAX = 64
"""Points with at most so many outcomes in whole pages are tried exhaustively."""


def live(fs: FaultyFileSystem, ledger: Ledger) -> None:
    """Appends to two logs over rolls, a clean stop, a second start, a kill."""
    bench = opened(fs, is_late=True, segment_bytes_max=SEGMENT)
    ledger.append(bench, LOG, 10)
    bench.run()
    ledger.append(bench, LOG, 10, 20)
    ledger.append(bench, OTHER, 5)
    ledger.append(bench, LOG, 60)
    bench.run()
    ledger.append(bench, OTHER, 7000)
    bench.run()
    bench.close()
    bench = opened(fs, is_late=True, segment_bytes_max=SEGMENT)
    ledger.append(bench, LOG, 9000)
    ledger.append(bench, OTHER, 1)
    bench.run()


def outcomes_of(disk: FaultyFileSystem, number: int) -> list[FaultyFileSystem]:
    """Return what a power cut leaves: everything possible when that is little."""
    found = []
    for outcome in disk.crashes(torn=False):
        found.append(outcome)
        if len(found) > OUTCOMES_MAX:
            found = [disk.crash(keep_none), disk.crash(keep_all)]
            break
    return found + [disk.crash(keep_random(number * 1000 + i)) for i in range(SAMPLES)]


def points_of(ledger: Ledger) -> list[tuple[FaultyFileSystem, tuple[Promise, ...]]]:
    fs = FaultyFileSystem()
    points = crash_points(fs, lambda: live(fs, ledger), ledger.stored)
    return [(point.disk, point.progress) for point in points]


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_power_cut_at_any_sync(
    seed: int, rng: random.Random
) -> None:
    """Whatever subset of unsynced pages, sizes and names the disk kept: every
    acknowledged record is there byte for byte, and recovery is repeatable.
    """
    ledger = Ledger()
    points = points_of(ledger)
    assert len(ledger.stored()) == 7
    assert {len(stored) for _disk, stored in points} >= {0, 1, 4, 5, 7}
    for number, (disk, stored) in quarter([*enumerate(points)], rng):
        for outcome in outcomes_of(disk, seed + number):
            check_kept(outcome, stored, segment_bytes_max=SEGMENT)


@pytest.mark.slow
def test_recovery_may_be_cut_too(seed: int, rng: random.Random) -> None:
    """A power cut at every sync of the recovery after a power cut loses nothing."""
    points = points_of(Ledger())
    for number, (disk, stored) in quarter([*enumerate(points)], rng):
        broken = disk.crash(keep_random(seed + number))

        def recover(broken: FaultyFileSystem = broken) -> None:
            opened(broken, is_late=True, segment_bytes_max=SEGMENT).close()

        for again in crash_points(broken, recover, lambda: None):
            outcome = again.disk.crash(keep_random(seed + number))
            check_kept(outcome, stored, segment_bytes_max=SEGMENT)


@pytest.mark.slow
def test_a_disk_that_fails_during_recovery_loses_nothing(seed: int) -> None:
    """Every call of the recovery after a power cut fails once: the start fails or
    goes on, and the next one finds every acknowledged record.
    """
    points = points_of(Ledger())
    for number, (disk, stored) in enumerate(points[:: len(points) // 4 or 1]):
        broken = disk.crash(keep_random(seed + number))
        trial = broken.snapshot()
        opened(trial, is_late=True, segment_bytes_max=SEGMENT).close()
        for call, error in failures(trial.calls, (errno.EIO,)):
            fs = broken.snapshot()
            fs.fail_at(call, error)
            try:
                opened(fs, is_late=True, segment_bytes_max=SEGMENT).close()
            except StorageError:
                assert fs.open_paths() == []
            check_kept(fs.crash(keep_random(call)), stored, segment_bytes_max=SEGMENT)
