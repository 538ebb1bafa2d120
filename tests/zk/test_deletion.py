"""The end of a topic that is being deleted, step by step."""

import asyncio
from collections.abc import Awaitable, Callable

from metaq.clock import SystemClock
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.definitions import TopicDefinition, TopicState, encode_definition
from metaq.zk.deletion import brokers_with, finish_deletion
from metaq.zk.paths import NodePaths

CLOCK = SystemClock()
PATHS = NodePaths()
DELETING = encode_definition(TopicDefinition(partitions=1, state=TopicState.DELETING))
ACTIVE = encode_definition(TopicDefinition(partitions=1))
NODE = "/meta/catalog/topics/t"


def in_s() -> float:
    return CLOCK.monotonic_s() + 30


def run(
    scenario: Callable[[MemoryZooKeeper, MemoryCoordinator], Awaitable[None]],
) -> None:
    async def main() -> None:
        server = MemoryZooKeeper()
        coordinator = server.coordinator(CLOCK)
        coordinator.start()
        await asyncio.sleep(0)
        await scenario(server, coordinator)
        await coordinator.stop(deadline_s=in_s())

    asyncio.run(main())


def test_whoever_has_a_topic_or_speaks_of_it_is_waited_for() -> None:
    """Its record, its status, its registration: each alone holds the deletion up."""

    async def scenario(server: MemoryZooKeeper, zk: MemoryCoordinator) -> None:
        server.write(NODE, DELETING)
        server.write("/meta/catalog/partitions/t/10", b"1")
        server.write("/meta/catalog/status/t/2", b"{}")
        server.write("/meta/brokers/topics-sub/t/3-s1", b"")
        server.write("/meta/brokers/topics/t/junk", b"")
        server.write("/meta/catalog/partitions/other/5", b"1")
        assert await brokers_with(zk, PATHS, "t", deadline_s=in_s()) == (2, 3, 10)
        for path in (
            "catalog/partitions/t/10",
            "catalog/status/t/2",
            "brokers/topics-sub/t/3-s1",
        ):
            assert await finish_deletion(zk, PATHS, "t", deadline_s=in_s())
            assert NODE in server.nodes
            server.remove(f"/meta/{path}")
        server.remove("/meta/brokers/topics/t/junk")
        assert await finish_deletion(zk, PATHS, "t", deadline_s=in_s()) == ()
        assert NODE not in server.nodes

    run(scenario)


def test_the_last_traces_go_and_others_stay() -> None:
    """Offsets of all groups, and the empty parents of the topic's nodes."""

    async def scenario(server: MemoryZooKeeper, zk: MemoryCoordinator) -> None:
        server.write(NODE, DELETING)
        for group in ("g", "h"):
            server.write(f"/meta/consumers/{group}/offsets/t/0-0", b"1-1")
            server.write(f"/meta/consumers/{group}/offsets/t/0-1", b"1-1")
        server.write("/meta/consumers/g/offsets/other/0-0", b"1-1")
        for path in ("brokers/topics/t", "brokers/topics-pub/t", "catalog/status/t"):
            server.write(f"/meta/{path}", b"")
        assert await finish_deletion(zk, PATHS, "t", deadline_s=in_s()) == ()
        left = {path for path in server.nodes if "/t" in path.replace("/topics", "")}
        assert left == set()
        assert "/meta/consumers/g/offsets/other/0-0" in server.nodes

    run(scenario)


def test_a_topic_that_is_wanted_is_left_alone() -> None:
    """Also when its definition cannot be read, or is gone."""

    async def scenario(server: MemoryZooKeeper, zk: MemoryCoordinator) -> None:
        for data in (ACTIVE, b"{"):
            server.write(NODE, data)
            server.write("/meta/consumers/g/offsets/t/0-0", b"1-1")
            assert await finish_deletion(zk, PATHS, "t", deadline_s=in_s()) == ()
            assert server.nodes[NODE].data == data
            assert "/meta/consumers/g/offsets/t/0-0" in server.nodes
        server.remove(NODE)
        assert await finish_deletion(zk, PATHS, "t", deadline_s=in_s()) == ()
        assert "/meta/consumers/g/offsets/t/0-0" in server.nodes

    run(scenario)


def test_a_new_life_of_the_name_is_not_taken_by_the_slowest() -> None:
    """Others have finished, and made the topic again, while we were at it."""

    async def scenario(server: MemoryZooKeeper, zk: MemoryCoordinator) -> None:
        server.write(NODE, ACTIVE)
        server.write(NODE, DELETING)
        finishing = asyncio.ensure_future(
            finish_deletion(zk, PATHS, "t", deadline_s=in_s())
        )
        while ("get", NODE) not in server.calls:
            await asyncio.sleep(0)
        server.remove(NODE)
        server.write(NODE, ACTIVE)
        assert await finishing == ()
        assert server.nodes[NODE].data == ACTIVE

    run(scenario)
