"""One partition: appends, rolls, room."""

import errno
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from zlib import crc32

import pytest

from metaq.config.settings import SPAN_BYTES_MIN
from metaq.errors import NoSpaceError
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.record.layout import HEADER_BYTES, encode_record
from metaq.record.scan import CleanEnd, scan_records
from metaq.storage.append_request import WriterProgress
from metaq.storage.log_state import LogState
from metaq.storage.log_writer import GROUP_BYTES_MAX, UNCOVERED_BYTES_MAX
from metaq.storage.partition_log import high_watermark
from metaq.storage.span_index import read_index
from tests.rigs.fs import FaultyFileSystem, Operation, keep_none
from tests.rigs.storage import Ticket
from tests.storage.support import DATA, LOG, RECORD, content_of, log_of, opened, put

# -- appends


def test_two_appends_lie_behind_each_other(fs: FaultyFileSystem) -> None:
    """The first has the offset 0, the second its size; both are known at once."""
    bench = opened(fs)
    log = log_of(bench)
    first, second = put(bench, log), put(bench, log)
    assert log.next_offset == 2 * RECORD
    assert log.high_watermark == 0
    assert not first.is_answered
    bench.run()
    assert first.is_stored
    assert second.is_stored
    assert log.high_watermark == 2 * RECORD
    bench.close()


def test_a_batch_is_contiguous_and_counts_its_records(fs: FaultyFileSystem) -> None:
    """Two records in one append are at 0, back to back."""
    bench = opened(fs)
    log = log_of(bench)
    ticket = Ticket()
    data = bench.append(log, [b"a", b"b"], ticket)
    put(bench, log)
    bench.run()
    assert content_of(log)[: len(data)] == data
    assert log.record_count == 3
    assert log.statistics().append_count == 2
    bench.close()


def test_appends_in_one_group_cost_one_write_and_one_sync(
    fs: FaultyFileSystem,
) -> None:
    """However many appends are queued, the disk is asked once."""
    bench = opened(fs)
    log = log_of(bench)
    put(bench, log)
    bench.run()
    before = len(fs.log)
    for _ in range(100):
        put(bench, log)
    bench.run()
    segment = DATA / "test-0" / "00000000000000000000.meta"
    calls = [call.name for call in fs.log[before:] if call.path == segment]
    assert calls == ["write", "sync"]
    assert log.statistics().sync_count == 2
    bench.close()


def test_the_ticket_is_answered_after_the_sync(fs: FaultyFileSystem) -> None:
    """When a put is acknowledged its bytes are on the device, and not before."""
    bench = opened(fs)
    log = log_of(bench)
    ticket = put(bench, log)
    path = DATA / "test-0" / "00000000000000000000.meta"
    seen = []
    fs.on_call(lambda call: seen.append((call.name, ticket.is_answered)))
    bench.run()
    assert ("sync", False) in seen
    assert ticket.is_stored
    assert len(fs.synced_bytes(path)) == RECORD
    bench.close()


@pytest.mark.parametrize("size", [100, SPAN_BYTES_MIN])
def test_the_news_of_a_sync_goes_out_before_the_index_is_written(
    fs: FaultyFileSystem, size: int
) -> None:
    """No reply waits for the index; that of a lone put least of all."""
    seen: list[str] = []
    bench = opened(fs)
    log = log_of(bench)
    put(bench, log)
    bench.run()
    fs.on_call(lambda call: seen.append(f"{call.name} {call.path.suffix}"))
    bench.loop.on_post = lambda: seen.append("reported")
    put(bench, log, size=size)
    bench.run()
    fs.on_call(None)
    order = [*dict.fromkeys(seen)]
    assert order[:4] == ["write .meta", "sync .meta", "reported", "write .spans"]
    bench.close()


def test_a_small_group_is_indexed_when_the_thread_rests(fs: FaultyFileSystem) -> None:
    """Until a whole span has no entry the index may wait; then it does not."""
    bench = opened(fs)
    log = log_of(bench)
    put(bench, log)
    bench.run()
    index = DATA / "test-0" / "00000000000000000000.spans"
    writes = [0]

    def count(call: Operation) -> None:
        writes[-1] += call.name == "write" and call.path == index

    fs.on_call(count)
    bench.is_busy = True
    sizes = (100, 100, SPAN_BYTES_MIN, 100)
    for size in sizes:
        put(bench, log, size=size)
        bench.run()
        writes.append(0)
    bench.is_busy = False
    put(bench, log)
    bench.run()
    fs.on_call(None)
    assert writes == [0, 0, 1, 0, 1]
    bench.close()


