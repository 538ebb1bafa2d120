"""Chunks of one copy for another: whole records, whole batches, and no damage."""

from typing import Any

import pytest

from metaq.model import Offset
from metaq.record.checksum import crc32
from metaq.replication.messages import TailReply, TailRequest
from metaq.replication.serving import (
    answer_tail,
    chunk_of,
    copies_of,
    read_chunk,
    refusal,
)
from metaq.storage.segment import DamagedSegmentError
from tests.replication.stream_rig import E2, RECORD, Copy, Stage, play
from tests.storage.support import LOG


async def filled(stage: Stage, *counts: int, producer: str = "") -> Copy:
    """Return a copy that leads with an append of so many records each, all synced."""
    leader = await stage.lead(in_sync=(1,))
    for count in counts:
        ticket = leader.put(count, producer=producer)
        await stage.until(lambda: ticket.is_stored)  # noqa: B023
    return leader


def test_chunks_from_a_file_are_whole_records() -> None:
    """As many as fit, at least one; number, last id and checksum are with them."""

    async def scenario(stage: Stage) -> None:
        log = (await filled(stage, 1, 4)).log()
        sizes = {1: 1, RECORD: 1, 2 * RECORD + 1: 2, 1 << 20: 5}
        for size, count in sizes.items():
            chunk = await read_chunk(log, Offset(0), size)
            assert (chunk.record_count, chunk.size_bytes) == (count, count * RECORD)
            assert chunk.last_id == count
            (body,) = chunk.body
            assert chunk.crc32 == crc32(body)
        rest = await read_chunk(log, Offset(2 * RECORD), 1 << 20)
        assert rest.end_offset == 5 * RECORD
        assert rest.number == log.number

    play(scenario)


def test_chunks_end_within_no_batch_that_may_be_sent_again() -> None:
    """A batch is left out whole, or is alone in its chunk however large it is."""

    async def scenario(stage: Stage) -> None:
        log = (await filled(stage, 2, 3, producer="p")).log()
        first = await read_chunk(log, Offset(0), 4 * RECORD)
        assert first.end_offset == 2 * RECORD
        assert [each.size_bytes for each in first.batches] == [2 * RECORD]
        second = await read_chunk(log, Offset(2 * RECORD), RECORD)
        assert second.end_offset == 5 * RECORD
        assert [each.offset for each in second.batches] == [2 * RECORD]
        both = await read_chunk(log, Offset(0), 5 * RECORD)
        assert len(both.batches) == 2

    play(scenario)


def test_chunks_are_of_one_segment_and_name_it() -> None:
    """So followers roll where their leader did."""

    async def scenario(stage: Stage) -> None:
        log = (await filled(stage, *[1] * 5)).log()
        assert len(log.segments) == 3
        offset, bases = Offset(0), []
        while offset < log.synced_end:
            chunk = await read_chunk(log, offset, 1 << 20)
            bases.append((chunk.segment, chunk.size_bytes // RECORD))
            offset = chunk.end_offset
        assert bases == [(0, 2), (2 * RECORD, 2), (4 * RECORD, 1)]

    play(scenario, segment_bytes_max=2 * RECORD)


def test_appends_in_memory_make_a_chunk_without_the_file() -> None:
    """With their notes; the bytes are those that were put."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead()
        leader.put(2, producer="p")
        leader.put(1)
        log = leader.log()
        assert log.tail(Offset(0), 1 << 20) == [], "nothing is synced"
        await stage.until(lambda: log.synced_end == 3 * RECORD)
        chunk = chunk_of(log, log.tail(Offset(0), 1 << 20))
        assert leader.reader.count == 0
        assert (chunk.record_count, chunk.last_id, len(chunk.batches)) == (3, 3, 1)
        assert chunk == await read_chunk(log, Offset(0), 1 << 20)

    play(scenario)


def test_damaged_records_are_reported_and_not_sent() -> None:
    """Those before are; the error names where good ones begin again."""

    async def scenario(stage: Stage) -> None:
        leader = await filled(stage, 4)
        log = leader.log()
        path = log.segments.active.path
        leader.fs.flip_bit(path, 8 * (2 * RECORD + 50))
        good = await read_chunk(log, Offset(0), 2 * RECORD)
        assert good.record_count == 2
        with pytest.raises(DamagedSegmentError) as caught:
            await read_chunk(log, Offset(0), 1 << 20)
        assert caught.value.damage.offset == 2 * RECORD
        assert caught.value.damage.next_good_offset == 3 * RECORD
        assert log.number is not None
        request = TailRequest("s", E2, log.number, Offset(2 * RECORD), 1 << 20)
        reply = await answer_tail(leader.logs.logs(), leader.tables, request)
        assert reply == TailReply(None, is_damaged=True)
        assert [each.offset for each in log.damage] == [2 * RECORD]

    play(scenario)


def test_a_file_that_ends_too_early_is_damage() -> None:
    """A synced record that is cut is no record that is still on its way."""

    async def scenario(stage: Stage) -> None:
        leader = await filled(stage, 2)
        log = leader.log()
        path = log.segments.active.path
        kept = leader.fs.synced_bytes(path)[: RECORD + 60]
        leader.fs.write_atomically(path, kept)
        wanted = f"too short: expected {2 * RECORD} bytes, got {RECORD + 60}"
        with pytest.raises(DamagedSegmentError, match=wanted):
            await read_chunk(log, Offset(0), 1 << 20)

    play(scenario)


def test_tables_name_each_log_that_has_a_number() -> None:
    """With the synced end and high watermark."""

    async def scenario(stage: Stage) -> None:
        leader = await filled(stage, 3)
        (found,) = copies_of(leader.logs.logs(), leader.tables)
        assert found.log_id == LOG
        copy = found.copy
        assert (copy.start, copy.end, copy.hw) == (0, 3 * RECORD, 3 * RECORD)
        assert [entry.epoch for entry in copy.table] == [E2]

    play(scenario)


def test_tails_are_bytes_from_an_offset_on_or_nothing() -> None:
    """Nothing at the end, and of a log that is not here."""

    async def scenario(stage: Stage) -> None:
        leader = await filled(stage, 3)
        logs, number = leader.logs.logs(), leader.log().number
        assert number is not None

        async def tail(number: int, offset: int) -> Any:
            request = TailRequest("s", E2, number, Offset(offset), 2 * RECORD)
            return (await answer_tail(logs, leader.tables, request)).chunk

        assert (await tail(number, RECORD)).end_offset == 3 * RECORD
        assert await tail(number, 3 * RECORD) is None
        assert await tail(number + 1, 0) is None

    play(scenario)


def test_a_refusal_has_its_code_at_the_end() -> None:
    """Peers read the word and its values; people the sentence."""
    assert str(refusal("No.")) == "No."
    text = str(refusal("It is over.", "stale-epoch", epoch=7))
    assert text.startswith("It is over.")
    assert "stale-epoch" in text
    assert "epoch=7" in text
