"""Recovery: clean ends, torn tails, holes, names, and what it leaves."""

import errno
import logging
from dataclasses import replace
from itertools import chain
from random import Random

import pytest

from metaq.model import MessageId, Millis, Offset
from metaq.record.layout import encode_record
from metaq.storage.recovery import COPY_BYTES, TORN_FILES_MAX, RecoveredLog, recover_log
from metaq.storage.span_index import read_index, write_index
from metaq.storage.walk import MTIME_LAG_MS
from tests.cases import for_each
from tests.sampling import quarter
from tests.storage.logs import (
    DIRECTORY,
    SPAN,
    content,
    disk_with_directory,
    everything,
    put_file,
    put_segment,
    record,
)
from tests.storage.recovering import (
    BOUND,
    BYTES,
    META,
    SPANS,
    disk_with_log,
    recover,
    writes,
)

# -- clean ----------------------------------------------------------------------------


def test_a_clean_log_is_opened_without_a_single_write() -> None:
    """All records are counted, the newest id is known, nothing changes on disk."""
    disk = disk_with_log()
    before = everything(disk)
    calls = disk.calls
    result = recover(disk)
    assert [(s.base_offset, s.size_bytes) for s in result.segments] == [(0, len(BYTES))]
    assert (result.last_id, result.record_count) == (5, 5)
    assert (result.damage, result.torn) == ((), None)
    assert writes(disk, calls) == []
    assert everything(disk) == before


def test_an_empty_directory_gives_no_segment() -> None:
    """The caller makes the first segment; nothing is wrong."""
    result = recover(disk_with_directory())
    assert result == RecoveredLog((), None, MessageId(-1), 0)


def test_a_log_of_several_segments_counts_them_all() -> None:
    """Sealed segments are counted by their indexes; the empty active one is kept."""
    disk = disk_with_log()
    put_segment(disk, len(BYTES), [], last_id_before=5)
    result = recover(disk)
    assert [s.base_offset for s in result.segments] == [0, len(BYTES)]
    assert (result.last_id, result.record_count, result.damage) == (5, 5, ())


def test_the_writer_that_is_returned_goes_on_at_the_end() -> None:
    """Records appended after recovery are covered, and the next start is clean."""
    disk = disk_with_log(record(6))
    result = recover_log(
        disk,
        DIRECTORY,
        unsynced_bytes_max=BOUND,
        span_bytes_min=SPAN,
        now_ms=Millis(10_000),
    )
    assert result.spans is not None
    put_file(disk, META, record(7))
    list(result.spans.extend([record(7)], record_count=1))
    result.spans.commit(Millis(11_000))
    result.spans.close()
    calls = disk.calls
    again = recover(disk)
    assert (again.record_count, again.last_id) == (7, 7)
    assert writes(disk, calls) == []


# -- torn tail ------------------------------------------------------------------------


@for_each("size", range(1, len(record(6))))
@for_each("indexed", [True, False])
def test_a_record_torn_at_any_byte_is_cut_and_kept_aside(
    size: int, indexed: bool
) -> None:
    """Every acknowledged record stays, the tail goes, a copy of it remains."""
    disk = disk_with_log(record(6)[:size], indexed=indexed)
    result = recover(disk)
    assert content(disk, META) == disk.synced_bytes(DIRECTORY / META) == BYTES
    assert result.torn is not None
    assert (result.torn.offset, result.torn.cut_bytes) == (len(BYTES), size)
    assert result.torn.kept_as == DIRECTORY / f"{META}.torn-{len(BYTES)}"
    assert disk.synced_bytes(result.torn.kept_as) == record(6)[:size]
    assert result.segments[-1].size_bytes == len(BYTES)
    assert (result.last_id, result.record_count, result.damage) == (5, 5, ())


