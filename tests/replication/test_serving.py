"""Chunks of one replica's copy for another, and damage that is not sent."""

import asyncio

import pytest

from metaq.errors import StorageError
from metaq.model import Offset
from metaq.record.scan import CleanEnd, scan_records
from metaq.replication.epochs import Epoch
from metaq.replication.messages import TailReply, TailRequest
from metaq.replication.serving import answer_tail, chunk_of, read_chunk
from tests.replication.streams import SET, Leader
from tests.replication.test_leading import Peer
from tests.rigs.virtual_time import run_virtually

RECORD = 116


async def alone(**system: int) -> Leader:
    """Return a leader whose high watermark waits for no other replica."""
    return await Leader(in_sync=frozenset({1}), minimum=1, **system).begin()


def rot(leader: Leader, position: int) -> None:
    """Change bytes of the segment on the disk."""
    with leader.fs.open_update(leader.log().segments.active.path) as file:
        file.write_at(position, b"rotten")


def test_damage_in_the_leaders_file_is_reported_and_not_sent() -> None:
    """The log stops at the leader; its follower is not given the bytes."""

    async def scenario() -> None:
        leader = await alone()
        leader.put(50)
        await asyncio.sleep(0.1)
        rot(leader, RECORD * 20 + 30)
        peer = Peer(leader)
        peer.join()
        await asyncio.sleep(0.1)
        peer.joined()
        peer.pull()
        await asyncio.sleep(0.1)
        assert not peer.answers
        (damage,) = leader.log().damage
        assert (damage.offset, damage.next_good_offset) == (RECORD * 20, RECORD * 21)
        await leader.end()

    run_virtually(scenario())


def test_a_chunk_from_the_file_ends_with_a_record() -> None:
    """As many as fit; one that is larger than the chunk comes whole."""

    async def scenario() -> None:
        leader = await alone()
        leader.put(10)
        leader.put(1, 4000)
        leader.put(1)
        await asyncio.sleep(0.1)
        log = leader.log()
        chunk = await read_chunk(log, Offset(0), 3 * RECORD + 50)
        assert (chunk.offset, chunk.end_offset, chunk.record_count) == (0, 348, 3)
        assert chunk.last_id == 3
        assert isinstance(scan_records(b"".join(chunk.body)), CleanEnd)
        large = await read_chunk(log, Offset(10 * RECORD), 100)
        assert (large.size_bytes, large.record_count) == (4020, 1)
        await leader.end()

    run_virtually(scenario())


def test_a_chunk_never_has_half_of_a_batch() -> None:
    """A follower would remember it as all of it: the chunk ends before the batch, or
    has the whole of it."""

    async def scenario() -> None:
        leader = await alone()
        leader.put(2)
        leader.put(8, producer="p")
        leader.put(2)
        await asyncio.sleep(0.1)
        log = leader.log()
        before = await read_chunk(log, Offset(0), 5 * RECORD)
        assert (before.end_offset, before.batches) == (2 * RECORD, ())
        whole = await read_chunk(log, before.end_offset, RECORD)
        assert whole.end_offset == 10 * RECORD
        assert whole.batches == tuple(log.producers)
        await leader.end()

    run_virtually(scenario())


def test_appends_in_memory_make_the_chunk_that_the_file_makes() -> None:
    """The same bytes, counts and notes, whichever way they are read."""

    async def scenario() -> None:
        leader = await Leader().begin()
        leader.put(3, producer="p")
        leader.put(2)
        await asyncio.sleep(0.1)
        log = leader.log()
        requests = log.tail(Offset(0), 1 << 20)
        assert len(requests) == 2
        assert chunk_of(log, requests) == await read_chunk(log, Offset(0), 1 << 20)
        await leader.end()

    run_virtually(scenario())


def test_a_member_answers_for_its_tail() -> None:
    """None where it has none, and where damage is."""

    async def scenario() -> None:
        leader = await alone()
        leader.put(5)
        await asyncio.sleep(0.1)
        logs, number = leader.logs.logs(), leader.log().number or 0

        async def tail(number: int, offset: int) -> TailReply:
            epoch = Epoch(2, "n")
            request = TailRequest(SET, epoch, number, Offset(offset), 2 * RECORD)
            return await answer_tail(logs, leader.tables, request)

        found = (await tail(number, RECORD)).chunk
        assert found is not None
        assert found.end_offset == 3 * RECORD
        assert (await tail(number, 5 * RECORD)).chunk is None
        assert (await tail(number + 1, 0)).chunk is None
        rot(leader, 4 * RECORD + 30)
        assert await tail(number, 4 * RECORD) == TailReply(None, is_damaged=True)
        assert leader.log().damage
        with pytest.raises(StorageError):
            await read_chunk(leader.log(), Offset(4 * RECORD), 500)
        await leader.end()

    run_virtually(scenario())
