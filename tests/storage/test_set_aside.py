"""Deleted topics: their logs end, their directories go aside, and then away."""

import errno
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from metaq.errors import ClosedError, LogDirOfflineError, NoSpaceError, StorageError
from metaq.model import LogId, Millis, Offset
from metaq.storage.holdings import HOLDINGS_FILE
from metaq.storage.inventory import read_holdings, write_holdings
from metaq.storage.log_state import LogState
from metaq.storage.opening import partition_names
from metaq.storage.set_aside import remove_set_aside, set_aside
from metaq.storage.verify import list_logs
from tests.rigs.faulty_calls import Operation
from tests.rigs.fs import FaultyFileSystem, keep_all, keep_none, keep_random
from tests.rigs.storage import StorageBench
from tests.sampling import failures
from tests.storage.offline import offline
from tests.storage.support import DATA, LOG, OTHER, config, filled, log_of, opened, put

KEPT = LogId("test-1", 0)
"""Another topic, whose name begins like the one that is deleted."""
WHEN = Millis(1_795_000_000_123)


class Outcomes(list[Exception | None]):
    """Outcomes of deletions."""

    def one(self) -> Exception | None:
        (found,) = self
        self.clear()
        return found


@pytest.fixture
def reported() -> Outcomes:
    return Outcomes()


def names(fs: FaultyFileSystem, path: Path = DATA) -> set[str]:
    return set(fs.list_directory(path)) - {".lock", HOLDINGS_FILE}


def held(fs: FaultyFileSystem) -> set[str]:
    """Return the partitions that the next start expects."""
    record = read_holdings(fs, DATA)
    assert record is not None
    return set(record.partitions)


def test_a_deleted_topic_starts_again_at_offset_0(reported: Outcomes) -> None:
    """Its partitions lie aside as a whole, and others are not touched."""
    fs = FaultyFileSystem()
    bench, log = filled(fs)
    for log_id in (OTHER, KEPT):
        put(bench, log_of(bench, log_id))
    bench.run()
    kept_bytes = log_of(bench, KEPT).size_bytes
    bench.manager.delete_topic("test", reported.append)
    assert not reported
    bench.run()
    assert reported.one() is None
    assert log.state is LogState.CLOSED
    assert set(bench.manager.logs()) == {KEPT}
    assert names(fs) == {"deleted", "test-1-0"}
    (place,) = names(fs, DATA / "deleted")
    assert names(fs, DATA / "deleted" / place) == {"test-0", "test-1"}
    (directory,) = bench.manager.directories()
    assert directory.size_bytes == kept_bytes
    again = log_of(bench)
    assert again.next_offset == 0
    put(bench, again, size=7)
    bench.run()
    found = again.read(Offset(0), 1000)
    assert found.read().endswith(b"x" * 7)
    found.release()
    bench.manager.remove_deleted()
    assert names(fs, DATA / "deleted" / place) == {"test-0", "test-1"}, "not at once"
    bench.manager.remove_deleted()
    assert names(fs) == {"test-0", "test-1-0"}
    bench.close()
    assert fs.open_paths() == []


def test_nothing_of_ours_beside_the_partitions_is_taken_for_one(
    reported: Outcomes, caplog: pytest.LogCaptureFixture
) -> None:
    """By a start, by `metaq verify`, by a reader of segments."""
    fs = FaultyFileSystem()
    bench, _ = filled(fs)
    put(bench, log_of(bench, KEPT))
    bench.run()
    bench.manager.delete_topic("test", reported.append)
    bench.run()
    bench.close()
    fs.write_atomically(DATA / "topics.json", b"{}")
    assert set(fs.list_directory(DATA)) == {
        ".lock",
        "deleted",
        "holdings",
        "test-1-0",
        "topics.json",
    }
    assert partition_names(fs, DATA) == ("test-1-0",)
    assert [log_id for log_id, _ in list_logs(fs, DATA)] == [KEPT]
    caplog.clear()
    bench = opened(fs)
    assert set(bench.manager.logs()) == {KEPT}
    assert not caplog.messages
    bench.close()


def test_what_is_in_flight_is_answered(reported: Outcomes) -> None:
    """And nothing is taken after the deletion."""
    bench = opened(FaultyFileSystem())
    log = log_of(bench)
    ticket = put(bench, log)
    bench.manager.delete_topic("test", reported.append)
    with pytest.raises(ClosedError):
        put(bench, log)
    bench.run()
    assert (ticket.is_stored, reported.one()) == (True, None)
    bench.close()


