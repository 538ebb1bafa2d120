"""One connection per address: shared attempts, pauses between them, and the end."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable

import pytest

from metaq.client.names import parse_address
from metaq.client.options import ClientOptions
from metaq.clock import SystemClock
from metaq.errors import ClosedError, ConnectionLostError, MetaqError, NoBrokerError
from metaq.model import BrokerAddress
from metaq.peer.pool import IDLE_ROUTE_COUNT_MAX, ConnectionPool
from metaq.protocol.commands import Command, Reply, Result, Stats, Version
from metaq.protocol.encoding import encode
from tests.brokers import StartBroker
from tests.client.scripted import TIMEOUT_S, ScriptedBroker, free_address, ok, refusal
from tests.rigs.waiting import until

ONE_BROKER = {"ScriptedBroker": "connections end when and how the test says"}

CLOCK = SystemClock()
OPTIONS = ClientOptions(reconnect_first_s=0.01, reconnect_max_s=0.02)

STEADY = ClientOptions(reconnect_first_s=0.02, reconnect_max_s=0.02)


def most_attempts(start_s: float) -> float:
    """Return how many attempts since then keep the pauses of STEADY."""
    # At least half of each pause is kept.
    return 1 + (CLOCK.monotonic_s() - start_s) / (STEADY.reconnect_first_s / 2)


def soon(seconds: float = 30.0) -> float:
    return CLOCK.monotonic_s() + seconds


def run(
    scenario: Callable[[ConnectionPool], Awaitable[None]],
    options: ClientOptions = OPTIONS,
) -> None:
    async def main() -> None:
        pool = ConnectionPool(
            clock=CLOCK, options=options, loop=asyncio.get_running_loop()
        )
        try:
            await scenario(pool)
        finally:
            await pool.close(deadline_s=soon())
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_wait_for_an_address_that_is_left_ends_at_once() -> None:
    """Nothing tries to connect any more; an open connection there is closed."""

    async def scenario(pool: ConnectionPool) -> None:
        with free_address() as address:
            waiting = asyncio.ensure_future(pool.get(address, deadline_s=soon()))
            await until(lambda: pool.statistics().failure_count)
            pool.leave(address, "another replica leads")
            with pytest.raises(NoBrokerError, match="another replica leads"):
                await waiting
        await until(lambda: len(asyncio.all_tasks()) == 1)
        async with ScriptedBroker() as broker:
            connection = await pool.get(broker.address, deadline_s=soon())
            pool.leave(broker.address, "another replica leads")
            assert not connection.is_open
        pool.leave(BrokerAddress("unknown", 1), "it was never asked")

    run(scenario)


def test_many_callers_share_one_attempt_and_one_connection() -> None:
    """All callers get the same connection, made once."""

    async def scenario(pool: ConnectionPool) -> None:
        async with ScriptedBroker() as broker:
            assert pool.ready(broker.address) is None
            found = await asyncio.gather(
                *(pool.get(broker.address, deadline_s=soon()) for _ in range(50))
            )
            assert len(set(found)) == 1
            assert pool.ready(broker.address) is found[0]
            assert await pool.get(broker.address, deadline_s=soon()) is found[0]
            assert broker.accepted_count == 1
            seen = pool.statistics()
            assert (seen.attempt_count, seen.failure_count, seen.lost_count) == (
                1,
                0,
                0,
            )
            assert seen.connections[0].address == broker.address

    run(scenario)


@pytest.mark.slow
def test_a_broker_that_is_away_costs_few_attempts_whoever_asks() -> None:
    """No busy loop: the pauses belong to the address, not to the caller."""

    async def scenario(pool: ConnectionPool) -> None:
        start_s = CLOCK.monotonic_s()

        async def insist() -> None:
            end_s = start_s + 0.15
            while CLOCK.monotonic_s() < end_s or pool.statistics().attempt_count < 2:
                with pytest.raises(NoBrokerError):
                    await pool.get(address, deadline_s=soon(0.01))

        await asyncio.gather(*(insist() for _ in range(20)))
        count = pool.statistics().attempt_count
        assert 2 <= count <= most_attempts(start_s)

    with free_address() as address:
        run(scenario, STEADY)


def test_no_broker_says_where_why_and_how_long() -> None:
    """The error alone is enough to know what was tried."""

    async def scenario(pool: ConnectionPool) -> None:
        text = await refusal(pool, address)
        assert str(address) in text
        assert "Connection refused" in text
        assert re.search(r"tried for \d+(\.\d+)? s", text)

    with free_address() as address:
        run(scenario)


def test_a_broker_that_comes_back_is_found_without_a_last_attempt() -> None:
    """A caller that waits gets the connection as soon as a broker listens again."""

    async def scenario(pool: ConnectionPool) -> None:
        waiting = asyncio.ensure_future(pool.get(address, deadline_s=soon()))
        await until(lambda: pool.statistics().failure_count >= 3)
        async with ScriptedBroker(address.port):
            connection = await waiting
            assert connection.is_open

    with free_address() as address:
        run(scenario)


def test_a_lost_connection_is_made_again_when_it_is_asked_for() -> None:
    """The old one fails what was in flight; the new one is another object."""

    async def scenario(pool: ConnectionPool) -> None:
        async with ScriptedBroker() as broker:
            first = await pool.get(broker.address, deadline_s=soon())
            broker.answer = lambda _command: None
            command = Stats("", first.next_opaque())
            call = asyncio.ensure_future(first.call(command, deadline_s=soon()))
            await until(lambda: len(broker.commands) == 2)
            broker.cut()
            with pytest.raises(ConnectionLostError):
                await call
            assert pool.ready(broker.address) is None
            broker.answer = ok
            second = await pool.get(broker.address, deadline_s=soon())
            assert second is not first
            assert pool.statistics().lost_count == 1

    run(scenario)


def test_a_lost_connection_is_not_handed_out_while_it_fails_its_requests() -> None:
    """A callback that looks for a connection at once finds none, not the dead one."""

    async def scenario(pool: ConnectionPool) -> None:
        async with ScriptedBroker() as broker:
            connection = await pool.get(broker.address, deadline_s=soon())
            seen: list[object] = []
            connection.submit(
                b"stats  5\r\n", 5, lambda _o: seen.append(pool.ready(broker.address)),
                deadline_s=soon(),
            )  # fmt: skip
            connection.close("gone")
            assert seen == [None]

    run(scenario)


@pytest.mark.slow
def test_a_peer_that_drops_every_connection_is_not_called_in_a_busy_loop() -> None:
    """A short life counts as a failure, although connecting succeeded."""

    async def scenario(pool: ConnectionPool) -> None:
        async with ScriptedBroker() as broker:
            start_s = CLOCK.monotonic_s()
            end_s = start_s + 0.15
            while CLOCK.monotonic_s() < end_s or pool.statistics().attempt_count < 2:
                connection = await pool.get(broker.address, deadline_s=soon())
                broker.cut()
                await until(lambda c=connection: not c.is_open)  # type: ignore[misc]
            assert 2 <= broker.accepted_count <= most_attempts(start_s)

    run(scenario, STEADY)


@pytest.mark.slow
def test_a_peer_that_breaks_the_rules_at_once_is_called_with_pauses() -> None:
    """The connection has ended before a caller could be given it."""

    async def scenario(pool: ConnectionPool) -> None:
        async with ScriptedBroker() as broker:

            def answer(command: Command) -> Reply | None:
                talk = broker.talks[-1]
                reply = ok(command)
                assert reply is not None
                talk.transport.write(encode(reply) + b"no reply at all\r\n")
                return None

            broker.answer = answer
            start_s = CLOCK.monotonic_s()
            text = ""
            while pool.statistics().attempt_count < 2 or "malformed reply" not in text:
                assert CLOCK.monotonic_s() < start_s + TIMEOUT_S, text
                with pytest.raises(NoBrokerError) as caught:
                    await pool.get(broker.address, deadline_s=soon(0.15))
                text = str(caught.value)
            seen = pool.statistics()
            assert seen.attempt_count <= most_attempts(start_s)
            # One may be under way when the time is over.
            assert seen.attempt_count - seen.lost_count in {0, 1}
            assert not seen.connections

    run(scenario, STEADY)


def test_an_attempt_goes_on_when_one_of_its_callers_leaves() -> None:
    """Cancellation is the caller's own."""

    async def scenario(pool: ConnectionPool) -> None:
        async with ScriptedBroker() as broker:
            calls = [
                asyncio.ensure_future(pool.get(broker.address, deadline_s=soon()))
                for _ in range(2)
            ]
            await asyncio.sleep(0)
            calls[0].cancel()
            connection = await calls[1]
            assert connection.is_open
            assert calls[0].cancelled()
            assert broker.accepted_count == 1

    run(scenario)


