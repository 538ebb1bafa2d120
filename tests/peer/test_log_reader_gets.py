"""Gets that leave ahead of their caller: which are sent, kept and given up."""

import asyncio
from functools import partial

import pytest

from metaq.errors import RemoteProtocolError
from metaq.model import BrokerId, Offset, TopicPartition
from metaq.peer.connection import BrokerConnection
from metaq.peer.log_reader import AHEAD_MAX, GET_BYTES, LogGets, LogReader
from metaq.peer.replies import Fetched, GetOutcome, parse_get
from metaq.protocol.commands import Command, Get, Reply, Result, Value
from tests.client.asking import CLOCK, connected, run, soon
from tests.client.scripted import ScriptedBroker, ok
from tests.rigs.waiting import until

ONE_BROKER = {"ScriptedBroker": "which commands are sent is what is tested"}

PARTITION = TopicPartition("t", BrokerId(0), 0)
SIZE = 10
SOON_S = 10.0
"""Less than the heartbeats that end a connection without a word."""


def log_of(end: int, command: Command) -> Reply | None:
    """Answer gets of a log in which each byte is the last one of its offset."""
    if not isinstance(command, Get):
        return ok(command)
    stop = min(command.offset + command.max_size, end)
    data = bytes(at % 256 for at in range(command.offset, stop))
    return Value(data, command.opaque)


def gets_of(broker: ScriptedBroker) -> list[int]:
    return [one.offset for one in broker.commands if isinstance(one, Get)]


async def get(gets: LogGets, *offsets: int) -> GetOutcome:
    wanted = [(Offset(at), SIZE) for at in offsets]
    parse = partial(parse_get, asked=wanted[0][0])
    return await gets.get(wanted, parse, deadline_s=soon())


def gets_over(connection: BrokerConnection) -> LogGets:
    async def connect(_deadline_s: float) -> BrokerConnection:
        return connection

    return LogGets(PARTITION, connect)


def test_gets_ahead_are_sent_once_and_answer_later_calls() -> None:
    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = partial(log_of, 1000)
        gets = gets_over(connection)
        assert await get(gets, 0, 10, 20) == Fetched(bytes(range(10)))
        assert await get(gets, 10, 20) == Fetched(bytes(range(10, 20)))
        assert await get(gets, 20) == Fetched(bytes(range(20, 30)))
        assert gets_of(broker) == [0, 10, 20]

    run(scenario)


def test_gets_that_are_no_longer_wanted_are_given_up() -> None:
    """One of them that is wanted again is sent again."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = partial(log_of, 1000)
        gets = gets_over(connection)
        await get(gets, 0, 10, 20)
        assert await get(gets, 5) == Fetched(bytes(range(5, 15)))
        await get(gets, 10, 30)
        gets.drop()
        await get(gets, 30)
        assert gets_of(broker) == [0, 10, 20, 5, 10, 30, 30]

    run(scenario)


def test_another_connection_is_asked_anew() -> None:
    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = partial(log_of, 1000)
        async with connected(broker) as other:
            connections = iter([connection, other])

            async def connect(_deadline_s: float) -> BrokerConnection:
                return next(connections)

            gets = LogGets(PARTITION, connect)
            await get(gets, 0, 10)
            await get(gets, 10)
        assert gets_of(broker) == [0, 10, 10]

    run(scenario)


def test_a_reply_that_cannot_be_ends_the_connection() -> None:
    def answer(command: Command) -> Reply | None:
        is_get = isinstance(command, Get)
        return Result(301, b"nowhere", command.opaque) if is_get else ok(command)

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = answer
        with pytest.raises(RemoteProtocolError):
            await get(gets_over(connection), 0)
        assert not connection.is_open

    run(scenario)


def test_a_reader_has_gets_ahead_until_a_reply_is_short() -> None:
    """The end of a segment makes those after it useless."""
    end = 6 * GET_BYTES

    def answer(command: Command) -> Reply | None:
        if not isinstance(command, Get):
            return ok(command)
        is_short = command.offset == GET_BYTES
        return Value(bytes(7 if is_short else command.max_size), command.opaque)

    async def scenario(broker: ScriptedBroker, _connection: BrokerConnection) -> None:
        broker.answer = answer
        reader = LogReader(
            PARTITION, broker.address, timeout_s=30, retry_timeout_s=30, clock=CLOCK
        )
        await reader.read(Offset(0), Offset(end))
        first = [n * GET_BYTES for n in range(1 + AHEAD_MAX)]
        assert len(first) > 1
        assert gets_of(broker) == first
        assert len(await reader.read(Offset(GET_BYTES), Offset(end))) == 7
        ahead = (1 + AHEAD_MAX) * GET_BYTES
        await until(lambda: gets_of(broker) == [*first, ahead])
        behind = GET_BYTES + 7
        await reader.read(Offset(behind), Offset(end))
        assert gets_of(broker) == [*first, ahead, behind]
        await reader.read(Offset(behind + GET_BYTES), Offset(end))
        more = [behind + n * GET_BYTES for n in range(1, 2 + AHEAD_MAX)]
        await until(lambda: gets_of(broker)[-len(more) :] == more)
        await reader.close()

    run(scenario)


def test_a_reader_that_moves_waits_for_no_connection_to_where_it_was() -> None:
    """A process that hangs is connected to, and says no word."""

    async def scenario(leader: ScriptedBroker, _connection: BrokerConnection) -> None:
        leader.answer = partial(log_of, 1000)
        async with ScriptedBroker() as former:
            former.answer = lambda _command: None
            reader = LogReader(
                PARTITION, former.address, timeout_s=60.0, retry_timeout_s=60.0
            )
            reading = asyncio.ensure_future(reader.read(Offset(0), Offset(10)))
            await until(lambda: former.commands)
            reader.move(leader.address)
            async with asyncio.timeout(SOON_S):
                assert await reading == bytes(range(10))
            await reader.close()

    run(scenario)
