"""The disk of a replica: waits that are bounded, and what a failing disk says."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.clock import SystemClock
from metaq.errors import DiskError, NoSpaceError, StorageError
from metaq.model import LogId, Offset
from metaq.replication import store
from metaq.replication.epochs import Epoch
from metaq.replication.record import make_record
from metaq.replication.replica import SetFile
from metaq.replication.set_file import encode_set_file, read_set_file
from metaq.replication.store import ReplicaStore
from metaq.storage.log_dir import DirState
from metaq.storage.log_removal import carry_out
from metaq.storage.log_state import LogState
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.waiting import until

DATA = Path("/data")
RECORD = make_record("s1", 1, {1, 2}, min_in_sync=1, nonce="n")
FILE = SetFile("s1", 1, RECORD)


class Directory:
    """A data directory that carries out what a test lets it."""

    def __init__(self, path: str = "/data") -> None:
        self.path = path
        self.free_bytes = 0
        self.state = DirState.ONLINE
        self.offline_cause: StorageError | None = None
        self.watch = SimpleNamespace(is_silent=False)
        self.queue: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def answer(self) -> None:
        for work in self.queue:
            work()


class Log:
    """A log in some state."""

    def __init__(self, state: LogState, directory: Directory | None = None) -> None:
        self.state = state
        self.log_dir = directory
        self.high_watermark, self.next_offset = Offset(5), Offset(5)
        self.follows = 0
        self.number = 7
        self.log_id = LogId("test", 0)

    def follow(self) -> None:
        self.follows += 1


class Logs:
    """All logs of a replica."""

    def __init__(self, *logs: Log, directories: tuple[Directory, ...] = ()) -> None:
        self._logs = dict(enumerate(logs))
        self._directories = directories

    def logs(self) -> dict[int, Log]:
        return self._logs

    def directories(self) -> tuple[Directory, ...]:
        return self._directories

    def identities(self) -> dict[str, str]:
        return {"/a": "ia", "/b": "ib"}


def run(
    scenario: Callable[[ReplicaStore, FaultyFileSystem], Coroutine[Any, Any, None]],
    logs: Logs | None = None,
) -> None:
    """Run a scenario on a store."""
    fs = FaultyFileSystem()
    fs.make_directory(DATA)
    held: Any = logs or Logs()
    tables: Any = None
    made = ReplicaStore(fs, DATA, held, tables, clock=SystemClock())

    async def main() -> None:
        made.begin()
        try:
            await scenario(made, fs)
        finally:
            await made.end()

    asyncio.run(main())


class Writes:
    """`write_set_file` in a test's hands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[Exception] = []
        self.is_full = False
        self.refused_count = 0
        self.written: list[SetFile] = []
        self.gate = threading.Event()
        self.gate.set()
        monkeypatch.setattr(store, "write_set_file", self._write)

    def _write(self, _fs: object, _directory: Path, file: SetFile) -> None:
        self.gate.wait(30)
        if self.is_full:
            self.refused_count += 1
            raise NoSpaceError("full")
        if self.errors:
            raise self.errors.pop(0)
        self.written.append(file)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    monkeypatch.setattr(store, "WRITE_PAUSE_S", 0.001)
    return Writes(monkeypatch)


def test_a_file_is_on_the_disk_before_what_comes_after_it() -> None:
    """And is not written twice."""

    async def scenario(made: ReplicaStore, fs: FaultyFileSystem) -> None:
        assert made.revision == 0
        await made.save(FILE)
        assert read_set_file(fs, DATA) == FILE
        assert made.revision == 1
        calls = fs.calls
        await made.save(FILE)
        assert fs.calls == calls

    run(scenario)


