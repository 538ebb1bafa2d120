"""Groups that are begun on the loop's thread, while the kernel syncs."""

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from zlib import crc32

import pytest

from metaq.config.settings import TopicConfig
from metaq.errors import LogDirOfflineError, NoSpaceError
from metaq.fs import LOCK_FILE
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.record.layout import encode_record
from metaq.storage.appender import (
    ALIVE_S,
    BEGUN_BYTES_MAX,
    BEGUN_LOGS_MAX,
    FEW_RECORDS_MAX,
)
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.storage.span_index import read_index
from metaq.testing.clock import ManualClock
from tests.rigs.fs import FaultyFileSystem, MemorySyncs, keep_none
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.support import (
    DATA,
    LOG,
    OTHER,
    RECORD,
    config,
    content_of,
    log_of,
    put,
)

SPAN_BYTES_MIN = 16384
SEGMENT = DATA / "test-0" / "00000000000000000000.meta"


@pytest.fixture
def fs() -> FaultyFileSystem:
    return FaultyFileSystem()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def bench(fs: FaultyFileSystem, clock: ManualClock) -> Iterator[StorageBench]:
    """A bench with two logs, whose disk has just answered."""
    bench = StorageBench(fs, config(segment_bytes_max=1 << 20), clock)
    bench.open()
    for log_id in (LOG, OTHER):
        put(bench, log_of(bench, log_id))
    bench.run()
    yield bench
    bench.close()
    assert fs.open_paths() == []


def calls_of(fs: FaultyFileSystem, work: Callable[[], object]) -> list[str]:
    """Return which calls were made meanwhile, without those that look only."""
    before = fs.calls
    work()
    calls = [f"{each.name} {each.path.suffix}" for each in fs.log[before:]]
    return [call for call in calls if not call.startswith("stat")]


def syncs_of(fs: FaultyFileSystem) -> MemorySyncs:
    assert fs.syncs is not None
    return fs.syncs


def begin(bench: StorageBench) -> None:
    assert bench.workers[0].begin()


