"""Finds topics, their partitions, and the brokers that are or were registered."""

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata import ZooKeeperMetadata
from metaq.client.cluster.metadata_queries import insist
from metaq.client.cluster.presence import (
    missing_topics,
    put_addresses,
    refuse_exchanges,
    require_all_there,
    unknown_topic,
)
from metaq.client.errors import PartitionsAwayError
from metaq.client.names import name_some
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.config.topic_rules import is_pattern
from metaq.errors import NoBrokerError
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.zk.children import read_values
from metaq.zk.offsets import GroupOffsets
from metaq.zk.paths import parse_broker_id
from metaq.zk.znodes import decode_address

NAMES_SHOWN_MAX: Final = 10
NEW_TOPIC_S: Final = 3.0
"""Maximum wait for a new topic to appear, or to be registered for consumers after it
was for producers, in seconds."""


async def find_topics(
    context: ClientContext, pattern: str, *, deadline_s: float
) -> tuple[str, ...]:
    """Return the topics whose whole name matches a pattern of `re`, ascending.

    Sections of a broker's settings that are patterns themselves are listed like topics,
    even in ZooKeeper; they are left out.

    Raises:
        NoBrokerError: nothing is known of the cluster.
        CoordinationError: ZooKeeper cannot be asked.
    """
    metadata = context.metadata
    if isinstance(metadata, ZooKeeperMetadata):
        names = await insist(context, metadata.topics, deadline_s)
    else:
        snapshot = await read_cluster(context, (), deadline_s=deadline_s)
        names = frozenset(snapshot.gets)
    matches = re.compile(pattern).fullmatch
    found = (name for name in names if matches(name) and not is_pattern(name))
    return tuple(sorted(found))


async def read_cluster(
    context: ClientContext, topics: Iterable[str], *, deadline_s: float
) -> ClusterSnapshot:
    """Return a snapshot that covers the given topics, served or not.

    Raises:
        NoBrokerError: nothing is known of the cluster, or of a topic.
        CoordinationError: ZooKeeper is out of reach.
        NodeNameError: a name is not legal for a topic.
    """
    metadata, wanted = context.metadata, frozenset(topics)
    since_s = context.clock.monotonic_s()
    for name in sorted(wanted):
        metadata.watch_topic(name)
    snapshot = metadata.snapshot
    try:
        while not snapshot.version or not wanted <= snapshot.topics:
            snapshot = await context.newer(snapshot, deadline_s)
    except NoBrokerError:
        metadata.require_reachable(context.clock.monotonic_s() - since_s)
        raise
    return snapshot


async def read_whole(
    context: ClientContext, topics: Iterable[str], *, deadline_s: float
) -> ClusterSnapshot:
    """Wait for a snapshot in which no partition of some topics is away.

    Raises:
        PartitionsAwayError: a broker was still away at the deadline.
        NoBrokerError, NodeNameError: as `read_cluster`.
    """
    names = frozenset(topics)
    snapshot = await read_cluster(context, names, deadline_s=deadline_s)
    while True:
        snapshot = await wait_for_readers(
            context, snapshot, names, deadline_s=deadline_s
        )
        try:
            require_all_there(snapshot, names)
        except PartitionsAwayError as away:
            try:
                snapshot = await context.newer(snapshot, deadline_s)
            except NoBrokerError:
                raise away from None
        else:
            return snapshot


async def wait_for_readers(
    context: ClientContext,
    snapshot: ClusterSnapshot,
    topics: Collection[str],
    *,
    deadline_s: float,
) -> ClusterSnapshot:
    """Return a snapshot after unfinished registrations.

    A broker registers a topic for producers first, and for consumers a moment later;
    before that its partitions would not be read. A topic that is closed to consumers
    looks the same, so the wait is at most NEW_TOPIC_S, or half of the remaining time.
    """
    if not isinstance(context.metadata, ZooKeeperMetadata):
        return snapshot
    # The rest of the time is for the caller's next requests.
    now_s = context.clock.monotonic_s()
    until_s = min(now_s + NEW_TOPIC_S, (now_s + deadline_s) / 2)
    with suppress(NoBrokerError):
        while _is_half_there(snapshot, topics):
            snapshot = await context.newer(snapshot, until_s)
    return snapshot


def _is_half_there(snapshot: ClusterSnapshot, topics: Iterable[str]) -> bool:
    """Return whether a broker has more partitions for puts than for gets."""
    for topic in snapshot.topics.intersection(topics) - snapshot.exchanges:
        gets = snapshot.gets.get(topic, {})
        puts = snapshot.puts.get(topic, {})
        if any(count > gets.get(broker, 0) for broker, count in puts.items()):
            return True
    return False


