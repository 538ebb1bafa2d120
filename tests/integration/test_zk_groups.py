"""Members, owners, offsets and snapshots on a real ZooKeeper."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from metaq.clock import SystemClock
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import OwnershipLostError
from metaq.model import (
    BrokerAddress,
    BrokerId,
    GroupOffset,
    MessageId,
    Offset,
    TopicPartition,
)
from metaq.zk.cluster import ClusterWatch
from metaq.zk.coordinator import ZooKeeperCoordinator
from metaq.zk.errors import MemberTakenError, NodeChangedError
from metaq.zk.groups import GroupMembership, Members, read_members, read_owners
from metaq.zk.offsets import GroupOffsets
from metaq.zk.paths import BrokerRole, NodePaths
from metaq.zk.plan import AdvertisedTopic, BrokerSnapshot
from metaq.zk.registry import BrokerRegistry
from metaq.zk.session import SessionState
from metaq.zk.znodes import decode_group_offset
from tests.integration.conftest import ZooKeeperServer, expire_session
from tests.rigs.inside import session_identity
from tests.rigs.waiting import until
from tests.zk.watching import wait_topic

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "vectors.json").read_text())[
    "zookeeper"
]
CLOCK = SystemClock()
PATIENCE_S = 60.0
SESSION_TIMEOUT_MS = 20_000
"""No session ends by itself, however long this machine stands still."""
PATHS = NodePaths()
B0 = BrokerId(0)
P0 = TopicPartition("test", B0, 0)
P1 = TopicPartition("test", B0, 1)


def in_s(seconds: float = PATIENCE_S) -> float:
    return CLOCK.monotonic_s() + seconds


class MeddledCoordinator(ZooKeeperCoordinator):
    """One on which something happens before a node is replaced, once."""

    before_replace: Callable[[], Awaitable[None]] | None = None

    async def replace(self, path: str, data: bytes, **named: Any) -> None:
        meddle, self.before_replace = self.before_replace, None
        if meddle is not None:
            await meddle()
        await super().replace(path, data, **named)


class Consumer:
    """A session, a membership and the group's offsets."""

    def __init__(
        self, hosts: str, consumer_id: str, group: str, session_timeout_ms: int
    ) -> None:
        self.hosts = hosts
        self.coordinator = MeddledCoordinator(
            hosts, session_timeout_ms=session_timeout_ms, clock=CLOCK
        )
        self.group = GroupMembership(
            self.coordinator, PATHS, group=group, consumer_id=consumer_id
        )
        self.offsets = GroupOffsets(self.coordinator, PATHS, group=group)
        self.session_version = 0

    async def connected(self, session_version: int = 1) -> None:
        def is_there() -> bool:
            status = self.coordinator.status
            return (
                status.state is SessionState.CONNECTED
                and status.session_version >= session_version
            )

        await until(is_there)

    async def register(self) -> None:
        self.session_version = await self.group.register(["test"], deadline_s=in_s())

    async def claim(self, partition: TopicPartition = P0) -> bool:
        return await self.group.claim(partition, deadline_s=in_s())

    async def commit(self, offset: int, partition: TopicPartition = P0) -> None:
        await self.commit_as(GroupOffset(Offset(offset), MessageId(7)), partition)

    async def commit_as(self, offset: GroupOffset, partition: TopicPartition) -> None:
        await self.offsets.commit_offset(
            partition,
            offset,
            member=self.group.member,
            session_version=self.session_version,
            deadline_s=in_s(),
        )

    async def expire(self) -> None:
        """End the session; the next one comes by itself."""
        identity = session_identity(self.coordinator)
        await asyncio.to_thread(expire_session, self.hosts, *identity)


@asynccontextmanager
async def consumer_on(
    hosts: str,
    consumer_id: str = "c1",
    group: str = "g",
    session_timeout_ms: int = SESSION_TIMEOUT_MS,
) -> AsyncIterator[Consumer]:
    consumer = Consumer(hosts, consumer_id, group, session_timeout_ms)
    consumer.coordinator.start()
    await consumer.connected()
    yield consumer
    await consumer.coordinator.stop(deadline_s=in_s())


