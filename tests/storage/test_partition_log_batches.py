"""A log remembers the batches that it has, and no others, over restarts."""

import errno
from pathlib import Path

import pytest

from metaq.errors import OUTCOME_UNKNOWN, MayBeStoredError, NoSpaceError
from metaq.model import MessageId, Offset, SizeBytes
from metaq.record.layout import encode_record
from metaq.storage.append_request import WriterProgress
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producer_file import PRODUCERS_NAME
from metaq.storage.producers import StoredBatch
from metaq.storage.verify import FindingKind, verify_directory
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.support import DATA, content_of, log_of, opened

PARTITION = DATA / "test-0"


def send(
    bench: StorageBench, sequence: int, count: int = 3, producer: str = "p"
) -> tuple[StoredBatch, Ticket]:
    """Queue a batch; the payloads are the sequences of its records."""
    log, first = log_of(bench), MessageId(bench.next_id)
    records = [
        encode_record(b"%d" % (sequence + n), id=MessageId(first + n))
        for n in range(count)
    ]
    bench.next_id += count
    data = b"".join(records)
    batch = StoredBatch(
        producer, sequence, count, -1, first, log.next_offset, SizeBytes(len(data))
    )
    ticket = Ticket()
    log.append(
        [data],
        size_bytes=len(data),
        record_count=count,
        last_id=MessageId(first + count - 1),
        ticket=ticket,
        batch=batch,
    )
    return batch, ticket


def known(log: PartitionLog, batch: StoredBatch) -> bool:
    found = log.producers.find(batch.producer, batch.sequence, batch.count, -1)
    assert found in (None, batch)
    return found is not None


def payloads(log: PartitionLog) -> list[int]:
    """Return the numbers that `send` stored, in the order of the log."""
    data, found = content_of(log), []
    while data:
        size = int.from_bytes(data[:4], "big")
        found.append(int(data[20 : 20 + size]))
        data = data[20 + size :]
    return found


def fail_write_behind_note(fs: FaultyFileSystem, error: int, **options: int) -> None:
    """Fail the write of the next group; the one before it is its note."""
    fs.fail_at(fs.calls + 2, error, **options)


def test_a_batch_is_remembered_from_its_append_on() -> None:
    """A sender that gets its ticket waits until the disk has it."""
    bench = opened(FaultyFileSystem())
    batch, ticket = send(bench, 0)
    log = log_of(bench)
    assert known(log, batch)
    repeats = [Ticket(), Ticket()]
    for repeat in repeats:
        log.join(batch, repeat)
        assert not repeat.is_answered
    bench.run()
    assert all(each.is_stored for each in (ticket, *repeats))
    assert known(log, batch)
    late = Ticket()
    log.join(batch, late)
    assert late.is_stored
    bench.close()


def test_repeats_are_answered_between_the_appends_that_they_belong_to() -> None:
    """A connection gets the replies of a partition in the order of its puts."""
    order: list[Ticket] = []
    bench = opened(FaultyFileSystem())
    log = log_of(bench)
    batch, _ticket = send(bench, 0)
    repeats, later = [Ticket(order) for _ in range(3)], Ticket(order)
    bench.append(log, [b"9"], later)
    for repeat in repeats:
        log.join(batch, repeat)
    bench.run()
    assert order == [*repeats, later]
    bench.close()


def test_an_append_that_ends_in_doubt_keeps_bytes_and_note() -> None:
    """It is answered early, and once; a batch that is sent again waits for the disk."""
    bench = opened(FaultyFileSystem())
    log = log_of(bench)
    first, early = send(bench, 0)
    _second, late = send(bench, 3)
    log.end_in_doubt("too slow", until=first.end_offset)
    assert str(early.error) == f"too slow: {OUTCOME_UNKNOWN}"
    assert not late.is_answered
    repeat = Ticket()
    log.join(first, repeat)
    assert known(log, first)
    assert not repeat.is_answered
    bench.run()
    assert repeat.is_stored
    assert late.is_stored
    assert payloads(log) == [0, 1, 2, 3, 4, 5]
    assert log.record_count == 6
    bench.close()


