"""The leader's streams: whose word counts, and what a put waits for."""

import asyncio
from typing import Any

import pytest

from metaq.errors import StorageError
from metaq.model import LogId, Offset
from metaq.protocol.commands import Follow
from metaq.replication.election import Flag
from metaq.replication.epochs import Epoch
from metaq.replication.leading import PULLS_MAX
from metaq.replication.messages import (
    JOIN,
    PULL,
    JoinReply,
    JoinRequest,
    Pull,
    decode_data,
    encode_pull,
)
from metaq.replication.progress import Quorum
from metaq.replication.serving import copies_of
from tests.replication.stream_rig import E2, E3, RECORD, Copy, Stage, play
from tests.rigs.storage import Ticket
from tests.storage.support import LOG, OTHER

ALONE = Quorum(1, frozenset({1}), 1)
BOTH = Quorum(1, frozenset({1, 2}), 1)


class Hand:
    """A follower without a disk: each message is the test's."""

    def __init__(self, stage: Stage, replica: int = 2) -> None:
        self.stage = stage
        self.replica = replica
        self.answers: list[Any] = []

    def join(self, copy: Copy | None = None, **changed: Any) -> Any:
        """Join with the logs of a copy, or with none."""
        logs = () if copy is None else copies_of(copy.logs.logs(), copy.tables)
        values = {
            "set_id": "s",
            "epoch": E2,
            "replica": self.replica,
            "incarnation": 1,
            "token": "token",
            "revision": 2,
            "flag": Flag.NONE,
            "logs": logs,
        }
        payload = JOIN.encode(JoinRequest(**{**values, **changed}))
        return self.send(JOIN.kind, payload)

    def pull(self, *acks: tuple[int, int], **changed: Any) -> Any:
        """Pull; return the list that the answer comes to."""
        values = {
            "epoch": E2,
            "replica": self.replica,
            "incarnation": 1,
            "revision": 2,
            "acks": acks,
            "credit_bytes": 4 << 20,
        }
        payload = encode_pull(Pull(**{**values, **changed}))
        return self.send(PULL, payload)

    def send(self, kind: str, payload: bytes) -> Any:
        answers: list[Any] = []
        command = Follow(kind, payload, 1)
        self.stage.leader.answers.handle(command, self, answers.append)
        return answers


def read(answers: list[Any]) -> Any:
    """Return the one answer, decoded."""
    (answer,) = answers
    assert isinstance(answer, bytes), answer
    return decode_data(answer)


async def joined(stage: Stage, hand: Hand, **changed: Any) -> JoinReply:
    """Return the answer to a join."""
    answers = hand.join(**changed)
    await stage.until(lambda: answers)
    return JOIN.decode_answer(answers[0])


# -- whose word counts


def test_a_put_is_answered_once_both_have_synced_it() -> None:
    """And it is there byte for byte; the follower's high watermark comes after."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead()
        follower = stage.follow()
        first = leader.put(3)
        await stage.until(lambda: first.is_stored)
        await stage.until(lambda: stage.is_equal(follower))
        follower.copy.is_stalled = True
        second = leader.put(2)
        await stage.until(lambda: leader.log().synced_end == 5 * RECORD)
        await stage.until(lambda: follower.copy.log().next_offset == 5 * RECORD)
        assert not second.is_answered
        assert leader.log().high_watermark == 3 * RECORD
        follower.copy.is_stalled = False
        await stage.until(lambda: stage.is_equal(follower))
        assert second.is_stored
        assert follower.copy.content() == leader.content()

    play(scenario)


def test_a_put_waits_for_the_sync_of_the_leader_too() -> None:
    """A group of the storage thread is sent after its sync."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead()
        follower = stage.follow()
        first = leader.put()
        await stage.until(lambda: first.is_stored)
        leader.is_stalled = True
        second = leader.put()
        await asyncio.sleep(1)
        assert not second.is_answered
        assert follower.copy.log().next_offset == RECORD
        leader.is_stalled = False
        await stage.until(lambda: second.is_stored)

    play(scenario)


