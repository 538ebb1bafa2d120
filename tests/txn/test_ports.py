"""The partition logs are what transactions declare that they need."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from metaq.broker.topics import Topics
from metaq.broker.transactions import ServedLogs
from metaq.errors import ClosedError, OffsetOutOfRangeError, StorageError
from metaq.model import LogId, MessageId, Offset
from metaq.record.layout import encode_record
from metaq.txn.ports import FindLog, StoredBatches
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.support import LOG, log_of, opened


def batch(*payloads: bytes) -> list[bytes]:
    return [encode_record(payload, id=MessageId(7)) for payload in payloads]


def reader_of(bench: StorageBench) -> StoredBatches:
    return bench.manager


def logs_of(bench: StorageBench) -> FindLog:
    topic = replace(bench.config.topic(LOG.topic), partition_count=LOG.partition + 1)
    config = replace(bench.config, topics={LOG.topic: topic})
    return ServedLogs(Topics(config, bench.manager, choose=lambda _count: 0)).find


def append(
    find_log: FindLog,
    log_id: LogId,
    chunks: list[bytes],
    before_write: Callable[[Offset], list[Callable[[], None]]] = lambda _offset: [],
) -> tuple[Offset, Ticket]:
    ticket = Ticket()
    offset = find_log(log_id).append(
        chunks,
        size_bytes=sum(map(len, chunks)),
        record_count=len(chunks),
        last_id=MessageId(7),
        ticket=ticket,
        before_write=before_write,
        completes=False,
    )
    return offset, ticket


def test_a_batch_is_appended_whole_and_read_back() -> None:
    """The offset that was given is where the bytes are, in one piece, in a log that
    did not exist before.
    """
    bench = opened(FaultyFileSystem(), segment_bytes_max=100)
    find_log, reader = logs_of(bench), reader_of(bench)
    first = batch(b"one", b"two" * 100)
    second = batch(b"three")
    places = [append(find_log, LOG, first), append(find_log, LOG, second)]
    bench.run()
    assert all(ticket.is_stored for _offset, ticket in places)
    for (offset, _ticket), chunks in zip(places, (first, second), strict=True):
        data = b"".join(chunks)
        assert reader.read_back(LOG, offset, len(data)) == data
    bench.close()


def test_the_offset_is_told_before_a_byte_is_written() -> None:
    """Once for each append that is written, and not for one that is void; what is
    returned for many is done once, after them.
    """
    bench = opened(FaultyFileSystem())
    find_log = logs_of(bench)
    told: list[tuple[Offset, int]] = []

    def before_write(offset: Offset) -> list[Callable[[], None]]:
        told.append((offset, log_of(bench).writer.end))
        return [behind]

    def behind() -> None:
        told.append((Offset(-1), log_of(bench).writer.end))

    for payload in (b"one", b"two"):
        append(find_log, LOG, batch(payload), before_write)
    bench.run()
    append(find_log, LOG, batch(b"three"), before_write)
    bench.fs.set_capacity(0)  # type: ignore[attr-defined]
    bench.run()
    append(find_log, LOG, batch(b"void"), before_write)
    bench.fs.set_capacity(1 << 40)  # type: ignore[attr-defined]
    bench.run()
    first = [(0, 0), (23, 0), (-1, 0)]
    assert told == [*first, (46, 46), (-1, 46), (46, 46), (-1, 46)]
    bench.close()


def test_reading_back_tells_applied_and_retired_from_not_applied() -> None:
    """The bounds in the error are what the replay check decides by."""
    bench = opened(FaultyFileSystem(), segment_bytes_max=10)
    find_log, reader = logs_of(bench), reader_of(bench)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        reader.read_back(LOG, Offset(0), 10)
    assert caught.value.high_watermark == 0
    assert reader.readable_range(LOG) == (0, 0)
    assert find_log(LOG).plan_append(10) == 0
    offset, _ticket = append(find_log, LOG, batch(b"x"))
    bench.run()
    with pytest.raises(OffsetOutOfRangeError) as caught:
        reader.read_back(LOG, Offset(21), 10)
    assert caught.value.high_watermark <= 21
    log = log_of(bench)
    log.on_removed(log.segments.first, 1)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        reader.read_back(LOG, offset, 21)
    assert caught.value.log_start > offset
    bench.close()


def test_a_batch_that_is_cut_by_the_end_is_returned_short() -> None:
    """Fewer bytes than asked for: the batch at that offset is another one."""
    bench = opened(FaultyFileSystem())
    find_log, reader = logs_of(bench), reader_of(bench)
    append(find_log, LOG, batch(b"x"))
    bench.run()
    assert len(reader.read_back(LOG, Offset(0), 1000)) == 21
    bench.close()


def test_a_closed_sink_takes_nothing() -> None:
    """After `close` an append raises and its ticket stays unanswered."""
    bench = opened(FaultyFileSystem())
    bench.close()
    ticket = Ticket()
    with pytest.raises(ClosedError):
        logs_of(bench)(LOG).append(
            [b"x"],
            size_bytes=1,
            record_count=1,
            last_id=MessageId(1),
            ticket=ticket,
            before_write=lambda _offset: (),
            completes=False,
        )
    assert not ticket.is_answered


def test_a_topic_that_is_not_served_takes_nothing() -> None:
    """Deleted between put and commit: no log is made for it."""
    bench = opened(FaultyFileSystem())
    with pytest.raises(StorageError, match="nosuch-0 is not served any more"):
        append(logs_of(bench), LogId("nosuch", 0), batch(b"x"))
    assert not bench.manager.logs()
    bench.close()
