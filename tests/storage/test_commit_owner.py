"""Groups of single puts that the loop commits, and which thread has the directory."""

import errno
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pytest

from metaq.config.settings import SPAN_BYTES_MIN, TopicConfig
from metaq.errors import LogDirOfflineError, NoSpaceError, StorageError
from metaq.fs import LOCK_FILE
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.record.layout import encode_record
from metaq.storage.append_request import Request
from metaq.storage.commit_owner import (
    ALIVE_S,
    GATHER_TURNS,
    LOOP_BYTES_MAX,
    LOOP_LOGS_MAX,
    TRANSITIONS,
    CommitOwner,
    Owner,
    OwnerEvent,
)
from metaq.storage.log_state import LogState
from metaq.storage.log_writer import UNCOVERED_BYTES_MAX
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.storage.span_index import read_index
from metaq.testing.clock import ManualClock
from tests.rigs.fs import FaultyFileSystem, MemorySyncs, keep_none
from tests.rigs.inside import commit_owner_of
from tests.rigs.storage import StepWorker, StorageBench, Ticket
from tests.sampling import IS_WHOLE
from tests.storage.support import (
    DATA,
    LOG,
    OTHER,
    RECORD,
    Promise,
    check_kept,
    config,
    content_of,
    log_of,
    put,
)

SEGMENT: Final = DATA / "test-0" / "00000000000000000000.meta"
LOOSE: Final = LogId("loose", 0)


@pytest.fixture
def fs() -> FaultyFileSystem:
    return FaultyFileSystem()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def bench(fs: FaultyFileSystem, clock: ManualClock) -> Iterator[StorageBench]:
    """A bench with two logs, whose disk has just answered, and nobody at work."""
    bench = begun(fs, clock)
    yield bench
    bench.close()
    assert fs.open_paths() == []


def begun(
    fs: FaultyFileSystem, clock: ManualClock, segment_bytes_max: int = 1 << 20
) -> StorageBench:
    loose = TopicConfig(name="loose", data_path=str(DATA), unflush_threshold=100)
    settings = config(segment_bytes_max=segment_bytes_max)
    bench = StorageBench(fs, replace(settings, topics={"loose": loose}), clock)
    bench.open()
    for log_id in (LOG, OTHER, LOOSE):
        put(bench, log_of(bench, log_id))
    bench.run()
    assert owner_of(bench) is Owner.NONE
    return bench


def owner_of(bench: StorageBench) -> Owner:
    return commit_owner_of(bench.manager.directories()[0]).owner


def calls_of(fs: FaultyFileSystem, work: Callable[[], object]) -> list[str]:
    """Return which calls were made in the course of it, without those that look."""
    before = fs.calls
    work()
    calls = [f"{each.name} {each.path.suffix}" for each in fs.log[before:]]
    return [call for call in calls if not call.startswith("stat")]


def syncs_of(fs: FaultyFileSystem) -> MemorySyncs:
    assert fs.syncs is not None
    return fs.syncs


single = partial(put, is_light=True)


