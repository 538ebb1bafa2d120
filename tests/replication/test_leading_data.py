"""Data of a leader's streams: from memory or files, bounded, and quiet when idle."""

import asyncio
import errno
import sys
from typing import Any

import pytest

from metaq.errors import UnavailableError
from metaq.model import LogId
from metaq.replication.leading import IDLE_S, LeadingStreams
from metaq.replication.messages import Data
from metaq.replication.progress import Quorum
from metaq.replication.serving import CHUNK_BYTES_MAX
from metaq.storage.log_state import LogState
from tests.replication.stream_rig import LAG_S, RECORD, Copy, Stage, Wire, play
from tests.replication.test_following_copies import remove_first
from tests.replication.test_leading_copies import ALONE, BOTH, Hand, joined, read
from tests.storage.support import LOG, OTHER

THIRD = LogId("third", 0)


async def filled(stage: Stage, *counts: int, **options: Any) -> Copy:
    """Return a leader alone with appends of so many records, all committed."""
    leader = await stage.lead(in_sync=(1,))
    for count in counts:
        ticket = leader.put(count, **options)
        await stage.until(lambda: ticket.is_stored)  # noqa: B023
    return leader


# -- what is sent


def test_bytes_in_memory_are_sent_without_a_read() -> None:
    """The same chunk to all followers; a turn later, not by a timer."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead(in_sync=(1, 2, 3))
        two, three = stage.follow(), stage.follow(replica=3)
        await stage.until(lambda: {*stage.leader.caught_up} == {2, 3})
        for _ in range(5):
            ticket = leader.put(2)
            began_s = asyncio.get_running_loop().time()
            await stage.until(lambda: ticket.is_stored)  # noqa: B023
            assert asyncio.get_running_loop().time() - began_s < IDLE_S / 10
        assert leader.reader.count == 0
        await stage.until(lambda: stage.is_equal(two) and stage.is_equal(three))

    play(scenario)


@pytest.mark.slow
def test_a_log_larger_than_the_credit_comes_from_its_files() -> None:
    """In messages within the credit and chunks within their limit; notes are whole."""

    async def scenario(stage: Stage) -> None:
        leader = await filled(stage)
        for producer in range(30):
            ticket = leader.put(3, producer=f"p{producer}", size=100_000)
            await stage.until(lambda: ticket.is_stored)  # noqa: B023
        hand, size = Hand(stage), 1_500_000
        await joined(stage, hand)
        offset, number = 0, leader.log().number or 0
        ends = {0, *(each.end_offset for each in leader.log().producers)}
        while offset < leader.log().synced_end:
            answers = hand.pull((number, offset), credit_bytes=size)
            await stage.until(lambda: answers)  # noqa: B023
            chunks = read(answers).chunks
            assert sum(each.size_bytes for each in chunks) <= size
            for each in chunks:
                assert each.offset == offset
                assert each.size_bytes <= CHUNK_BYTES_MAX
                assert {each.offset, each.end_offset} <= ends
                assert each.batches
                offset = each.end_offset
        assert leader.reader.count > 5
        stage.leader.streams.drop(hand)
        follower = stage.follow()
        await stage.until(lambda: stage.is_equal(follower))
        assert follower.copy.content() == leader.content()
        assert [*follower.copy.log().producers] == [*leader.log().producers]

    play(scenario)


async def read_ahead(stage: Stage) -> tuple[Copy, Hand, dict[int, int]]:
    """Return a leader that has read chunks of two logs ahead, and what was sent."""
    leader = await stage.lead(in_sync=(1,))
    for log_id in (LOG, OTHER, THIRD):
        ticket = leader.put(2, log_id, size=400_000)
        await stage.until(lambda: ticket.is_stored)  # noqa: B023
    hand = Hand(stage)
    await joined(stage, hand)
    answers = hand.pull()
    await stage.until(lambda: answers)
    await asyncio.sleep(0.1)
    (chunk,) = read(answers).chunks
    return leader, hand, {chunk.number: chunk.end_offset}


def test_chunks_that_wait_for_credit_go_first() -> None:
    """Later bytes of their log do not overtake them, however small they are."""

    async def scenario(stage: Stage) -> None:
        leader, hand, ends = await read_ahead(stage)
        stage.leader.set_quorum(BOTH)  # what is put now stays in memory
        for log_id in (LOG, OTHER, THIRD):
            leader.put(1, log_id)
        await asyncio.sleep(0.1)
        for _ in range(3):
            answers = hand.pull(credit_bytes=900_000)
            await stage.until(lambda: answers)  # noqa: B023
            for each in read(answers).chunks:
                assert each.offset == ends.get(each.number, 0)
                ends[each.number] = each.end_offset
        assert set(ends) == set(leader.tables.numbers.values())

    play(scenario)


def test_a_high_watermark_goes_with_the_next_bytes_or_soon_alone() -> None:
    """At once to one that says that reads wait for it."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead()
        follower = stage.follow()
        await stage.until(lambda: stage.leader.caught_up)
        loop = asyncio.get_running_loop()

        async def time_of_put() -> float:
            ticket = leader.put()
            await stage.until(lambda: ticket.is_stored)
            began_s = loop.time()
            await stage.until(lambda: stage.is_equal(follower))
            return loop.time() - began_s

        assert 0.05 < await time_of_put() < 0.2

    play(scenario)