def test_small_groups_are_covered_together(fs: FaultyFileSystem) -> None:
    """Their checksum is that of all their bytes, whenever it was computed."""
    bench = opened(fs)
    log = log_of(bench)
    bench.is_busy = True
    for size in (10, 100, UNCOVERED_BYTES_MAX, 20, 30):
        put(bench, log, size=size)
        bench.run()
    bench.is_busy = False
    put(bench, log)
    bench.run()
    index = read_index(fs, log.segments.active.path, Offset(0))
    assert index is not None
    assert (index.end_offset, index.record_count) == (log.high_watermark, 6)
    content, done = content_of(log), 0
    for span in index.spans:
        assert span.checksum == crc32(content[done : span.end_offset])
        done = span.end_offset
    bench.close()


def test_a_disk_error_of_an_index_that_was_put_off_is_loud(
    fs: FaultyFileSystem,
) -> None:
    """The directory goes offline, although an append was answered before."""
    bench = opened(fs)
    log = log_of(bench)
    put(bench, log)
    bench.run()
    ticket = put(bench, log)
    fs.fail_at(fs.calls + 3, errno.EIO)
    bench.run()
    assert ticket.is_stored
    assert log.state is LogState.OFFLINE


def test_an_append_is_answered_when_the_high_watermark_has_passed_it(
    fs: FaultyFileSystem,
) -> None:
    """Neither before, nor by counting what was asked for."""
    bench = opened(fs)
    log = log_of(bench)
    first, second = put(bench, log), put(bench, log)
    news = WriterProgress(
        log_end=Offset(2 * RECORD),
        synced_end=Offset(2 * RECORD - 1),
        last_sync_s=0.0,
        sync_count=1,
        sync_s=0.0,
    )
    log.on_progress(news)
    assert (first.is_stored, second.is_answered) == (True, False)
    log.on_progress(news)
    assert not second.is_answered
    log.on_progress(news._replace(synced_end=Offset(2 * RECORD)))
    assert second.is_stored
    assert log.statistics().append_count == 2
    bench.run()
    bench.close()


def test_a_read_ends_at_the_high_watermark_in_a_sealed_segment_too(
    fs: FaultyFileSystem,
) -> None:
    """A bound that is older than the sync may still be in it when it is sealed."""
    bench = opened(fs)
    log = log_of(bench)
    put(bench, log), put(bench, log)
    end = Offset(2 * RECORD)
    news = WriterProgress(end, Offset(RECORD), 0.0, 1, 0.0)
    log.on_progress(news)
    active = log.segments.active
    log.on_rolled(
        replace(active, size_bytes=SizeBytes(end)), replace(active, base_offset=end)
    )
    found = log.read(Offset(0), 1000)
    assert (found.size_bytes, log.high_watermark) == (RECORD, RECORD)
    found.release()
    bench.run()
    bench.close()


@pytest.mark.parametrize(
    ("held", "expected"),
    [(None, 300), (range(100, 200), 100), (range(300, 400), 300)],
)
def test_the_high_watermark_is_the_least_of_its_bounds(
    held: range | None, expected: int
) -> None:
    assert high_watermark(Offset(300), held) == expected


def test_the_high_watermark_never_passes_what_is_synced(fs: FaultyFileSystem) -> None:
    """At every call of the disk, what is readable is on the device already."""
    bench = opened(fs, segment_bytes_max=500)
    log = log_of(bench)

    def check(_call: object) -> None:
        on_device = 0
        for name in fs.list_directory(DATA / "test-0") if log.high_watermark else ():
            if name.endswith(".meta"):
                on_device += len(fs.synced_bytes(DATA / "test-0" / name))
        assert log.high_watermark <= on_device

    looking = False

    def on_call(call: object) -> None:
        nonlocal looking
        if not looking:  # `check` itself asks the disk
            looking = True
            check(call)
            looking = False

    fs.on_call(on_call)
    for count in range(1, 12):
        put(bench, log, count)
        bench.run()
    fs.on_call(None)
    assert log.high_watermark == 66 * RECORD
    bench.close()


def test_a_large_record_takes_the_same_path_as_a_small_one(
    fs: FaultyFileSystem,
) -> None:
    """A record of 1 MiB between small ones: one group, one order, one sync."""
    bench = opened(fs)
    log = log_of(bench)
    order: list[Ticket] = []
    tickets = [Ticket(order) for _ in range(3)]
    for ticket, size in zip(tickets, (10, 1 << 20, 10), strict=True):
        bench.append(log, [b"y" * size], ticket)
    bench.run()
    assert order == tickets
    assert log.statistics().sync_count == 1
    assert isinstance(scan_records(content_of(log)), CleanEnd)
    bench.close()


