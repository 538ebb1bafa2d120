"""A connection that falls silent: heartbeats, and deadlines missed in a row."""

import asyncio
from collections.abc import Awaitable, Callable

from metaq.client.options import ClientOptions
from metaq.errors import ConnectionLostError, RequestTimeoutError
from metaq.peer.connection import BrokerConnection
from metaq.peer.pool import open_connection
from metaq.protocol.commands import Result, Stats, Value
from metaq.protocol.encoding import encode
from metaq.testing.clock import ManualClock
from tests.client.asking import OPTIONS, Asker, lacking, run, silent
from tests.client.scripted import ScriptedBroker
from tests.rigs.waiting import until

ONE_BROKER = {"ScriptedBroker": "answers that are slow, late or never come"}


def on_time(
    scenario: Callable[
        [ScriptedBroker, BrokerConnection, ManualClock], Awaitable[None]
    ],
) -> None:
    """Run on a clock that only the test moves: heartbeats after 10 s, 5 s to answer."""

    clock = ManualClock()

    async def main() -> None:
        async with ScriptedBroker() as broker:
            connection = await open_connection(
                broker.address, clock=clock, deadline_s=clock.monotonic_s() + 5,
                options=OPTIONS,
            )  # fmt: skip
            try:
                await scenario(broker, connection, clock)
            finally:
                connection.close("test over")

    with asyncio.Runner(loop_factory=lambda: DrivenLoop(clock)) as runner:
        runner.run(main())


class DrivenLoop(asyncio.SelectorEventLoop):
    """Its timers are due when a clock says so that the test moves."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        super().__init__()

    def time(self) -> float:
        return super().time() + self._clock.monotonic_s()


async def pass_time(clock: ManualClock, seconds: float) -> None:
    clock.advance_s(seconds)
    for _ in range(3):  # turns in which timers that are due are called
        await asyncio.sleep(0)


def test_an_idle_connection_is_asked_and_stays_when_it_answers() -> None:
    """Heartbeats keep a broker from closing what is idle."""

    async def scenario(
        _broker: ScriptedBroker, connection: BrokerConnection, clock: ManualClock
    ) -> None:
        for count in range(3):
            await pass_time(clock, 9.9)
            assert connection.statistics().heartbeat_count == count
            await pass_time(clock, 0.2)
            assert connection.statistics().heartbeat_count == count + 1
            await until(lambda: not connection.in_flight_count)
        await pass_time(clock, 5)
        assert connection.is_open
        assert connection.statistics().unknown_reply_count == 0

    on_time(scenario)


def test_heartbeats_come_by_themselves() -> None:
    """The one timer of a connection is set without any request."""

    async def scenario(_broker: ScriptedBroker, connection: BrokerConnection) -> None:
        await until(lambda: connection.statistics().heartbeat_count >= 2)

    run(scenario, ClientOptions(heartbeat_s=0.005))


def test_a_broker_that_answers_no_heartbeat_is_lost() -> None:
    """A peer that is gone without a word is noticed without any request."""

    async def scenario(
        broker: ScriptedBroker, connection: BrokerConnection, clock: ManualClock
    ) -> None:
        reasons: list[str] = []
        connection.on_closed(reasons.append)
        broker.answer = lambda _command: None
        await pass_time(clock, 10)
        await until(lambda: len(broker.commands) == 2)
        await pass_time(clock, 4.9)
        assert connection.is_open
        await pass_time(clock, 0.2)
        assert reasons == ["no answer to a heartbeat within 5 s"]

    on_time(scenario)


def test_a_heartbeat_that_finds_no_memory_is_sent_later() -> None:
    """Silence is noticed all the same, and so are deadlines."""

    async def scenario(
        broker: ScriptedBroker, connection: BrokerConnection, clock: ManualClock
    ) -> None:
        problems: list[dict[str, object]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: problems.append(context))
        broker.answer = lambda _command: None
        with lacking(BrokerConnection, "submit", times=2):
            await pass_time(clock, 10)
            await pass_time(clock, 1)
        assert [type(each["exception"]) for each in problems] == 2 * [MemoryError]
        asker = Asker(connection, clock)
        asker.ask(1, seconds=2)
        await pass_time(clock, 2)
        assert isinstance(asker.outcomes[0][1], RequestTimeoutError)
        assert connection.statistics().heartbeat_count == 1
        await pass_time(clock, 5)
        assert not connection.is_open

    on_time(scenario)


def test_a_slow_large_reply_is_no_missing_heartbeat() -> None:
    """While bytes move, the answer to the heartbeat comes after them."""

    async def scenario(
        broker: ScriptedBroker, connection: BrokerConnection, clock: ManualClock
    ) -> None:
        broker.answer = lambda _command: None
        asker = Asker(connection, clock)
        asker.ask(1, seconds=1000)
        await until(lambda: len(broker.commands) == 2)
        await pass_time(clock, 10)
        data = encode(Value(b"", 2))
        for index in range(len(data)):
            received = connection.statistics().received_bytes
            broker.talks[0].transport.write(data[index : index + 1])
            await until(
                lambda seen=received: connection.statistics().received_bytes > seen
            )
            await pass_time(clock, 4)
            assert connection.is_open
        assert asker.outcomes == [(1, Value(b"", 2))]
        await pass_time(clock, 4)
        assert not connection.is_open

    on_time(scenario)


def test_deadlines_missed_in_a_row_end_a_connection_that_answers_nothing() -> None:
    """A broker that answers heartbeats alone is left, so that a new try is made."""

    async def scenario(
        broker: ScriptedBroker, connection: BrokerConnection, clock: ManualClock
    ) -> None:
        broker.answer = silent
        asker = Asker(connection, clock)
        for number in range(3):
            asker.ask(number, seconds=12)
        asker.ask(3, seconds=60)
        await until(lambda: len(broker.commands) == 5)
        await pass_time(clock, 10)
        await until(lambda: connection.in_flight_count == 4)
        await pass_time(clock, 2)
        assert not connection.is_open
        kinds = [type(outcome) for _, outcome in asker.outcomes]
        assert kinds == [RequestTimeoutError] * 3 + [ConnectionLostError]

    on_time(scenario)


def test_impatient_requests_do_not_end_a_connection_that_answers_late() -> None:
    """Deadlines shorter than an answer takes say nothing about the connection."""

    async def scenario(
        broker: ScriptedBroker, connection: BrokerConnection, clock: ManualClock
    ) -> None:
        broker.answer = silent
        asker = Asker(connection, clock)
        for number in range(10):
            asker.ask(number, seconds=1)
        await until(lambda: len(broker.commands) == 11)
        await pass_time(clock, 4.9)
        assert len(asker.outcomes) == 10
        assert connection.is_open
        last = broker.commands[-1]
        assert isinstance(last, Stats)
        broker.talks[0].transport.write(encode(Result(200, b"", last.opaque)))
        await until(lambda: connection.statistics().unknown_reply_count)
        for number in range(3):
            asker.ask(number, seconds=1)
        await pass_time(clock, 4.9)
        assert connection.is_open
        assert connection.statistics().timeout_count == 13
        await pass_time(clock, 0.2)
        assert not connection.is_open

    on_time(scenario)