def test_a_batch_that_ended_in_doubt_and_finds_no_room_is_forgotten() -> None:
    """It is not in the log, so its repetition is refused with the rest, and stored."""
    fs = FaultyFileSystem()
    bench = opened(fs)
    log = log_of(bench)
    send(bench, 0)
    bench.run()
    batch, early = send(bench, 3)
    log.end_in_doubt("too slow", until=batch.end_offset)
    repeat = Ticket()
    log.join(batch, repeat)
    fail_write_behind_note(fs, errno.ENOSPC)
    bench.run()
    assert isinstance(early.error, MayBeStoredError)
    assert isinstance(repeat.error, NoSpaceError)
    assert not known(log, batch)
    _batch, again = send(bench, 3)
    bench.run()
    assert again.is_stored
    assert payloads(log) == [0, 1, 2, 3, 4, 5]
    bench.close()


@pytest.mark.parametrize("taken", [0, 21, 63])
def test_a_batch_under_which_the_disk_fails_stays_in_doubt(taken: int) -> None:
    """Sent again, it is not refused as if it were not there; the restart decides."""
    fs = FaultyFileSystem()
    bench = opened(fs)
    log = log_of(bench)
    stored, _ticket = send(bench, 0)
    bench.run()
    batch, ticket = send(bench, 3)
    fail_write_behind_note(fs, errno.EIO, taken=taken)
    bench.run()
    assert isinstance(ticket.error, MayBeStoredError)
    assert known(log, batch)
    repeat, other = Ticket(), Ticket()
    log.join(batch, repeat)
    log.join(stored, other)
    assert isinstance(repeat.error, MayBeStoredError)
    assert str(repeat.error) == str(ticket.error)
    assert other.is_stored
    again = opened(fs.snapshot())
    assert known(log_of(again), batch) == (taken == 63)
    again.close()
    bench.close()


def test_an_append_in_flight_survives_a_refusal_of_what_follows_it() -> None:
    """It is written, and waits for its sync: a full disk does not take that back."""
    fs = FaultyFileSystem()
    bench = opened(fs)
    log = log_of(bench)
    written, ticket = send(bench, 0)
    refused, other = send(bench, 3)
    progress = WriterProgress(written.end_offset, Offset(0), 0.0, 0, 0.0)
    log.on_progress(progress)
    log.on_refused(NoSpaceError("full"))
    assert isinstance(other.error, NoSpaceError)
    assert not ticket.is_answered
    assert known(log, written)
    assert not known(log, refused)
    assert log.next_offset == written.end_offset
    log.on_progress(progress._replace(synced_end=written.end_offset))
    assert ticket.is_stored


def test_after_a_stop_and_after_a_kill_the_same_is_remembered() -> None:
    """A kill leaves what was written in the page cache."""
    fs = FaultyFileSystem()
    bench = opened(fs, segment_bytes_max=120)
    batches = []
    for number in range(7):
        batches.append(send(bench, 3 * number)[0])
        bench.run()
    killed = opened(fs.snapshot(), segment_bytes_max=120)
    bench.close()
    stopped = opened(fs.crash(), segment_bytes_max=120)
    for again in (killed, stopped):
        log = log_of(again)
        assert list(log.producers) == batches[2:]
        # And it goes on from there.
        late, _ticket = send(again, 21)
        again.run()
        assert list(log.producers) == [*batches[3:], late]
        again.close()


def test_a_batch_without_room_is_forgotten_and_its_entry_not_believed() -> None:
    """Other records lie where it would have been."""
    fs = FaultyFileSystem()
    bench = opened(fs)
    first, _ticket = send(bench, 0)
    bench.run()
    lost = [send(bench, 3), send(bench, 6)]
    fail_write_behind_note(fs, errno.ENOSPC)
    bench.run()
    log = log_of(bench)
    for batch, ticket in lost:
        assert isinstance(ticket.error, NoSpaceError)
        assert not known(log, batch)
    entry = (PARTITION / PRODUCERS_NAME, 2 * 104)
    assert fs.size_of(entry[0]) >= 16 + entry[1]
    bench.append(log, [b"7"] * 20, Ticket())
    bench.run()
    again = opened(fs.snapshot())
    assert list(log_of(again).producers) == [first]
    again.close()
    bench.close()


