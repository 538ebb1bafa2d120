"""Data directories: lock, room, the storage thread, the offline switch."""

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from metaq.config.settings import BrokerConfig, LimitsConfig, SystemConfig
from metaq.errors import (
    DiskError,
    LogDirLockedError,
    LogDirOfflineError,
    MayBeStoredError,
    NoSpaceError,
    StorageError,
)
from metaq.fs.group_thread import GroupThread
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.storage.append_request import AppendRequest, Request
from metaq.storage.log_dir import TRANSITIONS, DirEvent, DirState
from metaq.storage.log_manager import FREE_SPACE_IDLE_S
from metaq.storage.log_state import LogState
from metaq.testing.clock import ManualClock
from tests.rigs.fs import FaultyFileSystem, Operation, keep_none
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.offline import offline
from tests.storage.support import DATA, LOG, OTHER, content_of, log_of, opened


def limited(fs: FaultyFileSystem, clock: ManualClock, **limits: int) -> StorageBench:
    settings = BrokerConfig(
        system=SystemConfig(data_path=str(DATA), segment_bytes_max=1000),
        limits=LimitsConfig(**{"free_bytes_min": 0, **limits}),
    )
    bench = StorageBench(fs, settings, clock)
    bench.open()
    return bench


def put(bench: StorageBench, size: int = 100) -> Ticket:
    ticket = Ticket()
    bench.append(log_of(bench), [b"x" * (size - 20)], ticket)
    return ticket


def test_a_data_directory_has_one_owner(fs: FaultyFileSystem) -> None:
    """A second broker on the same directory refuses to start, and harms nothing."""
    bench = opened(fs)
    ticket = put(bench)
    with pytest.raises(LogDirLockedError, match="directory=/data"):
        opened(fs)
    bench.run()
    assert ticket.is_stored
    bench.close()
    opened(fs).close()


@pytest.mark.parametrize(("numbers", "silence_s"), [(None, 60), ({}, 12)])
def test_a_disk_that_hangs_is_noticed_sooner_where_another_copy_goes_on(
    fs: FaultyFileSystem, numbers: dict[LogId, int] | None, silence_s: int
) -> None:
    """A leader gives up after it: alone it would wait for the disk in any case."""
    clock, system = ManualClock(), SystemConfig(data_path=str(DATA))
    bench = StorageBench(fs, BrokerConfig(system=system), clock)
    bench.manager.open(numbers=numbers)
    (directory,) = bench.manager.directories()
    for _ in range(100):
        clock.advance_s(0.5)
        bench.manager.tick(clock.monotonic_s())
        bench.run()
    since_s = clock.monotonic_s()
    while not directory.watch.is_silent:
        clock.advance_s(0.5)
        bench.manager.tick(clock.monotonic_s())
    took_s = clock.monotonic_s() - since_s
    assert silence_s / 2 < took_s <= silence_s
    bench.run()
    assert not directory.watch.is_silent
    bench.close()


def test_the_parent_of_a_data_directory_has_to_exist(fs: FaultyFileSystem) -> None:
    """As in MetaQ only one level is made; the error says what to make."""
    settings = BrokerConfig(system=SystemConfig(data_path="/no/such/parent"))
    text = "path=/no/such/parent: create /no/such first"
    with pytest.raises(StorageError, match=text):
        StorageBench(fs, settings).open()


def test_a_file_in_the_place_of_the_data_directory_is_fatal(
    fs: FaultyFileSystem,
) -> None:
    """A path that is not a directory is refused."""
    fs.open_append(DATA, create=True).close()
    with pytest.raises(StorageError, match="is not a directory: path=/data"):
        opened(fs)


def test_names_that_were_never_synced_are_durable_after_the_start(
    fs: FaultyFileSystem,
) -> None:
    """A partition directory that another hand left there survives a power cut."""
    opened(fs).close()
    fs.fail_at(fs.calls + 2, errno.EIO)  # the sync of the directory
    with pytest.raises(DiskError):
        fs.make_directory(DATA / "copied-0")
    assert not fs.crash(keep_none).exists(DATA / "copied-0")
    opened(fs).close()
    assert fs.crash(keep_none).exists(DATA / "copied-0")


# -- offline


