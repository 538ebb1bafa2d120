"""Members of one group on a ZooKeeper in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from metaq.model import BrokerId, TopicPartition
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.groups import GroupMembership
from metaq.zk.paths import NodePaths
from tests.rigs.virtual_time import VirtualClock

CLOCK = VirtualClock()
PATHS = NodePaths()
P0 = TopicPartition("test", BrokerId(0), 0)
P1 = TopicPartition("test", BrokerId(0), 1)
MEMBER = "/meta/consumers/g/ids/g_c1"
OWNER = "/meta/consumers/g/owners/test/0-0"


def in_s(seconds: float = 5.0) -> float:
    return CLOCK.monotonic_s() + seconds


async def settle() -> None:
    await asyncio.sleep(0.1)


async def connect(server: MemoryZooKeeper) -> MemoryCoordinator:
    coordinator = server.coordinator(CLOCK)
    coordinator.start()
    await asyncio.sleep(0)
    return coordinator


@asynccontextmanager
async def member_on(
    server: MemoryZooKeeper, consumer_id: str = "c1", *, group: str = "g"
) -> AsyncIterator[tuple[GroupMembership, MemoryCoordinator]]:
    coordinator = await connect(server)
    yield (
        GroupMembership(coordinator, PATHS, group=group, consumer_id=consumer_id),
        coordinator,
    )
    await coordinator.stop(deadline_s=in_s())
