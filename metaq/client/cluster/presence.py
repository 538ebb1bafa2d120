"""Which partitions are there and which are away; the errors and alarms that say so.

A broker that is gone takes its registration with it; its topics are in the catalog
(`ClusterSnapshot.recorded`). A partition that a broker has recorded and that no broker
serves is away, never empty. Java brokers record nothing; of their topics a group knows
its committed offsets, and a query what it has read before.
"""

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from itertools import groupby
from typing import Final

from metaq.client.errors import ExchangeError, NoTopicError, PartitionsAwayError
from metaq.client.names import name_some
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import NoBrokerError
from metaq.model import BrokerId, TopicPartition

NEAR_NAMES_MAX: Final = 3
"""Topics that an error offers in the place of one that is not there."""
NAMES_SHOWN_MAX: Final = 10
"""Topics that it lists where none has a name like it."""


def refuse_exchanges(snapshot: ClusterSnapshot, topics: Iterable[str]) -> None:
    """Refuse to take an exchange for a topic, which would look empty. Pure.

    Raises:
        ExchangeError: one of the names is that of an exchange.
    """
    for name in sorted(snapshot.exchanges.intersection(topics)):
        raise ExchangeError(
            f"'{name}' is an exchange; it stores nothing itself: name the topics that"
            " it is bound to"
        )


def require_all_there(snapshot: ClusterSnapshot, topics: Iterable[str]) -> None:
    """Refuse to take the present partitions of topics for all of them. Pure.

    Args:
        snapshot: one that speaks of these topics.
        topics: their names.

    Raises:
        PartitionsAwayError: a broker of one of them is away, or a named address has
            never answered.
        ExchangeError: one of them is no topic.
    """
    names = sorted(set(topics))
    refuse_exchanges(snapshot, names)
    away = [partition for name in names for partition in snapshot.away(name)]
    if away:
        raise PartitionsAwayError(f"{name_away(away)}; {_cure(away)}", partitions=away)
    if snapshot.silent:
        addresses = ", ".join(sorted(map(str, snapshot.silent)))
        raise PartitionsAwayError(
            f"no answer yet from {addresses}: what it has of topic"
            f" {', '.join(names)} is not known; wait, start that broker, or leave its"
            " address out",
            partitions=(),
        )


def name_away(partitions: Collection[TopicPartition]) -> str:
    """Return which brokers are away, with which partitions; at least one."""
    by_broker = groupby(sorted(partitions, key=_broker_of), key=_broker_of)
    return "; ".join(
        f"broker {broker_id} is away, and with it {name_some(list(found))}"
        for broker_id, found in by_broker
    )


def _cure(partitions: Collection[TopicPartition]) -> str:
    brokers = sorted(set(map(_broker_of, partitions)))
    forget = ", ".join(f"'metaq brokers forget {number}'" for number in brokers)
    which = " and ".join(map(str, brokers))
    return f"wait, start broker {which}, or if it is gone for good {forget}"


def _broker_of(partition: TopicPartition) -> BrokerId:
    return partition.broker_id


# -- queries that choose topics --------------------------------------------------------


def missing_topics(snapshot: ClusterSnapshot, topics: Iterable[str]) -> tuple[str, ...]:
    """Return the topics of which no broker has a partition, here or away."""
    return tuple(
        topic
        for topic in topics
        if not snapshot.gets.get(topic) and not snapshot.recorded.get(topic)
    )


def unknown_topic(topic: str, names: Collection[str]) -> NoTopicError:
    """Return the error of a query of a topic that is not among those that there are."""
    return NoTopicError(f"no broker has topic '{topic}'; {_alike(topic, names)}")


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
        partition: str(leader)
        for topic in topics
        for partition in snapshot.put_partitions(topic)
        if (leader := snapshot.leader(partition.broker_id)) is not None
    }


def describe_absent(snapshot: ClusterSnapshot, topics: Iterable[str]) -> str:
    """Return which brokers of a list are away, as far as it matters; "" for none."""
    known = {p for topic in topics for p in snapshot.put_partitions(topic)}
    away = {p.broker_id for p in known - put_addresses(snapshot, topics).keys()}
    parts = [f"broker {broker_id} is away" for broker_id in sorted(away)]
    parts += [f"broker {at} has never answered" for at in silent_of(snapshot)]
    return "; ".join(parts)
