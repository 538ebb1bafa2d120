"""Connections, pool and metadata together, against brokers and networks that fail."""

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from metaq.client.cluster.metadata import ZooKeeperMetadata
from metaq.client.options import ClientOptions
from metaq.clock import SystemClock
from metaq.errors import (
    ConnectionLostError,
    MetaqError,
    NotSentError,
    RequestTimeoutError,
)
from metaq.model import BrokerId
from metaq.peer.connection import BrokerConnection
from metaq.peer.pool import ConnectionPool
from metaq.peer.replies import parse_receipt
from metaq.protocol.commands import Mput, Put, Reply, Result
from metaq.protocol.encoding import encode
from metaq.record.checksum import checksum
from metaq.testing.fake_broker import FakeBroker, FaultKind
from metaq.testing.proxy import Direction, Proxy
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.paths import NodePaths
from tests.brokers import AnyBroker, StartBroker
from tests.client.scripted import refusal
from tests.rigs.waiting import until

CLOCK = SystemClock()
OPTIONS = ClientOptions(
    reconnect_first_s=0.005, reconnect_max_s=0.02, metadata_s=0.02,
)  # fmt: skip
WATCHFUL = ClientOptions(heartbeat_s=0.05, heartbeat_timeout_s=1.0)


def soon(seconds: float = 30.0) -> float:
    return CLOCK.monotonic_s() + seconds


@contextlib.asynccontextmanager
async def open_pool(options: ClientOptions = OPTIONS) -> AsyncIterator[ConnectionPool]:
    loop = asyncio.get_running_loop()
    pool = ConnectionPool(clock=CLOCK, options=options, loop=loop)
    try:
        yield pool
    finally:
        await pool.close(deadline_s=soon())


def put(connection: BrokerConnection, payload: bytes) -> Put:
    opaque = connection.next_opaque()
    return Put("test", 0, payload, 0, checksum(payload), opaque)


ONE_BROKER = {
    "test_each_put_hears_of_its_own_record": "manners of MetaQ 1.4, one by one",
    "test_requests_beyond_what_a_java_broker_knows_cost_the_connection": "MetaQ 1.4's",
    "test_an_unknown_outcome_is_called_unknown": "answers that are late or never come",
    "test_a_broker_is_found_at_the_same_port_and_at_another": "another port",
}


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker()


async def put_all(connection: BrokerConnection, count: int) -> list[int]:
    """Put numbered payloads, pipelined; return their offsets in order."""
    replies: dict[int, Reply | MetaqError] = {}
    for number in range(count):
        command = put(connection, b"%06d" % number)

        def on_reply(outcome: Reply | MetaqError, number: int = number) -> None:
            assert number not in replies
            replies[number] = outcome

        connection.submit(encode(command), command.opaque, on_reply, deadline_s=soon())
    await until(lambda: len(replies) == count)
    offsets = []
    for number in range(count):
        reply = replies[number]
        assert not isinstance(reply, MetaqError), reply
        offsets.append(parse_receipt(reply).offset)
    return offsets


@pytest.mark.slow
@pytest.mark.parametrize(
    "misbehave",
    [
        lambda _broker: None,
        lambda broker: setattr(broker, "reorder", True),
        lambda broker: setattr(broker, "split_bytes", 7),
        lambda broker: setattr(broker, "delay_s", 0.01),
    ],
    ids=["well", "reorder", "split", "delay"],
)
def test_each_put_hears_of_its_own_record(
    misbehave: Callable[[FakeBroker], None],
) -> None:
    """Whatever the order and the pieces of the replies: pairing never slips."""

    async def main() -> None:
        with FakeBroker() as broker:
            async with open_pool() as pool:
                connection = await pool.get(broker.address, deadline_s=soon())
                assert not connection.capabilities.has_mput
                misbehave(broker)
                offsets = await put_all(connection, 100)
            stored = broker.payloads()
            by_offset = dict(zip(sorted(offsets), stored, strict=True))
            assert [by_offset[o] for o in offsets] == [b"%06d" % n for n in range(100)]

    asyncio.run(main())


