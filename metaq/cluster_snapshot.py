"""The brokers, and the partitions of topics, as clients see them at one moment.

A snapshot from ZooKeeper looks the same as one from brokers named by address.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from metaq.model import BrokerAddress, BrokerId, TopicPartition, no_items

Counts = Mapping[str, Mapping[BrokerId, int]]
"""Topic → broker → number of partitions there; brokers ascending."""


@dataclass(frozen=True, slots=True)
class BrokerCopies:
    """Addresses of the copies of one broker's partitions."""

    leader: BrokerAddress | None
    """Address that takes puts; None while there is no leader."""
    followers: Mapping[int, BrokerAddress]
    """Follower K of `slaveK` → its address, K ascending."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """Immutable state of the cluster at one moment."""

    version: int = 0
    """Number of the snapshot; 0 before the first one."""
    brokers: Mapping[BrokerId, BrokerCopies] = field(default_factory=no_items)
    """Brokers with at least one registered copy, ids ascending."""
    puts: Counts = field(default_factory=no_items)
    """Partitions that producers may put to, of watched topics that have any. Their
    leader may be unreachable at the moment."""
    gets: Counts = field(default_factory=no_items)
    """Partitions that consumers may read, from a leader or a follower."""
    recorded: Counts = field(default_factory=no_items)
    """Recorded partitions of watched topics, served or not; none of Java brokers."""
    silent: frozenset[BrokerAddress] = frozenset()
    """Named addresses that have never answered, so their topics are unknown. Empty with
    ZooKeeper."""
    seen: frozenset[BrokerId] = frozenset()
    """Brokers of this and earlier snapshots, whether still registered or not."""
    exchanges: frozenset[str] = frozenset()
    """Watched names that are exchanges, not topics: puts to them are routed, and they
    cannot be read. With named brokers: all exchanges of these brokers."""
    topics: frozenset[str] = frozenset()
    """Watched topics known to this snapshot, including those without a broker."""

    names: frozenset[str] | None = None
    """Names of all topics and exchanges, including some that were deleted; None while
    they are unknown or not watched."""

    def leader(self, broker_id: BrokerId) -> BrokerAddress | None:
        """Return the address that takes puts for a broker; None without a leader."""
        copies = self.brokers.get(broker_id)
        return None if copies is None else copies.leader

    def leaders(self) -> dict[BrokerId, BrokerAddress]:
        """Return the address of each broker that takes puts, ids ascending."""
        return {i: copies.leader for i, copies in self.brokers.items() if copies.leader}

    def put_partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """Return the partitions for producers, in numeric order; () for none."""
        return _partitions(topic, self.puts)

    def get_partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """Return the partitions that groups divide, in string order."""
        return tuple(sorted(_partitions(topic, self.gets), key=lambda each: each.name))

    def away(self, topic: str) -> tuple[TopicPartition, ...]:
        """Return recorded partitions that no broker serves now, in numeric order."""
        recorded = _partitions(topic, self.recorded)
        return tuple(one for one in recorded if not self.is_served(one))

    def is_served(self, partition: TopicPartition) -> bool:
        """Return whether a registered broker serves this partition of its topic."""
        topic, broker_id = partition.topic, partition.broker_id
        puts, gets = self.puts.get(topic, {}), self.gets.get(topic, {})
        count = max(puts.get(broker_id, 0), gets.get(broker_id, 0))
        return broker_id in self.brokers and partition.partition < count


def _partitions(topic: str, counts: Counts) -> tuple[TopicPartition, ...]:
    return tuple(
        TopicPartition(topic, broker_id, number)
        for broker_id, count in sorted(counts.get(topic, {}).items())
        for number in range(count)
    )
