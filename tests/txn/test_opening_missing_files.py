"""Files of a journal that somebody removed, a checkpoint that is wrong, no space."""

import errno
import random
from contextlib import suppress
from pathlib import Path

import pytest

from metaq.errors import NoSpaceError, StorageError
from metaq.model import SizeBytes
from metaq.txn.opening import JournalOpening, journal_numbers
from metaq.txn.recovery import JournalDamagedError
from metaq.txn.side_files import (
    JAVA_OUTCOMES_FILE,
    OUTCOMES,
    SIDE_FILES,
    JournalPosition,
    encode_checkpoint,
)
from metaq.txn.state import HeuristicOutcome
from tests.rigs.fs import FaultyFileSystem, Operation, keep_all, keep_none, keep_random
from tests.sampling import quarter, sample
from tests.txn.support import JOURNAL, A, TransactionBench, opened
from tests.txn.test_redo_file_handover import java_start

XIDS = tuple(f"XID:1:0{n}::uq" for n in range(1, 7))


def prepare(bench: TransactionBench, key: str) -> None:
    bench.begin(key)
    bench.put(key, A, b"x" * 80)
    bench.prepare(key)
    bench.run()


def prepared_disk(*, checkpoint: bool = False) -> FaultyFileSystem:
    """Return a disk with prepared transactions in several redo files."""
    bench = opened(FaultyFileSystem(), file_bytes_max=200)
    for key in XIDS:
        prepare(bench, key)
    if checkpoint:
        bench.coordinator.checkpoint()
        bench.run()
    disk = bench.fs.crash(keep_all)
    assert len(journal_numbers(disk, JOURNAL)) > 2
    return disk


def contents(disk: FaultyFileSystem) -> dict[str, bytes]:
    """Return what each file of the journal holds."""
    names = [name for name in disk.list_directory(JOURNAL) if name != ".lock"]
    return {name: disk.read_file(JOURNAL / name, SizeBytes(1 << 20)) for name in names}


def check_damage(disk: FaultyFileSystem, text: str) -> None:
    """Assert that a start says so, each time, and changes nothing."""
    before = contents(disk)
    for _ in range(2):
        with pytest.raises(JournalDamagedError, match=text):
            opened(disk)
        assert contents(disk) == before


@pytest.mark.slow
def test_a_checkpoint_is_not_believed_over_redo_files(rng: random.Random) -> None:
    """Whichever bit of it is wrong: all that is prepared is restored, and a Java broker
    that comes next, which does believe it, finds all as well.
    """
    good = prepared_disk(checkpoint=True)
    path = JOURNAL / "checkpoint.1"
    size = len(good.read_file(path, SizeBytes(99)))
    for bit in sample(range(8 * size), 40, rng):
        disk = good.snapshot()
        disk.flip_bit(path, bit)
        for _ in range(2):
            bench = opened(disk)
            assert sorted(bench.coordinator.recover(None)) == sorted(XIDS)
            disk = bench.fs.crash(keep_all)
            assert sorted(java_start(disk).prepared) == sorted(XIDS)


@pytest.mark.parametrize("number", [7, 99_999, 2**31, 10**40])
def test_a_checkpoint_far_ahead_skips_nothing(number: int) -> None:
    """Neither at this start nor at the next ones."""
    disk = prepared_disk()
    data = encode_checkpoint(JournalPosition(number, 5))
    disk.write_atomically(JOURNAL / "checkpoint.1", data)
    for _ in range(3):
        bench = opened(disk)
        assert sorted(bench.coordinator.recover(None)) == sorted(XIDS)
        disk = bench.fs.crash(keep_all)


def test_a_redo_file_that_is_missing_beside_its_checksums_is_damage() -> None:
    """Whichever of several: it is named, and nothing is changed."""
    good = prepared_disk()
    for number in journal_numbers(good, JOURNAL):
        disk = good.snapshot()
        disk.unlink(JOURNAL / f"redo.{number}")
        check_damage(disk, rf"file={JOURNAL}/redo.{number} is missing")
        # As the page of transactions says.
        disk.unlink(JOURNAL / f"sums.{number}")
        assert opened(disk).coordinator.recover(None)


@pytest.mark.parametrize("name", [each.name for each in SIDE_FILES])
@pytest.mark.parametrize("is_clean", [False, True])
def test_a_file_of_ours_that_is_missing_is_damage(name: str, is_clean: bool) -> None:
    """After a kill and after a clean stop, until the checksums are moved away."""
    bench = opened(FaultyFileSystem())
    prepare(bench, XIDS[0])
    bench.decide(XIDS[0], HeuristicOutcome.COMMIT)
    bench.run()
    if is_clean:
        bench.close()
    disk = bench.fs.crash(keep_all)
    assert opened(disk.snapshot()).coordinator.recover(None) == [XIDS[0]]
    disk.unlink(JOURNAL / name)
    check_damage(disk, rf"file={JOURNAL}/{name} is missing")
    for number in journal_numbers(disk, JOURNAL):
        disk.unlink(JOURNAL / f"sums.{number}")
    left = [] if name == OUTCOMES.name else [XIDS[0]]
    assert opened(disk).coordinator.recover(None) == left


def test_a_journal_without_any_redo_file_is_damage() -> None:
    """Ours never has none; a directory that is empty is a new one."""
    disk = prepared_disk(checkpoint=True)
    for number in journal_numbers(disk, JOURNAL):
        for kind in ("redo", "sums"):
            disk.unlink(JOURNAL / f"{kind}.{number}")
    check_damage(disk, "expected a redo file, as it has outcomes, .*checkpoint")
    for name in [each.name for each in SIDE_FILES]:
        disk.unlink(JOURNAL / name)
    check_damage(disk, "expected a redo file, as it has checkpoint, got none")
    disk.unlink(JOURNAL / "checkpoint.1")
    assert opened(disk).coordinator.recover(None) == []


