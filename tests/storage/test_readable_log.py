"""Copies for replicas that follow: from memory, and from the file."""

from collections.abc import Sequence

import pytest

from metaq.errors import ClosedError, CorruptRecordError, OffsetOutOfRangeError
from metaq.model import Offset
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import Damage
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import StorageBench
from tests.storage.support import RECORD, content_of, log_of, opened, put
from tests.storage.test_partition_log_batches import send
from tests.storage.test_partition_log_following import copy, following

BIG = 1 << 20


def leading(
    fs: FaultyFileSystem, *sizes: int, **system: int
) -> tuple[StorageBench, PartitionLog]:
    """Return a log that leads, with one committed record, and appends after it."""
    bench, log = following(fs, **system)
    log.lead()
    for count in sizes:
        put(bench, log, count)
        bench.run()
    return bench, log


def offsets(log: PartitionLog, offset: int, max_bytes: int = BIG) -> Sequence[int]:
    found = log.tail(Offset(offset * RECORD), max_bytes)
    return [each.offset // RECORD for each in found]


def end_of(log: PartitionLog, offset: int, count: int) -> tuple[float, bool]:
    end, is_exact = log.copy_end(Offset(offset * RECORD), count * RECORD)
    return end / RECORD, is_exact


def read(log: PartitionLog, start: int, end: int) -> bytes:
    found = log.read_copy(Offset(start * RECORD), Offset(end * RECORD))
    try:
        return found.read()
    finally:
        found.release()


def test_appends_in_flight_are_copied_from_memory(fs: FaultyFileSystem) -> None:
    """Whole, in their order, from exactly the offset that is asked for."""
    bench, log = leading(fs, 1, 2, 1)
    assert offsets(log, 1) == [1, 2, 4]
    assert offsets(log, 2) == [2, 4]
    assert offsets(log, 3) == [], "in the midst of an append"
    assert offsets(log, 0) == [], "committed: no longer in memory"
    assert offsets(log, 5) == []
    data = b"".join(bytes(c) for each in log.tail(Offset(RECORD), BIG) for c in each[4])
    assert data == read(log, 1, 5)
    bench.close()


def test_a_tail_is_as_long_as_is_wanted_and_one_append_at_least(
    fs: FaultyFileSystem,
) -> None:
    """However large the first append is."""
    bench, log = leading(fs, 3, 1, 1)
    assert offsets(log, 1, 1) == [1]
    assert offsets(log, 1, 4 * RECORD - 1) == [1]
    assert offsets(log, 1, 4 * RECORD) == [1, 4]
    bench.close()


def test_nothing_is_copied_that_is_not_synced_here(fs: FaultyFileSystem) -> None:
    """Its offset may be given to other bytes when the disk is full."""
    bench, log = leading(fs, 1)
    put(bench, log)
    assert offsets(log, 1) == [1]
    with pytest.raises(OffsetOutOfRangeError):
        read(log, 1, 3)
    bench.run()
    assert offsets(log, 1) == [1, 2]
    bench.close()


def test_a_copy_is_of_one_segment(fs: FaultyFileSystem) -> None:
    """Segments of a follower begin where those of the leader do."""
    bench, log = leading(fs, 1, 1, 1, segment_bytes_max=2 * RECORD)
    assert [each.base_offset // RECORD for each in log.segments] == [0, 2, 4]
    assert offsets(log, 1) == [1]
    assert offsets(log, 2) == [2, 3]
    assert end_of(log, 1, 99) == (2, True)
    assert end_of(log, 2, 99) == (4, True)
    bases = [log.segment_base(Offset(at * RECORD)) // RECORD for at in (0, 1, 2, 3, 4)]
    assert bases == [0, 0, 2, 2, 4]
    assert log.segment_base(Offset(99 * RECORD)) == 4 * RECORD
    bench.close()


def test_an_append_in_doubt_is_read_from_the_file(fs: FaultyFileSystem) -> None:
    """Its bytes are let go, so that late copies cost no memory."""
    bench, log = leading(fs, 1, 1)
    log.end_in_doubt("late", until=Offset(2 * RECORD))
    assert offsets(log, 1) == []
    assert offsets(log, 2) == [2]
    assert end_of(log, 1, 1) == (2, True)
    assert len(read(log, 1, 2)) == RECORD
    bench.close()


def test_a_copy_from_the_file_ends_where_an_append_does(fs: FaultyFileSystem) -> None:
    """Above the high watermark; with one append at least, to the synced end at most."""
    bench, log = leading(fs, 2, 3, 1)
    assert end_of(log, 1, 99) == (7, True)
    assert end_of(log, 1, 1) == (3, True)
    assert end_of(log, 1, 4) == (3, True)
    assert end_of(log, 1, 5) == (6, True)
    assert end_of(log, 3, 2) == (6, True)
    assert end_of(log, 4, 1) == (6, True), "goes on in the midst of one"
    bench.close()


def test_a_copy_of_committed_bytes_ends_with_any_record(fs: FaultyFileSystem) -> None:
    """At the high watermark at the latest: where appends end after it is known."""
    bench, log = leading(fs, 4, 2)
    log.set_bound(Offset(5 * RECORD))
    assert log.high_watermark == 5 * RECORD
    assert end_of(log, 0, 2) == (2, False)
    assert end_of(log, 0, 5) == (5, True)
    assert end_of(log, 4, 2) == (5, True)
    assert end_of(log, 4, 3) == (7, True)
    bench.close()


def test_a_copy_of_what_a_leader_found_ends_with_any_record(
    fs: FaultyFileSystem,
) -> None:
    """It does not know where appends end in it."""
    bench, log = following(fs)
    copy(bench, log, 2), copy(bench, log, 2)
    bench.run()
    assert end_of(log, 2, 2) == (4, False), "of one that follows"
    log.lead()
    put(bench, log, 2)
    bench.run()
    assert offsets(log, 1) == []
    assert end_of(log, 1, 2) == (3, False)
    assert end_of(log, 1, 4) == (5, True)
    assert end_of(log, 1, 5) == (5, True)
    assert end_of(log, 1, 99) == (7, True)
    assert len(read(log, 1, 5)) == 4 * RECORD
    bench.close()


def test_notes_go_with_the_bytes(fs: FaultyFileSystem) -> None:
    """Those of a range, in the order of their bytes."""
    bench = opened(fs)
    batches = [send(bench, 10 * number, producer=f"p{3 - number}")[0]
               for number in range(3)]  # fmt: skip
    bench.run()
    log = log_of(bench)
    assert log.batches_in(Offset(0), log.next_offset) == tuple(batches)
    assert log.batches_in(batches[1].offset, batches[1].end_offset) == (batches[1],)
    bench.close()


def test_damage_ends_a_copy(fs: FaultyFileSystem) -> None:
    """Before it begins; a copy that begins there says so."""
    bench, log = leading(fs, 3)
    path, at = log.segments.active.path, Offset(2 * RECORD)
    log.on_damage(Damage(path, at, Offset(3 * RECORD), "checksum mismatch"))
    assert len(read(log, 1, 4)) == RECORD
    assert len(read(log, 3, 4)) == RECORD
    with pytest.raises(CorruptRecordError):
        read(log, 2, 4)
    bench.close()


def test_gets_stop_at_the_high_watermark_all_the_same(fs: FaultyFileSystem) -> None:
    """And a log that is closed gives nothing to a copy."""
    bench, log = leading(fs, 2)
    assert len(content_of(log)) == RECORD
    with pytest.raises(OffsetOutOfRangeError):
        log.read(Offset(RECORD), 1)
    bench.close()
    with pytest.raises(ClosedError):
        read(log, 0, 1)