def test_a_batch_that_was_cut_short_is_cut_off() -> None:
    """A kill in the middle of its write leaves its first records: all or none."""
    fs = FaultyFileSystem()
    bench = opened(fs)
    first, _ticket = send(bench, 0)
    bench.run()
    bench.append(log_of(bench), [b"8", b"9"], Ticket())
    torn, ticket = send(bench, 3)
    path = PARTITION / "00000000000000000000.meta"

    # The group is two records of 21 bytes, then the batch.
    fail_write_behind_note(fs, errno.EIO, taken=42 + 21)
    bench.run()
    assert ticket.error is not None
    disk = fs.snapshot()
    assert disk.size_of(path) == 63 + 42 + 21
    again = opened(disk)
    log = log_of(again)
    assert payloads(log) == [0, 1, 2, 8, 9]
    assert not known(log, torn)
    assert known(log, first)
    assert disk.exists(path.with_name(f"{path.name}.torn-105"))
    _batch, ticket = send(again, 3)
    again.run()
    assert ticket.is_stored
    assert payloads(log) == [0, 1, 2, 8, 9, 3, 4, 5]
    again.close()
    last = opened(disk)
    assert payloads(log_of(last)) == [0, 1, 2, 8, 9, 3, 4, 5]
    last.close()
    bench.close()


@pytest.mark.parametrize("damage", ["missing", "header", "entry", "torn"])
def test_a_damaged_file_costs_memory_of_producers_only(
    damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log starts, which is logged once and mends the file; the check names it."""
    fs = FaultyFileSystem()
    bench = opened(fs)
    batches = [send(bench, 3 * number)[0] for number in range(3)]
    bench.run()
    bench.close()
    path = PARTITION / PRODUCERS_NAME
    match damage:
        case "missing":
            fs.unlink(path)
        case "header":
            fs.flip_bit(path, 5)
        case "entry":
            fs.flip_bit(path, 8 * (16 + 104 + 70))
        case "torn":
            file = fs.open_append(path, create=False)
            file.truncate(SizeBytes(16 + 2 * 104 + 50))
            file.close()
    left = {
        "missing": [], "header": [], "entry": [batches[0], batches[2]],
        "torn": batches[:2],
    }  # fmt: skip
    findings = check(fs)
    assert findings == ([] if damage == "missing" else [(FindingKind.PRODUCERS, path)])
    for _ in range(2):
        bench = opened(fs)
        assert list(log_of(bench).producers) == left[damage]
        bench.close()
        assert check(fs) == []
    reported = caplog.text.count("producers are forgotten: partition=test-0")
    assert reported == (damage != "missing")
    bench = opened(fs)
    send(bench, 100)
    bench.run()
    bench.close()
    assert check(fs) == []


def check(fs: FaultyFileSystem) -> list[tuple[FindingKind, Path]]:
    report = verify_directory(
        fs, DATA, in_use=False, unsynced_bytes_max=SizeBytes(1 << 20)
    )
    return [(found.kind, found.path) for found in report.findings]


def test_the_ids_of_a_batch_that_was_only_noted_are_not_used_again() -> None:
    """If the clock did not move, a record would have its id at its offset, and pass for
    it after one more start: its repetition would be answered, and not stored.
    """
    fs = FaultyFileSystem()
    bench = opened(fs)
    first, _ticket = send(bench, 0)
    bench.run()
    lost, ticket = send(bench, 3)
    fail_write_behind_note(fs, errno.EIO, taken=0)
    bench.run()
    assert ticket.error is not None
    killed = fs.snapshot()
    again, other = opened(killed), Ticket()
    assert log_of(again).next_offset == lost.offset
    again.append(log_of(again), [b"9"] * 3, other)
    again.run()
    assert other.is_stored
    last = opened(killed.snapshot())
    assert list(log_of(last).producers) == [first]
    for each in (last, again, bench):
        each.close()


def test_puts_without_a_producer_make_no_file() -> None:
    """Nothing is noted, nothing is written."""
    fs = FaultyFileSystem()
    bench = opened(fs)
    bench.append(log_of(bench), [b"1"], Ticket())
    bench.run()
    bench.close()
    assert not fs.exists(PARTITION / PRODUCERS_NAME)
    assert log_of(opened(fs)).log_start_offset == Offset(0)


def test_an_append_that_is_refused_at_once_is_not_remembered() -> None:
    """The log is closing: nothing was queued."""
    bench = opened(FaultyFileSystem())
    batch, _ticket = send(bench, 0)
    bench.run()
    log = log_of(bench)
    log.begin_close()
    with pytest.raises(Exception, match="closed"):
        send(bench, 3)
    assert list(log.producers) == [batch]
