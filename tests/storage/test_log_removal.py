"""Logs of a replica that are set aside, and begin again; see test_set_aside as well."""

import errno

import pytest

from metaq.errors import StorageError
from metaq.model import LogId, Offset
from metaq.storage.log_dir import LogDir
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import Damage
from tests.rigs.fs import FaultyFileSystem, crash_points, keep_random
from tests.rigs.storage import StorageBench
from tests.storage.support import DATA, LOG, OTHER, RECORD, config, content_of, put
from tests.storage.test_partition_log_following import copy

NUMBERS = {LOG: 7, OTHER: 8}
ASIDE = DATA / "aside"
START = Offset(50 * RECORD)
NEW = 77
SAMPLES = 3


def replica(fs: FaultyFileSystem) -> StorageBench:
    """Return a replica's logs, open."""
    bench = StorageBench(fs, config())
    bench.manager.open(numbers=NUMBERS)
    bench.next_id = max(0, bench.manager.last_message_id()) + 1
    return bench


def log_of(bench: StorageBench, log_id: LogId = LOG) -> PartitionLog:
    log = bench.manager.get(log_id)
    assert log is not None
    return log


def filled(fs: FaultyFileSystem) -> StorageBench:
    """Return two logs with three records each, of which two are readable."""
    bench = replica(fs)
    for log in bench.manager.logs().values():
        copy(bench, log, 3)
        bench.run()
        log.set_bound(Offset(2 * RECORD))
    return bench


def begin_again(bench: StorageBench) -> list[Exception | None]:
    done: list[Exception | None] = []
    bench.manager.begin_again({LOG: (START, NEW)}, done.append)
    bench.run()
    return done


def aside(fs: FaultyFileSystem) -> list[str]:
    """Return the partitions that are set aside."""
    if not fs.is_directory(ASIDE):
        return []
    moments = [ASIDE / moment for moment in fs.list_directory(ASIDE)]
    return [name for moment in moments for name in fs.list_directory(moment)]


def test_a_log_begins_again_empty_and_its_files_stay(fs: FaultyFileSystem) -> None:
    """With another number, where its leader's begins; the others are not touched."""
    bench = filled(fs)
    old, other = log_of(bench), log_of(bench, OTHER)
    assert begin_again(bench) == [None]
    log = log_of(bench)
    assert old.state is LogState.CLOSED
    assert log.state is LogState.FOLLOWING
    assert (log.number, log.log_start_offset, log.next_offset) == (NEW, START, START)
    assert not log.is_settled
    assert log_of(bench, OTHER) is other
    copy(bench, log, 2)
    bench.run()
    log.set_bound(log.next_offset)
    assert len(content_of(log)) == 2 * RECORD
    assert aside(fs) == ["test-0"]
    assert [log.log_dir.size_bytes] == [5 * RECORD]
    bench.close()
    assert fs.open_paths() == []


def test_it_begins_again_and_again(fs: FaultyFileSystem) -> None:
    """With its old number too; whatever state it is in; nothing aside is lost."""
    bench = filled(fs)
    path = log_of(bench).segments.active.path
    log_of(bench).on_damage(Damage(path, Offset(0), Offset(RECORD), "mismatch"))
    assert begin_again(bench) == [None]
    assert begin_again(bench) == [None]
    copy(bench, log_of(bench), 1)
    bench.run()
    assert begin_again(bench) == [None]
    assert aside(fs) == ["test-0", "test-0"]
    bench.manager.remove_aside()
    assert not fs.exists(ASIDE)
    bench.close()


def test_a_log_that_is_gone_is_set_aside_alone(fs: FaultyFileSystem) -> None:
    """The next start does not miss it; one that is not there is passed over."""
    bench = filled(fs)
    done: list[Exception | None] = []
    for _ in range(2):
        bench.manager.set_logs_aside([LOG], done.append)
        bench.run()
    assert done == [None, None]
    assert bench.manager.get(LOG) is None
    bench.close()
    bench = StorageBench(fs, config())
    bench.manager.open(numbers={OTHER: 8})
    assert bench.manager.logs().keys() == {OTHER}
    assert not bench.manager.lacks_bytes
    assert aside(fs) == ["test-0"]
    for _ in range(2):
        bench.manager.remove_deleted()
    assert aside(fs) == ["test-0"], "no deleted topic"
    bench.close()