async def answered_at_once(hand: Hand, *acks: tuple[int, int]) -> Any:
    """Return the answer to a pull that comes after what it brings, without a tick."""
    answers = hand.pull(*acks)
    for _ in range(3):
        await asyncio.sleep(0)
    return read(answers)


def test_what_no_pull_waited_for_goes_with_the_next_one_at_once() -> None:
    """Logs that are deleted or made, bytes that were read ahead.

    A high watermark alone waits for 100 ms.
    """

    async def scenario(stage: Stage) -> None:
        leader, hand, sent = await read_ahead(stage)
        found = await answered_at_once(hand, *sent.items())
        assert found.chunks
        answers = hand.pull(*((each.number, each.end_offset) for each in found.chunks))
        await stage.until(lambda: answers)
        stage.leader.set_quorum(BOTH)
        leader.put(1)
        answers = hand.pull()
        await stage.until(lambda: answers)
        (chunk,) = read(answers).chunks
        await stage.until(lambda: leader.log().synced_end == chunk.end_offset)
        stage.leader.set_quorum(ALONE)
        assert leader.log().high_watermark == chunk.end_offset
        await asyncio.sleep(0)  # those that wait are answered: there is none
        answers = hand.pull()
        await stage.until(lambda: answers)
        (mark,) = read(answers).marks
        assert mark == (chunk.number, chunk.end_offset, 0)
        await leader.tables.bury([leader.log(OTHER).number or 0])
        await asyncio.sleep(0)
        assert (await answered_at_once(hand)).gone == (leader.log(OTHER).number,)
        made = leader.log(LogId("fourth", 0)).log_id
        await asyncio.sleep(0)
        assert [b.log_id for b in (await answered_at_once(hand)).new_logs] == [made]

    play(scenario)


def test_a_pull_that_waits_is_answered_when_a_log_is_deleted_or_made() -> None:
    """Not only at the next tick."""

    async def scenario(stage: Stage) -> None:
        leader, hand, _sent = await read_ahead(stage)
        number = leader.log(OTHER).number

        async def waiting() -> list[Any]:
            answers: list[Any] = [0]
            while answers:
                answers = hand.pull()
                for _ in range(3):
                    await asyncio.sleep(0)
            return answers

        answers = await waiting()
        await leader.tables.bury([number or 0])
        await asyncio.sleep(0)
        assert read(answers).gone == (number,)
        answers = await waiting()
        made = leader.log(LogId("fourth", 0)).log_id
        await asyncio.sleep(0)
        assert [each.log_id for each in read(answers).new_logs] == [made]

    play(scenario)