def test_a_run_of_retention_is_waited_for(reported: Outcomes) -> None:
    """It works on the files that it was shown; the next one does not see them."""
    fs = FaultyFileSystem()
    bench, _ = filled(fs)
    run = bench.manager.begin_retention(["test"])
    assert run is not None
    bench.manager.delete_topic("test", reported.append)
    bench.run()
    assert not reported
    assert run().failures == ()
    bench.run()
    assert reported.one() is None
    assert names(fs) == {"deleted"}
    run = bench.manager.begin_retention(["test"])
    assert run is not None
    assert run().segment_count == 0
    bench.run()
    bench.close()


def test_a_close_meanwhile_leaves_the_rest_to_the_next_start(
    reported: Outcomes,
) -> None:
    """Its waiter gets that error."""
    fs = FaultyFileSystem()
    bench, _ = filled(fs)
    run = bench.manager.begin_retention(["test"])
    assert run is not None
    bench.manager.delete_topic("test", reported.append)
    bench.manager.close(lambda: None)
    run()
    bench.run()
    assert isinstance(reported.one(), ClosedError)
    assert names(fs) == {"test-0"}
    assert fs.open_paths() == []


def test_a_full_disk_holds_a_deletion_up(reported: Outcomes) -> None:
    """It is tried again; a directory that has no room is not offline."""
    quiet, fs = FaultyFileSystem(), FaultyFileSystem()
    bench, _ = filled(quiet)
    begun = quiet.calls
    bench.manager.delete_topic("test", reported.append)
    bench.run()
    bench.close()
    made = next(call for call in quiet.log[begun:] if call.name == "mkdir")
    reported.clear()
    bench, _ = filled(fs)
    fs.fail_at(made.number, errno.ENOSPC)
    bench.manager.delete_topic("test", reported.append)
    bench.run()
    assert isinstance(reported.one(), NoSpaceError)
    assert offline(bench.manager) == {}
    assert bench.manager.logs() == {}
    bench.manager.delete_topic("test", reported.append)
    bench.run()
    assert reported.one() is None
    assert names(fs) == {"deleted"}
    bench.close()


def test_no_directory_moves_that_the_record_still_names(reported: Outcomes) -> None:
    """A start would miss the partition; the deletion is held up, and tried again."""
    quiet, fs = FaultyFileSystem(), FaultyFileSystem()
    for disk in (quiet, fs):
        filled(disk)[0].close()
    bench = opened(quiet)
    begun = quiet.calls
    bench.manager.delete_topic("test", reported.append)
    bench.run()
    bench.close()
    written = next(
        call
        for call in quiet.log[begun:]
        if call.name == "write" and call.path.name.startswith(HOLDINGS_FILE)
    )
    reported.clear()
    bench = opened(fs)
    fs.fail_at(written.number, errno.ENOSPC)
    bench.manager.delete_topic("test", reported.append)
    bench.run()
    assert isinstance(reported.one(), NoSpaceError)
    assert (names(fs), held(fs)) == ({"test-0"}, {"test-0"})
    assert offline(bench.manager) == {}
    bench.manager.delete_topic("test", reported.append)
    bench.run()
    assert reported.one() is None
    assert (names(fs), held(fs)) == ({"deleted"}, set())
    bench.close()


def test_an_offline_directory_keeps_what_it_has(reported: Outcomes) -> None:
    """Nothing is believed of it, so nothing is deleted before a restart."""
    fs = FaultyFileSystem()
    bench = opened(fs)
    log = log_of(bench)
    put(bench, log)
    bench.run()
    (directory,) = bench.manager.directories()
    directory.take_offline(StorageError("broken"))
    bench.run()
    bench.manager.delete_topic("test", reported.append)
    assert isinstance(reported.one(), LogDirOfflineError)
    assert bench.manager.get(LOG) is log
    bench.close()
    assert names(fs) == {"test-0"}


def test_a_directory_that_breaks_meanwhile_answers_what_is_in_flight(
    reported: Outcomes,
) -> None:
    """A put gets its answer, the deletion an error."""
    fs = FaultyFileSystem()
    bench = opened(fs)
    ticket = put(bench, log_of(bench))
    fs.fail_at(fs.calls + 1, 5)
    bench.manager.delete_topic("test", reported.append)
    bench.run()
    assert ticket.error is not None
    assert isinstance(reported.one(), StorageError)
    bench.close()
    assert fs.open_paths() == []


def test_topics_that_are_being_deleted_are_not_recovered() -> None:
    """A start in the middle serves none of their partitions."""
    fs = FaultyFileSystem()
    bench, _ = filled(fs)
    put(bench, log_of(bench, KEPT))
    bench.run()
    bench.close()
    bench = StorageBench(fs, bench.config)
    bench.manager.open(left_out={"test"})
    assert set(bench.manager.logs()) == {KEPT}
    bench.close()