def test_a_single_put_is_reported_when_its_sync_is_done(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """One write, one sync, and the reply in the turn in which it is done."""
    log, syncs, tickets = log_of(bench), syncs_of(fs), list[Ticket]()
    end = log.high_watermark
    assert calls_of(fs, lambda: tickets.append(single(bench, log))) == ["write .meta"]
    assert owner_of(bench) is Owner.LOOP
    assert not tickets[0].is_answered
    assert log.high_watermark == end
    assert calls_of(fs, syncs.reap) == ["sync .meta"]
    assert tickets[0].is_stored
    assert log.high_watermark == end + RECORD
    assert owner_of(bench) is Owner.NONE
    assert not bench.workers[0].queue


def test_what_comes_in_the_course_of_a_group_is_the_next_one(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """Of all logs together; each is synced beside the others."""
    log, other, syncs = log_of(bench), log_of(bench, OTHER), syncs_of(fs)
    first = single(bench, log)
    later = [single(bench, log), single(bench, other), single(bench, log)]
    bench.loop.run()
    assert len(syncs.begun) == 1
    syncs.reap()
    assert first.is_stored
    bench.loop.run()
    assert len(syncs.begun) == 2
    last = syncs.begun.pop()
    syncs.reap()
    assert [ticket.is_stored for ticket in later] == [True, False, True]
    assert owner_of(bench) is Owner.LOOP
    syncs.begun.append(last)
    syncs.reap()
    assert later[1].is_stored
    assert owner_of(bench) is Owner.NONE


def test_clients_that_are_answered_together_are_gathered_again(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """Their next puts are one group: at most `GATHER_TURNS` turns wait for them."""
    log, syncs = log_of(bench), syncs_of(fs)
    single(bench, log)
    tickets = [single(bench, log), single(bench, log)]
    syncs.reap()
    assert not syncs.begun, "the first client may put again"
    tickets.append(single(bench, log))
    bench.loop.run_some(1)
    assert len(syncs.begun) == 1, "all that may come are here"
    syncs.reap()
    assert all(ticket.is_stored for ticket in tickets)
    tickets = [single(bench, log), single(bench, log)]
    for _ in range(GATHER_TURNS - 1):
        bench.loop.run_some(1)
    assert not syncs.begun, "a third may come"
    bench.loop.run_some(1)
    syncs.reap()
    assert all(ticket.is_stored for ticket in tickets)
    bench.loop.run()
    for _ in range(3):
        ticket = single(bench, log)
        assert syncs.begun, "a client that is alone waits for no other"
        syncs.reap()
        assert ticket.is_stored
        bench.loop.run_some(1)


def test_the_loop_begins_nothing_before_it_has_heard_all_of_the_thread(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """Its reports are callbacks, however late they come."""
    log = log_of(bench)
    first = put(bench, log)
    bench.workers[0].step()
    second = single(bench, log)
    assert owner_of(bench) is Owner.THREAD
    assert not syncs_of(fs).begun
    bench.loop.run_some(1)
    assert first.is_stored
    assert owner_of(bench) is Owner.THREAD
    bench.run()
    assert second.is_stored
    assert owner_of(bench) is Owner.NONE


@pytest.mark.parametrize("has_task", [False, True])
def test_single_puts_wait_for_a_thread_that_has_no_other_puts(
    bench: StorageBench, fs: FaultyFileSystem, clock: ManualClock, has_task: bool
) -> None:
    """The loop takes over with its last report, also where it has a task."""
    log, syncs = log_of(bench), syncs_of(fs)
    if has_task:
        first = Ticket()
        log.log_dir.submit(first.on_stored)
    else:
        clock.advance_s(ALIVE_S)
        first = single(bench, log)
    assert owner_of(bench) is Owner.THREAD
    later = [single(bench, log), single(bench, log)]
    bench.loop.run()
    assert len(bench.workers[0].queue) == 1
    bench.workers[0].step()
    bench.loop.run()
    assert first.is_stored
    assert owner_of(bench) is Owner.LOOP
    assert len(syncs.begun) == 1
    bench.run()
    assert all(ticket.is_stored for ticket in later)


def test_single_puts_are_the_threads_where_it_has_more_to_do(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """They go first there; until it is done with others would be too long."""
    log, other = log_of(bench), log_of(bench, OTHER)
    tickets = [put(bench, log)]
    for _ in range(2):
        tickets.append(single(bench, other))
        bench.loop.run()
    assert len(bench.workers[0].queue) == 3
    bench.workers[0].step()
    bench.run()
    assert all(ticket.is_stored for ticket in tickets)
    tickets = [single(bench, log)]
    assert owner_of(bench) is Owner.LOOP
    bench.run()


@pytest.mark.parametrize("kind", ["stream", "task", "transaction", "threshold"])
def test_what_is_no_single_put_is_the_storage_threads(
    bench: StorageBench, fs: FaultyFileSystem, kind: str
) -> None:
    """Nothing is written by the loop; also a single put that waits with it is not."""
    log, ticket, calls = log_of(bench), Ticket(), fs.calls
    record = encode_record(b"x", id=MessageId(99))
    match kind:
        case "stream":
            ticket = put(bench, log)
        case "task":
            log.log_dir.submit(ticket.on_stored)
        case "transaction":
            log.append(
                [record],
                size_bytes=len(record),
                record_count=1,
                last_id=MessageId(99),
                ticket=ticket,
                before_write=lambda _offset: (),
                is_light=True,
            )
            bench.loop.run()
        case _:
            ticket = single(bench, log_of(bench, LOOSE))
    beside = single(bench, log)
    assert fs.calls == calls
    assert owner_of(bench) is Owner.THREAD
    bench.run()
    assert ticket.is_stored
    assert beside.is_stored


def test_what_a_group_of_the_loop_is_not_to_do_is_the_storage_threads(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """Create, roll, index, look at names, or write much."""
    bench = begun(fs, clock, segment_bytes_max=20 * RECORD)
    log, other, syncs = log_of(bench), log_of(bench, OTHER), syncs_of(fs)

    def is_begun(target: PartitionLog, size: int = 100) -> bool:
        ticket = single(bench, target, size=size)
        is_begun = bool(syncs.begun)
        bench.run()
        assert ticket.is_stored
        return is_begun

    assert is_begun(log)
    assert not is_begun(log_of(bench, LogId("new", 0)))
    assert is_begun(log, 19 * RECORD)
    assert not is_begun(log), "it is full"
    assert len(log.segments) == 2
    assert is_begun(log)
    bench.is_busy = True
    assert is_begun(log, 500)
    bench.close()
    bench = begun(fs := FaultyFileSystem(), clock)
    other, syncs = log_of(bench, OTHER), syncs_of(fs)
    assert not is_begun(other, LOOP_BYTES_MAX)
    bench.is_busy = True
    assert is_begun(other, UNCOVERED_BYTES_MAX), "its checksum is the loop's"
    assert is_begun(other, SPAN_BYTES_MIN)
    assert not is_begun(other), "bytes wait for the index"
    assert is_begun(other)
    bench.close()


def test_many_logs_at_once_are_the_storage_threads(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """Each would be a write on the loop."""
    logs = [log_of(bench, LogId("many", n)) for n in range(LOOP_LOGS_MAX + 1)]
    for each in logs:
        put(bench, each)
    bench.run()
    for count in (LOOP_LOGS_MAX, LOOP_LOGS_MAX + 1):
        first = single(bench, log_of(bench))
        tickets = [single(bench, each) for each in logs[:count]]
        syncs_of(fs).reap()
        assert first.is_stored
        bench.loop.run()
        is_begun = count == LOOP_LOGS_MAX
        assert owner_of(bench) is (Owner.LOOP if is_begun else Owner.THREAD)
        bench.run()
        assert all(each.is_stored for each in tickets)


def test_small_groups_are_indexed_later(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """By the storage thread, whoever has written them."""
    log = log_of(bench)
    bench.is_busy = True
    single(bench, log)
    bench.run()

    def index_end() -> Offset:
        index = read_index(fs, log.segments.active.path, Offset(0))
        assert index is not None
        return index.end_offset

    assert index_end() < log.high_watermark
    bench.manager.index()
    bench.run()
    assert index_end() == log.high_watermark


def test_a_directory_says_when_there_is_something_to_index_again(
    bench: StorageBench,
) -> None:
    """Once it has said that there is nothing, it calls back at the next group."""
    log, stirs = log_of(bench), list[str]()

    def is_indexed() -> bool:
        return bench.manager.is_indexed(lambda: stirs.append("stirred"))

    bench.run()
    assert is_indexed()
    assert not stirs
    for _ in range(2):
        single(bench, log)
    assert not is_indexed()
    bench.run()
    assert not stirs
    bench.manager.index()
    bench.run()
    assert is_indexed()
    single(bench, log)
    bench.run()
    assert stirs == ["stirred"]


def test_an_error_of_a_sync_is_final(bench: StorageBench, fs: FaultyFileSystem) -> None:
    """The directory goes offline; nothing that was under way in it is acknowledged."""
    log, other = log_of(bench), log_of(bench, OTHER)
    tickets = [single(bench, log), single(bench, other)]
    fs.fail_at(fs.calls + 1, errno.EIO)
    bench.run()
    assert all("error=EIO" in str(each.error) for each in tickets)
    with pytest.raises(LogDirOfflineError):
        put(bench, other)
    assert log.state is other.state is LogState.OFFLINE
    assert [call.error for call in fs.log if call.name == "sync"].count("EIO") == 1


def test_a_write_without_room_is_taken_back_by_the_storage_thread(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """Before all that came since; the log goes on."""
    log, content = log_of(bench), content_of(log_of(bench))
    fs.fail_at(fs.calls + 1, errno.ENOSPC)
    ticket = single(bench, log)
    assert owner_of(bench) is Owner.THREAD
    assert not ticket.is_answered
    void = single(bench, log)
    calls = calls_of(fs, bench.workers[0].turn)
    assert calls[:2] == ["truncate .meta", "sync .meta"]
    bench.run()
    assert isinstance(ticket.error, NoSpaceError)
    assert isinstance(void.error, NoSpaceError)
    again = single(bench, log)
    bench.run()
    assert again.is_stored
    assert len(content_of(log)) == len(content) + RECORD


def test_a_sync_that_the_kernel_does_not_take_is_the_storage_threads(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """The bytes are written already; nothing is written twice."""
    syncs_of(fs).is_full = True
    ticket = single(bench, log_of(bench))
    assert owner_of(bench) is Owner.THREAD
    assert calls_of(fs, bench.workers[0].turn)[0] == "sync .meta"
    bench.run()
    assert ticket.is_stored


def test_a_silent_disk_is_the_storage_threads(
    bench: StorageBench, fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """Until it has synced something: the loop must not wait for one that hangs."""
    log = log_of(bench)
    for is_begun in (False, True):
        clock.advance_s(0 if is_begun else ALIVE_S)
        ticket = single(bench, log)
        assert bool(syncs_of(fs).begun) is is_begun
        bench.run()
        assert ticket.is_stored


@pytest.mark.parametrize("passed_s", [0, ALIVE_S], ids=["loop", "storage thread"])
def test_copies_hear_of_a_put_before_it_is_synced(
    passed_s: float, bench: StorageBench, clock: ManualClock
) -> None:
    """Whichever thread has it: their syncs go on beside the own one."""
    log = log_of(bench)
    log.follow()
    log.lead()
    bench.run()
    start, heard = log.log_end, list[tuple[int, int]]()
    log.on_moved = lambda _log: heard.append((log.log_end, log.synced_end))
    clock.advance_s(passed_s)
    single(bench, log)
    assert owner_of(bench) is (Owner.THREAD if passed_s else Owner.LOOP)
    bench.run()
    assert heard == [(start + RECORD, start), (start + RECORD, start + RECORD)]


def test_the_disk_is_looked_at_once_a_second(
    bench: StorageBench, fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """By the storage thread, whose group is the next one then: free space and lock."""
    log, before, begun_count = log_of(bench), fs.calls, 0
    for _ in range(40):
        clock.advance_s(0.1)
        single(bench, log)
        begun_count += bool(syncs_of(fs).begun)
        bench.run()
    assert [each.name for each in fs.log[before:]].count("statvfs") == 4
    assert begun_count == 36
    fs.unlink(DATA / LOCK_FILE)
    clock.advance_s(1)
    single(bench, log)
    bench.run()
    assert log.state is LogState.OFFLINE


def test_a_disk_that_keeps_the_loop_waiting_does_so_once_a_second(
    bench: StorageBench, fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """It answers, but its writes wait: they are the storage thread's."""
    log, begun_count = log_of(bench), 0
    fs.on_call(lambda call: clock.advance_s(0.1 if call.name == "write" else 0))
    start_s = clock.monotonic_s()
    for _ in range(50):
        ticket = single(bench, log)
        begun_count += bool(syncs_of(fs).begun)
        bench.run()
        assert ticket.is_stored
    fs.on_call(None)
    took_s = clock.monotonic_s() - start_s
    assert 1 < begun_count <= 1 + took_s / ALIVE_S


def test_the_producer_file_is_made_again_by_the_storage_thread(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """The first note of a start replaces the file, which takes syncs of its own."""
    log = log_of(bench)
    for number, is_first in ((7, True), (8, False)):
        record, ticket = encode_record(b"x", id=MessageId(number)), Ticket()
        size = SizeBytes(len(record))
        batch = StoredBatch(
            "p", number, 1, -1, MessageId(number), log.next_offset, size
        )
        append = partial(
            log.append,
            [record],
            size_bytes=size,
            record_count=1,
            last_id=MessageId(number),
            ticket=ticket,
            batch=batch,
            is_light=True,
        )
        assert calls_of(fs, append) == ([] if is_first else ["write ", "write .meta"])
        bench.run()
        assert ticket.is_stored


@pytest.mark.parametrize("method", ["write_small", "takes_small"])
def test_an_error_of_ours_leaves_no_put_without_an_answer(
    bench: StorageBench,
    fs: FaultyFileSystem,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """A bug in a write takes the directory offline; before it, without memory, a group
    is the storage thread's.
    """
    log, is_bug = log_of(bench), method == "write_small"

    def fail(*_: object, **__: object) -> bool:
        raise ValueError("bug") if is_bug else MemoryError

    monkeypatch.setattr(log.writer, method, fail)
    first, later = single(bench, log), single(bench, log)
    assert not syncs_of(fs).begun
    bench.run()
    if is_bug:
        assert log.state is LogState.OFFLINE
        assert "bug" in str(first.error)
        assert later.error is not None
    else:
        assert first.is_stored
        assert later.is_stored


def test_what_a_power_cut_finds_before_the_sync_was_not_acknowledged(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """And what was acknowledged is on the device."""
    log = log_of(bench)
    size = len(fs.crash(keep_none).synced_bytes(SEGMENT))
    ticket = single(bench, log)
    assert len(fs.crash(keep_none).synced_bytes(SEGMENT)) == size
    assert not ticket.is_answered
    syncs_of(fs).reap()
    assert len(fs.crash(keep_none).synced_bytes(SEGMENT)) == size + RECORD
    assert ticket.is_stored


class QuickWorker(StepWorker):
    """Does what it is given before its giver goes on."""

    def submit(self, *requests: Request) -> None:
        super().submit(*requests)
        self.step()

    def stop(self, *requests: Request) -> None:
        super().stop(*requests)
        self.step()


class QuickBench(StorageBench):
    """Storage threads that are quicker than the loop."""

    def _start_worker(self, *args: Any) -> StepWorker:
        self.workers.append(QuickWorker(*args))
        return self.workers[-1]


def test_the_thread_says_nothing_after_the_word_that_all_is_closed(
    fs: FaultyFileSystem,
) -> None:
    """The loop may have ended by then: who posts to one that has gets an error."""
    bench = QuickBench(fs, config())
    bench.open()
    bench.run()
    left: list[object] = []
    bench.manager.close(lambda: left.append(bench.loop.names()))
    bench.run()
    assert left == [()]


# -- all orders of what may happen


class World:
    """Two logs, one about to roll; what happens next is chosen from outside."""

    def __init__(self) -> None:
        self.fs = FaultyFileSystem()
        self.bench = begun(self.fs, ManualClock(), segment_bytes_max=3 * RECORD)
        self.promises: list[Promise] = []
        self.puts = 0
        self.faults = 0
        self.is_stopped = self.is_closed = False
        self.expected: dict[LogId, list[Ticket]] = {LOG: [], OTHER: []}

    @property
    def owner(self) -> CommitOwner:
        return commit_owner_of(self.bench.manager.directories()[0])

    def choices(self) -> dict[str, Callable[[], object]]:
        """Return what may happen now."""
        found: dict[str, Callable[[], object]] = {}
        if self.puts < PUTS_MAX and not self.is_stopped:
            found["single"] = partial(self.put, LOG, is_light=True)
            found["other"] = partial(self.put, OTHER, is_light=True)
            found["stream"] = partial(self.put, LOG, is_light=False)
        if not self.faults and not self.is_stopped:
            found["full"] = self.fill_disk
        if self.bench.loop.names():
            found["callback"] = partial(self.bench.loop.run_some, 1)
        worker = self.bench.workers[0]
        if worker.queue or worker.has_more:
            found["thread"] = worker.turn
        for number in range(len(self.syncs.begun)):
            found[f"sync {number}"] = partial(self.answer, number)
        if not self.is_stopped:
            found["stop"] = self.stop
        return found

    @property
    def syncs(self) -> MemorySyncs:
        return syncs_of(self.fs)

    def put(self, log_id: LogId, *, is_light: bool) -> None:
        self.puts += 1
        log = log_of(self.bench, log_id)
        offset = log.next_offset
        try:
            ticket = put(self.bench, log, is_light=is_light)
        except StorageError:
            return
        data = encode_record(b"x" * 100, id=MessageId(self.bench.next_id - 1))
        self.promises.append(Promise(log_id, data, ticket, offset))

    def fill_disk(self) -> None:
        self.faults += 1
        self.fs.fail_at(self.fs.calls + 1, errno.ENOSPC)

    def answer(self, number: int) -> None:
        others = self.syncs.begun
        self.syncs.begun = [others.pop(number)]
        self.syncs.reap()
        self.syncs.begun[:0] = others

    def stop(self) -> None:
        self.is_stopped = True

        def on_closed() -> None:
            self.is_closed = True

        self.bench.manager.close(on_closed)

    def check(self) -> None:
        """All that is readable is on the disk, and one thread works at a time."""
        worker, owner = self.bench.workers[0], self.owner.owner
        if self.syncs.begun:
            assert owner in (Owner.LOOP, Owner.LOOP_LAST)
            assert not worker.queue
            assert not worker.has_more
        if worker.queue or worker.has_more:
            assert owner in (Owner.THREAD, Owner.ENDED)
        for log in self.bench.manager.logs().values():
            active = log.segments.active
            if log.log_id != LOOSE and log.high_watermark > active.base_offset:
                synced = self.fs.synced_bytes(active.path)
                assert len(synced) >= log.high_watermark - active.base_offset
            assert not log.damage

    def key(self) -> object:
        """Return what makes two worlds go on alike."""
        logs = self.bench.manager.logs().values()
        worker = self.bench.workers[0]
        return (
            self.owner.owner,
            self.puts,
            self.faults,
            self.is_stopped,
            tuple((log.next_offset, log.high_watermark, log.state) for log in logs),
            tuple((log.writer.end, log.writer.synced_end) for log in logs),
            len(worker.queue),
            worker.has_more,
            self.bench.loop.names(),
            len(self.syncs.begun),
            tuple(
                (each.log_id, each.ticket.is_stored, each.ticket.error is None)
                for each in self.promises
            ),
        )

    def finish(self, *, is_checked: bool) -> None:
        """Let everything end; each put is answered, and what was stored is there.

        `is_checked`: also after a power cut, and again after the next start.
        """
        if not self.is_stopped:
            self.stop()
        self.bench.run()
        assert self.is_closed
        assert all(each.ticket.is_answered for each in self.promises)
        if not is_checked:
            return
        stored = tuple(each for each in self.promises if each.ticket.is_stored)
        check_kept(self.fs.crash(keep_none), stored, segment_bytes_max=3 * RECORD)


PUTS_MAX: Final = 2
"""Puts of a world: some 1,200 worlds differ, and none has more than 14 steps."""


@pytest.mark.slow
def test_every_order_of_puts_syncs_and_late_reports_keeps_what_was_promised(
    rng: random.Random,
) -> None:
    """Breadth first: callbacks any number of turns late, syncs in any order, a disk
    that is full at any call, a stop at any time.
    """
    seen: set[object] = set()
    owners: set[Owner] = set()
    paths: list[tuple[str, ...]] = [()]
    while paths:
        path = paths.pop(0)
        world = World()
        for name in path:
            world.choices()[name]()
            world.check()
        key = world.key()
        if key in seen:
            continue
        seen.add(key)
        owners.add(world.owner.owner)
        paths += [(*path, name) for name in world.choices()]
        world.finish(is_checked=IS_WHOLE or rng.random() < 0.2)
    assert owners == set(Owner)


def test_every_row_of_the_table_is_reachable_and_every_owner_ends() -> None:
    """From each owner a stop leads to the end; nothing leads out of it."""
    for owner in Owner:
        reached, todo = set[Owner](), [owner]
        while todo:
            now = todo.pop()
            if now not in reached:
                reached.add(now)
                todo += [to for (at, _), to in TRANSITIONS.items() if at is now]
        assert Owner.ENDED in reached
    assert {event for _, event in TRANSITIONS} == set(OwnerEvent)
    assert not [at for at, _ in TRANSITIONS if at is Owner.ENDED]
