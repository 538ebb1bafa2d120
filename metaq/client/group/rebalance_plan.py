"""A member's assignment of its group's partitions, and the steps that lead to it. Pure.

Every member computes its own assignment from the same facts (`metaq.assignment`), so
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
    """Partitions to be revoked and released: not assigned to us, but ours in
    ZooKeeper."""
    claim: frozenset[TopicPartition]
    """Partitions to be claimed and read: assigned to us, and not read yet."""


def plan_rebalance(
    *,
    owned: Collection[TopicPartition],
    active: Collection[TopicPartition],
    assignment: Collection[TopicPartition],
) -> RebalancePlan:
    """Return the way from our present partitions to the wanted ones.

    Args:
        owned: claimed, or claimed with an unknown outcome.
        active: handed to the consumer; claimed all of them.
        assignment: ours by the group's plan.
    """
    return RebalancePlan(
        revoke=frozenset({*owned, *active}.difference(assignment)),
        claim=frozenset(assignment).difference(active),
    )


def assignment_of(
    member: str,
    *,
    strategy: Strategy,
    members: Members,
    partitions: Mapping[str, Iterable[TopicPartition]],
) -> frozenset[TopicPartition]:
    """Return a member's assignment of some topics.

    Args:
        member: its name in the group.
        strategy: the group's.
        members: all members of the group, with the topics each subscribes to.
        partitions: of each topic that the member subscribes to.
    """
    assignment: set[TopicPartition] = set()
    for topic, found in partitions.items():
        named = {partition.name: partition for partition in found}
        readers = [name for name, topics in members.items() if topic in topics]
        names = partitions_of(strategy, readers, named, member)
        assignment.update(named[name] for name in names)
    return frozenset(assignment)
