"""Which brokers there are, and which partitions of which topics they serve.

A `Cluster` is one immutable snapshot. It is read from ZooKeeper, as MetaQ's clients do
it, or from a list of addresses, by asking each broker itself; whoever needs it takes a
`ClusterSource` and does not care which. Source: client spec 4, broker spec 7.1.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

from metaq.client.errors import UnexpectedReplyError
from metaq.client.wire import WireConnection
from metaq.clock import Clock
from metaq.config import parse_config
from metaq.config.topic_rules import compile_topic_pattern
from metaq.errors import ConfigError, NoBrokerError, WireError
from metaq.model import BrokerId, TopicPartition
from metaq.zk._kazoo import KazooCoordinator
from metaq.zk.errors import PayloadError
from metaq.zk.paths import BrokerRole, NodeKind, NodePaths, parse_role
from metaq.zk.session import Coordinator, SessionState, SessionStatus
from metaq.zk.znodes import (
    BrokerAddress,
    decode_address,
    decode_registration,
)

SESSION_TIMEOUT_MS: Final = 10_000
"""A snapshot is read within seconds; nothing of ours outlives the session."""
STOP_TIMEOUT_S: Final = 2.0

Counts = Mapping[str, Mapping[BrokerId, int]]
"""Topic → broker → number of partitions there."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What was known at one moment; only brokers that take puts (leaders)."""

    brokers: Mapping[BrokerId, BrokerAddress]
    """Where each broker is, by id in ascending order."""
    puts: Counts = field(default_factory=lambda: MappingProxyType({}))
    """Partitions that are advertised to producers; patterns of topics among them."""
    gets: Counts = field(default_factory=lambda: MappingProxyType({}))
    """Partitions that are advertised to consumers; patterns of topics among them."""

    @property
    def topics(self) -> tuple[str, ...]:
        """All topics anybody advertises, sorted; a pattern is none."""
        names = self.puts.keys() | self.gets.keys()
        return tuple(sorted(name for name in names if "*" not in name))

    def partitions(self, topic: str, counts: Counts) -> tuple[TopicPartition, ...]:
        """Return a topic's partitions on reachable brokers, in numeric order.

        A topic that nobody advertises, but that a pattern of a broker admits, has its
        first partition there: the first put to it makes it known, and its others.

        Args:
            topic: topic name.
            counts: `puts` or `gets` of this snapshot.

        Raises:
            NoBrokerError: nobody advertises or admits the topic.
        """
        by_broker = counts.get(topic) or _admitting(topic, counts)
        found = tuple(
            TopicPartition(topic, broker_id, number)
            for broker_id, count in sorted(by_broker.items())
            if broker_id in self.brokers
            for number in range(count)
        )
        if not found:
            known = ", ".join(self.topics[:10]) or "none"
            raise NoBrokerError(
                f"no broker serves topic '{topic}' at the moment; topics there are:"
                f" {known}"
            )
        return found


def _admitting(topic: str, counts: Counts) -> Mapping[BrokerId, int]:
    """Return the brokers with a pattern that admits the topic, one partition each."""
    return {
        broker_id: 1
        for name, by_broker in counts.items()
        if "*" in name and compile_topic_pattern(name).fullmatch(topic)
        for broker_id in by_broker
    }


class ClusterSource(Protocol):
    """Whoever knows the cluster."""

    def read(self, *, timeout_s: float) -> Cluster:
        """Return what is true now.

        Raises:
            NoBrokerError: nobody could be asked.
            CoordinationError: ZooKeeper answered something unusable.
        """
        ...


@dataclass(frozen=True, slots=True)
class ZooKeeperSource:
    """The cluster below one root in ZooKeeper."""

    connect: str
    """`host:port[,host:port...][/chroot]`."""
    paths: NodePaths
    """The root."""
    clock: Clock
    """For deadlines."""

    def read(self, *, timeout_s: float) -> Cluster:
        """Return what is registered now."""
        return asyncio.run(self._read(self.clock.monotonic_s() + timeout_s, timeout_s))

    async def _read(self, deadline_s: float, timeout_s: float) -> Cluster:
        coordinator = KazooCoordinator(
            self.connect, session_timeout_ms=SESSION_TIMEOUT_MS, clock=self.clock
        )
        connected = asyncio.Event()

        def on_status(status: SessionStatus) -> None:
            if status.state is SessionState.CONNECTED:
                connected.set()

        coordinator.add_listener(on_status)
        coordinator.start()
        try:
            async with asyncio.timeout(timeout_s):
                await connected.wait()
            return await read_cluster(coordinator, self.paths, deadline_s=deadline_s)
        except TimeoutError as error:
            raise NoBrokerError(
                f"no ZooKeeper answers at {self.connect} (waited {timeout_s:g} s)"
            ) from error
        finally:
            stop_s = self.clock.monotonic_s() + STOP_TIMEOUT_S
            await coordinator.stop(deadline_s=stop_s)