@pytest.mark.parametrize(
    "tail",
    [
        bytes(5),
        bytes(20),
        bytes(45),
        bytes(BOUND),
        b"garbage that is no record at all",
        b"\xff" * 40,
        record(6)[:-1] + b"?",
        bytes(21) + record(7),
        record(6)[:25] + bytes(20) + record(7) + record(8),
        bytes(5 * BOUND),
    ],
)
def test_what_a_crash_leaves_at_the_end_is_no_record(tail: bytes) -> None:
    """Zeros, stale pages and holes followed by records of the same write are torn."""
    disk = disk_with_log(tail)
    result = recover(disk)
    assert content(disk, META) == BYTES
    assert result.torn is not None
    assert result.torn.cut_bytes == len(tail)
    assert result.damage == ()


def test_whole_records_behind_the_index_are_kept_and_made_durable() -> None:
    """Written and never acknowledged: they may stay, then they have to be durable."""
    disk = disk_with_log(record(6) + record(7) + b"torn")
    result = recover(disk)
    assert (result.record_count, result.last_id) == (7, 7)
    after = disk.crash()
    assert content(after, META) == BYTES + record(6) + record(7)
    index = read_index(disk, DIRECTORY / META, Offset(0))
    assert index is not None
    assert index.end_offset == len(BYTES) + len(record(6) + record(7))
    assert recover(after).torn is None


def test_bytes_that_a_failed_sync_dropped_are_written_again() -> None:
    """Memory shows them, the disk lost them: a sync alone would not bring them back."""
    disk = disk_with_log()
    file = disk.open_append(DIRECTORY / META, create=False)
    file.write(record(6))
    disk.fail_at(disk.calls + 1, errno.EIO)
    with pytest.raises(Exception, match="sync failed"):
        file.sync()
    file.close()
    result = recover(disk)
    assert result.segments[-1].size_bytes == len(BYTES + record(6))
    assert content(disk.crash(), META) == BYTES + record(6)


