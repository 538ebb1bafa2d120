"""The leader's streams alone: who is refused, who is late, what is waited for."""

import asyncio

import pytest

from metaq.errors import WireError
from metaq.model import LogId, Offset
from metaq.protocol.texts import split_code
from metaq.replication import messages
from metaq.replication.election import Flag
from metaq.replication.epochs import Epoch
from metaq.replication.messages import Data, JoinReply, JoinRequest, Pull
from metaq.replication.serving import copies_of
from tests.replication.streams import (
    FIRST,
    LAG_S,
    SET,
    TOKEN,
    Leader,
    Site,
    Stream,
    same,
)
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until
from tests.storage.support import LOG

WIRE = object()


class Peer:
    """A follower of the test's making."""

    def __init__(self, leader: Leader, number: int = 2) -> None:
        self.leader, self.number = leader, number
        self.answers: list[bytes | WireError] = []
        self.incarnation = 1

    def join(self, site: Site | None = None, **changes: object) -> None:
        logs = copies_of(site.logs.logs(), site.tables) if site else ()
        request = JoinRequest(
            SET, FIRST, self.number, self.incarnation, TOKEN, 1, Flag.NONE, logs
        )
        fields = {name: getattr(request, name) for name in request.__slots__}
        request = JoinRequest(**{**fields, **changes})  # type: ignore[arg-type]
        self.leader.streams.join(request, WIRE, self.answers.append)

    def pull(
        self,
        acks: dict[int, int] | None = None,
        owner: object = WIRE,
        **changes: object,
    ) -> None:
        said = tuple((number, Offset(end)) for number, end in (acks or {}).items())
        pull = Pull(FIRST, self.number, self.incarnation, 1, said, 1 << 22)
        fields = {name: getattr(pull, name) for name in pull.__slots__}
        pull = Pull(**{**fields, **changes})  # type: ignore[arg-type]
        self.leader.streams.pull(pull, owner, self.answers.append)

    def joined(self) -> JoinReply:
        answer = self.answers.pop(0)
        assert isinstance(answer, bytes), answer
        return messages.JOIN.decode_answer(answer)

    def data(self) -> Data:
        answer = self.answers.pop(0)
        assert isinstance(answer, bytes), answer
        return messages.decode_data(answer)

    def refusal(self) -> str:
        answer = self.answers.pop(0)
        assert isinstance(answer, WireError), answer
        return str(answer)


async def joined(**options: object) -> tuple[Leader, Peer, int]:
    """Return a leader with a log, and a peer that has joined with nothing."""
    leader = await Leader(**options).begin()  # type: ignore[arg-type]
    leader.put(2)
    await asyncio.sleep(0.1)
    peer = Peer(leader)
    peer.join()
    await asyncio.sleep(0.1)
    assert not peer.joined().is_lost
    return leader, peer, leader.log().number or 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"set_id": "another"}, "replica of set a-set, not of another"),
        ({"token": "stray"}, "not known by its token"),
        ({"epoch": Epoch(1, "other")}, "of epoch 1, this leader's is 1"),
        ({"epoch": Epoch(7, "x")}, "of epoch 7, this leader's is 1"),
    ],
)
def test_a_stray_join_is_refused(changes: dict[str, object], text: str) -> None:
    """Nothing that it says counts."""

    async def scenario() -> None:
        leader = await Leader().begin()
        peer = Peer(leader)
        peer.join(**changes)
        assert text in peer.refusal()
        peer.pull()
        assert "has to join first" in peer.refusal()
        await leader.end()

    run_virtually(scenario())


def test_messages_of_other_epochs_lives_and_connections_do_not_count() -> None:
    """Each acknowledges all of the log; its high watermark stays."""

    async def scenario() -> None:
        leader, peer, number = await joined()
        peer.pull()
        await asyncio.sleep(0.1)
        acks = {number: peer.data().chunks[0].end_offset}
        peer.pull(acks, epoch=Epoch(9, "x"))
        _text, code = split_code(peer.refusal())
        assert code is not None
        assert (code.word, code.number("epoch")) == ("stale-epoch", 1)
        peer.pull(acks, incarnation=2)
        assert "has to join first" in peer.refusal()
        peer.pull(acks, owner=object())
        assert "has to join first" in peer.refusal()
        assert leader.log().high_watermark == 0
        peer.pull(acks)
        assert leader.log().high_watermark == leader.log().synced_end
        await leader.end()

    run_virtually(scenario())


def test_an_acknowledgement_of_what_was_not_sent_ends_the_stream() -> None:
    """It cannot be true, so nothing of that follower is."""

    async def scenario() -> None:
        leader, peer, number = await joined()
        peer.pull({number: 1})
        assert "expected an acknowledgement up to 0, got 1" in peer.refusal()
        peer.pull()
        assert "has to join first" in peer.refusal()
        assert leader.log().high_watermark == 0
        await leader.end()

    run_virtually(scenario())


def test_more_pulls_than_three_end_the_stream() -> None:
    """They are held in memory."""

    async def scenario() -> None:
        leader, peer, number = await joined()
        peer.pull()
        await asyncio.sleep(0.1)
        acks = {number: peer.data().chunks[0].end_offset}
        for _ in range(3):
            peer.pull(acks)
        assert not peer.answers
        peer.pull()
        assert [peer.refusal() for _ in range(4)] == [
            "Expected 3 pulls at most, got 4."
        ] * 4
        await leader.end()

    run_virtually(scenario())