@pytest.mark.slow
def test_a_quiet_leader_sends_empty_messages_and_looks_at_no_log() -> None:
    """Twice a second, and as many steps for fifty logs as for two."""
    steps = [steps_while_idle(count) for count in (2, 50)]
    assert steps[0] == steps[1]
    assert steps[0]


def steps_while_idle(count: int) -> int:
    """Return the lines of a leader that run in ten seconds without a put."""
    module, lines = LeadingStreams.__module__, list[int]()

    def on_line(frame: Any, _event: str, _arg: object) -> Any:
        lines.append(frame.f_lineno)
        return on_line

    def on_call(frame: Any, _event: str, _arg: object) -> Any:
        return on_line if frame.f_globals.get("__name__") == module else None

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead()
        for number in range(count):
            leader.put(1, LogId("many", number))
        follower = stage.follow()
        await stage.until(lambda: stage.leader.caught_up)
        await stage.until(lambda: stage.is_equal(follower))
        await asyncio.sleep(1)
        before, tracer = len(follower.wire.data), sys.gettrace()
        sys.settrace(on_call)
        await asyncio.sleep(10)
        sys.settrace(tracer)
        data = follower.wire.data[before:]
        assert 15 <= len(data) <= 20
        assert all(each == Data(each.epoch) for each in data)
        assert all(not each.acks for each in follower.wire.pulls()[-10:])
        assert stage.leader.streams.stalled() == frozenset()
        assert leader.reader.count == 0

    play(scenario)
    return len(lines)


# -- what cannot be read


@pytest.mark.slow
def test_damage_at_the_leader_is_reported_and_costs_one_log() -> None:
    """The follower lacks that and what is after it until it is mended."""

    async def scenario(stage: Stage) -> None:
        leader = await filled(stage, 2, 2)
        other = leader.put(1, OTHER)
        await stage.until(lambda: other.is_stored)
        leader.fs.flip_bit(leader.log().segments.active.path, 8 * (2 * RECORD + 50))
        follower = stage.follow()
        await stage.until(lambda: OTHER in follower.copy.logs.logs())
        await stage.until(lambda: follower.copy.log(OTHER).synced_end == RECORD)
        await asyncio.sleep(3)
        (damage,) = leader.log().damage
        assert damage.offset == 2 * RECORD
        assert follower.copy.log().next_offset == 2 * RECORD
        assert follower.error is None
        assert stage.leader.caught_up == []
        kept = leader.put(1, OTHER)
        await stage.until(lambda: kept.is_stored)
        await stage.until(lambda: follower.copy.log(OTHER).synced_end == 2 * RECORD)
        leader.fs.flip_bit(leader.log().segments.active.path, 8 * (2 * RECORD + 50))
        leader.log().on_mended(damage)
        await stage.until(lambda: stage.is_equal(follower))

    play(scenario)


def test_a_disk_that_does_not_give_the_bytes_ends_the_stream() -> None:
    """The follower joins again; nothing is believed to be damaged for that."""

    async def scenario(stage: Stage) -> None:
        leader = await filled(stage, 3)
        leader.reader.is_held = True
        hand = Hand(stage)
        await joined(stage, hand)
        waits = hand.pull()
        await stage.until(lambda: leader.reader.count)
        leader.fs.fail_at(leader.fs.calls + 1, errno.EIO)
        leader.reader.release()
        await stage.until(lambda: waits)
        assert isinstance(waits[0], UnavailableError)
        assert "EIO" in str(waits[0])
        assert leader.log().state is LogState.OPEN
        follower = stage.follow()
        await stage.until(lambda: stage.is_equal(follower))

    play(scenario)


