"""Presence of the topics that a query chose: served partitions and those away.

A partition that a broker has recorded and that no broker serves is away, never empty.
Java brokers record nothing; of their topics a query knows what it has read before.
"""

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Final

from metaq.client.cluster.away_partitions import (
    describe_away as name_away,
)
from metaq.client.cluster.catalog import read_cluster
from metaq.client.cluster.context import ClientContext
from metaq.client.names import name_some
from metaq.errors import NoBrokerError
from metaq.model import TopicPartition
from metaq.zk.cluster import ClusterSnapshot

NEAR_NAMES_MAX: Final = 3
"""Topics that an error offers in the place of one that is not there."""
NAMES_SHOWN_MAX: Final = 10
"""Topics that it lists where none has a name like it."""


def missing_topics(snapshot: ClusterSnapshot, topics: Iterable[str]) -> tuple[str, ...]:
    """Return the topics of which no broker has a partition, here or away."""
    return tuple(
        topic
        for topic in topics
        if not snapshot.gets.get(topic) and not snapshot.recorded.get(topic)
    )


def unknown_topic(topic: str, names: Collection[str]) -> NoBrokerError:
    """Return the error of a query of a topic that is not among those that there are."""
    return NoBrokerError(f"no broker has topic '{topic}'; {_alike(topic, names)}")


def unknown_pattern(pattern: str, names: Collection[str]) -> NoBrokerError:
    """Return the error of a query whose pattern matches none of the names."""
    return NoBrokerError(f"no topic matches {pattern!r}; {_alike(pattern, names)}")


def _alike(text: str, names: Collection[str]) -> str:
    near = get_close_matches(text, names, n=NEAR_NAMES_MAX)
    if near:
        return f"topics with such a name: {', '.join(near)}"
    return f"topics are: {', '.join(sorted(names)[:NAMES_SHOWN_MAX]) or 'none'}"


def find_away(
    snapshot: ClusterSnapshot,
    topics: Iterable[str],
    is_chosen: Callable[[TopicPartition], bool],
    before: Collection[TopicPartition],
) -> tuple[TopicPartition, ...]:
    """Return chosen partitions that are known and that no broker serves, in order.

    Args:
        snapshot: speaks of the topics.
        topics: those of the query.
        is_chosen: whether a partition is one of the query's.
        before: what the query knows without any record; counts for topics that no
            broker has recorded.
    """
    away = {p for topic in topics for p in snapshot.away(topic) if is_chosen(p)}
    away.update(
        p
        for p in before
        if p.broker_id not in snapshot.brokers and not snapshot.recorded.get(p.topic)
    )
    return tuple(sorted(away))


def describe_away(
    snapshot: ClusterSnapshot,
    topics: Iterable[str],
    is_chosen: Callable[[TopicPartition], bool],
    before: Collection[TopicPartition],
) -> str:
    """Return a sentence about partitions away, and the remedy; "" for none."""
    away = find_away(snapshot, topics, is_chosen, before)
    not_served = [p for p in away if p.broker_id in snapshot.brokers]
    gone = [p for p in away if p.broker_id not in snapshot.brokers]
    parts = [name_away(gone)] if gone else []
    if not_served:
        parts.append(f"recorded and not served: {name_some(not_served)}")
    parts += [f"broker {at} has never answered" for at in silent_of(snapshot)]
    if not parts:
        return ""
    cure = "start it"
    if any(snapshot.recorded.get(p.topic) for p in away):
        cure += ", or forget it for good: metaq brokers forget N"
    return f"{'; '.join(parts)}: {cure}"


def silent_of(snapshot: ClusterSnapshot) -> list[str]:
    """Return the named addresses that have never answered, in order."""
    return sorted(map(str, snapshot.silent))


def put_addresses(
    snapshot: ClusterSnapshot, topics: Iterable[str]
) -> dict[TopicPartition, str]:
    """Return the partitions of topics that take puts, with their addresses."""
    return {
        partition: str(copies.leader)
        for topic in topics
        for partition in snapshot.put_partitions(topic)
        if (copies := snapshot.brokers.get(partition.broker_id))
        and copies.leader is not None
    }


async def read_takers(
    context: ClientContext, topics: Iterable[str], *, deadline_s: float
) -> ClusterSnapshot:
    """Wait for a snapshot in which each of some topics takes puts.

    Raises:
        NoBrokerError: one does not.
    """
    wanted = tuple(topics)
    snapshot = await read_cluster(context, wanted, deadline_s=deadline_s)
    while missing := [t for t in wanted if not put_addresses(snapshot, [t])]:
        try:
            snapshot = await context.metadata.wait_newer(
                snapshot.version, deadline_s=deadline_s
            )
        except NoBrokerError as error:
            raise NoBrokerError(
                f"no broker takes puts to topic '{missing[0]}'"
            ) from error
    return snapshot


def describe_absent(snapshot: ClusterSnapshot, topics: Iterable[str]) -> str:
    """Return which brokers of a list are away, as far as it matters; "" for none."""
    known = {p for topic in topics for p in snapshot.put_partitions(topic)}
    away = {p.broker_id for p in known - put_addresses(snapshot, topics).keys()}
    parts = [f"broker {broker_id} is away" for broker_id in sorted(away)]
    parts += [f"broker {at} has never answered" for at in silent_of(snapshot)]
    return "; ".join(parts)
