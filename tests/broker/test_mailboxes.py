"""Mailboxes: what is handed over, kept, dropped and refused, and when."""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from metaq.broker.mailboxes import (
    KEPT_S,
    REPLIES_MAX,
    REPLY_BYTES_MAX,
    REPLY_OVERHEAD_BYTES,
    Mailboxes,
    MailboxStatistics,
)
from metaq.config.settings import LimitsConfig
from metaq.errors import NotFoundError, ServerError, UnavailableError
from metaq.protocol.commands import Answer, Listen, Value
from metaq.protocol.decoding import Frame, decode_frame, decode_line
from metaq.record.runs import decode_runs
from tests.rigs.broker import Peer, running_broker
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until

NAME: Final = "a" * 32
OTHER: Final = "b" * 32
LIMITS: Final = LimitsConfig()
WAIT_MS: Final = 5_000


class FakeSession:
    """A connection that notes what it was answered."""

    def __init__(self) -> None:
        self.taker_count = self.held = 0
        self.replies = list[list[tuple[int, bytes]]]()

    def hold(self, *, count: int, size_bytes: int) -> None:
        assert size_bytes == 0
        self.held += count

    def answer(self, replies: bytes, *, count: int, size_bytes: int) -> None:
        assert size_bytes == 0
        self.held -= count
        line, _, payload = replies.partition(b"\r\n")
        frame = decode_line(line)
        assert isinstance(frame, Frame)
        value = decode_frame(frame, payload)
        assert isinstance(value, Value)
        self.replies.append([(int(at), data) for at, data in decode_runs(payload)])


class Rig:
    """Mailboxes whose time goes by at once."""

    def __init__(self) -> None:
        self.boxes = Mailboxes()
        self.session = FakeSession()

    def listen(
        self,
        wait_ms: int = WAIT_MS,
        *,
        name: str = NAME,
        session: FakeSession | None = None,
        limits: LimitsConfig = LIMITS,
    ) -> None:
        self.boxes.listen(Listen(name, 1, wait_ms), session or self.session, limits)

    def answer(self, number: int, data: bytes = b"x", name: str = NAME) -> None:
        assert self.boxes.answer(Answer(name, number, data, 2)) == b""

    async def pass_s(self, seconds: float) -> None:
        """Let time go by, with the broker's tick each second."""
        ends_s = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < ends_s:
            await asyncio.sleep(min(1.0, seconds))
            self.boxes.close_left()

    def counts(self, **figures: int) -> None:
        assert self.boxes.statistics() == replace(MailboxStatistics(), **figures)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtually(scenario)


def test_replies_of_one_turn_come_together_to_the_listener() -> None:
    """One answer for all that came in a turn of the loop."""

    async def scenario() -> None:
        rig = Rig()
        rig.listen()
        assert rig.session.held == rig.session.taker_count == 1
        rig.answer(1, b"one")
        rig.answer(2, b"two")
        assert rig.session.replies == []
        await asyncio.sleep(0)
        assert rig.session.replies == [[(1, b"one"), (2, b"two")]]
        assert rig.session.held == rig.session.taker_count == 0
        rig.counts(open_count=1, reply_count=2)

    run(scenario())


def test_what_comes_between_two_listens_is_kept() -> None:
    """The next listen has it at once, and only that one."""

    async def scenario() -> None:
        rig = Rig()
        rig.listen(0)
        rig.answer(7)
        rig.listen()
        rig.listen(0)
        assert rig.session.replies == [[], [(7, b"x")], []]

    run(scenario())


def test_a_wait_ends_in_time() -> None:
    """With nothing, no later than the broker allows."""

    async def scenario() -> None:
        rig = Rig()
        limits = replace(LIMITS, wait_ms_max=2_000)
        rig.listen(60_000, limits=limits)
        await asyncio.sleep(1.9)
        assert rig.session.replies == []
        await asyncio.sleep(0.2)
        assert rig.session.replies == [[]]

    run(scenario())


