"""Bytes that a leader has written go to its followers while it syncs them."""

import asyncio

from tests.replication.stream_rig import RECORD, Copy, Following, Stage, play
from tests.replication.test_leading_copies import Hand, joined, read
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import Ticket


async def led(stage: Stage) -> Copy:
    """Return a leader that has synced a put a moment ago: the next is its loop's."""
    leader = await stage.lead(stage.copy(FaultyFileSystem()))
    follower = stage.follow(stage.copy(FaultyFileSystem()))
    ticket = leader.put()
    await stage.until(lambda: ticket.is_stored and stage.is_equal(follower))
    return leader


async def ahead(stage: Stage) -> tuple[Copy, Following, Ticket]:
    """Return a leader that syncs a put, a follower that has synced it, the put."""
    leader = await led(stage)
    (follower,) = stage.followers
    leader.is_stalled = True
    ticket = leader.put(is_light=True)
    await stage.until(lambda: follower.copy.log().synced_end == 2 * RECORD)
    await asyncio.sleep(0.2)
    assert leader.log().synced_end == RECORD
    return leader, follower, ticket


def test_both_disks_sync_a_put_at_the_same_time() -> None:
    """It is answered, and readable, when the leader's has synced it too."""

    async def scenario(stage: Stage) -> None:
        leader, follower, ticket = await ahead(stage)
        assert not ticket.is_answered
        assert leader.log().high_watermark == RECORD
        assert follower.copy.log().high_watermark == RECORD
        leader.is_stalled = False
        await stage.until(lambda: stage.is_equal(follower))
        assert ticket.is_stored
        assert follower.copy.content() == leader.content()

    play(scenario)


def test_a_follower_that_is_ahead_has_lost_nothing_when_it_joins_again() -> None:
    """It keeps its bytes: the leader has written them, and knows that they are equal.

    Compared with what the leader has synced its copy would be cut, below an
    acknowledgement: as if its disk had lost it.
    """

    async def scenario(stage: Stage) -> None:
        leader, follower, ticket = await ahead(stage)
        await follower.end()
        stage.leader.streams.drop(follower.wire)
        again = stage.follow(follower.copy)
        await stage.until(lambda: "joined" in again.saves)
        assert stage.leader.lost == []
        assert not again.is_lost
        assert again.copy.log().synced_end == 2 * RECORD
        leader.is_stalled = False
        await stage.until(lambda: stage.is_equal(again) and ticket.is_stored)
        assert not [
            each for wire in stage.wires[1:] for each in wire.data if each.chunks
        ]

    play(scenario)


def test_what_is_only_in_the_file_is_sent_after_the_sync() -> None:
    """A put that ended in doubt leaves memory; its stream waits, and goes on."""

    async def scenario(stage: Stage) -> None:
        leader = await led(stage)
        hand, number = Hand(stage, 3), leader.log().number or 0
        await joined(stage, hand)
        leader.is_stalled = True
        leader.put(is_light=True)
        log = leader.log()
        log.end_in_doubt("late", until=log.next_offset)
        answers = hand.pull((number, 0))
        await stage.until(lambda: answers)
        assert sum(each.size_bytes for each in read(answers).chunks) == RECORD
        answers = hand.pull((number, RECORD))
        await asyncio.sleep(0.2)
        assert not answers
        leader.is_stalled = False
        await stage.until(lambda: answers)
        (chunk,) = read(answers).chunks
        assert (chunk.offset, chunk.end_offset) == (RECORD, 2 * RECORD)

    play(scenario)


def test_a_put_that_finds_no_room_is_sent_to_nobody() -> None:
    """Its offset is of the next one, in the same epoch."""

    async def scenario(stage: Stage) -> None:
        leader = await led(stage)
        (follower,) = stage.followers
        leader.fs.set_capacity(leader.fs.used_bytes() + RECORD // 2)
        refused = leader.put(is_light=True)
        await stage.until(lambda: refused.error is not None)
        assert follower.copy.log().next_offset == RECORD
        leader.fs.set_capacity(1 << 30)
        await asyncio.sleep(1.5)  # the free space is looked at again
        ticket = leader.put(is_light=True)
        await stage.until(lambda: ticket.is_stored and stage.is_equal(follower))
        assert follower.copy.content() == leader.content()

    play(scenario)


def test_a_small_copy_is_written_without_the_storage_thread() -> None:
    """To wake it takes as long as a sync does."""

    async def scenario(stage: Stage) -> None:
        leader = await led(stage)
        (follower,) = stage.followers
        copy, path = follower.copy, follower.copy.log().segments.active.path
        copy.is_stalled = True
        ticket = leader.put(is_light=True)
        await stage.until(lambda: len(copy.fs.content(path)) == 2 * RECORD)
        assert copy.bench.queued_appends() == 0
        assert copy.fs.synced_size(path) == RECORD
        copy.is_stalled = False
        await stage.until(lambda: ticket.is_stored and stage.is_equal(follower))

    play(scenario)
