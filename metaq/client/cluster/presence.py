"""Finds partitions that are away, and describes them in errors and alarms. Pure.

The registration of a broker ends with its session; its topics stay in the catalog
(`ClusterSnapshot.recorded`). A partition that is recorded and not served is away, not
empty. Java brokers record nothing; their partitions are known from a group's committed
offsets, or from what a query has read before.
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
"""Maximum number of similar topics in the error about an unknown one."""
NAMES_SHOWN_MAX: Final = 10
"""Maximum number of topics in it if none is similar."""


def refuse_exchanges(snapshot: ClusterSnapshot, topics: Iterable[str]) -> None:
    """Refuse names of exchanges, which would look like empty topics. Pure.

    Raises:
        ExchangeError: one of the names is that of an exchange.
    """
    for name in sorted(snapshot.exchanges.intersection(topics)):
        raise ExchangeError(
            f"'{name}' is an exchange; it stores nothing itself: name the topics that"
            " it is bound to"
        )


def require_all_there(snapshot: ClusterSnapshot, topics: Iterable[str]) -> None:
    """Raise unless the present partitions of topics are all of them. Pure.

    Args:
        snapshot: a snapshot that covers these topics.
        topics: names of the topics.

    Raises:
        PartitionsAwayError: a partition is away, or a named address has never answered.
        ExchangeError: one of the names is that of an exchange.
    """
    names = sorted(set(topics))
    refuse_exchanges(snapshot, names)
    away = [partition for name in names for partition in snapshot.away(name)]
    if away:
        raise PartitionsAwayError(f"{name_away(away)}; {_cure(away)}", partitions=away)
    if snapshot.silent:
        addresses = ", ".join(sorted(map(str, snapshot.silent)))
        raise PartitionsAwayError(
            f"no answer yet from {addresses}, so its partitions of topic"
            f" {', '.join(names)} are unknown; wait, start that broker, or leave its"
            " address out",
            partitions=(),
        )


def name_away(partitions: Collection[TopicPartition]) -> str:
    """Return, in words, the brokers of partitions that are away; at least one."""
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
    """Return the topics of which no partition is readable or recorded."""
    return tuple(
        topic
        for topic in topics
        if not snapshot.gets.get(topic) and not snapshot.recorded.get(topic)
    )


def unknown_topic(topic: str, names: Collection[str]) -> NoTopicError:
    """Return the error of a query about an unknown topic."""
    return NoTopicError(f"no broker has topic '{topic}'; {_alike(topic, names)}")


def unknown_pattern(pattern: str, names: Collection[str]) -> NoBrokerError:
    """Return the error of a query whose pattern matches none of the names."""
    return NoBrokerError(f"no topic matches {pattern!r}; {_alike(pattern, names)}")


def _alike(text: str, names: Collection[str]) -> str:
    near = get_close_matches(text, names, n=NEAR_NAMES_MAX)
    if near:
        return f"similar topics: {', '.join(near)}"
    return f"topics are: {', '.join(sorted(names)[:NAMES_SHOWN_MAX]) or 'none'}"


def find_away(
    snapshot: ClusterSnapshot,
    topics: Iterable[str],
    is_chosen: Callable[[TopicPartition], bool],
    before: Collection[TopicPartition],
) -> tuple[TopicPartition, ...]:
    """Return chosen partitions that are known and that no broker serves, in order.

    Args:
        snapshot: a snapshot that covers the topics.
        topics: topics of the query.
        is_chosen: whether a partition belongs to the query.
        before: partitions that the query has read before; used for topics that no
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
    """Return a sentence about partitions that are away, with the remedy; "": none."""
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
    """Return, in words, the brokers away that matter for puts to topics; "": none."""
    known = {p for topic in topics for p in snapshot.put_partitions(topic)}
    away = {p.broker_id for p in known - put_addresses(snapshot, topics).keys()}
    parts = [f"broker {broker_id} is away" for broker_id in sorted(away)]
    parts += [f"broker {at} has never answered" for at in silent_of(snapshot)]
    return "; ".join(parts)