def test_retention_may_remove_what_is_being_sent() -> None:
    """The stream ends, and the next join begins at the new log start."""

    async def scenario(stage: Stage) -> None:
        leader = await filled(stage, *[1] * 8)
        leader.reader.is_held = True
        hand = Hand(stage)
        await joined(stage, hand)
        waits = hand.pull()
        await stage.until(lambda: leader.reader.count)
        remove_first(leader, 3)
        leader.reader.release()
        await stage.until(lambda: waits)
        assert isinstance(waits[0], UnavailableError)
        assert leader.log().state is LogState.OPEN
        follower = stage.follow()
        await stage.until(lambda: stage.is_equal(follower))
        assert follower.copy.log().log_start_offset == 6 * RECORD

    play(scenario, segment_bytes_max=2 * RECORD)


def test_a_log_that_is_deleted_while_it_is_read_ends_no_stream() -> None:
    """Nothing of it is sent any more, and its follower hears that it is gone."""

    async def scenario(stage: Stage) -> None:
        leader = await filled(stage, 3)
        leader.reader.is_held = True
        follower = stage.follow()
        await stage.until(lambda: leader.reader.count)
        number = leader.log().number
        assert number is not None
        await leader.tables.bury([number])
        gone: list[object] = []
        leader.logs.delete_topic("test", gone.append)
        await stage.until(lambda: gone)
        leader.reader.release()
        await stage.until(lambda: LOG not in follower.copy.logs.logs())
        ticket = leader.put(2, OTHER)
        await stage.until(lambda: ticket.is_stored)
        await stage.until(lambda: stage.is_equal(follower))
        assert follower.error is None

    play(scenario)


def test_nothing_is_sent_of_a_log_that_was_deleted_before() -> None:
    """Neither its birth nor bytes that were read ahead."""

    async def scenario(stage: Stage) -> None:
        leader, hand, _ends = await read_ahead(stage)
        leader.put(1, LogId("new", 0))
        numbers = {leader.log(each).number or 0 for each in (THIRD, LogId("new", 0))}
        await leader.tables.bury(numbers)
        answers = hand.pull()
        await stage.until(lambda: answers)
        data = read(answers)
        assert [each.number for each in data.chunks] == [leader.log(OTHER).number]
        assert data.new_logs == ()
        assert {*data.gone} == numbers

    play(scenario)


def test_a_file_stays_open_for_a_read_that_was_called_off() -> None:
    """Its number could be another file's by the time the thread reads."""

    async def scenario(stage: Stage) -> None:
        leader = await filled(stage, *[1] * 4)
        path = leader.log().segments.first.path
        assert leader.content()
        leader.reader.is_held, leader.reader.is_running = True, False
        hand = Hand(stage)
        await joined(stage, hand)
        hand.pull()
        await stage.until(lambda: leader.reader.count)
        stage.leader.streams.drop(hand)
        await asyncio.sleep(0.1)
        remove_first(leader, 1)
        assert path in leader.fs.open_paths()
        leader.reader.release()
        await asyncio.sleep(0.1)
        assert path not in leader.fs.open_paths()

    play(scenario, segment_bytes_max=2 * RECORD)


# -- who is late


