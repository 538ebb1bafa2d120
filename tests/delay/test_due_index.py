"""The index of a tier: runs in memory and in files, merged by due time."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from metaq.delay.due_index import (
    BLOCK_ENTRIES,
    ENTRY,
    FRESH_MAX,
    DueIndex,
    discard_old,
    due_path,
    encode_file,
    entry_of,
    open_run,
    topic_hash,
)
from metaq.delay.plan import NOTHING_DONE, DueEntry, Progress
from metaq.delay.records import decode_head, encode_cancelled, encode_head
from metaq.errors import CorruptRecordError
from metaq.fs import SystemFileSystem
from metaq.model import MessageId, Offset
from metaq.record.layout import Record, encode_record
from metaq.record.scan import read_record
from tests.rigs.fs import FaultyFileSystem

DIRECTORY = Path("/data")
BASE = Offset(1000)
SEGMENT = DIRECTORY / f"{BASE:020d}.meta"


def record_of(payload: bytes) -> Record:
    found = read_record(encode_record(payload, id=MessageId(1)))
    assert isinstance(found, Record)
    return found


def write_segment(
    fs: FaultyFileSystem, dues: Sequence[int]
) -> tuple[Offset, list[DueEntry]]:
    """Write a segment with a batch of two for each due time."""
    data, found = b"", list[DueEntry]()
    for due_ms in dues:
        payload = encode_head(due_ms, MessageId(1), "t", 0, 2) + b"x" * (due_ms % 7)
        record = encode_record(payload, id=MessageId(1))
        entry = due_ms, BASE + len(data), 2, len(record), topic_hash("t")
        found.append(DueEntry(*entry))
        data += record
    fs.make_directory(DIRECTORY)
    with fs.open_append(SEGMENT, create=True) as file:
        file.write(data)
    return Offset(BASE + len(data)), sorted(found)


def drain(index: DueIndex, fs: FaultyFileSystem) -> list[DueEntry]:
    """Take everything, loading what is wanted."""
    found = list[DueEntry]()
    while True:
        for run in index.wanted(2**62):
            run.load(fs)
        if index.peek() is None:
            return found
        found.append(index.pop())


def test_the_entry_of_a_record_and_of_what_cancels_in_it() -> None:
    """Both have the same place, and the record comes first."""
    payload = encode_head(9, MessageId(1), "t", 0, 3) + b"body"
    record = record_of(payload)
    entry = entry_of(Offset(50), record)
    assert ENTRY.unpack(entry) == (9, 50, 3, record.size_bytes, topic_hash("t"))
    cancelled = record_of(encode_cancelled(decode_head(payload), 2, 3, Offset(50), 90))
    taken_back = entry_of(Offset(999), cancelled)
    assert ENTRY.unpack(taken_back) == (9, 50, -3, 30, topic_hash("t"))
    assert sorted([taken_back, entry]) == [entry, taken_back]


def test_entries_in_memory_come_in_the_order_of_their_times() -> None:
    """However many there are, and while others are added."""
    index, source = DueIndex(), random.Random(1)
    entries = [
        DueEntry(source.randrange(10**6), offset, 1, 10, 0)
        for offset in range(3 * FRESH_MAX)
    ]
    for each in entries:
        index.add(ENTRY.pack(*each), Offset(0))
    assert index.messages == len(entries)
    assert index.size_bytes == 10 * len(entries)
    found = [index.pop() for _ in range(FRESH_MAX)]
    index.add(ENTRY.pack(0, 5, 1, 10, 0), Offset(0))
    assert index.pop() == (0, 5, 1, 10, 0)
    while index.peek() is not None:
        found.append(index.pop())
    assert found == sorted(entries)
    assert (index.messages, index.size_bytes, index.segments) == (0, 0, set())


@pytest.mark.parametrize("count", [1, BLOCK_ENTRIES, 2 * BLOCK_ENTRIES + 3])
def test_a_file_gives_what_its_segment_has(fs: FaultyFileSystem, count: int) -> None:
    """Made when it is opened first, then read, a block at a time."""
    source = random.Random(count)
    dues = [source.randrange(500) for _ in range(count)]
    end, wanted = write_segment(fs, dues)
    for _ in range(2):
        run, late = open_run(fs, SEGMENT, BASE, end, NOTHING_DONE)
        assert late == []
        index = DueIndex()
        index.add_run(run)
        assert index.messages == 2 * count
        assert index.size_bytes == end - BASE
        assert index.segments == {BASE}
        assert drain(index, fs) == wanted
        assert (index.messages, index.size_bytes) == (0, 0)
    assert fs.exists(due_path(SEGMENT, BASE))


@pytest.mark.parametrize("passed", [0, 1, 500, BLOCK_ENTRIES, 1500, 2499, 2500])
@pytest.mark.parametrize("seen", [10**9, 0, 40_000])
def test_a_file_is_entered_behind_what_is_done(
    fs: FaultyFileSystem, passed: int, seen: int
) -> None:
    """Records that were not seen yet, and are not after that, are late."""
    source = random.Random(passed)
    end, wanted = write_segment(fs, [source.randrange(10**5) for _ in range(2500)])
    done = Progress(*wanted[passed - 1].key, seen) if passed else NOTHING_DONE
    run, late = open_run(fs, SEGMENT, BASE, end, done)
    index = DueIndex()
    index.add_run(run)
    assert index.messages == 2 * (2500 - passed)
    assert drain(index, fs) == wanted[passed:]
    unseen = [each for each in wanted[:passed] if each.offset >= done.seen]
    assert [DueEntry(*ENTRY.unpack(each)) for each in late] == unseen


@pytest.mark.slow
def test_a_file_that_is_not_right_is_made_again(fs: FaultyFileSystem) -> None:
    """Cut, damaged, of other bytes: it gives what its segment has."""
    end, wanted = write_segment(fs, list(range(1500)))
    path = due_path(SEGMENT, BASE)
    open_run(fs, SEGMENT, BASE, end, NOTHING_DONE)
    whole = fs.content(path)
    others = [
        b"",
        whole[:20],
        whole[:200],
        whole[:-1],
        whole.replace(b"mqdue002", b"mqdue001"),
        encode_file(BASE, Offset(end - 1), []),
        encode_file(Offset(0), end, []),
    ]
    for bit in range(0, 8 * len(whole), 9973):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        others.append(bytes(damaged))
    for other in others:
        fs.write_atomically(path, other)
        index = DueIndex()
        try:
            index.add_run(open_run(fs, SEGMENT, BASE, end, NOTHING_DONE).run)
            assert drain(index, fs) == wanted
        except CorruptRecordError:
            # In a block that was not read at the opening: nothing of it is believed,
            # and its owner drops the file.
            assert fs.content(path) == other
            fs.discard(path)
            index = DueIndex()
            index.add_run(open_run(fs, SEGMENT, BASE, end, NOTHING_DONE).run)
            assert drain(index, fs) == wanted


def test_a_damaged_segment_has_no_index(fs: FaultyFileSystem) -> None:
    """Nothing of it is passed over."""
    end, _wanted = write_segment(fs, [1, 2, 3])
    with pytest.raises(CorruptRecordError):
        open_run(fs, SEGMENT, BASE, Offset(end + 9), NOTHING_DONE)
    fs.flip_bit(SEGMENT, 8 * 30)
    with pytest.raises(CorruptRecordError):
        open_run(fs, SEGMENT, BASE, end, NOTHING_DONE)


@pytest.mark.parametrize("others", [0, 1])
def test_a_file_takes_the_place_of_its_segment_in_memory(
    fs: FaultyFileSystem, others: int
) -> None:
    """Entries of other segments stay; none may have come since it was sealed."""
    end, wanted = write_segment(fs, [5, 3, 9])
    index = DueIndex()
    for each in wanted:
        index.add(ENTRY.pack(*each), BASE)
    following = [DueEntry(4, end, 1, 10, 0)] * others
    for other in following:
        index.add(ENTRY.pack(*other), end)
    index.add_run(open_run(fs, SEGMENT, BASE, end, NOTHING_DONE).run)
    assert index.messages == 6 + others
    assert drain(index, fs) == sorted([*wanted, *following])


def test_a_file_leaves_the_order_of_other_segments_as_it_is(
    fs: FaultyFileSystem,
) -> None:
    """Each in memory was begun before the next one."""
    end, (own,) = write_segment(fs, [1])
    index = DueIndex()
    added = [
        own if due_ms == 1 else DueEntry(due_ms, end + due_ms, 1, 10, 0)
        for due_ms in (1, 2, 4, 5, 3, 6, 7)
    ]
    for each in added:
        index.add(ENTRY.pack(*each), Offset(each.offset))
    index.add_run(open_run(fs, SEGMENT, BASE, end, NOTHING_DONE).run)
    assert drain(index, fs) == sorted(added)


def test_a_count_that_is_not_right_reads_no_more_than_there_is(tmp_path: Path) -> None:
    """The head of a file names its blocks, and may be damaged."""
    fs, segment = SystemFileSystem(), tmp_path / SEGMENT.name
    segment.write_bytes(
        encode_record(encode_head(9, MessageId(1), "t", 0, 2), id=MessageId(1))
    )
    end, path = Offset(BASE + segment.stat().st_size), due_path(segment, BASE)
    open_run(fs, segment, BASE, end, NOTHING_DONE)
    whole = path.read_bytes()
    path.write_bytes(whole[:28] + b"\xff" * 4 + whole[32:])
    open_run(fs, segment, BASE, end, NOTHING_DONE)
    assert path.read_bytes() == whole


def test_files_of_segments_that_are_gone_go(fs: FaultyFileSystem) -> None:
    """Others stay."""
    write_segment(fs, [1])
    for base in (Offset(7), BASE):
        fs.write_atomically(due_path(SEGMENT, base), b"x")
    discard_old(fs, DIRECTORY, BASE)
    assert sorted(fs.list_directory(DIRECTORY)) == sorted(
        [SEGMENT.name, due_path(SEGMENT, BASE).name]
    )
    discard_old(fs, DIRECTORY / "none", BASE)