def test_requests_beyond_what_a_java_broker_knows_cost_the_connection() -> None:
    """MetaQ closes without a word; the pool's next connection works."""

    async def main() -> None:
        with FakeBroker() as broker:
            async with open_pool() as pool:
                connection = await pool.get(broker.address, deadline_s=soon())
                command = Mput(
                    topic="test", partition=0, count=0, checksum=0,
                    opaque=connection.next_opaque(), payload=b"",
                )  # fmt: skip
                with pytest.raises(ConnectionLostError, match="outcome unknown"):
                    await connection.call(command, deadline_s=soon())
                again = await pool.get(broker.address, deadline_s=soon())
                assert again is not connection
                assert len(await put_all(again, 3)) == 3

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "error", "stored"),
    [
        (FaultKind.SWALLOW, RequestTimeoutError, 0),
        (FaultKind.SWALLOW_STORED, RequestTimeoutError, 1),
        (FaultKind.DROP, ConnectionLostError, 0),
        (FaultKind.DROP_STORED, ConnectionLostError, 1),
    ],
)
def test_an_unknown_outcome_is_called_unknown(
    kind: FaultKind, error: type[MetaqError], stored: int
) -> None:
    """Stored or not, the client cannot know, and does not pretend to."""

    async def main() -> None:
        with FakeBroker() as broker:
            async with open_pool() as pool:
                connection = await pool.get(broker.address, deadline_s=soon())
                broker.inject(kind)
                late_s = soon(0.05) if error is RequestTimeoutError else soon()
                with pytest.raises(error, match="outcome unknown") as caught:
                    await connection.call(put(connection, b"x"), deadline_s=late_s)
                assert type(caught.value) is error
                await until(lambda: broker.statistics().fault_count)
                assert len(broker.payloads()) == stored

    asyncio.run(main())


@pytest.mark.slow
def test_a_broker_is_found_at_the_same_port_and_at_another() -> None:
    """Through ZooKeeper the address changes; the pool connects wherever it is."""

    async def main() -> None:
        zookeeper = MemoryZooKeeper()
        coordinator = zookeeper.coordinator(CLOCK)
        metadata = ZooKeeperMetadata(coordinator, NodePaths(), clock=CLOCK)
        await metadata.start()
        coordinator.start()
        with FakeBroker(coordinator=zookeeper.coordinator) as broker:
            async with open_pool() as pool:
                snapshot = await metadata.topic("test", deadline_s=soon())
                first = broker.address
                await pool.get(first, deadline_s=soon())
                for port in (None, 0):
                    broker.go_away()
                    await until(lambda: BrokerId(0) not in metadata.snapshot.brokers)
                    await until(lambda: pool.ready(first) is None)
                    broker.come_back(port=port)
                    await until(lambda: BrokerId(0) in metadata.snapshot.brokers)
                    snapshot = metadata.snapshot
                    leader = snapshot.brokers[BrokerId(0)].leader
                    assert leader == broker.address
                    connection = await pool.get(broker.address, deadline_s=soon())
                    assert len(await put_all(connection, 2)) == 2
                assert broker.address != first
        await metadata.stop()
        await coordinator.stop(deadline_s=soon())

    asyncio.run(main())


def count_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def through_proxy(
    broker: AnyBroker,
    scenario: Callable[[Proxy, ConnectionPool], Awaitable[None]],
    options: ClientOptions = OPTIONS,
) -> None:
    async def main() -> None:
        # The proxy keeps its port for as long as there is a proxy.
        before = count_sockets() + 1
        with Proxy("127.0.0.1", broker.port) as proxy:
            async with open_pool(options) as pool:
                await scenario(proxy, pool)
        await until(lambda: count_sockets() <= before)

    asyncio.run(main())


