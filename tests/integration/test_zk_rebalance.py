"""Groups of consumers on a real ZooKeeper that expires, restarts, hangs and forgets.

The brokers are entries in the tree and the sinks only keep books: what is proven is
the assignment. No member may stay without its share for longer than PATIENCE_S.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from metaq.assignment import Strategy, assign
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata import ZooKeeperMetadata
from metaq.client.group.rebalancer import GroupSource
from metaq.client.group.subscribed_topics import SubscribedTopics
from metaq.client.names import TopicPattern, Topics, split_topics
from metaq.client.options import ClientOptions
from metaq.clock import SystemClock
from metaq.errors import CoordinationError
from metaq.model import BrokerId, TopicPartition
from metaq.testing.proxy import Proxy
from metaq.zk.coordinator import ZooKeeperCoordinator
from metaq.zk.groups import read_owners
from metaq.zk.paths import BrokerRole, NodeKind, NodePaths
from metaq.zk.session import SessionState
from metaq.zk.znodes import TopicRegistration, encode_registration
from tests.integration.conftest import ZooKeeperServer, expire_session
from tests.rigs.inside import session_identity
from tests.rigs.waiting import until

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow]

CLOCK = SystemClock()
PATIENCE_S = 90.0
OPTIONS = ClientOptions(request_timeout_s=5.0, session_timeout_s=20.0)
"""No session ends by itself, however long this machine stands still."""
SHORT = ClientOptions(request_timeout_s=5.0, session_timeout_s=2.0)
"""For tests that wait for the end of a session."""
PATHS = NodePaths()
ROLE = BrokerRole(BrokerId(0))
COUNT = 6


def in_s(seconds: float = PATIENCE_S) -> float:
    return CLOCK.monotonic_s() + seconds


def part(number: int) -> TopicPartition:
    return TopicPartition("t", BrokerId(0), number)


class Book:
    """Readers by partition; each has one living reader at any moment."""

    def __init__(self) -> None:
        self.readers: dict[TopicPartition, str] = {}
        self.violations: list[str] = []


class Sink:
    def __init__(self, book: Book, name: str) -> None:
        self.book = book
        self.name = name
        self.fence_count = 0

    async def assign(self, partitions: Collection[TopicPartition]) -> None:
        for partition in partitions:
            reader = self.book.readers.get(partition)
            if reader is not None:
                self.book.violations.append(f"{partition}: {reader} and {self.name}")
            self.book.readers[partition] = self.name

    def announce(self, partitions: Collection[TopicPartition]) -> None:
        pass

    async def revoke(self, partitions: Collection[TopicPartition]) -> None:
        self._drop(partitions)

    def fence(self, partitions: Collection[TopicPartition]) -> None:
        self.fence_count += 1
        self._drop(partitions)

    def _drop(self, partitions: Collection[TopicPartition]) -> None:
        for partition in partitions:
            if self.book.readers.get(partition) == self.name:
                del self.book.readers[partition]


class Member:
    """A session, what is known of the cluster, and a source."""

    def __init__(
        self,
        hosts: str,
        book: Book,
        consumer_id: str,
        options: ClientOptions = OPTIONS,
        topics: Topics = ("t",),
    ) -> None:
        self.name = f"g_{consumer_id}"
        self.hosts = hosts
        self.book = book
        self.sink = Sink(book, self.name)
        self.coordinator = coordinator_on(hosts, options)
        self.metadata = ZooKeeperMetadata(self.coordinator, PATHS, clock=CLOCK)
        self.topics = SubscribedTopics(self.metadata, *split_topics(topics))
        no: Any = None
        self.source = GroupSource(
            ClientContext(
                CLOCK, options, no, self.metadata, PATHS, no, no, self.coordinator
            ),
            group="g",
            consumer_id=consumer_id,
            topics=self.topics,
            strategy=Strategy.DEFAULT,
        )

    @property
    def reading(self) -> set[TopicPartition]:
        return {p for p, name in self.book.readers.items() if name == self.name}

    async def expire(self) -> None:
        """End the session by force; it has a new one when this returns.

        A fence alone does not show that: the owner may win its session back in between.
        """
        version = self.coordinator.status.session_version
        identity = session_identity(self.coordinator)
        await asyncio.to_thread(expire_session, self.hosts, *identity)
        await until(lambda: self.coordinator.status.session_version > version)


def coordinator_on(
    hosts: str, options: ClientOptions = OPTIONS
) -> ZooKeeperCoordinator:
    timeout_ms = int(options.session_timeout_s * 1000)
    return ZooKeeperCoordinator(hosts, session_timeout_ms=timeout_ms, clock=CLOCK)


@asynccontextmanager
async def member_on(
    hosts: str,
    book: Book,
    consumer_id: str,
    *,
    is_first: bool = False,
    options: ClientOptions = OPTIONS,
    topics: Topics = ("t",),
) -> AsyncIterator[Member]:
    member = Member(hosts, book, consumer_id, options, topics)
    member.coordinator.start()
    await member.metadata.start()
    member.topics.start()
    if is_first:
        await until(lambda: member.coordinator.status.state is SessionState.CONNECTED)
        await serve(member)
    await member.source.start(member.sink)
    yield member
    await member.source.stop()
    await member.metadata.stop()
    await member.coordinator.stop(deadline_s=in_s())


async def serve(member: Member) -> None:
    """Register the topic as a broker does, but for good."""
    await member.coordinator.set_or_create(
        PATHS.topic(NodeKind.TOPIC_SUB, "t", ROLE),
        encode_registration(TopicRegistration(COUNT, ROLE)),
        deadline_s=in_s(),
    )


async def shared(
    *members: Member, java: str | None = None, is_forced: bool = False
) -> None:
    """Wait until each member has exactly its share, and ZooKeeper says so too.

    No member has read messages of another; unless a session was ended by force, of
    which its owner hears after the others.
    """
    names = [part(number).name for number in range(COUNT)]
    everybody = [member.name for member in members] + ([java] if java else [])
    plan = assign(Strategy.DEFAULT, everybody, names)

    await until(lambda: _are_shared(members, plan))
    if not is_forced:
        assert members[0].book.violations == []


async def _are_shared(
    members: Collection[Member], plan: Mapping[str, Collection[str]]
) -> bool:
    for member in members:
        read = {partition.name for partition in member.reading}
        if member.source.unsettled_since_s is not None or read != set(
            plan[member.name]
        ):
            return False
    for member in members:
        try:
            owners = await read_owners(
                member.coordinator, PATHS, "g", "t", deadline_s=in_s(2)
            )
        except CoordinationError:
            return False
        owned = {p.name for p, name in owners.items() if name == member.name}
        if owned != set(plan[member.name]):
            return False
    return True


def test_members_come_go_and_expire(zookeeper: str) -> None:
    """Shares follow; the session that ended is fenced before another member reads
    on."""

    async def scenario() -> None:
        book = Book()
        async with member_on(zookeeper, book, "c1", is_first=True) as one:
            await shared(one)
            async with member_on(zookeeper, book, "c2") as two:
                await shared(one, two)
                await one.expire()
                await until(lambda: one.sink.fence_count)
                await shared(one, two, is_forced=True)
                async with member_on(zookeeper, book, "c3") as three:
                    await shared(one, two, three, is_forced=True)
                    await asyncio.gather(one.expire(), two.expire(), three.expire())
                    await until(lambda: three.sink.fence_count)
                    await shared(one, two, three, is_forced=True)
                await shared(one, two, is_forced=True)
            await shared(one, is_forced=True)

    asyncio.run(scenario())


def test_topics_that_match_a_pattern_come_and_go(zookeeper: str) -> None:
    """The member names those that there are; another one that names one has a share."""

    async def scenario() -> None:
        book = Book()
        async with member_on(zookeeper, book, "c1", topics=TopicPattern("t*")) as one:
            names = PATHS.member("g", one.name)

            async def is_listed(data: bytes) -> bool:
                node = await one.coordinator.get(names, deadline_s=in_s())
                return node is not None and node.data == data

            await until(lambda: is_listed(b""))
            await serve(one)
            await shared(one)
            assert await is_listed(b"t")
            async with member_on(zookeeper, book, "c2") as two:
                await shared(one, two)
            await shared(one)
            path = PATHS.topic(NodeKind.TOPIC_SUB, "t", ROLE)
            await one.coordinator.delete(path, deadline_s=in_s())
            await until(lambda: not one.reading)
            await until(lambda: is_listed(b""))

    asyncio.run(scenario())


def test_owner_and_member_nodes_that_were_deleted_come_back(zookeeper: str) -> None:
    """An operator's slip costs a moment, not the night."""

    async def scenario() -> None:
        book = Book()
        async with (
            member_on(zookeeper, book, "c1", is_first=True) as one,
            member_on(zookeeper, book, "c2") as two,
        ):
            await shared(one, two)
            [lost, *_rest] = sorted(two.reading)
            path = PATHS.owner("g", lost)
            await one.coordinator.delete(path, deadline_s=in_s())
            await until(lambda: two.sink.fence_count)
            path = PATHS.member("g", two.name)
            await one.coordinator.delete(path, deadline_s=in_s())
            await until(lambda: one.coordinator.exists(path, deadline_s=in_s()))
            await shared(one, two)

    asyncio.run(scenario())