def test_replies_that_wait_have_one_bound_for_all_mailboxes() -> None:
    """Else one peer fills the memory with mailboxes; who listens gets replies still."""

    async def scenario() -> None:
        rig, one = Rig(), 1000 + REPLY_OVERHEAD_BYTES
        rig.boxes = Mailboxes(waiting_bytes_max=2 * one)
        rig.listen(0)
        rig.listen(0, name=OTHER)
        rig.answer(1, bytes(1000))
        rig.answer(2, bytes(1000), OTHER)
        with pytest.raises(
            UnavailableError, match=f"at most {2 * one} bytes.* got {3 * one}"
        ):
            rig.answer(3, bytes(1000), OTHER)
        rig.listen(name="c" * 32)
        rig.answer(4, bytes(1000), "c" * 32)
        await asyncio.sleep(0)
        rig.listen(0)  # fetched: there is room
        rig.answer(5, bytes(1000), OTHER)
        await rig.pass_s(KEPT_S + 2)  # closed: so there is
        rig.listen(0)
        rig.answer(6, bytes(1000))
        rig.answer(7, bytes(1000))
        assert rig.boxes.statistics().refused_count == 1

    run(scenario())


def test_a_mailbox_without_a_listener_is_closed() -> None:
    """After KEPT_S; then its requester has left, and what was in it is counted."""

    async def scenario() -> None:
        rig = Rig()
        rig.listen(0)
        rig.answer(1)
        await rig.pass_s(KEPT_S - 1)
        rig.counts(open_count=1, reply_count=1)
        await rig.pass_s(2)
        with pytest.raises(NotFoundError, match="has left"):
            rig.answer(2)
        rig.counts(reply_count=1, dropped_count=1, gone_count=1)

    run(scenario())


def test_a_mailbox_with_a_listener_stays() -> None:
    """Listens that follow each other keep it for as long as they go on."""

    async def scenario() -> None:
        rig = Rig()
        for _ in range(20):
            rig.listen(WAIT_MS)
            await rig.pass_s(WAIT_MS / 1000 + 1)
        rig.listen(WAIT_MS)
        rig.answer(1)
        await asyncio.sleep(0)
        assert rig.session.replies[-1] == [(1, b"x")]

    run(scenario())


def test_a_listener_whose_connection_ends_loses_nothing() -> None:
    """A reply of that turn waits for the next connection."""

    async def scenario() -> None:
        rig, second = Rig(), FakeSession()
        rig.listen()
        rig.answer(1)
        rig.boxes.drop(rig.session)
        assert rig.session.replies == [[]]
        await asyncio.sleep(0)
        rig.boxes.drop(rig.session)
        rig.listen(session=second)
        assert second.replies == [[(1, b"x")]]

    run(scenario())


def test_a_newer_connection_takes_the_place_of_an_older_one() -> None:
    """The older one may be dead, and has its answer."""

    async def scenario() -> None:
        rig, second = Rig(), FakeSession()
        rig.listen()
        rig.listen(session=second)
        assert rig.session.replies == [[]]
        assert (rig.session.taker_count, second.taker_count) == (0, 1)
        rig.answer(1)
        await asyncio.sleep(0)
        assert second.replies == [[(1, b"x")]]

    run(scenario())


def test_bounds_refuse_and_drop_nothing() -> None:
    """Replies by number and bytes, mailboxes by number, waits by `waitersMax`."""

    async def scenario() -> None:
        rig = Rig()
        rig.boxes = Mailboxes(count_max=2)
        rig.listen(0)
        for number in range(REPLIES_MAX):
            rig.answer(number)
        with pytest.raises(UnavailableError, match="at most 1000 replies"):
            rig.answer(5_000)
        rig.listen(0)
        assert len(rig.session.replies[-1]) == REPLIES_MAX
        rig.answer(1, b"x" * REPLY_BYTES_MAX)
        with pytest.raises(UnavailableError, match="1048577"):
            rig.answer(2)
        for wrong in (b"", b"x" * (REPLY_BYTES_MAX + 1)):
            with pytest.raises(ServerError, match=f"got {len(wrong)}"):
                rig.answer(3, wrong)
        rig.listen(0)
        few = replace(LIMITS, waiters_max=1)
        rig.listen(limits=few)
        rig.listen(name=OTHER, limits=few)
        assert rig.session.taker_count == 1
        with pytest.raises(UnavailableError, match="at most 2"):
            rig.listen(name="c" * 32)
        rig.counts(open_count=2, reply_count=1001, refused_count=3)

    run(scenario())