def test_the_tree_is_the_one_of_metaq(zookeeper: str) -> None:
    """Members, owners and offsets, payloads and kinds, as MetaQ's consumer leaves."""
    recorded = {
        node["path"]: (node["data"], node["ephemeral"])
        for node in GOLDEN["java_consumer_running"]
        if "/consumers/golden-group" in node["path"]
    }
    [name] = [path for path in recorded if "/ids/" in path]
    consumer_id = name.rpartition("/")[2].removeprefix("golden-group_")

    async def scenario() -> None:
        async with consumer_on(zookeeper, consumer_id, "golden-group") as one:
            await one.register()
            for partition in (P0, P1):
                assert await one.claim(partition)
                path = PATHS.group_offset("golden-group", partition)
                offset = decode_group_offset(recorded[path][0].encode())
                await one.commit_as(offset, partition)
            tree = {}
            paths = ["/meta/consumers/golden-group"]
            for path in paths:
                node = await one.coordinator.get(path, deadline_s=in_s())
                assert node is not None
                tree[path] = (node.data.decode(), bool(node.owner_session_id))
                names = await one.coordinator.children(path, deadline_s=in_s())
                paths.extend(f"{path}/{name}" for name in names or ())
            assert tree == recorded

    asyncio.run(scenario())


def test_an_expired_owner_loses_everything_and_commits_nothing(zookeeper: str) -> None:
    """The next owner gets the partition; the late one is refused and joins again."""

    async def scenario() -> None:
        async with consumer_on(zookeeper) as one, consumer_on(zookeeper, "c2") as two:
            seen: list[Members] = []
            two.group.watch_members(seen.append)
            await one.register()
            await two.register()
            await until(lambda: bool(seen) and seen[-1].keys() == {"g_c1", "g_c2"})
            assert await one.claim()
            await one.commit(10)
            assert not await two.claim()
            await one.expire()
            await one.connected(session_version=2)
            await until(lambda: seen[-1].keys() == {"g_c2"})
            await until(two.claim)
            await two.commit(20)
            with pytest.raises(OwnershipLostError, match="version 1, now it is 2"):
                await one.commit(15)
            await one.register()
            assert one.group.claims == frozenset()
            with pytest.raises(OwnershipLostError, match=r"g_c1 .* got g_c2"):
                await one.commit(15)
            stored = await one.offsets.read_offset(P0, deadline_s=in_s())
            assert stored == GroupOffset(Offset(20), MessageId(7))
            await until(lambda: seen[-1].keys() == {"g_c1", "g_c2"})

    asyncio.run(scenario())


def test_a_late_commit_fails_at_the_version(zookeeper: str) -> None:
    """The partition changes hands after the look at the owner, before the write."""

    async def scenario() -> None:
        async with consumer_on(zookeeper) as one, consumer_on(zookeeper, "c2") as two:
            await one.register()
            await two.register()
            assert await one.claim()
            await one.commit(10)

            async def change_hands() -> None:
                await one.group.release(P0, deadline_s=in_s())
                assert await two.claim()
                await two.commit(500)

            one.coordinator.before_replace = change_hands
            with pytest.raises(OwnershipLostError, match="got g_c2"):
                await one.commit(20)
            stored = await two.offsets.read_offset(P0, deadline_s=in_s())
            assert stored == GroupOffset(Offset(500), MessageId(7))

    asyncio.run(scenario())


@pytest.mark.parametrize("has_committed", [False, True])
def test_a_late_commit_in_one_request_fails_with_its_session(
    zookeeper: str, has_committed: bool
) -> None:
    """The request goes out under the next session, before anybody here knows of it.

    The next owner's node has the version of ours, and without a commit of his so has
    the offset: the member's node is gone with the session.
    """

    async def scenario() -> None:
        async with consumer_on(zookeeper) as one, consumer_on(zookeeper, "c2") as two:
            await one.register()
            await two.register()
            assert await one.claim()
            await one.commit(10)
            assert await together(one, 1, 20, version=0) == 1
            await one.expire()
            await one.connected(session_version=2)
            assert await two.claim()
            if has_committed:
                await two.commit(500)
            with pytest.raises(OwnershipLostError, match="version 1, now it is 2"):
                await together(one, 1, 30, version=1)
            with pytest.raises(NodeChangedError, match="ids/g_c1"):
                await together(one, 2, 30, version=1)
            stored = await two.offsets.read_offset(P0, deadline_s=in_s())
            assert stored is not None
            assert stored.offset == (500 if has_committed else 20)

    asyncio.run(scenario())


