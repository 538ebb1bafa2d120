"""Members of a group on an in-memory ZooKeeper, with sinks that only keep records."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from metaq.assignment import Strategy, assign
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata import ZooKeeperMetadata
from metaq.client.group.rebalancer import GroupSource
from metaq.client.group.subscribed_topics import SubscribedTopics
from metaq.client.names import TopicPattern
from metaq.client.options import ClientOptions
from metaq.model import BrokerId, TopicPartition
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.paths import BrokerRole, NodeKind, NodePaths
from metaq.zk.znodes import TopicRegistration, encode_registration
from tests.rigs.inside import kill
from tests.rigs.virtual_time import VirtualClock, run_virtually

CLOCK = VirtualClock()
PATHS = NodePaths()
OPTIONS = ClientOptions(request_timeout_s=5.0, session_timeout_s=20.0)
GROUP = "g"
TOPIC = "t"
ID = PATHS.member(GROUP, "g_c1")


def part(number: int, broker: int = 0, topic: str = TOPIC) -> TopicPartition:
    return TopicPartition(topic, BrokerId(broker), number)


def parts(*numbers: int) -> set[TopicPartition]:
    return {part(number) for number in numbers}


def owner_path(partition: TopicPartition) -> str:
    return PATHS.owner(GROUP, partition)


def serve(
    server: MemoryZooKeeper, count: int, broker: int = 0, topic: str = TOPIC
) -> None:
    """Register a topic as a broker does; 0 partitions: withdraw it."""
    role = BrokerRole(BrokerId(broker))
    path = PATHS.topic(NodeKind.TOPIC_SUB, topic, role)
    if count:
        server.put(path, encode_registration(TopicRegistration(count, role)))
    else:
        server.remove(path)


class Sink:
    """Reads nothing; notes its calls, and what it would read."""

    def __init__(self) -> None:
        self.reading: set[TopicPartition] = set()
        self.calls: list[tuple[str, frozenset[TopicPartition]]] = []
        self.announced: list[frozenset[TopicPartition]] = []
        self.on_assign: Callable[[TopicPartition], None] = lambda _partition: None
        self.assign_s = 0.0
        self.revoke_s = 0.0
        self.before_release: Callable[[], None] = lambda: None

    async def assign(self, partitions: Collection[TopicPartition]) -> None:
        for partition in partitions:
            self.on_assign(partition)
        await asyncio.sleep(self.assign_s)
        assert self.reading.isdisjoint(partitions)
        self.calls.append(("assign", frozenset(partitions)))
        self.reading.update(partitions)

    def announce(self, partitions: Collection[TopicPartition]) -> None:
        assert self.reading.issuperset(partitions)
        if partitions:
            self.announced.append(frozenset(partitions))

    async def revoke(self, partitions: Collection[TopicPartition]) -> None:
        self.calls.append(("revoke", frozenset(partitions)))
        await asyncio.sleep(self.revoke_s)
        self.reading.difference_update(partitions)
        self.before_release()

    def fence(self, partitions: Collection[TopicPartition]) -> None:
        self.calls.append(("fence", frozenset(partitions)))
        self.reading.difference_update(partitions)

    def called(self, what: str) -> set[TopicPartition]:
        return {p for call, many in self.calls if call == what for p in many}


class Member:
    """A session, a source and a sink."""

    def __init__(
        self,
        server: MemoryZooKeeper,
        consumer_id: str = "c1",
        *,
        topics: Collection[str] = (TOPIC,),
        patterns: Collection[TopicPattern] = (),
        strategy: Strategy = Strategy.DEFAULT,
        options: ClientOptions = OPTIONS,
        where: str | None = None,
    ) -> None:
        self.server = server
        self.sink = Sink()
        self.coordinator: MemoryCoordinator = server.coordinator(CLOCK)
        self.metadata = ZooKeeperMetadata(self.coordinator, PATHS, clock=CLOCK)
        self.topics = SubscribedTopics(self.metadata, topics, patterns)
        no: Any = None
        self.source = GroupSource(
            ClientContext(
                CLOCK, options, no, self.metadata, PATHS, no, no, self.coordinator
            ),
            group=GROUP,
            consumer_id=consumer_id,
            topics=self.topics,
            strategy=strategy,
            where=where,
        )
        self.name = f"{GROUP}_{consumer_id}"
        self.has_quit = False

    @property
    def reading(self) -> set[TopicPartition]:
        return self.sink.reading

    @property
    def is_settled(self) -> bool:
        return self.source.unsettled_since_s is None

    async def join(self) -> "Member":
        await self.connect()
        await self.source.start(self.sink)
        return self

    async def connect(self) -> None:
        self.coordinator.start()
        await self.metadata.start()
        self.topics.start()

    async def leave(self) -> None:
        await self.source.stop()
        await self.quit()

    async def quit(self) -> None:
        self.has_quit = True
        await self.metadata.stop()
        await self.coordinator.stop(deadline_s=CLOCK.monotonic_s() + 1)

    async def die(self) -> int:
        """End as a killed process does; return the session that lives on."""
        number = self.coordinator.status.session_id
        self.sink.reading.clear()
        self.server.abandon(self.coordinator)
        kill(self.source)
        self.has_quit = True
        await self.metadata.stop()
        return number


class Group:
    """Members of one ZooKeeper; those that are still there at the end leave."""

    def __init__(self, partitions: int) -> None:
        self.server = MemoryZooKeeper()
        self.members: list[Member] = []
        serve(self.server, partitions)

    def make(self, consumer_id: str = "c1", where: str | None = None) -> Member:
        member = Member(self.server, consumer_id, where=where)
        self.members.append(member)
        return member

    async def join(self, consumer_id: str = "c1", where: str | None = None) -> Member:
        return await self.make(consumer_id, where).join()

    async def leave(self) -> None:
        for member in self.members:
            if not member.has_quit:
                await member.leave()


def run_group(
    scenario: Callable[[Group, Member], Awaitable[None]],
    partitions: int,
    *,
    is_joined: bool = True,
    where: str | None = None,
) -> None:
    """Run a scenario in virtual time, with one member."""

    async def run() -> None:
        group = Group(partitions)
        one = group.make(where=where)
        if is_joined:
            await one.join()
        await scenario(group, one)
        await group.leave()

    run_virtually(run())


def owners(server: MemoryZooKeeper, topic: str = TOPIC) -> dict[str, str]:
    """Return partition name → owner."""
    parent = PATHS.group_partitions(NodeKind.OWNER, GROUP, topic)
    return {
        name: server.nodes[f"{parent}/{name}"].data.decode()
        for name in server.names(parent) or ()
    }


def is_at_rest(
    server: MemoryZooKeeper, members: Collection[Member], count: int, strategy: Strategy
) -> bool:
    """Whether each member reads exactly its share, and ZooKeeper says the same."""
    if not all(member.is_settled for member in members):
        return False
    names = [part(number).name for number in range(count)]
    plan = assign(strategy, [member.name for member in members], names)
    read = {
        member.name: {partition.name for partition in member.reading}
        for member in members
    }
    found = {name: owner for owner, many in read.items() for name in many}
    return found == owners(server) and all(
        read[member] == set(many) for member, many in plan.items()
    )


def serving(count: int) -> MemoryZooKeeper:
    server = MemoryZooKeeper()
    serve(server, count)
    return server


def refusing(error: Exception, *refused: TopicPartition) -> Callable[..., None]:
    def check(partition: TopicPartition) -> None:
        if partition in refused:
            raise error

    return check