@pytest.mark.parametrize("seed", range(20))
def test_each_reply_arrives_once_or_is_counted(seed: int) -> None:
    """Listens, answers, lost connections and time in any order."""

    async def scenario() -> None:
        chance, rig = random.Random(seed), Rig()
        sessions = [FakeSession() for _ in range(3)]
        names = [f"{number:032x}" for number in range(4)]
        sent = dict[int, bytes]()
        for number in range(600):
            match chance.randrange(5):
                case 0:
                    wait_ms = chance.choice([0, 100, 20_000])
                    who = chance.choice(sessions)
                    rig.listen(wait_ms, name=chance.choice(names), session=who)
                case 1 | 2:
                    data = b"%d" % number
                    try:
                        rig.answer(number, data, chance.choice(names))
                        sent[number] = data
                    except NotFoundError:
                        pass
                case 3:
                    rig.boxes.drop(chance.choice(sessions))
                case 4:
                    await rig.pass_s(chance.choice([0.0, 0.05, 2.0, 40.0]))
        for name in names:
            rig.listen(0, name=name, session=sessions[0])
        found = [one for each in sessions for many in each.replies for one in many]
        assert len(found) == len(set(found))
        assert set(found) <= set(sent.items())
        dropped = rig.boxes.statistics().dropped_count
        assert len(found) + dropped == len(sent)
        await rig.pass_s(KEPT_S + 30)
        assert rig.boxes.statistics().open_count == 0
        assert all(each.held == each.taker_count == 0 for each in sessions)

    run(scenario())


def test_over_the_wire(data_dir: Path) -> None:
    """The lines of docs/protocol.md, and a connection that ends while it listens."""

    async def scenario() -> None:
        name = NAME.encode()
        async with running_broker(data_dir) as broker, Peer(broker) as responder:
            async with Peer(broker) as requester:
                first = await requester.ask(b"listen %b 1\r\n" % name)
                assert first == b"value 0 1\r\n"
                requester.write(b"listen %b 2 wait=30000\r\n" % name)
                reply = await responder.ask(b"answer %b 5 2 3\r\n\0x" % name)
                assert reply == b"result 200 0 3\r\n"
                got = await requester.read_some()
                run_of_one = b"\0\0\0\0\0\0\0\5\0\0\0\2\0x"
                assert got == b"value 14 2\r\n" + run_of_one
                requester.write(b"listen %b 4 wait=30000\r\n" % name)
                reply = await responder.ask(b"answer %b 5 1 6\r\n\0" % OTHER.encode())
                assert reply.startswith(b"result 404 ")
            statistics = broker.context.mailboxes.statistics()
            assert (statistics.open_count, statistics.gone_count) == (1, 1)

    asyncio.run(scenario())


def test_a_put_of_a_connection_that_listens_is_gathered(data_dir: Path) -> None:
    """Nothing else of it is under way: its put shares an append with others."""

    async def scenario() -> None:
        async with (
            running_broker(data_dir) as broker,
            Peer(broker) as one,
            Peer(broker) as other,
        ):
            await one.ask(b"put test 0 1 0 -1 1\r\nx")
            for peer, name in ((one, NAME), (other, OTHER)):
                peer.write(b"listen %b 2 wait=30000\r\n" % name.encode())
            await until(lambda: all(each.taker_count for each in broker.sessions))
            log = broker.context.topics.find_log("test", 0)
            before = log.statistics().append_count
            for peer in (one, other):
                peer.write(b"put test 0 1 0 -1 3\r\nx")
            for peer in (one, other):
                assert (await peer.read_some()).startswith(b"result 200 ")
            assert log.statistics().append_count == before + 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "line", [b"listen x 1", b"listen %b x" % NAME.encode(), b"answer x 1 0 2"]
)
def test_other_lines_end_the_connection(data_dir: Path, line: bytes) -> None:
    """A name is 32 hexadecimal digits: no one guesses it."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            peer.write(line + b"\r\n")
            assert await peer.read_some() == b""

    asyncio.run(scenario())
