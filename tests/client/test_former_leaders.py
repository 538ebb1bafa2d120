"""A former leader that hangs or has died delays no request."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import AsyncClient
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.model import BrokerId, Offset, TopicPartition
from metaq.testing.fake_broker import FakeBroker, FaultKind
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.paths import NodePaths
from tests.client.worlds import QUICK, WORLDS, parts_of, payloads, take
from tests.rigs.waiting import until, wait_until

OFTEN = 1_000_000
AnyFake = FakeBroker
Pair = tuple[FakeBroker, FakeBroker]

ONE_BROKER = {
    "replicas": "two of one id, of which one hangs on request",
    "successors": "two of one id, one after the other",
}
TIMEOUT_S = 60.0
PARTITION = TopicPartition("test", BrokerId(0), 0)
LEADER = NodePaths("/meta").broker(0) + "/master"  # type: ignore[arg-type]


@pytest.fixture
def zookeeper() -> MemoryZooKeeper:
    return MemoryZooKeeper()


@pytest.fixture
def replicas(zookeeper: MemoryZooKeeper) -> Iterator[Pair]:
    """Two brokers of one id; the first is registered, and hangs after one put."""
    first = FakeBroker(coordinator=zookeeper.coordinator)
    with first, FakeBroker() as second:
        for verb in ("put", "get"):
            first.inject(FaultKind.SWALLOW, verb=verb, count=OFTEN)
        # Its session is not over yet, and it does not repair its nodes.
        for session in zookeeper.coordinators:
            zookeeper.suspend(session)
        yield first, second


@pytest.fixture
def successors(zookeeper: MemoryZooKeeper) -> Iterator[Pair]:
    """Two brokers of one id; the second one does not run yet."""
    first, second = (FakeBroker(coordinator=zookeeper.coordinator) for _ in range(2))
    with first:
        yield first, second
    second.stop()


def lead(zookeeper: MemoryZooKeeper, broker: AnyFake) -> None:
    zookeeper.write(LEADER, str(broker.address).encode())


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_what_a_former_leader_does_not_answer_goes_to_the_new_one(
    replicas: Pair, zookeeper: MemoryZooKeeper, world: str
) -> None:
    """Puts and gets that wait for it; long before heartbeats or deadlines end them."""
    old, new = replicas
    new.add(b"first")
    client: Any = WORLDS[world](
        coordinator=zookeeper.coordinator, **QUICK, heartbeat_s=60.0
    )
    with (
        client,
        client.producer(timeout_s=60.0) as producer,
        client.consumer("g", ["test"], wait_s=60.0) as consumer,
    ):
        future = producer.send_nowait("test", b"second")
        wait_until(lambda: old.statistics().commands["put"] == 1)
        wait_until(lambda: old.statistics().commands["get"] >= 1)
        lead(zookeeper, new)
        assert payloads(take(consumer, 2)) == [b"first", b"second"]
        producer.flush()
        assert future.done()


@pytest.mark.slow
def test_a_leader_that_is_back_in_time_keeps_its_connection(
    replicas: Pair, zookeeper: MemoryZooKeeper
) -> None:
    """Only a former one is left, after time for its last answers."""

    async def main() -> None:
        old, new = replicas
        async with AsyncClient(coordinator=zookeeper.coordinator, **QUICK) as client:
            parts = parts_of(client)
            connections = {}
            for broker in replicas:
                address = broker.address
                connections[broker] = await parts.pool.get(
                    address, deadline_s=parts.deadline_s()
                )
            version = 0

            async def see(broker: AnyFake) -> None:
                nonlocal version
                lead(zookeeper, broker)
                await until(
                    lambda: (
                        (copies := parts.metadata.snapshot.brokers.get(0))  # type: ignore[call-overload]
                        and copies.leader == broker.address
                    )
                )

            await see(old)
            await see(new)
            assert connections[old].is_open
            await see(old)
            await until(lambda: not connections[new].is_open)
            assert connections[old].is_open

    asyncio.run(main())


@pytest.mark.slow
def test_a_question_to_a_leader_that_died_goes_to_the_next_one(
    successors: Pair, zookeeper: MemoryZooKeeper
) -> None:
    """It does not wait for the dead one until its own deadline."""

    async def ask() -> None:
        former, leader = successors
        async with AsyncClient(coordinator=zookeeper.coordinator, **QUICK) as client:
            parts = parts_of(client)
            deadline_s = parts.clock.monotonic_s() + TIMEOUT_S
            log = LogQueries(parts, PARTITION, deadline_s)
            assert await log.nearest(Offset(0)) is None  # there is no put yet
            former.go_away(keeps_nodes=True)
            asking = asyncio.ensure_future(log.nearest(Offset(0)))
            await until(lambda: parts.pool.statistics().failure_count)
            await asyncio.to_thread(former.go_away)
            await asyncio.to_thread(leader.start)
            assert await asking is None
            assert parts.clock.monotonic_s() < deadline_s - TIMEOUT_S / 2
            assert leader.statistics().commands["offset"] == 1

    asyncio.run(ask())