def test_a_thousand_interleaved_appends_keep_their_order(fs: FaultyFileSystem) -> None:
    """Over ten logs: answers come in order per log, and bytes lie in that order."""
    bench = opened(fs, segment_bytes_max=5_000)
    logs = [log_of(bench, LogId("test", number)) for number in range(10)]
    orders: list[list[Ticket]] = [[] for _ in logs]
    tickets: list[list[Ticket]] = [[] for _ in logs]
    expected = [b"" for _ in logs]
    for number in range(1_000):
        which = number * 7 % 10
        ticket = Ticket(orders[which])
        tickets[which].append(ticket)
        expected[which] += bench.append(logs[which], [b"%d" % number], ticket)
        if number % 37 == 0:
            bench.run()
    bench.run()
    assert orders == tickets
    assert [content_of(log) for log in logs] == expected
    bench.close()


def test_many_appends_survive_a_close_with_the_same_layout(
    fs: FaultyFileSystem,
) -> None:
    """100 appends, close, open: same segments, same sizes, no gap, same bytes."""
    bench = opened(fs, segment_bytes_max=1_000)
    log = log_of(bench)
    for _ in range(100):
        put(bench, log)
        bench.run()
    before, content = list(log.segments), content_of(log)
    bench.close()
    assert fs.open_paths() == []
    again = opened(fs, segment_bytes_max=1_000)
    log = log_of(again)
    after = list(log.segments)
    assert [s.path for s in after] == [s.path for s in before]
    assert [s.size_bytes for s in after[:-1]] == [s.size_bytes for s in before[:-1]]
    assert all(one.end_offset == two.base_offset for one, two in pairwise(after))
    assert content_of(log) == content
    assert log.record_count == 100
    assert log.next_offset == 100 * RECORD
    again.close()


def test_a_log_may_start_at_any_offset(fs: FaultyFileSystem) -> None:
    """A log made at 2048 names its file and its offsets accordingly."""
    bench = opened(fs)
    settings = bench.config.topic("test")
    log = bench.manager.get_or_create(LOG, settings, start_offset=Offset(2048))
    assert log.log_start_offset == log.next_offset == 2048
    put(bench, log)
    bench.run()
    assert fs.exists(DATA / "test-0" / "00000000000000002048.meta")
    assert log.high_watermark == 2048 + RECORD
    assert log.read(Offset(2048), 20).position == 0
    bench.close()


# -- rolls


def test_ten_records_roll_exactly(fs: FaultyFileSystem) -> None:
    """A segment of ten records is sealed by the tenth; the next one is empty."""
    bench = opened(fs, segment_bytes_max=10 * RECORD)
    log = log_of(bench)
    for number in range(10):
        assert len(log.segments) == 1, number
        put(bench, log)
        bench.run()
    names = fs.list_directory(DATA / "test-0")
    assert [name for name in names if name.endswith(".meta")] == [
        "00000000000000000000.meta",
        "00000000000000001200.meta",
    ]
    assert fs.size_of(DATA / "test-0" / "00000000000000001200.meta") == 0
    assert [s.size_bytes for s in log.segments] == [1200, 0]
    bench.close()


def test_a_new_segment_notes_the_greatest_id_before_it(fs: FaultyFileSystem) -> None:
    """Messages of a transaction may lie last, with the ids of their puts."""
    bench = opened(fs, segment_bytes_max=2 * RECORD)
    log = log_of(bench)
    for number in (9, 5):
        record = encode_record(bytes(RECORD - HEADER_BYTES), id=MessageId(number))
        log.append(
            (record,),
            size_bytes=RECORD,
            record_count=1,
            last_id=MessageId(number),
            ticket=Ticket(),
        )
    bench.run()
    active = log.segments.active
    index = read_index(fs, active.path, active.base_offset)
    assert index is not None
    assert index.last_id_before == 9
    bench.close()


def test_a_batch_larger_than_a_segment_stays_in_one(fs: FaultyFileSystem) -> None:
    """A segment exceeds its limit by one group at most, and is sealed after it."""
    bench = opened(fs, segment_bytes_max=200)
    log = log_of(bench)
    put(bench, log, 1)
    bench.run()
    put(bench, log, 50)
    bench.run()
    assert [s.base_offset for s in log.segments] == [0, 51 * RECORD]
    bench.close()


def test_a_roll_makes_the_new_name_durable_before_it_is_used(
    fs: FaultyFileSystem,
) -> None:
    """A power cut right after the first put to a new segment keeps the put."""
    bench = opened(fs, segment_bytes_max=RECORD)
    log = log_of(bench)
    for _ in range(3):
        put(bench, log)
        bench.run()
    found = opened(fs.crash(keep_none))
    assert log_of(found).next_offset == 3 * RECORD
    found.close()
    bench.close()


