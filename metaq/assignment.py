"""Assignment of partitions to the members of a group, and rebalance plans. Pure.

Theory of operation: no leader hands partitions out. Every member sees the same members
and the same partitions, computes the same plan by one of MetaQ's strategies, and takes
its own partitions. The plan is therefore a function of two *sets*, and all members,
MetaQ's and ours, must compute it identically. That makes sort order part of the format:
Java compares strings by UTF-16 code units, which differs from Python's order for
characters above U+FFFF, and `0-10` is before `0-2`.

    DEFAULT   both lists sorted, the partitions cut into runs whose lengths differ by at
              most one; the longer runs first. A change moves about half of them.
    CONSIST   160 points per member on a ring of 2**32; a partition belongs to the first
              point at or after its hash. A member that joins or leaves moves only its
              own partitions.

Source: docs/metaq-1.4/client.md 4 and 14.7.
"""

import bisect
import enum
import hashlib
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from metaq.model import TopicPartition

POINTS_PER_DIGEST: Final = 4
DIGESTS_PER_MEMBER: Final = 40


class Strategy(enum.Enum):
    """Strategy by which a group divides partitions; the same for all its members."""

    DEFAULT = "DEFAULT"
    CONSIST = "CONSIST"


def _utf16_units(text: str) -> bytes:
    return text.encode("utf-16-be", "surrogatepass")


def string_order(texts: Iterable[str]) -> list[str]:
    """Return the texts without repetitions, as Java's String.compareTo orders them."""
    return sorted(set(texts), key=_utf16_units)


def assign(
    strategy: Strategy, members: Iterable[str], partitions: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return the plan for all members of one topic.

    Args:
        strategy: the group's strategy.
        members: names of the members that subscribe to the topic; any order.
        partitions: names `b-p` of the topic's partitions; any order.

    Returns:
        The partitions of every member; members and partitions in string order. Each
        partition has one owner, unless there are no members.
    """
    # In string order: if two members have an equal point, the later member gets it.
    names, places = string_order(members), string_order(partitions)
    if strategy is Strategy.DEFAULT:
        return _range_assignment(names, places)
    points = {name: member_points(name) for name in names}
    return ring_assignment(points, {place: partition_hash(place) for place in places})


def assignment_of(
    member: str,
    *,
    strategy: Strategy,
    members: Mapping[str, Collection[str]],
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
        plan = assign(strategy, readers, named)
        assignment.update(named[name] for name in plan.get(member, ()))
    return frozenset(assignment)


def _range_assignment(
    members: Sequence[str], partitions: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return MetaQ's DEFAULT: runs of neighbours in string order."""
    if not members:
        return {}
    length, longer_count = divmod(len(partitions), len(members))
    plan = {}
    start = 0
    for index, member in enumerate(members):
        end = start + length + (index < longer_count)
        plan[member] = tuple(partitions[start:end])
        start = end
    return plan


def ring_assignment(
    points: Mapping[str, Iterable[int]], hashes: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    """Return the partitions of the member at or after each hash, around the ring.

    Args:
        points: by member; if two have an equal point, the later member gets it.
        hashes: by partition.
    """
    if not points:
        return {}
    ring = {point: member for member, some in points.items() for point in some}
    order = sorted(ring)
    parts: dict[str, list[str]] = {member: [] for member in points}
    for partition, place in hashes.items():
        at = bisect.bisect_left(order, place)
        parts[ring[order[at % len(order)]]].append(partition)
    return {member: tuple(part) for member, part in parts.items()}


def member_points(member: str) -> list[int]:
    """Return the points of a member on the ring, each 0..2**32-1."""
    return [
        point
        for number in range(DIGESTS_PER_MEMBER)
        for point in _words(f"{member}-{number}")
    ]


def partition_hash(partition: str) -> int:
    """Return the hash of a partition `b-p` on the ring, 0..2**32-1."""
    return _words(partition)[0]


def _words(text: str) -> tuple[int, ...]:
    """Return the MD5 of a text as little-endian unsigned 32-bit numbers."""
    # As in Java: an unpaired surrogate, which has no UTF-8 form, is hashed as "?".
    digest = hashlib.md5(text.encode("utf-8", "replace"), usedforsecurity=False)
    return struct.unpack(f"<{POINTS_PER_DIGEST}I", digest.digest())


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """Changes to make, `revoke` before `claim`; other partitions are not touched."""

    revoke: frozenset[TopicPartition]
    """Partitions to revoke and release: ours in ZooKeeper, but not assigned to us."""
    claim: frozenset[TopicPartition]
    """Partitions to claim and read: assigned to us, but not read yet."""


def plan_rebalance(
    *,
    owned: Collection[TopicPartition],
    active: Collection[TopicPartition],
    assignment: Collection[TopicPartition],
) -> RebalancePlan:
    """Return the changes from our present partitions to the assigned ones.

    Args:
        owned: claimed, or claimed with an unknown outcome.
        active: handed to the consumer; all of them are claimed.
        assignment: assigned to us by the group's plan.
    """
    return RebalancePlan(
        revoke=frozenset({*owned, *active}.difference(assignment)),
        claim=frozenset(assignment).difference(active),
    )