def test_attempts_end_when_nobody_waits() -> None:
    """An address without callers is left alone."""

    async def scenario(pool: ConnectionPool) -> None:
        with pytest.raises(NoBrokerError):
            await pool.get(address, deadline_s=soon(0.01))
        await until(lambda: len(asyncio.all_tasks()) == 1)

    with free_address() as address:
        run(scenario)


def test_a_waiter_is_called_back_once_or_not_at_all() -> None:
    """With the connection, at the deadline, at the end; not when it was forgotten."""

    async def scenario(pool: ConnectionPool) -> None:
        heard: list[tuple[str, type | None]] = []

        def wait(name: str, address: BrokerAddress, left_s: float) -> Callable:
            def on_end(error: MetaqError | None) -> None:
                heard.append((name, None if error is None else type(error)))

            return pool.when_open(address, on_end, deadline_s=soon(left_s))

        async with ScriptedBroker() as broker:
            wait("forgotten", broker.address, 30)()
            wait("first", broker.address, 30)
            wait("away", away, 0.02)
            assert heard == []  # never at once
            await until(lambda: len(heard) == 2)
            wait("second", broker.address, 30)
            wait("forgotten, open", broker.address, 30)()
            wait("forgotten, away", away, 0.0)()
            closing = wait("closing", away, 30)
            assert len(heard) == 2
            await until(lambda: len(heard) == 3)
            await pool.close(deadline_s=soon())
            wait("closed", broker.address, 30)
            await until(lambda: len(heard) == 5)
            closing()  # harmless
        assert sorted(heard[:2]) == [("away", NoBrokerError), ("first", None)]
        assert heard[2:] == [
            ("second", None),
            ("closing", ClosedError),
            ("closed", ClosedError),
        ]

    with free_address() as away:
        run(scenario)