def test_it_waits_for_a_run_of_retention(fs: FaultyFileSystem) -> None:
    """A run works on the files that it was shown."""
    bench = filled(fs)
    job = bench.manager.begin_retention(["test"])
    assert job is not None
    assert begin_again(bench) == []
    assert aside(fs) == []
    job()
    bench.run()
    assert aside(fs) == ["test-0"]
    assert log_of(bench).number == NEW
    bench.close()


def test_an_error_says_that_it_is_to_be_done_again(fs: FaultyFileSystem) -> None:
    """On a disk that fails, and when the logs are closed."""
    bench = filled(fs)
    bench.manager.directories()[0].take_offline(StorageError("broken"))
    bench.run()
    (error,) = begin_again(bench)
    assert "offline" in str(error)
    bench.close()
    (error,) = begin_again(bench)
    assert "no log to forget" in str(error)


def check(fs: FaultyFileSystem, *, is_done: bool) -> None:
    """Start on a disk: all bytes are in the log or aside, and both open."""
    bench = replica(fs)
    log = log_of(bench)
    assert log.state is LogState.FOLLOWING, log.damage
    assert len(content_of(log_of(bench, OTHER))) == 2 * RECORD
    is_aside = log.next_offset == 0
    # A directory may have both names for a moment.
    assert aside(fs) == ["test-0"] if is_aside else log.next_offset == 3 * RECORD
    assert is_aside or not is_done
    # It lacks bytes that were readable: nothing may be promised with it.
    assert bench.manager.lacks_bytes == is_aside
    assert begin_again(bench) == [None]
    assert log_of(bench).next_offset == START
    bench.close()


@pytest.mark.slow
def test_whenever_the_power_goes_a_log_is_there_or_aside(seed: int) -> None:
    """As a whole, and what was begun may be done again."""
    disk = FaultyFileSystem(has_syncs=False)
    filled(disk).close()
    fs = disk.snapshot()

    def life() -> None:
        bench = replica(fs)
        done.extend(begin_again(bench))
        bench.close()

    done: list[Exception | None] = []
    points = crash_points(fs, life, lambda: bool(done))
    assert len(points) > 8
    for at, point in enumerate(points):
        for sample in range(SAMPLES):
            choose = keep_random(seed + 100 * at + sample)
            check(point.disk.crash(choose), is_done=point.progress)


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_whichever_call_fails_a_log_is_there_or_aside(number: int, seed: int) -> None:
    """It is reported, or has done no harm; nothing stays open."""
    disk = FaultyFileSystem(has_syncs=False)
    filled(disk).close()

    def life(fs: FaultyFileSystem, call: int | None) -> int:
        bench = replica(fs)
        before = fs.calls
        if call is not None:
            fs.fail_at(before + call, number)
        done = begin_again(bench)
        assert len(done) == 1
        calls = fs.calls - before
        is_done = done == [None]
        bench.close()
        assert fs.open_paths() == []
        if call is not None:
            check(fs.crash(keep_random(seed + call)), is_done=is_done)
        return calls

    count = life(disk.snapshot(), None)
    assert count > 8
    for call in range(1, count + 1):
        life(disk.snapshot(), call)


# -- numbers of new logs


def test_a_leaders_new_log_is_given_a_number_before_anything_is_appended(
    fs: FaultyFileSystem,
) -> None:
    """And handed over, so that it leads at once; one with a number is not asked for."""
    bench = replica(fs)
    manager = bench.manager
    asked: list[tuple[LogId, LogDir, Offset]] = []
    born: list[PartitionLog] = []

    def draw(log_id: LogId, directory: LogDir, start: Offset) -> int:
        asked.append((log_id, directory, start))
        return 99

    def lead(log: PartitionLog) -> None:
        born.append(log)
        log.lead()

    manager.assign_number, manager.on_numbered = draw, lead
    third, fourth = LogId("test", 3), LogId("test", 4)
    settings = bench.config.topic("test")
    log = manager.get_or_create(third, settings)
    assert manager.get_or_create(third, settings) is log
    assert asked == [(third, manager.directories()[0], 0)]
    assert born == [log]
    assert log.number == 99
    assert log.is_settled
    ticket = put(bench, log)
    bench.run()
    log.set_bound(Offset(RECORD))
    assert ticket.is_stored
    manager.get_or_create(fourth, settings, start_offset=START, number=5)
    assert len(asked) == 1
    with pytest.raises(StorageError):
        manager.get_or_create(LogId("a/b", 0), settings)
    assert len(asked) == 1, "no number for a name that cannot be"
    bench.close()