@pytest.mark.slow
def test_a_put_waits_for_all_that_may_be_in_sync() -> None:
    """Of the confirmed set, a proposed one, and those that went until all know."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead(in_sync=(1, 2))
        two, three = stage.follow(), stage.follow(replica=3)
        first = leader.put()
        await stage.until(lambda: first.is_stored)
        await stage.until(lambda: stage.is_equal(three))
        three.copy.is_stalled = True
        streams = stage.leader.streams
        held = leader.put()
        await stage.until(lambda: two.copy.log().synced_end == 2 * RECORD)
        await asyncio.sleep(0.2)
        assert not held.is_answered, "it has caught up, and may be taken in"
        stage.leader.set_quorum(BOTH.propose(frozenset({1, 2, 3})))
        await asyncio.sleep(6)
        assert not held.is_answered, "it may be in sync already"
        assert streams.stalled() == {3}
        stage.leader.set_quorum(BOTH)
        await stage.until(lambda: held.is_stored)
        three.copy.is_stalled = False
        await stage.until(lambda: stage.is_equal(three))

    play(scenario)


@pytest.mark.parametrize(
    "changed",
    [
        {"epoch": Epoch(1, "a")},
        {"epoch": Epoch(2, "other")},
        {"epoch": E3},
        {"incarnation": 2},
        {"replica": 3},
    ],
)
def test_acknowledgements_of_others_do_not_count(changed: Any) -> None:
    """Of another epoch, another life, or of a replica that did not join."""

    async def scenario(stage: Stage) -> None:
        leader, hand = await stage.lead(), Hand(stage)
        await joined(stage, hand)
        ticket = leader.put()
        number = leader.log().number or 0
        data = hand.pull()
        await stage.until(lambda: leader.log().synced_end)
        await stage.until(lambda: data)
        refused = hand.pull((number, RECORD), **changed)
        assert isinstance(refused[0], Exception)
        await asyncio.sleep(1)
        assert not ticket.is_answered
        hand.pull()
        hand.pull((number, RECORD))
        await stage.until(lambda: ticket.is_stored)

    play(scenario)


def test_acknowledgements_over_another_connection_do_not_count() -> None:
    """A stream has one; messages of an earlier one may come late."""

    async def scenario(stage: Stage) -> None:
        leader, first, second = await stage.lead(), Hand(stage), Hand(stage)
        await joined(stage, first)
        number = leader.log().number or 0
        waits = first.pull()
        await stage.until(lambda: waits)  # the log is new
        waits = first.pull()
        ticket = leader.put()
        await joined(stage, second)
        assert "Replica 2 joined again" in str(waits[0])
        await stage.until(lambda: leader.log().synced_end)
        late = first.pull((number, RECORD))
        assert "Replica 2 has to join first" in str(late[0])
        stage.leader.streams.drop(first)
        data = second.pull()
        await stage.until(lambda: data)
        assert not ticket.is_answered
        second.pull((number, RECORD))
        await stage.until(lambda: ticket.is_stored)

    play(scenario)


def test_nobody_acknowledges_what_was_not_sent() -> None:
    """Such a stream ends: its follower has bytes of somebody else."""

    async def scenario(stage: Stage) -> None:
        leader, hand = await stage.lead(), Hand(stage)
        ticket = leader.put()
        number = leader.log().number or 0
        await joined(stage, hand)
        waits = hand.pull((number, RECORD))
        text = f"Log {number}: expected an acknowledgement up to 0, got {RECORD}."
        assert str(waits[0]) == text
        assert "has to join first" in str(hand.pull()[0])
        assert not ticket.is_answered

    play(scenario)


def test_more_pulls_than_agreed_end_the_stream() -> None:
    """The queue of a follower is bounded."""

    async def scenario(stage: Stage) -> None:
        await stage.lead()
        hand = Hand(stage)
        await joined(stage, hand)
        waiting = [hand.pull() for _ in range(PULLS_MAX + 1)]
        assert all("Expected 3 pulls at most, got 4" in str(a[0]) for a in waiting)

    play(scenario)


# -- joins


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"set_id": "t"}, "This broker is a replica of set s, not of t."),
        ({"epoch": E3}, "The message is of epoch 3, this leader's is 2."),
        ({"token": "x"}, "Replica 2 is not known by its token."),
    ],
)
def test_a_join_of_another_set_epoch_or_life_is_refused(
    changed: Any, text: str
) -> None:
    """With the reason, and the epoch where it is one."""

    async def scenario(stage: Stage) -> None:
        await stage.lead()
        (answer,) = Hand(stage).join(**changed)
        assert text in str(answer)
        assert ("epoch=2" in str(answer)) == ("epoch" in text)

    play(scenario)


def test_a_first_pull_after_a_join_says_that_all_is_there() -> None:
    """Without any log, and with all of them equal: nothing else will say it."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead()
        follower = stage.follow()
        await stage.until(lambda: stage.leader.caught_up == [2])
        assert stage.leader.streams.has_caught_up(2)
        ticket = leader.put()
        await stage.until(lambda: ticket.is_stored)
        await stage.until(lambda: stage.is_equal(follower))
        await follower.end()
        stage.leader.caught_up.clear()
        hand = Hand(stage)
        await joined(stage, hand, copy=follower.copy)
        assert stage.leader.caught_up == []
        hand.pull()
        assert set(stage.leader.caught_up) == {2}

    play(scenario)


