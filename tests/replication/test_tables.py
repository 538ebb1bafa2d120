"""Numbers and epochs of a replica's logs: on disk before any byte that needs them."""

import asyncio
import errno
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from metaq.config.settings import BrokerConfig, LimitsConfig, SystemConfig, TopicConfig
from metaq.errors import LogDirOfflineError, StorageError
from metaq.fs.frame_file import read_frames
from metaq.model import LogId, Offset
from metaq.replication.epoch_journal import (
    EPOCHS_FILE,
    MAGIC,
    EpochBegun,
    decode_entries,
)
from metaq.replication.epochs import Epoch, EpochStart, EpochTable
from metaq.replication.tables import COMPACT_BYTES, EpochTables
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from tests.rigs.fs import FaultyFileSystem, crash_points, keep_random
from tests.rigs.storage import StorageBench
from tests.storage.offline import offline
from tests.storage.support import put

T = TypeVar("T")

ONE, TWO = Path("/one"), Path("/two")
HERE, THERE = LogId("here", 0), LogId("there", 0)
E1, E2, E3 = Epoch(1, "a"), Epoch(2, "b"), Epoch(3, "c")
SAMPLES = 4


def disk() -> FaultyFileSystem:
    return FaultyFileSystem(has_syncs=False)


def config() -> BrokerConfig:
    return BrokerConfig(
        system=SystemConfig(data_path=str(ONE)),
        limits=LimitsConfig(free_bytes_min=0),
        topics={"there": TopicConfig(name="there", data_path=str(TWO))},
    )