@pytest.mark.slow
def test_a_network_that_swallows_everything_is_noticed(broker: AnyBroker) -> None:
    """No bytes, no end: the heartbeat finds out, and the next connection works."""

    async def scenario(proxy: Proxy, pool: ConnectionPool) -> None:
        connection = await pool.get(proxy.address, deadline_s=soon())
        proxy.stall()
        reasons: list[str] = []
        connection.on_closed(reasons.append)
        with pytest.raises(ConnectionLostError, match="heartbeat"):
            await connection.call(put(connection, b"x"), deadline_s=soon(60))
        assert pool.ready(proxy.address) is None
        proxy.pass_all()
        again = await pool.get(proxy.address, deadline_s=soon())
        assert len(await put_all(again, 3)) == 3

    through_proxy(broker, scenario, WATCHFUL)


@pytest.mark.slow
def test_a_trickling_network_is_slow_and_nothing_else(broker: AnyBroker) -> None:
    """Bytes that come one by one are still the same replies."""

    async def scenario(proxy: Proxy, pool: ConnectionPool) -> None:
        connection = await pool.get(proxy.address, deadline_s=soon())
        proxy.trickle(piece_bytes=7, interval_s=0.0005)
        assert len(await put_all(connection, 20)) == 20
        assert connection.is_open

    through_proxy(broker, scenario)


@pytest.mark.slow
def test_a_cut_and_a_refusing_network_end_in_a_new_connection(
    broker: AnyBroker,
) -> None:
    """Reset connections fail what is in flight; refused ones are tried again."""

    async def scenario(proxy: Proxy, pool: ConnectionPool) -> None:
        connection = await pool.get(proxy.address, deadline_s=soon())
        proxy.stall(Direction.TO_CLIENT)
        before = proxy.statistics().to_server_bytes
        call = asyncio.ensure_future(
            connection.call(put(connection, b"x"), deadline_s=soon())
        )
        await until(lambda: proxy.statistics().to_server_bytes > before)
        proxy.refuse()
        proxy.cut()
        proxy.pass_all()
        with pytest.raises(ConnectionLostError):
            await call
        assert "Connection refused" in await refusal(pool, proxy.address)
        proxy.accept()
        again = await pool.get(proxy.address, deadline_s=soon())
        assert len(await put_all(again, 3)) == 3

    through_proxy(broker, scenario)


@pytest.mark.slow
def test_what_is_said_of_each_put_is_true(
    broker: AnyBroker, rng: random.Random
) -> None:
    """Cuts at any moment: one outcome each, and the broker's log agrees with it."""
    outcomes: dict[int, list[Reply | MetaqError]] = {}

    def put_some(connection: BrokerConnection) -> None:
        for _ in range(rng.randrange(1, 60)):
            number = len(outcomes)
            command = put(connection, b"%06d" % number)
            outcomes[number] = []
            connection.submit(
                encode(command), command.opaque, outcomes[number].append,
                deadline_s=soon(),
            )  # fmt: skip

    def kinds() -> set[type]:
        return {type(outcome) for found in outcomes.values() for outcome in found}

    async def scenario(proxy: Proxy, pool: ConnectionPool) -> None:
        numbers = itertools.count()
        # Chance has it that one of them does not come for long.
        while next(numbers) < 150 or not {NotSentError, ConnectionLostError} <= kinds():
            connection = await pool.get(proxy.address, deadline_s=soon())
            put_some(connection)
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            match rng.randrange(3):
                case 0:
                    connection.close("cut by the test")
                case 1:
                    proxy.cut()
        await until(lambda: all(outcomes.values()))
        # Now nothing is cut, so that some are answered on any machine.
        while Result not in kinds():
            put_some(await pool.get(proxy.address, deadline_s=soon()))
            await until(lambda: all(outcomes.values()))
        stored = [int(data) for data in await asyncio.to_thread(broker.stored)]
        assert len(set(stored)) == len(stored)
        for number, found in outcomes.items():
            assert len(found) == 1
            match found[0]:
                case Result(status=200):
                    assert number in stored
                case NotSentError():
                    assert number not in stored
                case outcome:
                    assert isinstance(outcome, ConnectionLostError)
        assert kinds() == {Result, NotSentError, ConnectionLostError}

    quick = ClientOptions(reconnect_first_s=0.0005, reconnect_max_s=0.001)
    through_proxy(broker, scenario, quick)