def test_closing_ends_attempts_waiters_and_connections() -> None:
    """Waiters hear that the pool is closed; nothing stays open."""

    async def scenario(pool: ConnectionPool) -> None:
        async with ScriptedBroker() as broker, ScriptedBroker() as mute:
            mute.answer = lambda _command: None
            connection = await pool.get(broker.address, deadline_s=soon())
            waiting = asyncio.ensure_future(pool.get(mute.address, deadline_s=soon()))
            await until(lambda: mute.commands)
            await pool.close(deadline_s=soon())
            with pytest.raises(ClosedError):
                await waiting
            assert not connection.is_open
            assert pool.ready(broker.address) is None
            with pytest.raises(ClosedError):
                await pool.get(broker.address, deadline_s=soon())
            await until(lambda: not mute.talks and not broker.talks)
            assert pool.statistics().lost_count == 0

    run(scenario)


def test_the_last_reply_of_a_metaq_broker_is_taken_before_the_end() -> None:
    """MetaQ's broker logs an error for a reply that it cannot write."""

    async def scenario(pool: ConnectionPool) -> None:
        async with ScriptedBroker() as broker:
            asked: list[Stats] = []

            def answer(command: Command) -> Reply | None:
                if isinstance(command, Version):
                    return Result(200, b"version 1.4.6.2", command.opaque)
                assert isinstance(command, Stats)
                asked.append(command)
                return None

            broker.answer = answer
            connection = await pool.get(broker.address, deadline_s=soon())
            asking = asyncio.ensure_future(
                connection.call(Stats("", connection.next_opaque()), deadline_s=soon())
            )
            await until(lambda: asked)
            closing = asyncio.ensure_future(pool.close(deadline_s=soon()))
            await asyncio.sleep(0)
            assert connection.is_open
            broker.talks[0].transport.write(encode(Result(200, b"", asked[0].opaque)))
            assert isinstance(await asking, Result)
            await closing
            await until(lambda: broker.ends)
            assert broker.ends == [None]  # the end of the stream, not a reset

    run(scenario)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_reply_that_does_not_come_is_not_waited_for_long(is_ours: bool) -> None:
    """A broker of this project may keep a get waiting: its reply is not awaited."""

    async def scenario(pool: ConnectionPool) -> None:
        async with ScriptedBroker() as broker:

            def answer(command: Command) -> Reply | None:
                if not isinstance(command, Version):
                    return None
                java = Result(200, b"version 1.4.6.2", command.opaque)
                return ok(command) if is_ours else java

            broker.answer = answer
            connection = await pool.get(broker.address, deadline_s=soon())
            asking = asyncio.ensure_future(
                connection.call(
                    Stats("", connection.next_opaque()), deadline_s=soon(3600)
                )
            )
            await until(lambda: len(broker.commands) == 2)
            closing = asyncio.ensure_future(pool.close(deadline_s=soon(0.01)))
            await asyncio.sleep(0)
            assert connection.is_open is not is_ours
            await closing
            with pytest.raises(ConnectionLostError):
                await asking

    run(scenario)