def test_owner_and_member_nodes_that_were_overwritten_come_back(zookeeper: str) -> None:
    """Nor does a member that lets go of what it reads stay without it."""

    async def scenario() -> None:
        book = Book()
        async with (
            member_on(zookeeper, book, "c1", is_first=True) as one,
            member_on(zookeeper, book, "c2") as two,
        ):
            await shared(one, two)

            async def holds(path: str, data: bytes) -> bool:
                node = await one.coordinator.get(path, deadline_s=in_s())
                return node is not None and node.data == data

            [lost, *_rest] = sorted(two.reading)
            for path, data in (
                (PATHS.owner("g", lost), two.name.encode()),
                (PATHS.member("g", two.name), b"t"),
            ):
                assert await holds(path, data)
                await one.coordinator.set_or_create(path, b"x", deadline_s=in_s())
                await until(lambda p=path, d=data: holds(p, d))  # type: ignore[misc]
                await shared(one, two)
            assert two.sink.fence_count == 1

    asyncio.run(scenario())


def test_a_member_of_metaq_shares(zookeeper: str) -> None:
    """It writes its nodes as MetaQ's does, and dies with its session."""

    async def scenario() -> None:
        book = Book()
        async with member_on(zookeeper, book, "c1", is_first=True) as one:
            java = coordinator_on(zookeeper)
            java.start()
            await until(lambda: java.status.state is SessionState.CONNECTED)
            path = PATHS.member("g", "g_java")
            await java.create_ephemeral(path, b"t", deadline_s=in_s())
            await shared(one, java="g_java")
            for number in range(COUNT // 2, COUNT):
                path = PATHS.owner("g", part(number))
                await java.create_ephemeral(path, b"g_java", deadline_s=in_s())
            async with member_on(zookeeper, book, "c2") as two:
                # c1, c2, java: java keeps the last two and gives the one before them.
                await until(lambda: two.source.last_error is not None)
                path = PATHS.owner("g", part(COUNT // 2))
                await java.delete(path, deadline_s=in_s())
                await shared(one, two, java="g_java")
            await java.stop(deadline_s=in_s())
            await shared(one)

    asyncio.run(scenario())


def test_a_server_that_restarts_or_hangs(zookeeper_alone: ZooKeeperServer) -> None:
    """Shorter than the session time-out or longer: each member has its share again."""

    async def scenario() -> None:
        book, hosts = Book(), zookeeper_alone.address
        async with (
            member_on(hosts, book, "c1", is_first=True, options=SHORT) as one,
            member_on(hosts, book, "c2", options=SHORT) as two,
        ):
            await shared(one, two)
            zookeeper_alone.restart()
            await shared(one, two)
            zookeeper_alone.pause()
            await until(lambda: not book.readers)
            zookeeper_alone.resume()
            await shared(one, two)
            zookeeper_alone.kill()
            await until(lambda: not book.readers)
            zookeeper_alone.start()
            await shared(one, two)

    asyncio.run(scenario())


def test_a_server_that_lost_its_data(zookeeper_alone: ZooKeeperServer) -> None:
    """Members, owners and topics are gone; the topic is registered again, as theirs."""

    async def scenario() -> None:
        book, hosts = Book(), zookeeper_alone.address
        async with (
            member_on(hosts, book, "c1", is_first=True, options=SHORT) as one,
            member_on(hosts, book, "c2", options=SHORT) as two,
        ):
            await shared(one, two)
            zookeeper_alone.stop()
            zookeeper_alone.wipe()
            # The new server refuses them until they give their sessions up.
            before = one.coordinator.status.session_version
            zookeeper_alone.start()
            await until(lambda: one.coordinator.status.session_version > before)
            await until(lambda: one.coordinator.status.state is SessionState.CONNECTED)
            await serve(one)
            await shared(one, two)

    asyncio.run(scenario())


def test_a_member_that_is_cut_off(zookeeper_alone: ZooKeeperServer) -> None:
    """It stops before its partitions go to the other, and joins when it can."""

    async def scenario() -> None:
        book, hosts = Book(), zookeeper_alone.address
        host, _, port = hosts.rpartition(":")
        with Proxy(host, int(port)) as proxy:
            async with (
                member_on(hosts, book, "c1", is_first=True, options=SHORT) as one,
                member_on(f"127.0.0.1:{proxy.port}", book, "c2", options=SHORT) as two,
            ):
                await shared(one, two)
                proxy.stall()
                await shared(one)
                assert two.reading == set()
                proxy.pass_all()
                await shared(one, two)
                proxy.cut()
                await shared(one, two)

    asyncio.run(scenario())
