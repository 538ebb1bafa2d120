"""Requests to a leader that is gone: they go on at the next one."""

import asyncio

from metaq.client import AsyncClient
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.session import context_of
from metaq.model import BrokerId, Offset, TopicPartition
from metaq.testing.fake_broker import FakeBroker
from metaq.testing.zk import MemoryZooKeeper
from tests.client.worlds import QUICK
from tests.rigs.waiting import until

ONE_BROKER = {"replicas": "two of one id, one after the other"}

TIMEOUT_S = 60.0
PARTITION = TopicPartition("test", BrokerId(0), 0)


def test_a_question_to_a_leader_that_died_goes_to_the_next_one() -> None:
    """It does not wait for the dead one until its own deadline."""
    zookeeper = MemoryZooKeeper()

    async def ask(former: FakeBroker, leader: FakeBroker) -> None:
        async with AsyncClient(coordinator=zookeeper.coordinator, **QUICK) as client:
            context = context_of(client)
            deadline_s = context.clock.monotonic_s() + TIMEOUT_S
            log = LogQueries(context, PARTITION, deadline_s)
            assert await log.nearest(Offset(0)) is None  # there is no put yet
            former.go_away(keeps_nodes=True)
            asking = asyncio.ensure_future(log.nearest(Offset(0)))
            await until(lambda: context.pool.statistics().failure_count)
            await asyncio.to_thread(former.go_away)
            await asyncio.to_thread(leader.start)
            assert await asking is None
            assert context.clock.monotonic_s() < deadline_s - TIMEOUT_S / 2
            assert leader.statistics().commands["offset"] == 1

    former, leader = (FakeBroker(coordinator=zookeeper.coordinator) for _ in range(2))
    with former:
        try:
            asyncio.run(ask(former, leader))
        finally:
            leader.stop()