async def read_cluster(
    coordinator: Coordinator, paths: NodePaths, *, deadline_s: float
) -> Cluster:
    """Read one snapshot of the cluster through a connected coordinator.

    Nodes that vanish meanwhile, or that hold what nobody can read, are left out: their
    broker is not usable now.
    """
    brokers = {}
    ids = await coordinator.children(paths.broker_ids(), deadline_s=deadline_s)
    numbers = sorted(int(name) for name in ids or () if name.isdecimal())
    for broker_id in map(BrokerId, numbers):
        path = paths.role(BrokerRole(broker_id))
        node = await coordinator.get(path, deadline_s=deadline_s)
        if node is not None:
            try:
                brokers[broker_id] = decode_address(node.data)
            except PayloadError:
                continue
    counts = [
        await _read_counts(coordinator, paths, kind, deadline_s)
        for kind in (NodeKind.TOPIC_PUB, NodeKind.TOPIC_SUB)
    ]
    return Cluster(MappingProxyType(brokers), *counts)


async def _read_counts(
    coordinator: Coordinator, paths: NodePaths, kind: NodeKind, deadline_s: float
) -> Counts:
    counts: dict[str, Mapping[BrokerId, int]] = {}
    topics = await coordinator.children(paths.topics(kind), deadline_s=deadline_s)
    for topic in topics or ():
        parent = paths.topic_children(kind, topic)
        by_broker = {}
        for name in await coordinator.children(parent, deadline_s=deadline_s) or ():
            role = parse_role(name)
            if role is None or not role.is_leader:
                continue
            path = paths.topic(kind, topic, role)
            node = await coordinator.get(path, deadline_s=deadline_s)
            if node is None:
                continue
            try:
                registration = decode_registration(node.data)
            except PayloadError:
                continue
            by_broker[role.broker_id] = registration.partition_count
        if by_broker:
            counts[topic] = MappingProxyType(by_broker)
    return MappingProxyType(counts)


@dataclass(frozen=True, slots=True)
class AddressSource:
    """Brokers that somebody named; each is asked what it has."""

    addresses: Sequence[BrokerAddress]
    """At least one."""
    clock: Clock
    """For deadlines."""

    def read(self, *, timeout_s: float) -> Cluster:
        """Ask each broker; `timeout_s` bounds each of them.

        Nothing on the wire tells how many partitions a topic has. What can be known is
        which of them have a log, and what the broker's configuration file says; a topic
        of which neither is known is taken to have one.
        """
        brokers: dict[BrokerId, BrokerAddress] = {}
        counts: dict[str, dict[BrokerId, int]] = {}
        for address in self.addresses:
            with WireConnection.open(
                address, timeout_s=timeout_s, clock=self.clock
            ) as connection:
                broker_id = _broker_id(connection.stats(timeout_s=timeout_s))
                for topic, count in _ask_counts(connection, timeout_s).items():
                    counts.setdefault(topic, {})[broker_id] = count
            brokers[broker_id] = address
        shared: Counts = MappingProxyType(dict(sorted(counts.items())))
        return Cluster(MappingProxyType(dict(sorted(brokers.items()))), shared, shared)


def _lines(text: str) -> list[list[str]]:
    return [line.split(" ") for line in text.splitlines()[1:] if line != "END"]


def _broker_id(text: str) -> BrokerId:
    for words in _lines(text):
        if words[0] == "broker_id" and words[-1].isdecimal():
            return BrokerId(int(words[-1]))
    raise UnexpectedReplyError(f"stats: expected a broker_id, got {text[:80]!r}")


def _ask_counts(connection: WireConnection, timeout_s: float) -> dict[str, int]:
    """Return the number of partitions of each topic, as far as the broker tells."""
    counts: dict[str, int] = {}
    # Of a topic: '<topic> partitions <n> ...', or '<topic> *Empty*' without a log.
    for words in _lines(connection.stats("topics", timeout_s=timeout_s)):
        if words[0]:
            counts[words[0]] = 1
    # Of a log: '<topic> part <number> min_offset <n> max_offset <n>'.
    for words in _lines(connection.stats("offsets", timeout_s=timeout_s)):
        if len(words) > 2 and words[1] == "part" and words[2].isdecimal():
            counts[words[0]] = max(counts.get(words[0], 1), int(words[2]) + 1)
    for topic, count in _configured_counts(connection, timeout_s).items():
        if topic in counts:
            counts[topic] = max(counts[topic], count)
    return counts


def _configured_counts(connection: WireConnection, timeout_s: float) -> dict[str, int]:
    try:
        text = connection.stats("config", timeout_s=timeout_s)
        topics = parse_config(text.encode(), str(connection.address)).topics
    except (WireError, ConfigError):
        # No file, or one that only the broker itself can read.
        return {}
    return {name: topic.partition_count for name, topic in topics.items()}
