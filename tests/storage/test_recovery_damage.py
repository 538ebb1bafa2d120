"""Recovery of damaged logs: flipped bits, short files, countless flaws."""

import random

import pytest

from metaq.model import Position, SizeBytes
from metaq.record.scan import CleanEnd, scan_records
from metaq.storage.damage import DAMAGES_MAX
from metaq.storage.walk import WINDOW_BYTES, search_record
from tests.sampling import quarter
from tests.storage.logs import (
    DIRECTORY,
    content,
    disk_with_directory,
    everything,
    put_file,
    put_segment,
    record,
)
from tests.storage.recovering import (
    BYTES,
    META,
    STARTS,
    UNCOVERED,
    disk_with_log,
    recover,
)

# -- corruption -----------------------------------------------------------------------


@pytest.mark.slow
def test_every_flipped_bit_below_the_index_stops_the_log(rng: random.Random) -> None:
    """Each flip is named, nothing is cut or written, and the good offset is good."""
    disk = disk_with_log(b"torn")
    intact = everything(disk)
    whole = {*STARTS, len(BYTES)}
    for bit in quarter(range(len(BYTES) * 8), rng):
        damaged = disk.snapshot()
        damaged.flip_bit(DIRECTORY / META, bit)
        before = everything(damaged)
        result = recover(damaged)
        (found,) = result.damage
        good = found.next_good_offset
        assert found.offset <= bit // 8
        assert good is not None
        assert bit // 8 < good
        assert {found.offset, good} <= whole
        assert isinstance(scan_records(intact[META][good : len(BYTES)]), CleanEnd)
        assert result.spans is None
        assert result.torn is None
        assert result.segments[-1].size_bytes == len(BYTES)
        assert everything(damaged) == before