def test_a_join_counts_what_both_share_and_nothing_of_a_former_life() -> None:
    """Bytes acknowledged in it may be lost: the high watermark waits again."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead(in_sync=(1,))
        follower = stage.follow()
        ticket = leader.put(3)
        await stage.until(lambda: stage.is_equal(follower))
        assert ticket.is_stored
        await follower.end()
        hand, number = Hand(stage), leader.log().number or 0
        reply = await joined(stage, hand, incarnation=2)
        assert [each.answer.point for each in reply.logs] == [0]
        assert not reply.is_lost, "no member"
        stage.leader.set_quorum(BOTH)
        held = leader.put()
        await stage.until(lambda: leader.log().synced_end == 4 * RECORD)
        await asyncio.sleep(0.5)
        assert not held.is_answered
        assert not stage.leader.streams.has_caught_up(2)
        data = hand.pull(incarnation=2)
        await stage.until(lambda: data)
        hand.pull((number, 3 * RECORD), incarnation=2)
        assert stage.leader.streams.has_caught_up(2)
        hand.pull((number, 4 * RECORD), incarnation=2)
        await stage.until(lambda: held.is_stored)

    play(scenario)


def test_a_member_without_its_bytes_is_reported_lost() -> None:
    """It hears so in the answer, and gets no stream."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead(in_sync=(1,))
        ticket = leader.put(3)
        await stage.until(lambda: ticket.is_stored)
        stage.leader.set_quorum(BOTH)
        hand = Hand(stage)
        reply = await joined(stage, hand)
        assert reply.is_lost
        assert stage.leader.lost == [2]
        assert "has to join first" in str(hand.pull()[0])
        reply = await joined(stage, hand, flag=Flag.INCOMPLETE)
        assert not reply.is_lost, "it knows"
        assert stage.leader.lost == [2]

    play(scenario)