class Rig:
    """The logs of a replica in two data directories, and their tables."""

    def __init__(self, fs: FaultyFileSystem) -> None:
        self.fs = fs
        self.next_numbers = iter(range(1, 10_000))
        draw = lambda: next(self.next_numbers)  # noqa: E731
        self.tables = EpochTables(fs, (ONE, TWO), draw)
        self.bench = StorageBench(fs, config())
        self.bench.manager.open(
            numbers=self.tables.numbers,
            starts=self.tables.starts,
            buried=self.tables.buried,
        )
        self.tables.attach(self.bench.manager)
        self.bench.manager.assign_number = lambda log_id, directory, start: (
            self.tables.begin_log(log_id, directory, start, E1)
        )
        self.bench.manager.on_numbered = PartitionLog.lead

    def log(self, log_id: LogId = HERE) -> PartitionLog:
        settings = self.bench.config.topic(log_id.topic)
        return self.bench.manager.get_or_create(log_id, settings)

    def number(self, log_id: LogId = HERE) -> int:
        number = self.log(log_id).number
        assert number is not None
        return number

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry it out, with the storage threads."""

        async def run() -> T:
            task = asyncio.ensure_future(work)
            while not task.done():
                await asyncio.sleep(0)
                self.bench.run()
            return task.result()

        return asyncio.run(run())

    def close(self) -> None:
        self.bench.close()
        self.tables.close()
        assert self.fs.open_paths() == []


def again(rig: Rig) -> Rig:
    """Return the same after a restart."""
    rig.close()
    return Rig(rig.fs)


def table(*entries: tuple[Epoch, int]) -> EpochTable:
    return tuple(EpochStart(epoch, Offset(start)) for epoch, start in entries)


def syncs(rig: Rig, since: int) -> list[Path]:
    """Return which journals were synced."""
    found = (each for each in rig.fs.log[since:] if each.name == "sync")
    return sorted(each.path for each in found if each.path.name == EPOCHS_FILE)


# -- what is kept


def test_a_number_is_drawn_with_the_log_and_known_at_the_next_start() -> None:
    """Also of a log that has no directory yet."""
    rig = Rig(disk())
    put(rig.bench, rig.log())
    rig.log(THERE)
    rig.bench.run()
    assert rig.tables.numbers == {HERE: 1, THERE: 2}
    rig = again(rig)
    assert rig.tables.numbers == {HERE: 1, THERE: 2}
    assert rig.tables.starts == {HERE: 0, THERE: 0}
    assert [each.number for each in rig.bench.manager.logs().values()] == [1, 2]
    assert rig.tables.table(1) == table((E1, 0))
    assert not rig.bench.manager.lacks_bytes
    rig.close()


def test_a_number_that_was_used_is_never_drawn_again() -> None:
    """By a log that lives, or one that is gone."""
    rig = Rig(disk())
    rig.log()
    rig.wait(rig.tables.bury([2]))
    rig.next_numbers = iter([1, 2, 3])
    assert rig.number(THERE) == 3
    rig.close()


def test_an_epoch_begins_in_all_logs_with_one_sync_for_each_directory() -> None:
    """A promotion of thousands of logs takes no longer."""
    rig = Rig(disk())
    numbers = [rig.number(LogId("here", each)) for each in range(5)]
    numbers += [rig.number(THERE)]
    rig.bench.run()
    since = rig.fs.calls
    ends = {number: Offset(10 * number) for number in numbers}
    rig.wait(rig.tables.begin_epoch(E2, ends))
    assert syncs(rig, since) == [ONE / EPOCHS_FILE, TWO / EPOCHS_FILE]
    assert rig.tables.table(3) == table((E1, 0), (E2, 30))
    rig.close()
    read = EpochTables(rig.fs, (ONE, TWO))
    for number in numbers:
        assert read.table(number) == table((E1, 0), (E2, 10 * number))


def test_logs_that_are_made_together_are_one_frame() -> None:
    """A join of thousands of new logs takes one sync, too."""
    rig = Rig(disk())
    since = rig.fs.calls
    for number in range(20):
        rig.log(LogId("here", number))
    rig.bench.run()
    assert syncs(rig, since) == [ONE / EPOCHS_FILE]
    rig.close()


def test_a_table_is_adopted_by_what_differs() -> None:
    """Nothing is written of a log that goes on as it was."""
    rig = Rig(disk())
    number = rig.number()
    rig.wait(rig.tables.begin_epoch(E2, {number: Offset(40)}))
    size, since = rig.fs.size_of(ONE / EPOCHS_FILE), rig.fs.calls
    rig.wait(rig.tables.adopt({number: table((E1, 0), (E2, 40))}))
    assert syncs(rig, since) == []
    for new in (
        table((E1, 0), (E2, 40), (E3, 60)),
        table((E1, 0), (E3, 30)),
        table((E1, 0)),
        table((E2, 0), (E3, 30)),
        table((E3, 7)),
    ):
        rig.wait(rig.tables.adopt({number: new}))
        assert rig.tables.table(number) == new
        assert EpochTables(rig.fs, (ONE,)).table(number) == new
    assert rig.fs.size_of(ONE / EPOCHS_FILE) < size + 800
    rig.close()


def test_an_epoch_that_is_waited_for_no_longer_counts_in_what_is_adopted() -> None:
    """Its disk hung, and it is written first: the adopted table has no such epoch."""
    rig = Rig(disk())
    number, new = rig.number(), table((E1, 0), (E3, 60))
    rig.bench.run()

    async def scenario() -> None:
        begin = rig.tables.begin_epoch(E2, {number: Offset(40)})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(begin, 0.01)
        adopting = asyncio.ensure_future(rig.tables.adopt({number: new}))
        called_off = asyncio.ensure_future(rig.tables.adopt({}))
        await asyncio.sleep(0.01)
        called_off.cancel()
        while not adopting.done():
            await asyncio.sleep(0)
            rig.bench.run()
        await adopting

    asyncio.run(scenario())
    assert rig.tables.table(number) == new
    assert EpochTables(rig.fs, (ONE,)).table(number) == new
    rig.close()


def test_what_is_buried_stays_gone_and_its_name_may_come_again() -> None:
    """Numbers that this replica never had are noted for others."""
    rig = Rig(disk())
    old = rig.number()
    rig.bench.run()
    rig.wait(rig.tables.bury([old, 77, 77]))
    assert rig.tables.gone == {old, 77}
    assert (rig.tables.numbers, rig.tables.buried) == ({}, {HERE})
    since = rig.fs.calls
    rig.wait(rig.tables.bury([old, 77]))
    assert syncs(rig, since) == []
    rig = again(rig)
    assert rig.tables.gone == {old, 77}
    assert rig.tables.buried == {HERE}
    directory = rig.bench.manager.directories()[0]
    rig.tables.adopt_log(HERE, 99, directory, Offset(5), E2)
    rig.bench.run()
    assert rig.tables.numbers == {HERE: 99}
    assert not rig.tables.buried
    rig.close()


def test_a_log_that_begins_again_has_one_birth() -> None:
    """With its old number, in the same data directory or in another one."""
    rig = Rig(disk())
    number = rig.number()
    rig.wait(rig.tables.begin_epoch(E2, {number: Offset(40)}))
    one, two = rig.bench.manager.directories()
    rig.tables.adopt_log(HERE, number, one, Offset(60), E3)
    rig.bench.run()
    assert rig.tables.table(number) == table((E3, 60))
    rig.tables.adopt_log(HERE, number, two, Offset(70), E3)
    rig.bench.run()
    read = EpochTables(rig.fs, (ONE, TWO))
    assert (read.numbers, read.starts, read.gone) == (
        {HERE: number}, {HERE: 70}, set()
    )  # fmt: skip
    rig.wait(rig.tables.bury([number]))
    rig.close()
    read = EpochTables(rig.fs, (ONE, TWO))
    assert (read.numbers, read.gone) == ({}, {number})


def test_epochs_without_a_byte_are_dropped_at_a_start() -> None:
    """A crash may come between an entry and the first byte of its epoch."""
    rig = Rig(disk())
    put(rig.bench, rig.log(), 2)
    rig.bench.run()
    number, end = rig.number(), rig.log().next_offset
    rig.wait(rig.tables.begin_epoch(E2, {number: end}))
    rig = again(rig)
    assert rig.tables.table(number) == table((E1, 0))
    rig.close()


def test_a_journal_gets_no_larger_than_it_has_to() -> None:
    """It is written again when most of it says nothing any more."""
    rig = Rig(disk())
    number = rig.number()
    for epoch in range(2, 40):
        begun = Epoch(epoch, "x" * 60_000)
        rig.wait(rig.tables.begin_epoch(begun, {number: Offset(0)}))
        assert rig.fs.size_of(ONE / EPOCHS_FILE) < COMPACT_BYTES + 3 * 70_000
    expected = table((begun, 0))
    rig.close()
    assert EpochTables(rig.fs, (ONE,)).table(number) == expected


# -- what goes wrong


def test_a_damaged_journal_is_not_believed_and_kept_aside() -> None:
    """The replica is incomplete then; its logs go on with numbers of a leader."""
    rig = Rig(disk())
    put(rig.bench, rig.log())
    rig.bench.run()
    rig.wait(rig.tables.begin_epoch(E2, {rig.number(): Offset(9)}))
    rig.close()
    rig.fs.flip_bit(ONE / EPOCHS_FILE, 8 * 30)
    rig = Rig(rig.fs)
    assert rig.tables.is_damaged
    assert not rig.tables.numbers
    assert rig.bench.manager.lacks_bytes
    one = rig.bench.manager.directories()[0]
    rig.tables.adopt_log(LogId("here", 7), 50, one, Offset(0), E3)
    rig.bench.run()
    assert rig.fs.exists(ONE / f"{EPOCHS_FILE}.damaged")
    rig = again(rig)
    assert not rig.tables.is_damaged
    assert rig.tables.numbers == {LogId("here", 7): 50}
    assert rig.bench.manager.lacks_bytes, "a log with bytes has no number"
    rig.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_takes_the_directory_offline(number: int) -> None:
    """Whichever call it is: without epochs no byte is believed. Others go on."""

    def work(rig: Rig) -> None:
        rig.wait(rig.tables.begin_epoch(E2, {1: Offset(0), 2: Offset(0)}))

    quiet = Rig(disk())
    quiet.log(), quiet.log(THERE)
    quiet.bench.run()
    before = quiet.fs.calls
    work(quiet)
    first = [
        before + at + 1
        for at, call in enumerate(quiet.fs.log[before:])
        if call.path.parent == ONE or call.path == ONE
    ]
    quiet.close()
    assert first
    for call in first:
        rig = Rig(disk())
        rig.log(), rig.log(THERE)
        rig.bench.run()
        rig.fs.fail_at(call, number)
        with pytest.raises(StorageError):
            work(rig)
        assert offline(rig.bench.manager).keys() == {str(ONE)}
        assert rig.log().state is LogState.OFFLINE
        assert rig.tables.table(2) == table((E2, 0))
        assert rig.tables.table(1) == table((E1, 0))
        with pytest.raises(LogDirOfflineError):
            work(rig)
        rig.close()


class Life:
    """A life of one log: bytes of an epoch, and the epochs that they are of."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.started: list[Epoch] = []
        """Epochs of which a byte may be on the disk."""
        self.epochs: list[Epoch] = []
        """Epochs whose begin was reported."""

    def run(self, fs: FaultyFileSystem) -> None:
        rng = random.Random(self.seed)
        rig = Rig(fs)
        try:
            self.started.append(E1)
            put(rig.bench, rig.log(), 1)
            for number in range(2, 6):
                rig.bench.run()
                epoch = Epoch(number, f"n{number}")
                end = rig.log().next_offset
                rig.wait(rig.tables.begin_epoch(epoch, {rig.number(): end}))
                self.epochs.append(epoch)
                self.started.append(epoch)
                put(rig.bench, rig.log(), rng.randint(1, 3))
            rig.bench.run()
        finally:
            rig.bench.close()
            rig.tables.close()

    def check(self, fs: FaultyFileSystem) -> None:
        rig = Rig(fs)
        log = rig.bench.manager.get(HERE)
        if log is not None and log.next_offset:
            found = [each.epoch for each in rig.tables.table(log.number or 0)]
            assert found == sorted(found)
            assert set(found) <= set(self.started), "no byte is of a later epoch"
        journal = read_frames(fs, ONE / EPOCHS_FILE, MAGIC) if self.epochs else ()
        entries = [each for frame in journal for each in decode_entries(frame.body)]
        begun = [each.epoch for each in entries if isinstance(each, EpochBegun)]
        assert set(self.epochs) <= set(begun)
        assert not rig.tables.is_damaged
        rig.close()


@pytest.mark.slow
def test_whenever_the_power_goes_every_byte_has_its_number_and_epoch(
    seed: int,
) -> None:
    """The entry is there before the first byte, and what was reported stays."""
    fs, life = disk(), Life(seed)
    points = crash_points(
        fs, lambda: life.run(fs), lambda: (list(life.started), list(life.epochs))
    )
    assert len(points) > 15
    for at, point in enumerate(points):
        after = Life(seed)
        after.started, after.epochs = point.progress
        for sample in range(SAMPLES):
            choose = keep_random(seed + at * 100 + sample)
            found = point.disk.crash(choose, torn=True)
            after.check(found)
