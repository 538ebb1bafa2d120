"""Transactions at a MetaQ 1.4 broker that was just started (issue 30, row 11).

It opens its port before it recovers, and then rolls back transactions begun before:
their earlier puts are lost, later ones are kept, and the commit gets the usual answer.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import pytest

from metaq.client.produce.broker_starts import (
    RECOVERY_S,
    REGISTRATION_S,
    BrokerStart,
    BrokerStarts,
)
from metaq.client.produce.transaction_branch import Branch, BranchParts, PlacedMessage
from metaq.client.produce.xa_commands import XaCommands
from metaq.errors import NoBrokerError, UnexpectedReplyError
from metaq.model import (
    BrokerAddress,
    BrokerId,
    LocalTransactionId,
    Millis,
    TopicPartition,
    XaTransactionId,
)
from metaq.peer.connection import PutListener
from metaq.protocol.commands import Put, Reply, Result, Stats, TransactionType
from metaq.protocol.connection import Connection, Role, WireLimits
from metaq.protocol.version import Capabilities
from metaq.testing.fake_metaq import FakeMetaq
from tests.rigs.pair import drain
from tests.rigs.virtual_time import VirtualClock, run_virtually

BROKER = BrokerId(0)
TOPICS = {f"t{number}": 1 for number in range(100)}
LATEST_S = RECOVERY_S + REGISTRATION_S * len(TOPICS)
PLACE = TopicPartition("t0", BROKER, 0)
XID = XaTransactionId(1, b"g", b"b", "q")


class StartingBroker:
    """A MetaQ 1.4 broker whose port is open, as the pool and its connections."""

    def __init__(self, recovers_after_s: float) -> None:
        self.clock = VirtualClock()
        self.metaq = FakeMetaq(
            TOPICS, broker_id=0, clock=self.clock, choose=lambda _count: 0
        )
        self.started_s = self.clock.monotonic_s()
        self.recovers_after_s = recovers_after_s
        self.stats_body: bytes | None = None
        self.connection = StartingConnection(self)
        asyncio.get_running_loop().call_later(
            recovers_after_s, self.metaq.transactions.recover
        )

    def parts(self) -> BranchParts:
        pool: Any = self
        return BranchParts(
            address_of=lambda _broker: BrokerAddress("127.0.0.1", 1),
            pool=pool,
            clock=self.clock,
            session_id="s",
            starts=BrokerStarts(self.clock),
        )

    async def get(self, _address: object, *, deadline_s: float) -> Any:
        return self.connection

    def answer(self, command: Any) -> Result:
        uptime_s = self.clock.monotonic_s() - self.started_s
        self.metaq.uptime_s = int(uptime_s)
        if isinstance(command, Stats) and self.stats_body is not None:
            return Result(200, self.stats_body, command.opaque)
        reply = self.metaq.answer(command)
        assert isinstance(reply, Result)
        return reply


class StartingConnection:
    """One of its connections."""

    def __init__(self, broker: StartingBroker) -> None:
        self.capabilities = Capabilities("1.4.6.2")
        self.said: list[str] = []
        self._broker = broker
        self._opaque = 0

    def next_opaque(self) -> int:
        return self.next_opaques(1)[0]

    def next_opaques(self, count: int) -> range:
        self._opaque += count
        return range(self._opaque - count, self._opaque)

    async def call(self, command: Any, *, deadline_s: float) -> Reply:
        self.said.append(str(getattr(command, "type", "stats")))
        return self._broker.answer(command)

    def submit_puts(
        self, frames: bytes, _opaques: range, run: PutListener, *, deadline_s: float
    ) -> None:
        wire = Connection(Role.SERVER, WireLimits())
        wire.receive_data(frames)
        for put in drain(wire):
            assert isinstance(put, Put)
            run.on_outcome((put.opaque,), self._broker.answer(put))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtually(scenario)


def after(seconds: float) -> float:
    return VirtualClock().monotonic_s() + seconds


def stored(broker: StartingBroker) -> list[bytes]:
    return [one.payload for one in broker.metaq.peek(PLACE.topic, 0).records()]


@pytest.mark.parametrize("recovers_after_s", [0.03, 1.0, LATEST_S - 0.1])
def test_what_is_reported_as_committed_is_whole(recovers_after_s: float) -> None:
    """Whenever the broker recovers: nothing is begun before it has."""

    async def main() -> None:
        broker = StartingBroker(recovers_after_s)
        parts = broker.parts()
        connection = await parts.connect(BROKER, deadline_s=after(30))
        branch = Branch(parts, connection, BROKER, LocalTransactionId("s", 1))
        await branch.begin(60, deadline_s=after(30))
        await branch.put([PlacedMessage(PLACE, b"a", 0)], deadline_s=after(30))
        await asyncio.sleep(recovers_after_s)
        await branch.put([PlacedMessage(PLACE, b"b", 0)], deadline_s=after(30))
        await branch.end(TransactionType.COMMIT_ONE_PHASE, deadline_s=after(30))
        assert stored(broker) == [b"a", b"b"]

    run(main())


def test_a_deadline_before_the_recovery_is_an_error_and_nothing_is_sent() -> None:
    async def main() -> None:
        broker = StartingBroker(1.0)
        with pytest.raises(NoBrokerError, match=r"broker 0 has just started, .* 7 s"):
            await broker.parts().connect(BROKER, deadline_s=after(1))
        assert broker.connection.said == ["stats"]

    run(main())


def test_a_broker_says_once_per_connection_when_it_was_started() -> None:
    """A connection ends with the process at its other end."""

    async def main() -> None:
        broker = StartingBroker(1.0)
        parts = broker.parts()
        for _ in range(3):
            await parts.connect(BROKER, deadline_s=after(30))
        assert broker.connection.said == ["stats"]
        broker.connection = StartingConnection(broker)
        await parts.connect(BROKER, deadline_s=after(30))
        assert broker.connection.said == ["stats"]

    run(main())


def test_a_broker_that_does_not_say_when_it_was_started_is_refused() -> None:
    """Not known is not long ago."""

    async def main() -> None:
        broker = StartingBroker(1.0)
        for body in (b"STATS\r\nEND\r\n", b"uptime long\r\ntopics 1\r\n"):
            broker.stats_body = body
            with pytest.raises(UnexpectedReplyError, match=r"broker 0: .*uptime"):
                await broker.parts().connect(BROKER, deadline_s=after(30))

    run(main())


def test_a_broker_of_ours_is_not_asked() -> None:
    async def main() -> None:
        broker = StartingBroker(1.0)
        broker.connection.capabilities = Capabilities("1", has_mput=True)
        await broker.parts().connect(BROKER, deadline_s=after(0))
        assert broker.connection.said == []

    run(main())


@pytest.mark.parametrize(
    ("promised_s", "is_warned"), [(-1.0, True), (2.0, False), (None, True)]
)
def test_a_recovered_branch_that_is_committed_is_warned_of(
    caplog: pytest.LogCaptureFixture, promised_s: float | None, is_warned: bool
) -> None:
    """MetaQ 1.4 may write it over later messages, and shows it after a start only."""

    async def main() -> None:
        broker = StartingBroker(1.0)
        started_ms = broker.clock.wall_ms()
        parts = broker.parts()
        connection = await parts.connect(BROKER, deadline_s=after(30))
        branch = Branch(parts, connection, BROKER, XID)
        await branch.begin(60, deadline_s=after(30))
        await branch.put([PlacedMessage(PLACE, b"a", 0)], deadline_s=after(30))
        assert await parts.vote(BROKER, XID, deadline_s=after(30))
        context: Any = None
        promised_ms = None
        if promised_s is not None:
            promised_ms = Millis(started_ms + int(promised_s * 1000))
        found = await XaCommands(context, parts).commit_at(
            BROKER, [XID], after(30), promised_ms
        )
        assert found == {XID: None}
        assert stored(broker) == [b"a"]

    with caplog.at_level(logging.WARNING):
        run(main())
    texts = [one.getMessage() for one in caplog.records]
    assert len(texts) == is_warned
    assert all("MetaQ 1.4" in text and "XID:1:67:62:q" in text for text in texts)


def test_a_start_after_the_promise_is_known() -> None:
    start = BrokerStart(Millis(5), 0.0)
    assert start.is_after(Millis(4))
    assert start.is_after(None)
    assert not start.is_after(Millis(5))