def test_a_disk_error_takes_all_logs_of_the_directory_offline_once(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """Every append in flight fails, one ERROR line is written, one report is made."""
    bench = opened(fs)
    logs = [log_of(bench), log_of(bench, OTHER)]
    tickets = [Ticket() for _ in range(4)]
    for number, ticket in enumerate(tickets):
        bench.append(logs[number % 2], [b"x"], ticket)
    fs.fail_at(fs.calls + 1, errno.EIO)
    bench.run()
    assert all(isinstance(ticket.error, MayBeStoredError) for ticket in tickets)
    assert {log.state for log in logs} == {LogState.OFFLINE}
    lines = [r for r in caplog.records if "data directory offline" in r.message]
    assert len(lines) == 1
    assert lines[0].levelname == "ERROR"
    cause = str(tickets[0].error).removesuffix(": outcome unknown")
    assert offline(bench.manager) == {str(DATA): cause}
    calls = fs.calls
    bench.manager.tick(1e9)
    bench.run()
    assert fs.calls == calls, "nothing is tried again"
    with pytest.raises(LogDirOfflineError):
        bench.manager.get_or_create(LOG.__class__("new", 0), bench.config.topic("new"))
    bench.close()
    assert fs.open_paths() == []


def test_another_data_directory_goes_on(fs: FaultyFileSystem) -> None:
    """A disk error is contained in its directory."""
    text = {"test": "/data", "safe": "/other"}
    settings = BrokerConfig(limits=LimitsConfig(free_bytes_min=0))
    topics = {
        name: settings.topic(name).__class__(name=name, data_path=path)
        for name, path in text.items()
    }
    settings = BrokerConfig(
        system=SystemConfig(data_path="/data"),
        limits=LimitsConfig(free_bytes_min=0),
        topics=topics,
    )
    bench = StorageBench(fs, settings)
    bench.open()
    safe = log_of(bench, LOG.__class__("safe", 0))
    put(bench)
    fs.fail_at(fs.calls + 1, errno.EIO)
    bench.run()
    assert [*offline(bench.manager)] == [str(DATA)]
    ticket = Ticket()
    bench.append(safe, [b"x"], ticket)
    bench.run()
    assert ticket.is_stored
    assert fs.exists(Path("/other/safe-0/00000000000000000000.meta"))
    bench.close()
    assert fs.open_paths() == []


def test_a_failed_sync_is_never_repeated(fs: FaultyFileSystem) -> None:
    """After the error no sync of the file is asked for, not even when closing."""
    bench = opened(fs)
    put(bench)
    bench.run()
    put(bench)
    segment = DATA / "test-0" / "00000000000000000000.meta"
    fs.fail_at(fs.calls + 2, errno.EIO)
    bench.run()
    bench.close()
    syncs = [c for c in fs.log if c.path == segment and c.name == "sync"]
    assert [call.error for call in syncs] == ["", "EIO"]


def test_every_event_of_a_directory_has_its_state() -> None:
    """CLOSED is the end; a directory never comes back from OFFLINE by itself."""
    assert (DirState.OFFLINE, DirEvent.OPEN) not in TRANSITIONS
    assert not any(state is DirState.CLOSED for state, _event in TRANSITIONS)
    assert TRANSITIONS[DirState.OFFLINE, DirEvent.CLOSE] is DirState.CLOSED


def test_a_bug_in_the_storage_thread_takes_the_directory_offline(
    fs: FaultyFileSystem,
) -> None:
    """An unexpected exception leaves no put unanswered."""
    bench = opened(fs)
    log = log_of(bench)
    ticket = put(bench)

    def broken(_call: Operation) -> None:
        fs.on_call(None)
        raise ZeroDivisionError

    fs.on_call(broken)
    bench.run()
    assert isinstance(ticket.error, StorageError)
    assert "ZeroDivisionError" in str(ticket.error)
    assert log.state is LogState.OFFLINE
    bench.close()


# -- room


def test_low_space_refuses_puts_before_the_disk_is_full(fs: FaultyFileSystem) -> None:
    """With less than the watermark free puts are refused; gets go on; space that
    comes back is noticed without a put and without a look per put.
    """
    clock = ManualClock()
    fs.set_capacity(10_000)
    bench = limited(fs, clock, free_bytes_min=9_000)
    first = put(bench, 500)
    bench.run()
    assert first.is_stored
    with pytest.raises(NoSpaceError, match="low on space"):
        put(bench, 600)
    assert len(content_of(log_of(bench))) == 500
    fs.set_capacity(9_400)
    clock.advance_s(1.5)
    put(bench, 10 + 20)
    bench.run()
    assert bench.manager.directories()[0].is_low_on_space
    with pytest.raises(NoSpaceError):
        put(bench, 30)
    fs.set_capacity(100_000)
    clock.advance_s(0.5)
    bench.manager.tick(clock.monotonic_s())
    bench.run()
    with pytest.raises(NoSpaceError):
        put(bench, 30)
    clock.advance_s(0.6)
    bench.manager.tick(clock.monotonic_s())
    bench.run()
    again = put(bench, 30)
    bench.run()
    assert again.is_stored
    bench.close()


def looks_at(fs: FaultyFileSystem) -> int:
    return sum(call.name == "statvfs" for call in fs.log)


def test_a_disk_that_hangs_is_told_once_and_asked_once(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing piles up while the storage thread waits; its answer ends the alarm."""
    clock = ManualClock()
    bench = limited(fs, clock)
    (directory,) = bench.manager.directories()
    looks = looks_at(fs)
    for _ in range(100):
        clock.advance_s(5)
        bench.manager.tick(clock.monotonic_s())
        assert directory.watch.is_silent == ("does not answer" in caplog.text)
    assert directory.watch.is_silent
    assert caplog.text.count("data directory does not answer: directory=/data") == 1
    bench.run()
    assert not directory.watch.is_silent
    assert "data directory answers again: directory=/data" in caplog.text
    assert looks_at(fs) == looks + 1
    for _ in range(100):
        clock.advance_s(5)
        bench.manager.tick(clock.monotonic_s())
        bench.run()
    assert caplog.text.count("does not answer") == 1
    bench.close()


def test_a_directory_is_low_for_the_size_that_was_refused(
    fs: FaultyFileSystem,
) -> None:
    """Health says what a large put was answered, although small ones still fit."""
    clock = ManualClock()
    fs.set_capacity(10_000)
    bench = limited(fs, clock, free_bytes_min=8_000)
    (directory,) = bench.manager.directories()
    with pytest.raises(NoSpaceError, match="low on space"):
        put(bench, 5_000)
    assert directory.is_low_on_space
    small = put(bench, 100)
    clock.advance_s(1)
    bench.run()
    assert small.is_stored
    assert directory.is_low_on_space
    fs.set_capacity(20_000)
    clock.advance_s(1)
    bench.manager.tick(clock.monotonic_s())
    bench.run()
    assert not directory.is_low_on_space

    def look_again() -> None:
        clock.advance_s(FREE_SPACE_IDLE_S)
        bench.manager.tick(clock.monotonic_s())
        bench.run()

    # What is due after a put is written first: side files take space, too.
    look_again()
    look_again()
    used = 20_000 - directory.free_bytes
    for free_bytes, is_low in ((8_000, False), (7_999, True)):
        fs.set_capacity(used + free_bytes)
        look_again()
        assert (directory.free_bytes, directory.is_low_on_space) == (free_bytes, is_low)
    bench.close()


def test_a_full_disk_is_logged_and_low_until_there_is_room(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a watermark too: one line with file and numbers, and no second soon."""
    clock = ManualClock()
    bench = limited(fs, clock)
    (directory,) = bench.manager.directories()
    put(bench)
    bench.run()
    fs.set_capacity(300)
    tickets = [put(bench, 500), put(bench, 100)]
    bench.run()
    put(bench, 500)
    bench.run()
    assert all(isinstance(ticket.error, NoSpaceError) for ticket in tickets)
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert line.startswith(
        "puts refused: write found no free space: path=/data/test-0/"
    )
    assert line.endswith("error=ENOSPC refused_bytes=600")
    assert directory.is_low_on_space
    fs.set_capacity(100_000)
    clock.advance_s(1)
    bench.manager.tick(clock.monotonic_s())
    bench.run()
    assert not directory.is_low_on_space
    bench.close()


def test_refused_puts_are_logged_but_not_each(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator must make room: one line a minute says so, at any rate of puts."""
    clock = ManualClock()
    fs.set_capacity(10_000)
    bench = limited(fs, clock, free_bytes_min=10_000)
    for pause_s in (0, 0, 59, 2, 0):
        clock.advance_s(pause_s)
        with pytest.raises(NoSpaceError):
            put(bench)
    lines = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert [line[:38] for line in lines] == [
        "puts refused: low on space: directory="
    ] * 2
    bench.close()


def test_the_free_space_is_not_asked_for_with_every_put(fs: FaultyFileSystem) -> None:
    """A hundred groups within a second look at most twice."""
    bench = limited(fs, ManualClock(), free_bytes_min=1)
    for _ in range(100):
        put(bench)
        bench.run()
    assert sum(call.name == "statvfs" for call in fs.log) <= 2
    bench.close()


def test_the_free_space_is_looked_at_now_and_then_without_puts(
    fs: FaultyFileSystem,
) -> None:
    """An idle broker asks every half minute, not every tick."""
    clock = ManualClock()
    bench = limited(fs, clock, free_bytes_min=1)
    before = sum(call.name == "statvfs" for call in fs.log)
    for _ in range(60):
        clock.advance_s(1)
        bench.manager.tick(clock.monotonic_s())
        bench.run()
    assert sum(call.name == "statvfs" for call in fs.log) - before == 2
    bench.close()


@pytest.mark.parametrize("limit", ["log_bytes_max", "data_dir_bytes_max"])
def test_a_size_limit_refuses_puts_a_segment_above_it(
    fs: FaultyFileSystem, limit: str
) -> None:
    """Retention keeps to the limit; a log that is one segment larger takes nothing."""
    bench = limited(fs, ManualClock(), **{limit: 2_000})
    for _ in range(30):
        put(bench)
        bench.run()
    assert bench.manager.is_over_size_limit
    with pytest.raises(NoSpaceError, match="expected less than 3000 bytes, got 3000"):
        put(bench)
    log = log_of(bench)
    fs.unlink(log.segments.first.path)
    log.on_removed(log.segments.first, 10)
    assert bench.manager.directories()[0].size_bytes == 2_000
    ticket = put(bench)
    bench.run()
    assert ticket.is_stored
    bench.close()


@pytest.mark.parametrize("limit", ["log_bytes_max", "data_dir_bytes_max"])
def test_a_size_limit_takes_what_is_larger_than_a_segment(
    fs: FaultyFileSystem, limit: str
) -> None:
    """Retention makes room above the limit alone: below it nothing may be refused."""
    bench = limited(fs, ManualClock(), **{limit: 2_000})
    for size in (1_900, 1_900):
        put(bench, size)
        bench.run()
    assert bench.manager.is_over_size_limit
    bench.close()


def test_the_size_of_a_directory_is_that_of_its_logs(fs: FaultyFileSystem) -> None:
    """It is counted on, over appends, retention and a restart."""
    bench = opened(fs)
    put(bench)
    bench.append(log_of(bench, OTHER), [b"x" * 30], Ticket())
    bench.run()
    assert bench.manager.directories()[0].size_bytes == 150
    bench.close()
    again = opened(fs)
    assert again.manager.directories()[0].size_bytes == 150
    again.close()


# -- slow syncs


def test_a_slow_sync_is_a_warning(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """A sync that takes longer than the limit is named with its duration."""
    clock = ManualClock()
    bench = limited(fs, clock, slow_sync_ms=100)
    put(bench)
    fs.on_call(lambda call: clock.advance_s(0.25) if call.name == "sync" else None)
    bench.run()
    fs.on_call(None)
    (line,) = [r.getMessage() for r in caplog.records if "slow sync" in r.message]
    assert line == (
        "slow sync: file=/data/test-0/00000000000000000000.meta duration_ms=250"
    )
    assert log_of(bench).statistics().sync_s == pytest.approx(0.25)
    bench.close()


# -- the thread


class Gate:
    """Does a piece of work for each request, and waits for the test each time."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.left = 0
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def run(self, batch: Sequence[Request]) -> bool:
        self.batches.append(len(batch))
        self.left += len(batch) - 1
        self.entered.release()
        assert self.go_on.acquire(timeout=30)
        return self.left > 0


def request(size: int) -> Request:
    return AppendRequest(
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        0,
        Offset(0),
        [],
        SizeBytes(size),
        1,
        MessageId(1),
        Ticket(),
    )


def test_the_thread_hands_over_what_came_before_each_piece_of_work() -> None:
    """It asks for pieces until all is done, the end of the thread included."""
    gate = Gate()
    thread = GroupThread[Request]("test", gate.run)
    thread.start()
    thread.submit(request(1))
    for arrivals in (3, 2):
        assert gate.entered.acquire(timeout=30)
        for _ in range(arrivals):
            thread.submit(request(10))
        gate.go_on.release()
    thread.stop()
    for _ in range(4):
        gate.go_on.release()
    thread.join(30)
    assert gate.batches == [1, 3, 2, 0, 0, 0]


def test_the_thread_ends_when_the_queue_is_empty() -> None:
    """`stop` lets everything before it run."""
    done: list[int] = []

    def run(batch: Sequence[Request]) -> bool:
        done.append(len(batch))
        return False

    thread = GroupThread[Request]("test", run)
    for _ in range(3):
        thread.submit(request(1))
    thread.stop()
    thread.start()
    thread.join(30)
    assert sum(done) == 3
