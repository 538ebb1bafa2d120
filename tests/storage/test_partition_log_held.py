"""One partition whose last append was cut by a crash: held until the rest is there."""

import pytest

from metaq.errors import NoSpaceError, OffsetOutOfRangeError
from metaq.model import MessageId, Offset
from metaq.record.layout import encode_record
from metaq.storage.log_snapshots import ScrubbedLogs
from metaq.storage.partition_log import PartitionLog
from metaq.storage.scrub import Scrub, run_step
from metaq.testing.clock import ManualClock
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.support import RECORD, config, content_of, log_of, opened, put

WHOLE = b"".join(
    encode_record(b"x" * (RECORD - 20), id=MessageId(number)) for number in range(1, 4)
)
"""One record in front, and an append of two."""


def held(
    fs: FaultyFileSystem, **system: int
) -> tuple[StorageBench, PartitionLog, ManualClock]:
    """Return a log of two records; the second one is the beginning of an append."""
    before = opened(fs)
    put(before, log_of(before), 2)
    before.run()
    before.close()
    clock = ManualClock()
    bench = StorageBench(fs, config(**system), clock)
    bench.open()
    log = log_of(bench)
    log.hold(Offset(RECORD))
    return bench, log, clock


def complete(bench: StorageBench, log: PartitionLog) -> Ticket:
    ticket = Ticket()
    data = WHOLE[2 * RECORD :]
    log.append(
        (data,),
        size_bytes=len(data),
        record_count=1,
        last_id=MessageId(3),
        ticket=ticket,
        completes=True,
    )
    bench.next_id = 4
    return ticket


def test_reads_end_where_the_cut_append_begins(fs: FaultyFileSystem) -> None:
    """Whatever is asked, and the scrub finds nothing wrong with the rest."""
    bench, log, _clock = held(fs)
    assert content_of(log) == WHOLE[:RECORD]
    assert log.read(Offset(0), 1000).size_bytes == RECORD
    with pytest.raises(OffsetOutOfRangeError):
        log.read(Offset(RECORD), 1)
    assert log.nearest_offset(Offset(2 * RECORD)) == RECORD
    assert log.readable_active().size_bytes == RECORD
    assert log.statistics().held_bytes == RECORD
    scrub = Scrub(
        bytes_per_s=1 << 20,
        span_bytes_min=1,
        first=0,
        on_damage=lambda log_id, damage: pytest.fail(f"{log_id} {damage}"),
    )
    step = scrub.take_step(ScrubbedLogs(bench.manager.logs()), 0.0)
    assert step is not None
    scrub.finish_step(step, run_step(fs, step), 0.0)
    assert scrub.state().checked_bytes == RECORD
    bench.close()


def test_nothing_but_the_rest_is_appended(fs: FaultyFileSystem) -> None:
    """Appends after the rest are taken; a waiter hears of all of it at once."""
    bench, log, _clock = held(fs)
    ends: list[int] = []
    log.wait(log.high_watermark, lambda: ends.append(log.high_watermark))
    text = (
        "partition test-0 takes no put before a committed transaction is whole there:"
        f" a crash has cut it, offset={RECORD} found_bytes={RECORD}"
    )
    with pytest.raises(NoSpaceError, match=text):
        put(bench, log)
    with pytest.raises(NoSpaceError, match=text):
        log.plan_append(1)
    rest = complete(bench, log)
    later = put(bench, log)
    assert log.high_watermark == RECORD
    bench.run()
    assert rest.is_stored
    assert later.is_stored
    assert content_of(log)[: 3 * RECORD] == WHOLE
    assert ends == [4 * RECORD]
    assert log.statistics().held_bytes == 0
    bench.close()


def test_a_rest_that_finds_no_room_leaves_the_log_held(fs: FaultyFileSystem) -> None:
    """And what was queued after it fails with it."""
    bench, log, _clock = held(fs)
    fs.set_capacity(0)
    failed = complete(bench, log), put(bench, log)
    bench.run()
    assert all(isinstance(ticket.error, NoSpaceError) for ticket in failed)
    fs.set_capacity(1 << 40)
    with pytest.raises(NoSpaceError, match="a crash has cut it"):
        put(bench, log)
    assert content_of(log) == WHOLE[:RECORD]
    rest = complete(bench, log)
    bench.run()
    assert rest.is_stored
    assert content_of(log) == WHOLE
    bench.close()


def test_in_threshold_mode_it_is_held_until_the_rest_is_synced(
    fs: FaultyFileSystem,
) -> None:
    """As long as the rest is not there, nothing is to be synced."""
    bench, log, clock = held(fs, unflush_threshold=100, unflush_interval_ms=10_000)
    for _ in range(2):
        clock.advance_s(11)
        bench.manager.tick(clock.monotonic_s())
        assert not any(worker.queue for worker in bench.workers)
    syncs = log.statistics().sync_count
    log.set_interval_s(100)
    rest, later = complete(bench, log), put(bench, log)
    bench.run()
    assert rest.is_stored
    assert later.is_stored
    assert log.statistics().held_bytes == 0
    assert content_of(log) == WHOLE[:RECORD]
    clock.advance_s(100)
    bench.manager.tick(clock.monotonic_s())
    bench.run()
    assert log.statistics().sync_count == syncs + 1
    assert content_of(log)[: 3 * RECORD] == WHOLE
    bench.close()


def test_an_append_that_was_cut_lies_in_one_segment(fs: FaultyFileSystem) -> None:
    """A segment that is full is rolled after the rest."""
    bench, log, _clock = held(fs, segment_bytes_max=2 * RECORD)
    complete(bench, log)
    put(bench, log)
    bench.run()
    first, *_more = log.segments
    assert first.size_bytes == 4 * RECORD
    put(bench, log)
    bench.run()
    assert [each.base_offset for each in log.segments] == [0, 4 * RECORD]
    bench.close()


def test_a_stop_of_a_held_log_loses_nothing(fs: FaultyFileSystem) -> None:
    """The next start finds what is there, and is given again what is to be held."""
    bench, _log, _clock = held(fs)
    bench.close()
    again = opened(fs)
    log = log_of(again)
    assert not log.damage
    assert content_of(log) == WHOLE[: 2 * RECORD]
    again.close()
