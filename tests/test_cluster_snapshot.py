"""Snapshots of a cluster: order of partitions, and which are away."""

from collections.abc import Mapping

from metaq.cluster_snapshot import BrokerCopies, ClusterSnapshot
from metaq.model import BrokerAddress, BrokerId, TopicPartition

B0, B1 = BrokerId(0), BrokerId(1)
SERVING = BrokerCopies(BrokerAddress("h", 8123), {})


def snapshot(**counts: Mapping[BrokerId, int]) -> ClusterSnapshot:
    """Return a snapshot of topic t; both brokers are there."""
    topics = {kind: {"t": found} for kind, found in counts.items()}
    return ClusterSnapshot(1, {B0: SERVING, B1: SERVING}, **topics)


def names(partitions: tuple[TopicPartition, ...]) -> list[str]:
    return [each.name for each in partitions]


def test_producers_see_numbers_and_groups_see_strings() -> None:
    """Java clients sort the texts, and all members have to divide alike."""
    counts = {B1: 1, B0: 11}
    found = snapshot(puts=counts, gets=counts)
    numbers = [f"0-{number}" for number in range(11)]
    assert names(found.put_partitions("t")) == [*numbers, "1-0"]
    assert names(found.get_partitions("t")) == sorted([*numbers, "1-0"])
    assert names(found.get_partitions("t"))[:3] == ["0-0", "0-1", "0-10"]


def test_a_topic_without_brokers_has_no_partitions() -> None:
    """Nothing is known of it, and nothing is away."""
    found = snapshot(puts={B0: 1}, gets={B0: 1}, recorded={B0: 1})
    for partitions in (found.put_partitions, found.get_partitions, found.away):
        assert partitions("u") == ()


def test_recorded_partitions_that_nobody_serves_are_away() -> None:
    """A broker serves what it takes puts for or gives gets from."""
    found = snapshot(puts={B0: 2}, gets={B0: 1}, recorded={B1: 1, B0: 3})
    assert names(found.away("t")) == ["0-2", "1-0"]


def test_a_broker_without_a_copy_serves_nothing() -> None:
    """Its registration of the topic may stay for a moment."""
    found = ClusterSnapshot(
        1, {B0: SERVING}, gets={"t": {B0: 1, B1: 1}}, recorded={"t": {B0: 1, B1: 1}}
    )
    assert found.is_served(TopicPartition("t", B0, 0))
    assert not found.is_served(TopicPartition("t", B1, 0))
    assert names(found.away("t")) == ["1-0"]


def test_only_leaders_take_puts() -> None:
    """A broker of which a follower alone is there has copies, and no leader."""
    copies = BrokerCopies(None, {1: BrokerAddress("h", 8124)})
    found = ClusterSnapshot(1, {B0: SERVING, B1: copies})
    assert found.leaders() == {B0: SERVING.leader}
    assert found.leader(B0) == SERVING.leader
    assert found.leader(B1) is None
    assert found.leader(BrokerId(2)) is None
