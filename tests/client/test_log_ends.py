"""`client/cluster/log_ends.py`: ranges of logs, and the requests for them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from metaq.client.cluster import log_ends
from metaq.client.cluster.log_ends import LogEnds
from metaq.client.session import AsyncClient
from metaq.errors import NoBrokerError
from metaq.model import BrokerId, TopicPartition
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import parts_of

ONE_BROKER = {
    "test_a_broker_that_does_not_wait_is_asked_seldom": "one that does is not asked",
}

pytestmark = pytest.mark.slow

FIRST = TopicPartition("test", BrokerId(0), 0)
SECOND = TopicPartition("test", BrokerId(0), 1)
BOTH = (FIRST, SECOND)
WAIT_S = 60.0


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 2})


def run(
    broker: AnyBroker,
    test: Callable[[AsyncClient, LogEnds], Awaitable[None]],
    **options: float,
) -> None:
    async def main() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await parts_of(client).metadata.topic("test", deadline_s=deadline(client))
            ends = LogEnds(parts_of(client), patience_s=WAIT_S, **options)
            try:
                await test(client, ends)
            finally:
                ends.close()

    asyncio.run(main())


def deadline(client: AsyncClient) -> float:
    return parts_of(client).clock.monotonic_s() + WAIT_S


def requests(client: AsyncClient) -> int:
    found = parts_of(client).pool.statistics().connections
    return sum(connection.request_count for connection in found)


async def put(client: AsyncClient, partition: int, count: int) -> None:
    async with client.producer() as producer:
        for _ in range(count):
            await producer.send("test", b"x" * 80, partition=f"0-{partition}")


def test_a_log_that_stands_still_costs_nothing(broker: AnyBroker) -> None:
    """Hundreds of looks, and no request after the first; MetaQ 1.4's is asked later."""

    async def test(client: AsyncClient, ends: LogEnds) -> None:
        await put(client, 0, 3)
        await put(client, 1, 1)
        expected = {FIRST: (0, 300), SECOND: (0, 100)}
        assert await ends.read(BOTH, deadline_s=deadline(client)) == expected
        await asyncio.sleep(0)
        before = requests(client)
        for _ in range(200):
            assert await ends.read(BOTH, deadline_s=deadline(client)) == expected
            await ends.wait(wait_s=0.0)
        assert requests(client) - before <= len(BOTH)

    run(broker, test, poll_s=60.0)


def test_news_wake_who_waits(broker: AnyBroker) -> None:
    """A message ends the wait; the next look has the new end.

    MetaQ 1.4 cannot wake a waiter: there, a look after a while has it.
    """
    wait_s = WAIT_S if broker.has_extensions else log_ends.POLL_S

    async def test(client: AsyncClient, ends: LogEnds) -> None:
        await put(client, 0, 1)
        await ends.read([FIRST], deadline_s=deadline(client))
        waiting = asyncio.create_task(ends.wait(wait_s=wait_s))
        await put(client, 0, 1)
        await asyncio.wait_for(waiting, WAIT_S / 2)
        found = await ends.read([FIRST], deadline_s=deadline(client))
        assert found == {FIRST: (0, 200)}

    run(broker, test)


def test_a_partition_without_a_log_is_none_until_it_has_one(
    broker: AnyBroker,
) -> None:
    """It costs nothing either, and its first message wakes who waits.

    With MetaQ 1.4 a look after a while finds it.
    """
    wait_s = WAIT_S if broker.has_extensions else log_ends.POLL_S

    async def test(client: AsyncClient, ends: LogEnds) -> None:
        found = await ends.read([SECOND], deadline_s=deadline(client))
        assert found[SECOND] in (None, (0, 0))
        await asyncio.sleep(0)
        before = requests(client)
        for _ in range(200):
            await ends.read([SECOND], deadline_s=deadline(client))
            await ends.wait(wait_s=0.0)
        if broker.has_extensions:
            assert requests(client) - before <= 1
        waiting = asyncio.create_task(ends.wait(wait_s=wait_s))
        await put(client, 1, 1)
        await asyncio.wait_for(waiting, WAIT_S / 2)
        found = await ends.read([SECOND], deadline_s=deadline(client))
        assert found == {SECOND: (0, 100)}

    run(broker, test)


def test_a_broker_that_does_not_wait_is_asked_seldom(
    start_metaq_1_4: StartBroker,
) -> None:
    """One request per log and look that is due; three where the log has grown."""
    java: Any = start_metaq_1_4({"test": 2})
    broker = java.inner

    async def test() -> None:
        def asked() -> int:
            return broker.statistics().commands["offset"]

        async with AsyncClient(brokers=[str(broker.address)]) as client:
            await parts_of(client).metadata.topic("test", deadline_s=deadline(client))
            ends = LogEnds(parts_of(client), patience_s=WAIT_S, poll_s=60.0)
            expected = {FIRST: (0, 21), SECOND: None}
            for _ in range(100):
                found = await ends.read(BOTH, deadline_s=deadline(client))
                assert found == expected
            assert asked() == 3
            ends.close()
            ends = LogEnds(parts_of(client), patience_s=WAIT_S, poll_s=0.0)
            for _ in range(10):
                await ends.read([FIRST], deadline_s=deadline(client))
            assert asked() == 3 + 2 + 9
            broker.add(b"x")
            found = await ends.read([FIRST], deadline_s=deadline(client))
            assert found == {FIRST: (0, 42)}
            assert asked() == 3 + 2 + 9 + 3
            assert broker.statistics().commands["get"] == 0
            ends.close()

    broker.add(b"x")
    asyncio.run(test())


def test_a_broker_that_is_away_leaves_what_was_known(broker: AnyBroker) -> None:
    """For a while; a log that was never known cannot be answered for."""

    async def test(client: AsyncClient, ends: LogEnds) -> None:
        await put(client, 0, 1)
        assert await ends.read([FIRST], deadline_s=deadline(client))
        await asyncio.to_thread(broker.stop)
        deadline_s = parts_of(client).clock.monotonic_s() + 0.3
        found = await ends.read([FIRST], deadline_s=deadline_s)
        assert found == {FIRST: (0, 100)}
        with pytest.raises(NoBrokerError):
            await ends.read([SECOND], deadline_s=deadline_s)

    run(broker, test)