async def read_takers(
    context: ClientContext, topics: Iterable[str], *, deadline_s: float
) -> ClusterSnapshot:
    """Wait for a snapshot in which each of some topics takes puts.

    Raises:
        NoBrokerError: a topic does not; an unknown one is not waited for.
        ExchangeError: one of the names is an exchange.
    """
    wanted = tuple(topics)
    snapshot = await read_cluster(context, wanted, deadline_s=deadline_s)
    refuse_exchanges(snapshot, wanted)
    if isinstance(context.metadata, ZooKeeperMetadata):
        snapshot = await _refuse_unknown(
            context, snapshot, wanted, deadline_s=deadline_s
        )
    while missing := [t for t in wanted if not put_addresses(snapshot, [t])]:
        try:
            snapshot = await context.newer(snapshot, deadline_s)
        except NoBrokerError as error:
            raise NoBrokerError(
                f"no broker takes puts to topic '{missing[0]}'"
            ) from error
    return snapshot


async def _refuse_unknown(
    context: ClientContext,
    snapshot: ClusterSnapshot,
    topics: Sequence[str],
    *,
    deadline_s: float,
) -> ClusterSnapshot:
    """Return a snapshot; raise if ZooKeeper has no node of a topic after a short wait.

    Nodes stay when the brokers of a topic are away, even MetaQ 1.4 brokers.
    """
    if not missing_topics(snapshot, topics):
        return snapshot
    # Asked now, because there is no time for it at the deadline.
    names = await context.metadata.topics(deadline_s=deadline_s)
    soon_s = min(deadline_s, context.clock.monotonic_s() + NEW_TOPIC_S)
    while unknown := set(missing_topics(snapshot, topics)) - names:
        try:
            snapshot = await context.newer(snapshot, soon_s)
        except NoBrokerError:
            raise unknown_topic(min(unknown), names) from None
    return snapshot


async def find_partitions(
    context: ClientContext, topics: Iterable[str], *, deadline_s: float
) -> tuple[TopicPartition, ...]:
    """Return the partitions of topics for gets, in order; raises as `read_cluster`.

    Includes partitions of a broker that is away as long as they are known.
    """
    names = sorted(set(topics))
    snapshot = await read_cluster(context, names, deadline_s=deadline_s)
    return tuple(sorted(p for name in names for p in snapshot.get_partitions(name)))


async def require_partitions(
    context: ClientContext, partitions: Iterable[TopicPartition], *, deadline_s: float
) -> None:
    """Wait until brokers have registered all of some partitions.

    Raises at once if a registered broker lacks one; waits for a broker that is away.

    Raises:
        NoBrokerError: no broker has one of them, or nothing is known of the cluster.
        NodeNameError: a name is not legal for a topic.
    """
    wanted = sorted(set(partitions))
    topics = {partition.topic for partition in wanted}
    snapshot = await read_cluster(context, topics, deadline_s=deadline_s)
    while lacking := [p for p in wanted if p not in snapshot.get_partitions(p.topic)]:
        refusal = _refusal(snapshot, lacking)
        # A broker registers all its partitions of a topic at once.
        if any(p.broker_id in snapshot.gets.get(p.topic, {}) for p in lacking):
            raise refusal
        try:
            snapshot = await context.newer(snapshot, deadline_s)
        except NoBrokerError as error:
            raise refusal from error


def _refusal(
    snapshot: ClusterSnapshot, lacking: Sequence[TopicPartition]
) -> NoBrokerError:
    topic = lacking[0].topic
    there = sorted(snapshot.get_partitions(topic))[:NAMES_SHOWN_MAX]
    known = ", ".join(each.name for each in there) or "none"
    return NoBrokerError(
        f"no broker has {name_some(lacking)}; of topic '{topic}' there are: {known}"
    )


async def recorded_addresses(
    context: ClientContext, *, deadline_s: float
) -> dict[BrokerId, BrokerAddress]:
    """Return the present or last addresses of recorded brokers.

    {} for a client of named brokers.

    Raises:
        CoordinationError: ZooKeeper cannot be asked.
    """
    if context.coordinator is None:
        return {}
    await context.metadata.reach(deadline_s=deadline_s)
    found = await read_values(
        context.coordinator,
        context.paths.recorded_brokers(),
        decode_address,
        deadline_s=deadline_s,
    )
    return {
        broker_id: address
        for name, address in found.items()
        if (broker_id := parse_broker_id(name)) is not None
    }


async def away_of_group(
    context: ClientContext, group: str, topics: Iterable[str], *, deadline_s: float
) -> set[TopicPartition]:
    """Return the partitions that a group should read and no broker serves.

    These are recorded partitions, and those in which the group has committed an offset,
    because nothing else is known of a Java broker that is away.

    Raises:
        CoordinationError: ZooKeeper cannot be asked.
        ConfigError: the client has no ZooKeeper.
    """
    coordinator = context.require_coordinator("groups are kept in")
    await context.metadata.reach(deadline_s=deadline_s)
    snapshot = context.metadata.snapshot
    offsets = GroupOffsets(coordinator, context.paths, group=group)
    away: set[TopicPartition] = set()
    for topic in topics:
        committed = await offsets.partitions(topic, deadline_s=deadline_s)
        away.update(snapshot.away(topic))
        away.update(one for one in committed if not snapshot.is_served(one))
    return away