@pytest.mark.slow
def test_every_flipped_bit_without_an_index_is_cut_or_stops(
    rng: random.Random,
) -> None:
    """A Java broker's log: header fields that no checksum covers are all it misses."""
    disk = disk_with_log(indexed=False)
    for bit in quarter(range(len(BYTES) * 8), rng):
        damaged = disk.snapshot()
        damaged.flip_bit(DIRECTORY / META, bit)
        before = content(damaged, META)
        result = recover(damaged, SizeBytes(50))
        found = bool(result.damage) or result.torn is not None
        assert found is (bit // 8 not in UNCOVERED), bit
        if result.damage:
            assert content(damaged, META) == before
            assert result.damage[0].offset <= bit // 8
        elif result.torn is not None:
            assert result.torn.offset <= bit // 8


@pytest.mark.parametrize("position", range(len(record(6))))
def test_a_bad_byte_with_a_record_far_behind_it_is_corruption(position: int) -> None:
    """More follows it than one write can be long: no crash explains that."""
    tail = bytearray(b"".join(record(number) for number in range(6, 20)))
    tail[position] ^= 0x40
    disk = disk_with_log()
    put_file(disk, META, tail)
    before = everything(disk)
    result = recover(disk)
    if 8 <= position < 20:  # id and flag have no checksum without a span
        assert result.damage == ()
        return
    (found,) = result.damage
    assert found.offset == len(BYTES)
    assert found.next_good_offset == len(BYTES + record(6))
    assert result.last_id == 19
    assert result.segments[-1].size_bytes == len(BYTES) + len(tail)
    assert everything(disk) == before


def test_in_threshold_mode_a_tail_of_any_length_may_be_torn() -> None:
    """Nothing after the index was synced, so nothing there is corruption."""
    tail = b"?" * 20 + b"".join(record(number) for number in range(6, 20))
    disk = disk_with_log(tail)
    result = recover(disk, None)
    assert content(disk, META) == BYTES
    assert result.torn is not None
    assert result.torn.cut_bytes == len(tail)


def test_damage_in_two_places_is_named_twice_and_a_torn_tail_stays() -> None:
    """With damage in the log nothing is cut, and the log ends at the last record."""
    disk = disk_with_log()
    records = [record(number) for number in range(6, 60)]
    records[3] = b"#" * len(records[3])
    put_file(disk, META, b"".join(records) + b"torn")
    disk.flip_bit(DIRECTORY / META, 8 * 90)
    result = recover(disk)
    end = len(BYTES) + sum(map(len, records))
    third = len(BYTES) + 3 * len(records[3])
    assert [(d.offset, d.next_good_offset) for d in result.damage] == [
        (60, 130), (third, third + 30),
    ]  # fmt: skip
    assert result.segments[-1].end_offset == end
    assert content(disk, META).endswith(b"torn")


def test_ranges_of_damage_that_touch_are_one() -> None:
    """The next good offset is never the start of more damage."""
    disk = disk_with_log()
    disk.flip_bit(DIRECTORY / META, 8 * 55)
    disk.flip_bit(DIRECTORY / META, 8 * 100)
    (found,) = recover(disk).damage
    assert (found.offset, found.next_good_offset) == (30, 130)


@pytest.mark.slow
def test_a_file_that_is_shorter_than_its_index_stops_the_log() -> None:
    """Acknowledged bytes are gone: the readable ones end at the last whole record."""
    for size in range(len(BYTES)):
        disk = disk_with_log()
        file = disk.open_append(DIRECTORY / META, create=False)
        file.truncate(SizeBytes(size))
        file.close()
        result = recover(disk)
        (found,) = result.damage
        assert found.next_good_offset is None
        assert "too short" in found.detail
        assert found.offset == max(b for b in (0, 30, 60, 130, 160) if b <= size)
        assert result.segments[-1].end_offset == found.offset
        assert content(disk, META) == BYTES[:size]


# -- long records and many flaws ------------------------------------------------------


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("fate", ["whole", "torn", "flipped"])
def test_a_record_longer_than_a_window_is_no_exception(
    fate: str, indexed: bool
) -> None:
    """It is checked piece by piece: kept, cut or named like any other."""
    long = record(6, 3 * WINDOW_BYTES)
    disk = disk_with_directory()
    first = [record(1)]
    if indexed:
        put_segment(disk, 0, [first])
        put_file(disk, META, long)
    else:
        put_segment(disk, 0, [first, [long]], indexed=False)
    if fate == "torn":
        file = disk.open_append(DIRECTORY / META, create=False)
        file.truncate(SizeBytes(30 + len(long) - 1))
        file.close()
    elif fate == "flipped":
        disk.flip_bit(DIRECTORY / META, 8 * 2 * WINDOW_BYTES)
    result = recover(disk)
    end = 30 if fate != "whole" else 30 + len(long)
    assert result.segments[-1].size_bytes == disk.size_of(DIRECTORY / META) == end
    assert (result.torn is None) == (fate == "whole")
    assert result.record_count == (2 if fate == "whole" else 1)


def test_a_span_longer_than_a_window_is_verified_whole() -> None:
    """Its checksum runs over all windows."""
    disk = disk_with_directory()
    put_segment(disk, 0, [[record(1, 3 * WINDOW_BYTES)], [record(2)]])
    assert recover(disk).damage == ()
    disk.flip_bit(DIRECTORY / META, 8 * 2 * WINDOW_BYTES)
    (found,) = recover(disk).damage
    assert (found.offset, found.next_good_offset) == (0, 3 * WINDOW_BYTES + 20)


def test_the_search_for_a_good_record_crosses_windows() -> None:
    """Wherever the next record is, it is found once and whole."""
    for gap in range(100, 170):
        disk = disk_with_directory()
        file = disk.open_read(put_file(disk, META, b"#" * gap + record(6)))
        found = search_record(file, Position(0), Position(file.size()), 64)
        assert found == gap
        file.close()


def test_countless_flaws_are_named_up_to_a_bound() -> None:
    """The last range then reaches to the end of the log."""
    bad = b"#" * 30
    disk = disk_with_log((bad + record(6)) * (DAMAGES_MAX + 5))
    result = recover(disk, SizeBytes(1))
    assert len(result.damage) == DAMAGES_MAX
    assert result.damage[-1].next_good_offset is None
    spans = [[record(1, 40)] + [record(2)] * 2 for _ in range(DAMAGES_MAX + 5)]
    covered = disk_with_directory()
    put_segment(covered, 0, spans)
    for number in range(len(spans)):
        covered.flip_bit(DIRECTORY / META, 8 * (120 * number + 30))
    result = recover(covered)
    assert len(result.damage) == DAMAGES_MAX
    assert result.damage[-1].next_good_offset is None