def test_a_small_group_is_told_of_behind_its_sync(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """One write, one sync, and the reply in the same turn of the loop."""
    log, syncs = log_of(bench), syncs_of(fs)
    first, second = put(bench, log), put(bench, log)
    end = log.high_watermark
    assert calls_of(fs, lambda: begin(bench)) == ["write .meta"]
    assert not first.is_answered
    assert log.high_watermark == end
    assert calls_of(fs, syncs.reap) == ["sync .meta"]
    assert first.is_stored
    assert second.is_stored
    assert log.high_watermark == end + 2 * RECORD
    assert not bench.workers[0].has_more


def test_groups_of_several_logs_are_synced_beside_each_other(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """None waits for the sync of another, and all are done before the next begin."""
    tickets = [put(bench, log_of(bench, log_id)) for log_id in (LOG, OTHER)]
    begin(bench)
    syncs = syncs_of(fs)
    assert len(syncs.begun) == 2
    last = syncs.begun.pop()
    syncs.reap()
    assert [ticket.is_stored for ticket in tickets] == [True, False]
    assert bench.workers[0].is_begun
    syncs.begun.append(last)
    syncs.reap()
    assert tickets[1].is_stored
    assert not bench.workers[0].is_begun


@pytest.mark.parametrize("count", [1, FEW_RECORDS_MAX + 1])
@pytest.mark.parametrize("size", [100, SPAN_BYTES_MIN])
def test_no_reply_waits_for_the_index(
    bench: StorageBench, fs: FaultyFileSystem, size: int, count: int
) -> None:
    """It follows a few replies; many go out while the next sync is under way, and it
    does as well. That of a small group is written when the thread rests.
    """
    worker, log, seen = bench.workers[0], log_of(bench), list[str]()
    worker.is_busy = True
    is_few, index = count == 1, ["write .spans"] if size > 100 else []

    class Telling(Ticket):
        def on_stored(self) -> None:
            super().on_stored()
            seen.append("told")

    fs.on_call(lambda call: seen.append(f"{call.name} {call.path.suffix}"))
    for behind in ([], [] if is_few else index):
        bench.append(log, [b"x" * (size // count)] * count, Telling())
        begin(bench)
        syncs_of(fs).reap()
        mine = index if is_few else []
        assert seen == ["write .meta", *behind, "sync .meta", "told", *mine]
        seen.clear()
    fs.on_call(None)
    worker.is_busy = False
    put(bench, log_of(bench, OTHER))
    assert calls_of(fs, bench.run).count("write .spans") == 1 + (
        not is_few or not index
    )


def test_a_rest_leaves_nothing_without_an_entry(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """Also what was left to be indexed, and is shorter than a span."""
    log, worker = log_of(bench), bench.workers[0]
    bench.append(log, [b"x" * 1000] * (FEW_RECORDS_MAX + 1), Ticket())
    bench.run()
    assert worker.begun_count
    index = read_index(fs, log.segments.active.path, Offset(0))
    assert index is not None
    assert index.end_offset == log.high_watermark


def test_the_index_is_of_the_bytes_that_are_there(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """Whatever was written between a group and its entry."""
    log, worker = log_of(bench), bench.workers[0]
    worker.is_busy = True
    for size in (10, SPAN_BYTES_MIN, 5000, 10, 3 * SPAN_BYTES_MIN, 10):
        put(bench, log, size=size)
        bench.run()
    assert worker.begun_count == 6
    worker.is_busy = False
    put(bench, log)
    bench.run()
    index = read_index(fs, log.segments.active.path, Offset(0))
    assert index is not None
    assert (index.end_offset, index.record_count) == (log.high_watermark, 8)
    content, done = content_of(log), 0
    for span in index.spans:
        assert span.checksum == crc32(content[done : span.end_offset])
        done = span.end_offset


def test_an_error_of_a_sync_is_final(bench: StorageBench, fs: FaultyFileSystem) -> None:
    """The directory goes offline; nothing that was under way in it is acknowledged."""
    log, other = log_of(bench), log_of(bench, OTHER)
    tickets = [put(bench, log), put(bench, other)]
    begin(bench)
    fs.fail_at(fs.calls + 1, errno.EIO)
    syncs_of(fs).reap()
    assert [each.is_stored for each in tickets] == [False, False]
    assert all("error=EIO" in str(each.error) for each in tickets)
    with pytest.raises(LogDirOfflineError):
        put(bench, other)
    assert log.state is other.state is LogState.OFFLINE
    assert [call.error for call in fs.log if call.name == "sync"].count("EIO") == 1


def test_a_write_without_room_is_taken_back_by_the_storage_thread(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """Work that waits for the disk has its own thread; the log goes on."""
    log, worker = log_of(bench), bench.workers[0]
    content = content_of(log)
    ticket = put(bench, log)
    fs.fail_at(fs.calls + 1, errno.ENOSPC)
    assert calls_of(fs, lambda: begin(bench)) == ["write .meta"]
    assert worker.has_more
    assert not ticket.is_answered
    calls = calls_of(fs, worker.turn)
    assert calls[:2] == ["truncate .meta", "sync .meta"]
    bench.loop.run()
    assert isinstance(ticket.error, NoSpaceError)
    assert put_and_run(bench, log).is_stored
    assert len(content_of(log)) == len(content) + RECORD


def put_and_run(bench: StorageBench, log: PartitionLog, size: int = 100) -> Ticket:
    ticket = put(bench, log, size=size)
    bench.run()
    return ticket


def test_a_full_segment_is_rolled_by_the_storage_thread(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """Behind the news, as ever, and before the next write."""
    bench = StorageBench(fs, config(segment_bytes_max=2 * RECORD), clock)
    bench.open()
    log, worker = log_of(bench), bench.workers[0]
    put_and_run(bench, log)
    ticket = put(bench, log)
    begin(bench)
    assert calls_of(fs, syncs_of(fs).reap) == ["sync .meta"]
    assert ticket.is_stored
    assert worker.has_more
    assert "sync_directory " in calls_of(fs, worker.turn)
    bench.loop.run()
    assert len(log.segments) == 2
    assert put_and_run(bench, log).is_stored
    bench.close()


def test_a_sync_that_the_kernel_does_not_take_is_the_storage_threads(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """The bytes are written already; nothing is written twice."""
    ticket = put(bench, log_of(bench))
    syncs_of(fs).is_full = True
    begin(bench)
    assert bench.workers[0].has_more
    assert calls_of(fs, bench.workers[0].turn) == ["sync .meta"]
    bench.loop.run()
    assert ticket.is_stored


def test_a_silent_disk_is_the_storage_threads(
    bench: StorageBench, clock: ManualClock
) -> None:
    """Until it has synced something: the loop must not wait for one that hangs."""
    worker, log = bench.workers[0], log_of(bench)
    clock.advance_s(ALIVE_S)
    ticket = put(bench, log)
    assert not worker.begin()
    bench.run()
    assert ticket.is_stored
    put(bench, log)
    begin(bench)
    bench.run()


def test_the_disk_is_looked_at_once_a_second(
    bench: StorageBench, fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """By the storage thread, whose group is the next one then: free space and lock."""
    worker, log, before = bench.workers[0], log_of(bench), fs.calls
    for _ in range(40):
        clock.advance_s(0.1)
        put_and_run(bench, log)
    assert [each.name for each in fs.log[before:]].count("statvfs") == 4
    assert worker.begun_count == 36
    fs.unlink(DATA / LOCK_FILE)
    clock.advance_s(0.5)
    assert put_and_run(bench, log).is_stored
    clock.advance_s(0.5)
    put_and_run(bench, log)
    assert log.state is LogState.OFFLINE


def test_a_disk_that_keeps_the_loop_waiting_does_so_once_a_second(
    bench: StorageBench, fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """It answers, but its writes wait: they are the storage thread's."""
    worker, log = bench.workers[0], log_of(bench)
    fs.on_call(lambda call: clock.advance_s(0.1 if call.name == "write" else 0))
    start_s, count = clock.monotonic_s(), worker.begun_count
    for _ in range(50):
        assert put_and_run(bench, log).is_stored
    fs.on_call(None)
    took_s = clock.monotonic_s() - start_s
    assert 1 < worker.begun_count - count <= 1 + took_s / ALIVE_S
    clock.advance_s(ALIVE_S)
    for is_begun in (False, True):
        put(bench, log)
        assert worker.begin() is is_begun
        bench.run()


@pytest.mark.parametrize("kind", ["large", "new", "many", "transaction", "task"])
def test_what_may_wait_for_the_disk_is_the_storage_threads(
    bench: StorageBench, fs: FaultyFileSystem, kind: str
) -> None:
    """It is not begun, and nothing is done."""
    worker, log = bench.workers[0], log_of(bench)
    logs = [log_of(bench, LogId("many", n)) for n in range(BEGUN_LOGS_MAX + 1)]
    if kind == "many":
        for each in logs:
            put(bench, each)
        bench.run()
    count = worker.begun_count
    match kind:
        case "large":
            tickets = [put(bench, log), put(bench, log, size=BEGUN_BYTES_MAX)]
        case "new":
            tickets = [put(bench, log), put(bench, log_of(bench, LogId("new", 0)))]
        case "many":
            tickets = [put(bench, each) for each in logs]
        case "transaction":
            tickets = [Ticket()]
            record = encode_record(b"x", id=MessageId(9))
            log.append(
                [record],
                size_bytes=len(record),
                record_count=1,
                last_id=MessageId(9),
                ticket=tickets[0],
                before_write=lambda _offset: (),
            )
        case _:
            tickets = [put(bench, log)]
            log.log_dir.submit(lambda: None)
    assert calls_of(fs, worker.begin) == []
    assert worker.begun_count == count
    bench.run()
    assert all(ticket.is_stored for ticket in tickets)


def test_the_producer_file_is_made_anew_by_the_storage_thread(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """The first note of a start replaces the file, which takes syncs of its own."""
    log, worker = log_of(bench), bench.workers[0]
    for number, is_first in ((7, True), (8, False)):
        record, ticket = encode_record(b"x", id=MessageId(number)), Ticket()
        size = SizeBytes(len(record))
        batch = StoredBatch(
            "p", number, 1, -1, MessageId(number), log.next_offset, size
        )
        log.append(
            [record],
            size_bytes=size,
            record_count=1,
            last_id=MessageId(number),
            ticket=ticket,
            batch=batch,
        )
        calls = calls_of(fs, lambda: begin(bench))
        assert calls == ([] if is_first else ["write ", "write .meta"])
        assert worker.has_more is is_first
        syncs_of(fs).reap()
        while worker.has_more:
            worker.turn()
        bench.loop.run()
        assert ticket.is_stored


def test_a_bug_in_a_begun_commit_takes_the_directory_offline(
    bench: StorageBench,
) -> None:
    """Nothing waits for ever, and nothing is acknowledged."""

    def fail() -> Iterator[None]:
        raise ValueError("bug")
        yield

    log, ticket = log_of(bench), Ticket()
    log.append(
        [b"x" * RECORD],
        size_bytes=RECORD,
        record_count=1,
        last_id=MessageId(9),
        ticket=ticket,
        finish=fail(),
    )
    behind = put(bench, log)
    bench.run()
    assert log.state is LogState.OFFLINE
    assert "bug" in str(ticket.error)
    assert behind.error is not None


def test_what_a_power_cut_finds_before_the_sync_was_not_acknowledged(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """And what was told is on the device."""
    log = log_of(bench)
    size = len(fs.crash(keep_none).synced_bytes(SEGMENT))
    ticket = put(bench, log)
    begin(bench)
    assert len(fs.crash(keep_none).synced_bytes(SEGMENT)) == size
    assert not ticket.is_answered
    syncs_of(fs).reap()
    assert len(fs.crash(keep_none).synced_bytes(SEGMENT)) == size + RECORD
    assert ticket.is_stored


def test_a_log_that_is_not_synced_now_is_told_of_before_the_others(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """Threshold mode needs no sync; a group beside it has steps of its own to take."""
    loose_topic = TopicConfig(name="loose", data_path=str(DATA), unflush_threshold=100)
    topics = {"loose": loose_topic}
    bench = StorageBench(fs, replace(config(), topics=topics), clock)
    bench.open()
    loose, log = log_of(bench, LogId("loose", 0)), log_of(bench)
    for each in (loose, log):
        put(bench, each)
    bench.run()
    first, record, second = put(bench, loose), bytearray(RECORD), Ticket()
    wanted = encode_record(b"x" * 100, id=MessageId(99))

    def finish() -> Iterator[None]:
        yield
        record[:] = wanted

    log.append(
        [record],
        size_bytes=RECORD,
        record_count=1,
        last_id=MessageId(99),
        ticket=second,
        finish=finish(),
    )
    begin(bench)
    bench.loop.run()
    assert first.is_stored
    assert not second.is_answered
    syncs_of(fs).reap()
    assert second.is_stored
    assert content_of(log).endswith(wanted)
    bench.close()
