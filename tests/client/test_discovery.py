"""Brokers and topics, from ZooKeeper and from addresses."""

import asyncio
from pathlib import Path

import pytest

from metaq.client.discovery import (
    AddressSource,
    Cluster,
    ZooKeeperSource,
    read_cluster,
)
from metaq.clock import SystemClock
from metaq.errors import NoBrokerError
from metaq.model import BrokerId, TopicPartition
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.paths import NodePaths
from metaq.zk.znodes import BrokerAddress
from tests.client.memory_broker import MemoryBroker

TREE = "/meta/brokers"
ROOT = Path(__file__).parents[2]


def read_tree(nodes: dict[str, bytes]) -> Cluster:
    async def read() -> Cluster:
        clock = SystemClock()
        server = MemoryZooKeeper()
        for path, data in nodes.items():
            server.put(path, data)
        coordinator = server.coordinator(clock)
        coordinator.start()
        deadline_s = clock.monotonic_s() + 5
        await asyncio.sleep(0)
        try:
            return await read_cluster(coordinator, NodePaths(), deadline_s=deadline_s)
        finally:
            await coordinator.stop(deadline_s=deadline_s)

    return asyncio.run(read())


def test_the_tree_of_brokers_and_topics_is_read() -> None:
    """Leaders, their addresses and the counts of both topic trees."""
    cluster = read_tree(
        {
            f"{TREE}/ids/10/master": b"meta://h10:1",
            f"{TREE}/ids/9/master": b"meta://[::1]:2",
            f"{TREE}/ids/9/slave1": b"meta://h9b:3",
            f"{TREE}/topics-pub/t/9-m": b'{"numParts":2,"broker":"9-m"}',
            f"{TREE}/topics-pub/t/10-m": b'{"numParts":1,"broker":"10-m"}',
            f"{TREE}/topics-sub/t/9-m": b'{"numParts":2,"broker":"9-m"}',
            f"{TREE}/topics-sub/t/9-s1": b'{"numParts":2,"broker":"9-s1"}',
            f"{TREE}/topics-sub/only-sub/9-m": b'{"broker":"9-m","numParts":3}',
        }
    )
    assert cluster.brokers == {
        BrokerId(9): BrokerAddress("::1", 2),
        BrokerId(10): BrokerAddress("h10", 1),
    }
    assert list(cluster.brokers) == [9, 10]
    assert cluster.topics == ("only-sub", "t")
    assert [str(p) for p in cluster.partitions("t", cluster.puts)] == [
        "t/9-0", "t/9-1", "t/10-0",
    ]  # fmt: skip
    assert cluster.gets["t"] == {9: 2}


def test_what_nobody_can_read_is_left_out() -> None:
    """Broken payloads and names hide their broker, and nothing else."""
    cluster = read_tree(
        {
            f"{TREE}/ids/1/master": b"http://h:1",
            f"{TREE}/ids/2/master": b"meta://h:2",
            f"{TREE}/ids/3": b"",
            f"{TREE}/ids/odd": b"",
            f"{TREE}/topics-pub/t/1-m": b'{"numParts":1,"broker":"1-m"}',
            f"{TREE}/topics-pub/t/2-m": b'{"numParts":1,"broker":"2-m"}',
            f"{TREE}/topics-pub/t/x": b"",
            f"{TREE}/topics-pub/u/2-m": b"nonsense",
        }
    )
    assert cluster.brokers == {BrokerId(2): BrokerAddress("h", 2)}
    assert cluster.topics == ("t",)
    assert cluster.partitions("t", cluster.puts) == (
        TopicPartition("t", BrokerId(2), 0),
    )


def test_an_empty_tree_is_an_empty_cluster() -> None:
    """A ZooKeeper that no broker ever saw has no topics; asking for one names none."""
    cluster = read_tree({})
    assert cluster.topics == ()
    with pytest.raises(NoBrokerError, match=r"'t' .*: none"):
        cluster.partitions("t", cluster.puts)


def test_an_unknown_topic_is_answered_with_those_there_are() -> None:
    """The error helps whoever mistyped."""
    address = BrokerAddress("h", 1)
    cluster = Cluster({BrokerId(1): address}, {"test": {BrokerId(1): 1}})
    with pytest.raises(NoBrokerError, match=r"'tset' .*: test"):
        cluster.partitions("tset", cluster.puts)


def test_a_topic_that_only_a_pattern_admits_has_its_first_partition() -> None:
    """Whoever puts to it first makes it; a topic of its own comes first."""
    ids = BrokerId(1), BrokerId(2)
    cluster = Cluster(
        {each: BrokerAddress("h", each) for each in ids},
        {
            "wild-*": {ids[0]: 4, ids[1]: 4},
            "wild-0": {ids[1]: 2},
            "other*": {ids[0]: 1},
        },
    )
    assert cluster.partitions("wild-1", cluster.puts) == (
        TopicPartition("wild-1", ids[0], 0),
        TopicPartition("wild-1", ids[1], 0),
    )
    assert len(cluster.partitions("wild-0", cluster.puts)) == 2
    with pytest.raises(NoBrokerError, match=r"'wile-1' .*: wild-0"):
        cluster.partitions("wile-1", cluster.puts)


def test_brokers_given_by_address_are_asked_themselves() -> None:
    """Id, topics and counts come from stats; patterns are there, and no topics."""
    with MemoryBroker(partitions=3) as broker:
        source = AddressSource([broker.address], SystemClock())
        cluster = source.read(timeout_s=5)
    assert cluster.brokers == {BrokerId(7): broker.address}
    assert cluster.puts == cluster.gets == {"t": {7: 3}, "wild-*": {7: 1}}
    assert cluster.topics == ("t",)


@pytest.mark.parametrize(("logs", "count"), [(0, 4), (2, 4), (9, 9)])
def test_a_brokers_configuration_tells_of_partitions_without_a_log(
    logs: int, count: int
) -> None:
    """The larger of what is configured and what is on the disk."""
    with MemoryBroker(partitions=logs) as broker:
        text = (ROOT / "config" / "server.ini").read_text()
        broker.config = f"{text}\n[topic=t]\nnumPartitions=4\n".encode()
        source = AddressSource([broker.address], SystemClock())
        assert source.read(timeout_s=5).puts["t"] == {7: count}


def test_no_zookeeper_is_one_sentence() -> None:
    """Nobody at the address: an error with the address, within the time given."""
    source = ZooKeeperSource("127.0.0.1:1", NodePaths(), SystemClock())
    with pytest.raises(NoBrokerError, match=r"no ZooKeeper answers at 127.0.0.1:1"):
        source.read(timeout_s=0.1)