async def together(
    one: Consumer, session_version: int, offset: int, *, version: int
) -> int:
    """Commit by one request; return the version of the node."""
    versions = await one.offsets.commit_together(
        {P0: (GroupOffset(Offset(offset), MessageId(7)), version)},
        member=one.group.member,
        session_version=session_version,
        deadline_s=in_s(),
    )
    return versions[P0]


def test_a_session_that_lives_on_is_waited_for(
    zookeeper_alone: ZooKeeperServer,
) -> None:
    """Cut off for a whole time-out by the server's own absence, and back.

    The session lives on in ZooKeeper, with our nodes, until its client has ended it;
    those of the new one stay.
    """

    async def scenario() -> None:
        # The test waits for the ends of two of them.
        address = zookeeper_alone.address
        async with consumer_on(address, session_timeout_ms=3000) as one:
            await one.register()
            assert await one.claim()
            await one.coordinator.create_ephemeral("/old", b"", deadline_s=in_s())
            zookeeper_alone.stop()
            await until(lambda: one.coordinator.status.state is SessionState.LOST)
            assert one.group.claims == frozenset()
            zookeeper_alone.start()
            await one.connected(session_version=2)

            async def is_back() -> bool:
                with suppress(MemberTakenError):
                    await one.register()
                    return await one.claim()
                return False

            await until(is_back)
            assert not await one.coordinator.exists("/old", deadline_s=in_s())
            members = await read_members(one.coordinator, PATHS, "g", deadline_s=in_s())
            assert dict(members) == {"g_c1": ("test",)}
            owners = await read_owners(
                one.coordinator, PATHS, "g", "test", deadline_s=in_s()
            )
            assert dict(owners) == {P0: "g_c1"}
            await one.commit(10)

    asyncio.run(scenario())


def test_snapshots_follow_a_broker(zookeeper: str) -> None:
    """It registers, changes a count, loses its session and goes."""

    def broker(count: int) -> BrokerSnapshot:
        return BrokerSnapshot(
            role=BrokerRole(B0),
            address=BrokerAddress("127.0.0.1", 8123),
            config_checksum=1,
            topics=(AdvertisedTopic("test", count),),
        )

    async def scenario() -> None:
        async with consumer_on(zookeeper) as one, consumer_on(zookeeper) as other:
            registry = BrokerRegistry(other.coordinator, PATHS, clock=CLOCK)
            registry.start()
            watch = ClusterWatch(one.coordinator, PATHS, clock=CLOCK)
            watch.open()

            async def newer(condition: Callable[[ClusterSnapshot], bool]) -> None:
                snapshot = watch.snapshot
                while not condition(snapshot):
                    snapshot = await watch.wait_newer(
                        snapshot.version, deadline_s=in_s()
                    )

            first = await wait_topic(watch, "test", deadline_s=in_s())
            assert (first.version, first.brokers, first.gets) == (1, {}, {})
            assert await registry.register(broker(2), deadline_s=in_s())
            await newer(lambda s: s.gets == s.puts == {"test": {B0: 2}})
            leader = watch.snapshot.brokers[B0].leader
            assert leader == BrokerAddress("127.0.0.1", 8123)
            registry.update(broker(3))
            await newer(lambda s: s.gets == s.puts == {"test": {B0: 3}})
            await one.expire()
            await one.connected(session_version=2)
            registry.update(broker(4))
            await newer(lambda s: s.gets == s.puts == {"test": {B0: 4}})
            assert watch.snapshot.get_partitions("test")[3] == TopicPartition(
                "test", B0, 3
            )
            await registry.withdraw(deadline_s=in_s())
            await newer(lambda s: not s.brokers and not s.gets and not s.puts)
            assert await watch.topics(deadline_s=in_s()) == {"test"}
            watch.close()
            await registry.stop()

    asyncio.run(scenario())