@pytest.mark.slow
def test_descriptors_do_not_leak_and_addresses_are_forgotten() -> None:
    """Hundreds of failed and lost connections leave nothing open."""

    async def scenario(pool: ConnectionPool) -> None:
        async with ScriptedBroker() as broker:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(30):
                connection = await pool.get(broker.address, deadline_s=soon())
                connection.close("again")
            for number in range(1, 2 * IDLE_ROUTE_COUNT_MAX):
                address = BrokerAddress(f"127.0.0.{number}", nobody.port)
                with pytest.raises(NoBrokerError):
                    await pool.get(address, deadline_s=soon(0.001))
            await until(lambda: not broker.talks)
            await until(lambda: len(asyncio.all_tasks()) == 1)
            # What earlier tests left to the collector may be closed by now.
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
            assert len(pool._routes) <= IDLE_ROUTE_COUNT_MAX + 1

    with free_address() as nobody:
        run(scenario, ClientOptions(reconnect_first_s=0.0001, reconnect_max_s=0.0001))


@pytest.mark.slow
def test_a_real_broker_is_asked_thousands_of_times_and_restarted(
    start_broker: StartBroker,
) -> None:
    """Pipelined requests, a restart on the same port, and the next connection."""
    broker = start_broker()
    address = parse_address(broker.address)

    async def ask(pool: ConnectionPool, address: BrokerAddress, count: int) -> None:
        connection = await pool.get(address, deadline_s=soon())
        assert connection.capabilities.has_mput == broker.has_extensions
        replies = await asyncio.gather(
            *(
                connection.call(Stats("", connection.next_opaque()), deadline_s=soon())
                for _ in range(count)
            )
        )
        assert all(isinstance(r, Result) and r.status == 200 for r in replies)

    async def scenario(pool: ConnectionPool) -> None:
        await ask(pool, address, 2000)
        await asyncio.to_thread(broker.stop)
        await until(lambda: pool.ready(address) is None)
        await asyncio.to_thread(broker.start)
        await ask(pool, address, 1)
        assert pool.statistics().lost_count >= 1

    run(scenario)
