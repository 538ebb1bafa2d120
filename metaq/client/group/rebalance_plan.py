"""A member's share of its group's partitions, and the steps that lead to it. Pure.

Every member computes its own share from the same facts (`metaq.assignment`), so
membership in a topic, and which names its partitions have, are MetaQ's rules to the
letter. Source: client spec 14.4 and 14.7.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from metaq.assignment import Strategy, partitions_of
from metaq.model import TopicPartition
from metaq.zk.groups import Members


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """Changes, in this order; partitions in neither set are not touched."""

    revoke: frozenset[TopicPartition]
    """Partitions to be revoked and released: not our share, but ours in ZooKeeper."""
    claim: frozenset[TopicPartition]
    """Partitions to be claimed and read: our share, and not read yet."""


def plan_rebalance(
    *,
    owned: Collection[TopicPartition],
    reading: Collection[TopicPartition],
    share: Collection[TopicPartition],
) -> RebalancePlan:
    """Return the way from our present partitions to the wanted ones.

    Args:
        owned: claimed, or claimed with an unknown outcome.
        reading: handed to the consumer; claimed all of them.
        share: our share by the group's plan.
    """
    return RebalancePlan(
        revoke=frozenset({*owned, *reading}.difference(share)),
        claim=frozenset(share).difference(reading),
    )


def share_of(
    member: str,
    *,
    strategy: Strategy,
    members: Members,
    partitions: Mapping[str, Iterable[TopicPartition]],
) -> frozenset[TopicPartition]:
    """Return a member's share of some topics.

    Args:
        member: its name in the group.
        strategy: the group's.
        members: all members of the group, with the topics each subscribes to.
        partitions: of each topic that the member subscribes to.
    """
    share: set[TopicPartition] = set()
    for topic, found in partitions.items():
        named = {partition.name: partition for partition in found}
        readers = [name for name, topics in members.items() if topic in topics]
        names = partitions_of(strategy, readers, named, member)
        share.update(named[name] for name in names)
    return frozenset(share)
