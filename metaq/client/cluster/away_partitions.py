"""Partitions that cannot be read because their broker is away: an error or an alarm.

A broker that is gone takes its registration with it; its topics are in the catalog
(`ClusterSnapshot.recorded`). Readers of all of a topic check here first.
"""

from collections.abc import Collection, Iterable
from itertools import groupby

from metaq.client.errors import PartitionsAwayError
from metaq.client.names import name_some
from metaq.model import BrokerId, TopicPartition
from metaq.zk.cluster import ClusterSnapshot
from metaq.zk.offsets import GroupOffsets
from metaq.zk.paths import NodePaths
from metaq.zk.session import Coordinator


def require_all_there(snapshot: ClusterSnapshot, topics: Iterable[str]) -> None:
    """Refuse to take the present partitions of topics for all of them. Pure.

    Args:
        snapshot: one that speaks of these topics.
        topics: their names.

    Raises:
        PartitionsAwayError: a broker of one of them is away, or a named address has
            never answered.
    """
    names = sorted(set(topics))
    away = [partition for name in names for partition in snapshot.away(name)]
    if away:
        raise PartitionsAwayError(
            f"{describe_away(away)}; {_cure(away)}", partitions=away
        )
    if snapshot.silent:
        addresses = ", ".join(sorted(map(str, snapshot.silent)))
        raise PartitionsAwayError(
            f"no answer yet from {addresses}: what it has of topic"
            f" {', '.join(names)} is not known; wait, start that broker, or leave its"
            " address out",
            partitions=(),
        )


async def find_away(
    coordinator: Coordinator,
    paths: NodePaths,
    snapshot: ClusterSnapshot,
    *,
    group: str,
    topics: Iterable[str],
    deadline_s: float,
) -> set[TopicPartition]:
    """Return the partitions that a group should read and no broker serves.

    Those that brokers have recorded; and those of which the group has committed an
    offset, which is all that is known of a Java broker that is away.

    Raises:
        CoordinationError: ZooKeeper cannot be asked.
    """
    offsets = GroupOffsets(coordinator, paths, group=group)
    away: set[TopicPartition] = set()
    for topic in topics:
        committed = await offsets.partitions(topic, deadline_s=deadline_s)
        away.update(snapshot.away(topic))
        away.update(one for one in committed if not snapshot.is_served(one))
    return away


def describe_away(partitions: Collection[TopicPartition]) -> str:
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