def write(disk: FaultyFileSystem, path: Path, data: bytes) -> None:
    file = disk.open_append(path, create=True)
    file.write(data)
    file.close()


def test_what_a_java_broker_removed_or_never_made_is_no_damage() -> None:
    """It was stopped, or it was killed and has left a redo file without checksums."""
    good = prepared_disk()
    first, *_, last = journal_numbers(good, JOURNAL)
    stopped, killed, java = good.snapshot(), good.snapshot(), good.snapshot()
    for disk in (stopped, killed):
        disk.unlink(JOURNAL / f"redo.{first}")
    stopped.set_wall_ms(1 << 42)
    write(stopped, JOURNAL / JAVA_OUTCOMES_FILE, b"\xac\xed\0\5")
    data = killed.read_file(JOURNAL / f"redo.{last}", SizeBytes(1 << 20))
    write(killed, JOURNAL / f"redo.{last + 1}", data)
    for name in java.list_directory(JOURNAL):
        if not name.startswith("redo."):
            java.unlink(JOURNAL / name)
    for disk in (stopped, killed, java):
        assert XIDS[-1] in opened(disk).coordinator.recover(None)


@pytest.mark.slow
def test_no_crash_is_called_damage(seed: int, rng: random.Random) -> None:
    """Of a first start, of files that begin and go, of a stop and of the next start."""
    fs = FaultyFileSystem()
    moments: list[FaultyFileSystem] = []

    def on_call(call: Operation) -> None:
        if call.name not in {"read", "stat", "list", "statvfs", "open"}:
            moments.append(fs.snapshot())

    fs.on_call(on_call)
    for key in XIDS[:2]:
        bench = opened(fs, file_bytes_max=100)
        for one in (XIDS[2], XIDS[3], key):
            prepare(bench, one)
        bench.coordinator.note_deletion("gone", lambda _error: None)
        bench.commit_together(XIDS[2], XIDS[3])
        bench.coordinator.checkpoint()
        bench.run()
        bench.close()
    fs.on_call(None)
    assert len(moments) > 100
    for number, disk in quarter([*enumerate(moments)], rng):
        for choose in (keep_all, keep_none, keep_random(seed + number)):
            bench = opened(disk.crash(choose))
            bench.kill()
            opened(bench.fs)


# -- no space at the start ------------------------------------------------------------


def open_twice(disk: FaultyFileSystem, *, is_full: bool) -> bool:
    """Open a journal, once more where there was no space; return whether that was so.

    Raises:
        StorageError: another error.
    """
    bench = TransactionBench(disk)
    bench.logs.open()
    opening = JournalOpening(disk, bench.journal, bench.logs.manager)
    before = contents(disk)
    had_none = False
    try:
        try:
            found = opening.run()
        except NoSpaceError:
            had_none = True
            assert not is_full or before == contents(disk)
            disk.set_capacity(1 << 40)
            found = opening.run()
        assert {each.replayed.key for each in found.transactions} == {*XIDS}
        assert len(journal_numbers(disk, JOURNAL)) == 1
    finally:
        bench.kill()
    return had_none


@pytest.mark.slow
def test_an_opening_without_space_is_tried_again() -> None:
    """However much is missing: what was prepared is there, in the end in one file."""
    good = prepared_disk()
    size = sum(map(len, contents(good).values()))
    used = TransactionBench(good.snapshot()).fs
    free = used.free_bytes(JOURNAL)
    refused = []
    for spare in range(0, 3 * size, size // 7):
        disk = good.snapshot()
        disk.set_capacity((1 << 40) - free + spare)
        refused.append(open_twice(disk, is_full=True))
        assert sorted(opened(disk).coordinator.recover(None)) == sorted(XIDS)
    assert (refused[0], refused[-1]) == (True, False)


@pytest.mark.slow
def test_whichever_call_finds_no_space_nothing_is_lost(seed: int) -> None:
    """Also after a power cut just then."""
    good = prepared_disk(checkpoint=True)
    trial = good.snapshot()
    open_twice(trial, is_full=False)
    refused = 0
    for call in range(1, trial.calls + 1):
        disk = good.snapshot()
        disk.fail_at(call, errno.ENOSPC)
        with suppress(StorageError):
            refused += open_twice(disk, is_full=False)
        for choose in (keep_all, keep_random(seed + call)):
            again = opened(disk.crash(choose))
            assert sorted(again.coordinator.recover(None)) == sorted(XIDS)
    assert refused


@pytest.mark.slow
def test_a_first_opening_that_was_tried_again_closes_as_others_do() -> None:
    """Nothing writes to the files of the earlier try."""
    for spare in range(0, 200, 8):
        disk = FaultyFileSystem()
        bench = TransactionBench(disk)
        bench.logs.open()
        opening = JournalOpening(disk, bench.journal, bench.logs.manager)
        disk.set_capacity((1 << 40) - disk.free_bytes(JOURNAL.parent) + spare)
        with pytest.raises(NoSpaceError):
            opening.run()
        disk.set_capacity(1 << 40)
        bench.go_on(opening.run())
        prepare(bench, XIDS[0])
        bench.close()
        assert bench.coordinator.figures().offline_cause is None, spare