def test_exhausted_descriptors_refuse_puts_until_there_are_some(
    fs: FaultyFileSystem,
) -> None:
    """No descriptor for the next segment is a lack that passes: nothing is lost, no
    put goes to the full segment, and the roll is tried again.
    """
    next_name = f"{RECORD:020d}.meta"
    trial = FaultyFileSystem()
    bench = opened(trial, segment_bytes_max=RECORD)
    put(bench, log_of(bench))
    bench.run()
    bench.close()
    creation = next(c for c in trial.log if c.path.name == next_name)
    fs.fail_at(creation.number, errno.EMFILE)
    bench = opened(fs, segment_bytes_max=RECORD)
    log = log_of(bench)
    first = put(bench, log)
    bench.run()
    assert first.is_stored
    assert len(log.segments) == 1
    fs.fail_at(fs.calls + 1, errno.EMFILE)
    second, third = put(bench, log), put(bench, log)
    bench.run()
    assert isinstance(second.error, NoSpaceError)
    assert isinstance(third.error, NoSpaceError)
    assert log.state is LogState.OPEN
    fourth = put(bench, log)
    bench.run()
    assert fourth.is_stored
    assert [s.base_offset for s in log.segments] == [0, RECORD, 2 * RECORD]
    bench.close()


# -- room


def test_without_room_a_put_fails_and_later_puts_succeed(fs: FaultyFileSystem) -> None:
    """No half record stays, reads go on, and no offset is lost or given twice."""
    bench = opened(fs)
    log = log_of(bench)
    put(bench, log)
    bench.run()
    fs.set_capacity(600)
    failing, later = put(bench, log, 3), put(bench, log)
    bench.run()
    assert isinstance(failing.error, NoSpaceError)
    assert isinstance(later.error, NoSpaceError)
    assert log.next_offset == log.high_watermark == RECORD
    assert fs.size_of(DATA / "test-0" / "00000000000000000000.meta") == RECORD
    assert len(content_of(log)) == RECORD
    fs.set_capacity(1 << 30)
    later = put(bench, log)
    bench.run()
    assert later.is_stored
    assert log.high_watermark == 2 * RECORD
    assert log.statistics().refused_count == 2
    bench.close()


def test_refusals_may_be_many(fs: FaultyFileSystem) -> None:
    """Log and writer count them apart, and agree after hundreds."""
    bench = opened(fs)
    log = log_of(bench)
    put(bench, log)
    bench.run()
    fs.set_capacity(300)
    for _ in range(300):
        refused = put(bench, log, 3)
        bench.run()
        assert isinstance(refused.error, NoSpaceError)
    fs.set_capacity(1 << 30)
    later = put(bench, log)
    bench.run()
    assert later.is_stored
    bench.close()


def test_without_memory_for_a_group_its_puts_fail_and_later_puts_succeed(
    fs: FaultyFileSystem,
) -> None:
    """Nothing is written, the directory stays in use, and no offset is lost."""

    class NoMemory(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            raise MemoryError

    bench = opened(fs)
    log = log_of(bench)
    first, second = put(bench, log), Ticket()
    log.append(
        NoMemory(),
        size_bytes=RECORD,
        record_count=1,
        last_id=MessageId(2),
        ticket=second,
    )
    bench.run()
    for failed in (first, second):
        assert isinstance(failed.error, NoSpaceError)
        assert str(failed.error) == f"no memory to write {2 * RECORD} bytes"
    later = put(bench, log)
    bench.run()
    assert later.is_stored
    assert log.high_watermark == RECORD
    bench.close()


def test_a_refused_batch_does_not_come_back_after_a_power_cut(
    fs: FaultyFileSystem,
) -> None:
    """Its first step was synced before the room ran out; the cut is synced as well."""
    bench = opened(fs)
    log = log_of(bench)
    put(bench, log)
    bench.run()
    fs.set_capacity(2 * GROUP_BYTES_MAX)
    failing = put(bench, log, 3, GROUP_BYTES_MAX)
    bench.run()
    assert isinstance(failing.error, NoSpaceError)
    found = opened(fs.crash(keep_none))
    assert log_of(found).high_watermark == RECORD
    found.close()
    bench.close()


def test_puts_queued_behind_a_failed_one_are_void_and_newer_ones_are_not(
    fs: FaultyFileSystem,
) -> None:
    """Requests of two versions in one queue: the old ones go, the new ones stay."""
    bench = opened(fs)
    log = log_of(bench)
    put(bench, log)
    bench.run()
    (worker,) = bench.workers
    failing = put(bench, log)
    fs.set_capacity(fs.size_of(DATA / "test-0" / "00000000000000000000.meta"))
    worker.step()
    void = put(bench, log)
    bench.loop.run()
    assert isinstance(failing.error, NoSpaceError)
    assert isinstance(void.error, NoSpaceError)
    fs.set_capacity(1 << 30)
    fresh = put(bench, log)
    assert log.next_offset == 2 * RECORD
    bench.run()
    assert fresh.is_stored
    assert log.high_watermark == 2 * RECORD
    assert isinstance(scan_records(content_of(log)), CleanEnd)
    bench.close()