def test_a_file_without_space_is_written_when_there_is_some(
    writes: Writes, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is no failed one; its begin and its end are logged, and no more."""
    writes.is_full = True

    async def scenario(made: ReplicaStore, _fs: object) -> None:
        saving = asyncio.create_task(made.save(FILE))
        await until(lambda: writes.refused_count > 1 and made.lack_of_space)
        size = len(encode_set_file(FILE))
        assert f"full: expected {size} free bytes, got" in made.lack_of_space
        writes.is_full = False
        await saving
        assert (made.failure, made.lack_of_space) == ("", "")

    run(scenario)
    assert writes.written == [FILE]
    assert [each.message.partition(":")[0] for each in caplog.records] == [
        "replica is waiting for space",
        "replica has space again",
    ]


def test_a_disk_that_refuses_the_file_has_failed_until_it_takes_one(
    writes: Writes,
) -> None:
    """A node that reads `failure` hands over, and claims nothing."""
    writes.errors = [DiskError("write", "/data/set", "EIO")]

    async def scenario(made: ReplicaStore, _fs: object) -> None:
        with pytest.raises(DiskError):
            await made.save(FILE)
        assert "EIO" in made.failure
        assert made.revision == 0
        await made.save(FILE)
        assert made.failure == ""

    run(scenario)
    assert writes.written == [FILE]


def test_a_disk_that_hangs_is_waited_for_no_longer_than_a_bound(
    writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader would keep its term for ever."""
    monkeypatch.setattr(store, "WRITE_S", 0.02)
    writes.gate.clear()

    async def scenario(made: ReplicaStore, _fs: object) -> None:
        with pytest.raises(
            StorageError, match=r"/data/set is not written within 0\.02"
        ):
            await made.save(FILE)
        assert "/data/set" in made.failure
        monkeypatch.setattr(store, "WRITE_S", 30.0)
        writes.gate.set()
        await made.save(FILE)
        assert made.failure == ""

    run(scenario)


def test_a_save_that_is_called_off_is_written_before_the_next(writes: Writes) -> None:
    """An older file may not come in the place of a newer one."""
    writes.gate.clear()
    newer = SetFile("s1", 1, RECORD, epoch=9)

    async def scenario(made: ReplicaStore, _fs: object) -> None:
        first = asyncio.create_task(made.save(FILE))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        second = asyncio.create_task(made.save(newer))
        await asyncio.sleep(0)
        writes.gate.set()
        await second

    run(scenario)
    assert writes.written == [FILE, newer]


def test_what_was_saved_before_a_save_that_was_called_off_is_written_again(
    writes: Writes,
) -> None:
    """It is not known whether the file still has it."""
    newer = SetFile("s1", 1, RECORD, epoch=9)

    async def scenario(made: ReplicaStore, _fs: object) -> None:
        await made.save(FILE)
        writes.gate.clear()
        saving = asyncio.create_task(made.save(newer))
        await asyncio.sleep(0)
        saving.cancel()
        await asyncio.wait({saving})
        writes.gate.set()
        await made.save(FILE)

    run(scenario)
    assert writes.written == [FILE, newer, FILE]


def test_a_directory_that_fails_or_hangs_is_named() -> None:
    """The first one is enough: the replica is all of its disks."""
    good, bad = Directory("/a"), Directory("/b")

    async def scenario(made: ReplicaStore, _fs: object) -> None:
        assert made.failure == ""
        bad.watch.is_silent = True
        assert made.failure == "/b does not answer"
        bad.state, bad.offline_cause = DirState.OFFLINE, StorageError("EIO")
        assert made.failure == "/b is offline: EIO"

    run(scenario, Logs(directories=(good, bad)))


def test_ends_are_fixed_when_all_that_was_queued_is_written() -> None:
    """Also a cut that has begun; an offline directory writes nothing any more."""
    first, gone = Directory("/a"), Directory("/b")
    gone.state = DirState.OFFLINE
    cut = Log(LogState.REOPENING, first)

    async def scenario(made: ReplicaStore, _fs: object) -> None:
        waiting = asyncio.create_task(made.finish_writing())
        await until(lambda: first.queue)
        first.answer()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        cut.state = LogState.FOLLOWING
        await waiting
        assert gone.queue == []

    run(scenario, Logs(cut, directories=(first, gone)))


def test_a_directory_that_hangs_is_not_waited_for() -> None:
    """Nothing is known of the ends of its logs."""
    first = Directory("/a")

    async def scenario(made: ReplicaStore, _fs: object) -> None:
        waiting = asyncio.create_task(made.finish_writing())
        await until(lambda: first.queue)
        first.watch.is_silent = True
        with pytest.raises(StorageError, match="/a does not answer"):
            await waiting
        first.watch.is_silent = False
        waiting = asyncio.create_task(made.finish_writing())
        await asyncio.sleep(0)
        first.state = DirState.OFFLINE
        await waiting

    run(scenario, Logs(directories=(first,)))


@pytest.mark.parametrize("state", LogState)
def test_a_term_ends_in_logs_of_every_state(state: LogState) -> None:
    """A log that is offline or closing has answered its puts already."""
    log = Log(state)

    async def scenario(made: ReplicaStore, _fs: object) -> None:
        made.stop_leading()

    run(scenario, Logs(log))
    assert log.follows == (state in {LogState.OPEN, LogState.STOPPED})


def test_a_hand_over_waits_for_the_followers_until_a_time() -> None:
    """It says whether they have all."""
    log = Log(LogState.OPEN)
    log.next_offset = Offset(9)

    async def scenario(made: ReplicaStore, _fs: object) -> None:
        now_s = SystemClock().monotonic_s()
        assert not await made.wait_committed(now_s)
        waiting = asyncio.create_task(made.wait_committed(now_s + 30))
        await asyncio.sleep(0.02)
        log.high_watermark = log.next_offset
        assert await waiting

    run(scenario, Logs(log))


def test_a_member_has_the_identities_of_all_directories() -> None:
    """With one version."""

    async def scenario(made: ReplicaStore, _fs: object) -> None:
        assert made.member("s1", 7, 3).directories == {"ia": 7, "ib": 7}
        assert made.member("s1", 7, 3).incarnation == 3

    run(scenario)


@pytest.mark.parametrize("what", ["holdings", "watermarks", "epoch"])
def test_a_write_on_a_disk_that_hangs_is_not_waited_for(
    what: str,
) -> None:
    """The replica could not give up, since its lock is held; the write goes on."""
    first, log = Directory("/a"), Log(LogState.FOLLOWING)
    log.high_watermark = Offset(6)
    logs, begun = Logs(log, directories=(first,)), list[Callable[..., None]]()
    held: Any = logs
    held.set_holdings_version = lambda _version, on_done: begun.append(on_done)
    held.lower_high_watermarks = lambda _ends, on_done: begun.append(on_done)

    async def begin_epoch(_epoch: Epoch, _ends: object) -> None:
        await carry_out(begun.append)

    async def scenario(made: ReplicaStore, _fs: object) -> None:
        held_tables: Any = SimpleNamespace(begin_epoch=begin_epoch)
        made.tables = held_tables  # type: ignore[misc]
        write = {
            "holdings": partial(made.save_holdings, 3),
            "watermarks": made.lower_watermarks,
            "epoch": partial(made.begin_epoch, Epoch(2, "n")),
        }[what]
        waiting = asyncio.create_task(write())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        first.watch.is_silent = True
        with pytest.raises(StorageError, match="/a does not answer"):
            await waiting
        (on_done,) = begun
        on_done(DiskError("sync", "/a/holdings", "EIO"))
        await asyncio.sleep(0)
        first.watch.is_silent = False
        waiting = asyncio.create_task(write())
        await until(lambda: len(begun) == 2)
        begun[1](None)
        await waiting

    run(scenario, logs)