def test_a_join_forgets_what_a_former_life_had() -> None:
    """A second life without the bytes hears of it, and counts for nothing."""

    async def scenario() -> None:
        leader, peer, number = await joined()
        peer.pull()
        await asyncio.sleep(0.1)
        peer.pull({number: peer.data().chunks[0].end_offset})
        peer.incarnation = 2
        peer.join()
        assert "joined again" in peer.refusal()
        await asyncio.sleep(0.1)
        assert peer.joined().is_lost
        assert leader.events[-1] == "lost 2"
        peer.join(flag=Flag.INCOMPLETE)
        await asyncio.sleep(0.1)
        assert not peer.joined().is_lost
        ticket = leader.put()
        await asyncio.sleep(0.1)
        assert not ticket.is_answered
        assert not leader.streams.has_caught_up(2)
        await leader.end()

    run_virtually(scenario())


def test_a_follower_is_late_when_it_does_not_acknowledge() -> None:
    """Silent or not: by the lag time; a leader that slept gives it time."""

    async def scenario() -> None:
        leader, peer, _number = await joined()
        peer.pull()
        await asyncio.sleep(LAG_S - 2)
        peer.pull()
        assert leader.streams.stalled() == frozenset()
        leader.streams.tick(leader.clock.boot_s() + 3600)
        assert leader.streams.stalled() == frozenset()
        await asyncio.sleep(2)
        assert leader.streams.stalled() == {2}
        (row,) = leader.streams.lag()
        assert (row.replica, row.state, row.is_connected) == (2, "in sync", True)
        assert row.lag_bytes == leader.log().synced_end
        assert row.lag_s >= LAG_S
        await leader.end()

    run_virtually(scenario())


def test_a_follower_whose_connection_is_gone_is_stalled_in_a_second() -> None:
    """And one that never came after the lag time."""

    async def scenario() -> None:
        leader, peer, _number = await joined(in_sync=frozenset({1, 2, 3}))
        peer.pull()
        leader.streams.drop(WIRE)
        await asyncio.sleep(0.5)
        assert leader.streams.stalled() == frozenset()
        await asyncio.sleep(1)
        assert leader.streams.stalled() == {2}
        await asyncio.sleep(LAG_S)
        assert leader.streams.stalled() == {2, 3}
        assert not leader.streams.has_caught_up(2)
        await leader.end()

    run_virtually(scenario())


def test_a_joining_replica_is_waited_for_where_it_caught_up_until_it_is_late() -> None:
    """Then without any change of the record; when it is back it joins in again."""

    async def scenario() -> None:
        leader, peer, number = await joined(in_sync=frozenset({1}), minimum=1)
        peer.pull()
        await asyncio.sleep(0.1)
        peer.pull({number: peer.data().chunks[0].end_offset})
        assert leader.events[-1] == "caught up 2"
        ticket = leader.put()
        await asyncio.sleep(LAG_S - 1)
        assert not ticket.is_answered
        await asyncio.sleep(2)
        assert ticket.is_stored
        assert not leader.streams.has_caught_up(2)
        peer.pull({number: leader.log().synced_end})
        assert leader.streams.has_caught_up(2)
        await leader.end()

    run_virtually(scenario())


def test_a_member_that_was_taken_out_holds_nothing_back() -> None:
    """Once the quorum says so; what it acknowledged before stays acknowledged."""

    async def scenario() -> None:
        leader, _peer, _number = await joined(in_sync=frozenset({1, 2, 3}))
        other = Site(3)
        stream = Stream(other, leader)
        await until(lambda: leader.events[-1] == "caught up 3")
        ticket = leader.put()
        await asyncio.sleep(1)
        assert not ticket.is_answered
        leader.quorum(1, 3)
        assert ticket.is_stored
        await stream.end()
        await leader.end()

    run_virtually(scenario())


def test_thousands_of_logs_join_in_turns_of_the_loop() -> None:
    """One made in the midst of it is in the answer, one deleted is not."""

    async def scenario() -> None:
        leader = await Leader().begin()
        for number in range(250):
            leader.log(LogId("many", number))
        first = leader.log(LogId("many", 0))
        peer = Peer(leader)
        peer.join()
        assert not peer.answers
        leader.put(log_id=LOG)
        assert first.number is not None
        leader.streams.remove_log(first.number)
        await asyncio.sleep(0.1)
        names = {each.log_id for each in peer.joined().logs}
        assert names == {LOG, *(LogId("many", number) for number in range(1, 250))}
        peer.pull()
        await asyncio.sleep(0.1)
        assert len(peer.data().chunks) == 1
        await leader.end()

    run_virtually(scenario())


def test_two_followers_get_the_same_bytes() -> None:
    """And a put waits for both of them."""

    async def scenario() -> None:
        leader = await Leader(in_sync=frozenset({1, 2, 3})).begin()
        sites = [Site(2), Site(3)]
        streams = [Stream(each, leader) for each in sites]
        tickets = [leader.put(3) for _ in range(50)]
        await until(lambda: all(each.is_stored for each in tickets))
        await until(lambda: same(leader, *sites))
        for each in streams:
            await each.end()
        await leader.end()

    run_virtually(scenario())


def test_the_end_of_a_term_answers_every_pull() -> None:
    """With the code that says so, and nothing moves the streams any more."""

    async def scenario() -> None:
        leader, peer, _number = await joined()
        peer.pull()
        await asyncio.sleep(0.1)
        peer.data()
        peer.pull()
        await leader.end()
        _text, code = split_code(peer.refusal())
        assert code is not None
        assert code.word == "not-leader"
        assert leader.log().on_moved is None

    run_virtually(scenario())