def test_a_start_does_not_miss_what_is_being_deleted() -> None:
    """A record may name it still; from then on it does not."""
    fs = FaultyFileSystem()
    bench, _ = filled(fs)
    put(bench, log_of(bench, KEPT))
    bench.run()
    bench.close()
    assert held(fs) == {"test-0", "test-1-0"}
    fs.rename(DATA / "test-0", Path("/away"))
    bench = StorageBench(fs, bench.config)
    bench.manager.open(left_out={"test"})
    assert set(bench.manager.logs()) == {KEPT}
    assert held(fs) == {"test-1-0"}
    bench.close()
    bench = opened(fs)
    assert set(bench.manager.logs()) == {KEPT}
    bench.close()


def test_a_directory_with_nothing_but_a_deleted_topic_may_be_empty() -> None:
    """And an accepted loss does not bring a partition of it back."""
    for is_accepted in (False, True):
        fs = FaultyFileSystem()
        bench, _ = filled(fs)
        bench.close()
        fs.rename(DATA / "test-0", Path("/away"))
        record = read_holdings(fs, DATA)
        assert record is not None
        write_holdings(fs, DATA, replace(record, is_accepted=is_accepted))
        bench = StorageBench(fs, bench.config)
        bench.manager.open(left_out={"test"})
        assert bench.manager.logs() == {}
        assert names(fs) == set()
        bench.close()


def delete(fs: FaultyFileSystem) -> None:
    """Live with two topics, and delete one of them; it may fail."""
    bench = opened(fs)
    for log_id in (LOG, OTHER, KEPT):
        put(bench, log_of(bench, log_id))
    bench.run()
    bench.manager.delete_topic("test", lambda _error: None)
    bench.run()
    for _ in range(2):  # what is there at the first one goes with the second
        bench.manager.remove_deleted()
    bench.close()


@pytest.mark.slow
def test_whichever_call_fails_no_partition_is_left_half() -> None:
    """For every n: a start that leaves the topic out deletes the rest, and what is
    made again is empty; the other topic keeps what it was said to have.
    """
    quiet = FaultyFileSystem()
    delete(quiet)
    errors = (errno.EIO, errno.ENOSPC, errno.EMFILE)
    for number, error in failures(quiet.calls, errors):
        fs = FaultyFileSystem()
        fs.fail_at(number, error)
        with suppress(StorageError):
            delete(fs)
        for choose in (keep_none, keep_all, keep_random(number)):
            check_deletable(fs.crash(choose))
        check_deletable(fs.snapshot())


def check_deletable(fs: FaultyFileSystem) -> None:
    record = read_holdings(fs, DATA) if fs.exists(DATA) else None
    assert record is None or set(record.partitions) <= names(fs)
    bench = StorageBench(fs, config())
    bench.manager.open(left_out={"test"})
    assert set(bench.manager.logs()) <= {KEPT}
    reported = Outcomes()
    bench.manager.delete_topic("test", reported.append)
    bench.run()
    assert reported.one() is None
    for _ in range(2):
        bench.manager.remove_deleted()
    assert names(fs) <= {"test-1-0"}
    log = log_of(bench)
    ticket = put(bench, log)
    bench.run()
    assert (log.log_start_offset, ticket.is_stored) == (0, True)
    bench.close()
    bench = opened(fs)
    assert not [log for log in bench.manager.logs().values() if log.damage]
    bench.close()


def test_two_deletions_of_one_moment_have_two_places() -> None:
    """A topic may be made and deleted again within the same millisecond."""
    fs = FaultyFileSystem()
    fs.make_directory(DATA)
    for _ in range(2):
        fs.make_directory(DATA / "t-0")
        set_aside(fs, DATA, lambda log_id: log_id.topic == "t", WHEN)
    assert names(fs, DATA / "deleted") == {
        "20261118T110640.123Z",
        "20261118T110640.124Z",
    }


def one_set_aside() -> FaultyFileSystem:
    fs = FaultyFileSystem()
    fs.make_directory(DATA)
    fs.make_directory(DATA / "t-0")
    fs.open_append(DATA / "t-0" / "x", create=True).close()
    set_aside(fs, DATA, lambda log_id: log_id.topic == "t", WHEN)
    return fs


def help_at(number: int, fs: FaultyFileSystem, call: Operation) -> None:
    if call.number == number:
        fs.on_call(None)
        remove_set_aside(fs, DATA)


def test_what_somebody_else_removes_meanwhile_is_gone() -> None:
    """An operator may help, at any moment."""
    quiet = one_set_aside()
    begun = quiet.calls
    remove_set_aside(quiet, DATA)
    assert quiet.calls - begun > 10
    for number in range(begun + 1, quiet.calls + 1):
        fs = one_set_aside()
        fs.on_call(partial(help_at, number, fs))
        remove_set_aside(fs, DATA)
        assert names(fs) == set()