def test_only_the_end_of_a_long_tail_is_written_again() -> None:
    """The loss of one failed sync is bounded, and so is this work; piece by piece."""
    tail = record(6, 3 * COPY_BYTES)
    disk = disk_with_log(tail, indexed=False)
    calls = disk.calls
    recover(disk, rewritten_bytes_max=5 * COPY_BYTES // 2)
    sizes = [
        call.size
        for call in disk.log[calls:]
        if call.name == "write" and call.path.name == META
    ]
    assert sizes == [COPY_BYTES, COPY_BYTES, COPY_BYTES // 2]
    assert content(disk, META) == BYTES + tail


def test_a_bounded_number_of_torn_tails_is_kept() -> None:
    """The one with the smallest offset goes first."""
    disk = disk_with_log()
    for offset in range(TORN_FILES_MAX + 2):
        put_file(disk, f"{META}.torn-{offset}", b"x")
    put_file(disk, META, b"torn")
    recover(disk)
    kept = [name for name in disk.list_directory(DIRECTORY) if ".torn-" in name]
    assert len(kept) == TORN_FILES_MAX
    assert f"{META}.torn-{len(BYTES)}" in kept
    assert f"{META}.torn-2" not in kept


def test_a_full_disk_does_not_keep_a_log_from_starting() -> None:
    """Without room for the copy the tail is cut all the same, and that is said."""
    disk = disk_with_log(record(6) + b"torn")
    disk.set_capacity(1)
    result = recover(disk)
    assert result.torn is not None
    assert result.torn.kept_as is None
    assert result.spans is None
    assert content(disk, META) == BYTES + record(6)
    assert not any("torn" in name for name in disk.list_directory(DIRECTORY))
    disk.set_capacity(1 << 20)
    assert recover(disk).record_count == 6


def test_torn_tail_and_damage_are_told_to_the_operator(caplog) -> None:
    """One warning with the numbers for what was cut, one error for what was not."""
    recover(disk_with_log(b"torn"))
    assert "torn tail cut" in caplog.text
    assert f"offset={len(BYTES)} cut_bytes=4" in caplog.text
    disk = disk_with_log()
    disk.flip_bit(DIRECTORY / META, 200)
    recover(disk)
    assert [r.levelno for r in caplog.records] == [logging.WARNING, logging.ERROR]
    assert "next_good_offset=30" in caplog.text


# -- index ----------------------------------------------------------------------------


def test_a_directory_of_a_java_broker_gets_an_index() -> None:
    """Without an index all records are walked; the index then equals the log."""
    disk = disk_with_log(indexed=False)
    disk.set_wall_ms(5_000)
    put_file(disk, META, record(6))
    assert recover(disk).record_count == 6
    index = read_index(disk, DIRECTORY / META, Offset(0))
    assert index is not None
    assert index.end_offset == len(BYTES + record(6))
    assert index.newest_append_ms == 5_000 + MTIME_LAG_MS
    calls = disk.calls
    assert recover(disk).record_count == 6
    assert writes(disk, calls) == []


@pytest.mark.slow
def test_every_flipped_bit_in_an_index_costs_time_and_no_data(rng: Random) -> None:
    """The index is made again; the log itself is not touched."""
    disk = disk_with_log()
    for bit in quarter(range(len(content(disk, SPANS)) * 8), rng):
        damaged = disk.snapshot()
        damaged.flip_bit(DIRECTORY / SPANS, bit)
        result = recover(damaged)
        assert (result.record_count, result.last_id, result.damage) == (5, 5, ())
        assert content(damaged, META) == BYTES
        index = read_index(damaged, DIRECTORY / META, Offset(0))
        assert index is not None
        assert index.end_offset == len(BYTES)


def test_rubbish_behind_the_believed_entries_goes_away() -> None:
    """Stale entries are not left for a later entry to join."""
    disk = disk_with_log()
    good = content(disk, SPANS)
    put_file(disk, SPANS, b"?" * 45)
    recover(disk)
    assert content(disk, SPANS) == good


@pytest.mark.parametrize(
    ("ids", "indexed", "expected"),
    [
        ([7, 8], True, 8),
        ([7, 8], False, 8),
        ([-9, -8], True, -1),
        ([-9, -8], False, -1),
        ([], True, 3),
        ([], False, -1),
    ],
)
def test_ids_go_on_behind_the_sealed_segments(ids, indexed, expected) -> None:
    """An empty active segment without an index does not forget the newest id."""
    disk = disk_with_directory()
    records = [encode_record(b"abc", id=MessageId(number), flag=0) for number in ids]
    before = -1 if ids else 3
    put_segment(
        disk, 0, [records] if ids else [], indexed=indexed, last_id_before=before
    )
    if ids:
        put_segment(disk, sum(map(len, records)), [], indexed=False)
    assert recover(disk).last_id == expected
    assert recover(disk).last_id == expected


@pytest.mark.parametrize("covered", [0, 1])
def test_ids_go_on_behind_records_that_a_short_index_leaves_out(covered: int) -> None:
    """No room for an entry, or a power cut in a roll: the sealed index ends early."""
    disk = disk_with_directory()
    commits = [[record(7, size=100)], [record(8), record(9)]]
    path = put_segment(disk, 0, commits)
    index = read_index(disk, path, Offset(0))
    assert index is not None
    write_index(disk, path, replace(index, spans=index.spans[:covered]))
    put_segment(disk, sum(map(len, chain(*commits))), [], indexed=False)
    assert recover(disk).last_id == 9
    assert recover(disk).last_id == 9


def test_records_with_an_id_tell_when_they_were_appended() -> None:
    """A rebuilt index takes the time of the newest id, never later than the file's."""
    disk = disk_with_directory()
    disk.set_wall_ms(1_700_000_000_000)
    when = 1_600_000_000_000
    message_id = (when - 1_303_895_660_503) << 22
    put_segment(
        disk, 0, [[encode_record(b"a", id=MessageId(message_id))]], indexed=False
    )
    recover_log(
        disk,
        DIRECTORY,
        unsynced_bytes_max=BOUND,
        span_bytes_min=SPAN,
        now_ms=Millis(1_700_000_000_000),
    ).spans.abandon()
    index = read_index(disk, DIRECTORY / META, Offset(0))
    assert index is not None
    assert index.newest_append_ms == when


def test_a_cut_is_durable_when_the_log_opens() -> None:
    """Torn bytes that are on the disk would come back, after records put there."""
    disk = disk_with_log()
    put_file(disk, META, record(6)[:7])
    recover(disk)
    assert content(disk.crash(), META) == BYTES
