"""The command `follow`, by which the replicas of a set talk."""

import asyncio
from pathlib import Path

from metaq.errors import UnavailableError
from metaq.protocol import texts
from metaq.protocol.commands import Follow
from metaq.replication.leading import Answer
from tests.rigs.broker import Peer, running_broker
from tests.rigs.waiting import until


class Member:
    """A replica that keeps what it is asked."""

    is_leading = knows_ends = False
    epoch = 0

    def __init__(self) -> None:
        self.asked: list[tuple[Follow, object, Answer]] = []
        self.dropped: list[object] = []

    def facts(self) -> str:
        return "replica {}"

    def handle(self, command: Follow, owner: object, answer: Answer) -> None:
        self.asked.append((command, owner, answer))

    def drop(self, owner: object) -> None:
        self.dropped.append(owner)


def run(data: Path, scenario) -> None:
    async def main() -> None:
        async with running_broker(data) as broker, Peer(broker) as peer:
            await scenario(broker, peer)

    asyncio.run(main())


def test_a_broker_in_no_set_answers_one_sentence(data_dir: Path) -> None:
    """And announces nothing to those who ask what it can."""

    async def scenario(broker, peer) -> None:
        answer = await peer.ask(b"follow pull 2 7\r\nhi")
        text = texts.NO_REPLICA_SET
        assert answer == b"result 503 %d 7\r\n%s" % (len(text), text.encode())
        assert b"follow" not in await peer.ask(b"version 3\r\n")
        broker.context.replica = Member()
        assert b"follow" in await peer.ask(b"version 3\r\n")

    run(data_dir, scenario)


def test_answers_come_when_the_replica_has_them(data_dir: Path) -> None:
    """A value, or a refusal with its status; other commands go on in between."""

    async def scenario(broker, peer) -> None:
        member = broker.context.replica = Member()
        await peer.send(b"follow pull 2 7\r\nhifollow join 0 8\r\n")
        await until(lambda: len(member.asked) == 2)
        assert peer.session.unanswered_count == 2
        (pull, owner, answer_pull), (join, _, answer_join) = member.asked
        assert pull == Follow("pull", b"hi", 7)
        assert join == Follow("join", b"", 8)
        assert owner is peer.session
        answer_join(UnavailableError("not now"))
        assert await peer.read_some() == b"result 503 7 8\r\nnot now"
        answer_pull(b"data")
        assert await peer.read_some() == b"value 4 7\r\ndata"
        assert peer.session.unanswered_count == 0

    run(data_dir, scenario)


def test_an_answer_leaves_at_once_though_others_are_due(data_dir: Path) -> None:
    """Some pulls of a follower always wait: an answer is not joined by the next."""

    async def scenario(broker, peer) -> None:
        member = broker.context.replica = Member()
        await peer.send(b"follow pull 2 7\r\nhifollow pull 2 8\r\nhi")
        await until(lambda: len(member.asked) == 2)
        channel = peer.session.channel
        before = channel.sent_bytes
        member.asked[0][2](b"data")
        assert channel.sent_bytes == before + len(b"value 4 7\r\ndata")
        member.asked[1][2](b"data")

    run(data_dir, scenario)


def test_a_connection_that_ends_is_answered_no_more(data_dir: Path) -> None:
    """The replica drops what it had asked; an answer that comes late is lost."""

    async def scenario(broker, peer) -> None:
        member = broker.context.replica = Member()
        await peer.send(b"follow pull 2 7\r\nhi")
        await until(lambda: member.asked)
        peer.session.abort("a test")
        await until(lambda: member.dropped)
        assert member.dropped[0] is peer.session
        member.asked[0][2](b"data")

    run(data_dir, scenario)