def test_deleted_logs_of_a_follower_are_named() -> None:
    """By their numbers, in the answer to its join."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead(in_sync=(1,))
        follower = stage.follow()
        for log_id in (LOG, OTHER):
            ticket = leader.put(1, log_id)
            await stage.until(lambda: ticket.is_stored)  # noqa: B023
        await stage.until(lambda: stage.is_equal(follower))
        await follower.end()
        number = leader.log(OTHER).number or 0
        await leader.tables.bury([number])
        reply = await joined(stage, Hand(stage), copy=follower.copy)
        assert reply.gone == (number,)
        assert [each.log_id for each in reply.logs] == [LOG]

    play(scenario)


def test_a_join_of_many_logs_takes_turns_with_everything_else() -> None:
    """A log that is made meanwhile is in it, and one whose connection ends is over."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead(in_sync=(1,))
        for number in range(250):
            leader.put(1, LogId("many", number))
        last = leader.put()
        await stage.until(lambda: last.is_stored)
        hand = Hand(stage)
        answers = hand.join()
        await asyncio.sleep(0)
        assert not answers
        leader.put(1, OTHER)
        await stage.until(lambda: answers)
        reply = JOIN.decode_answer(answers[0])
        assert len(reply.logs) == 252
        other = Hand(stage, 3)
        answers = other.join()
        await asyncio.sleep(0)
        stage.leader.streams.drop(other)
        await stage.until(lambda: answers)
        assert "was called off" in str(answers[0])
        assert [each.replica for each in stage.leader.streams.lag()] == [2]

    play(scenario)


# -- repeated batches


def test_a_batch_is_answered_after_a_failover_only_when_it_is_committed() -> None:
    """Its note travels with it; the copies alone are no answer."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead()
        follower = stage.follow()
        first = leader.put(1)
        await stage.until(lambda: first.is_stored)
        follower.wire.delay_s = 0.5
        sent = leader.put(3, producer="p")
        heir = follower.copy
        await stage.until(lambda: heir.log().synced_end == 4 * RECORD)
        assert not sent.is_answered
        await follower.end()
        stage.leader.end()
        assert sent.is_answered
        assert not sent.is_stored
        await stage.lead(heir, epoch=E3)
        log, batch = heir.log(), sent.batch
        assert log.producers.find("p", batch.sequence, 3, -1) == batch
        repeated = Ticket()
        log.join(batch, repeated)
        await asyncio.sleep(0.2)
        assert not repeated.is_answered
        again = stage.follow(leader, epoch=E3)
        await stage.until(lambda: repeated.is_stored)
        await stage.until(lambda: stage.is_equal(again))

    play(scenario)


# -- the end


def test_the_end_of_a_term_answers_all_that_wait() -> None:
    """Pulls and joins, with the code for it; nothing is reported any more."""

    async def scenario(stage: Stage) -> None:
        leader, hand = await stage.lead(), Hand(stage)
        ticket = leader.put()
        await joined(stage, hand)
        data = hand.pull()
        await stage.until(lambda: data)
        waiting = [hand.pull(), hand.pull()]
        joining = Hand(stage, 3).join()
        stage.leader.end()
        assert all("not-leader" in str(each[0]) for each in waiting)
        await asyncio.sleep(0)
        assert joining
        assert isinstance(ticket.error, StorageError)
        await asyncio.sleep(2)
        assert all(len(each) == 1 for each in (*waiting, joining))
        assert leader.log().on_moved is None

    play(scenario)


def test_the_first_high_watermark_of_a_term_is_its_start() -> None:
    """In one step, and only with the followers: where appends end is not known."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead(in_sync=(1,))
        ticket = leader.put(3)
        await stage.until(lambda: ticket.is_stored)
        stage.leader.end()
        heir = stage.copy(await stage.close(leader))
        assert heir.log().high_watermark == 3 * RECORD
        heir.log().lower_high_watermark(Offset(RECORD))
        await stage.lead(heir, epoch=E3)
        hand, number = Hand(stage), heir.log().number or 0
        await joined(stage, hand, epoch=E3, flag=Flag.INCOMPLETE)
        data = hand.pull(epoch=E3)
        await stage.until(lambda: data)
        hand.pull((number, 2 * RECORD), epoch=E3)
        await asyncio.sleep(0.2)
        assert heir.log().high_watermark == RECORD
        hand.pull((number, 3 * RECORD), epoch=E3)
        assert heir.log().high_watermark == 3 * RECORD

    play(scenario)