@pytest.mark.slow
def test_a_follower_that_is_silent_is_stalled_after_the_lag_time() -> None:
    """Or a second after its connection is gone; and is not when it is back."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead()
        follower = stage.follow()
        ticket = leader.put()
        await stage.until(lambda: ticket.is_stored)
        streams = stage.leader.streams
        hang(follower.wire)
        await asyncio.sleep(LAG_S - 0.5)
        assert streams.stalled() == frozenset()
        await asyncio.sleep(1)
        assert streams.stalled() == {2}
        await follower.end()
        await asyncio.sleep(0.1)
        assert streams.stalled() == {2}, "not better without its connection"
        again = stage.follow(follower.copy)
        await stage.until(lambda: again.saves)
        await asyncio.sleep(0.2)
        assert streams.stalled() == frozenset()
        again.wire.close("cut")
        await asyncio.sleep(0.8)
        assert streams.stalled() == frozenset()
        await asyncio.sleep(0.5)
        assert streams.stalled() == {2}
        assert [(each.state, each.is_connected) for each in streams.lag()] == [
            ("in sync", False)
        ]
        with pytest.raises(Exception, match="cut"):
            await again.task

    play(scenario)


def hang(wire: Wire) -> None:
    """Have nothing arrive any more."""
    wire.is_stalled = True


@pytest.mark.slow
def test_a_follower_that_pulls_and_does_not_sync_is_late() -> None:
    """With its distance in bytes and seconds; a member, or one that joins."""

    async def scenario(stage: Stage) -> None:
        leader, hand = await stage.lead(), Hand(stage)
        await joined(stage, hand)
        hand.pull()
        streams = stage.leader.streams
        ticket = leader.put(2)
        for _ in range(int(LAG_S / IDLE_S) + 2):
            answers = hand.pull()
            await stage.until(lambda: answers)  # noqa: B023
        assert streams.stalled() == {2}
        (row,) = streams.lag()
        assert (row.replica, row.state, row.lag_bytes) == (2, "in sync", 2 * RECORD)
        assert row.lag_s >= LAG_S
        assert not ticket.is_answered
        stage.leader.set_quorum(ALONE)
        await stage.until(lambda: ticket.is_stored)
        assert streams.stalled() == frozenset()
        assert streams.lag()[0].state == "joining"

    play(scenario)


@pytest.mark.slow
def test_a_replica_that_never_joins_is_stalled_from_the_lag_time_on() -> None:
    """It counts as heard when the term began."""

    async def scenario(stage: Stage) -> None:
        await stage.lead()
        await asyncio.sleep(LAG_S - 0.5)
        assert stage.leader.streams.stalled() == frozenset()
        await asyncio.sleep(1)
        assert stage.leader.streams.stalled() == {2}

    play(scenario)


@pytest.mark.slow
def test_a_leader_that_slept_does_not_believe_that_all_others_did() -> None:
    """A tick counts for a second at most: they may say something first."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead()
        follower = stage.follow()
        ticket = leader.put()
        await stage.until(lambda: ticket.is_stored)
        stage.leader.is_asleep = True
        hang(follower.wire)
        await asyncio.sleep(4)
        stage.leader.streams.tick(asyncio.get_running_loop().time() + 60)
        assert stage.leader.streams.stalled() == frozenset()
        follower.wire.release()
        await asyncio.sleep(0.1)
        second = leader.put()
        await stage.until(lambda: second.is_stored)

    play(scenario)


@pytest.mark.slow
def test_a_joining_replica_that_gets_late_is_waited_for_no_more() -> None:
    """It had caught up, and puts waited for it; it catches up again."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead(in_sync=(1,))
        follower = stage.follow()
        first = leader.put()
        await stage.until(lambda: stage.is_equal(follower))
        assert first.is_stored
        await stage.until(lambda: stage.leader.streams.has_caught_up(2))
        hang(follower.wire)
        held = leader.put()
        await asyncio.sleep(LAG_S - 1)
        assert not held.is_answered
        await asyncio.sleep(2)
        assert held.is_stored
        follower.wire.release()
        await stage.until(lambda: stage.is_equal(follower) or follower.error)

    play(scenario)


def test_a_member_that_was_taken_out_and_goes_on_catches_up_again() -> None:
    """By its pulls alone, without another join."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead()
        follower = stage.follow()
        ticket = leader.put()
        await stage.until(lambda: ticket.is_stored)
        streams = stage.leader.streams
        stage.leader.set_quorum(Quorum(1, frozenset({1}), 1))
        assert not streams.has_caught_up(2)
        await stage.until(lambda: streams.has_caught_up(2))
        stage.leader.set_quorum(BOTH)
        second = leader.put()
        await stage.until(lambda: second.is_stored)
        await stage.until(lambda: stage.is_equal(follower))
        assert follower.saves == ["joined"]

    play(scenario)
