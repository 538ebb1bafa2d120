"""Our client on MetaQ's own brokers, alone and in one cluster with ours."""

import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from kazoo.client import KazooClient

from metaq.client import Client, Message, OutgoingMessage, SendResult
from metaq.errors import ClientError
from metaq.model import Offset
from metaq.zk.znodes import decode_registration
from tests.java.server import JavaBroker
from tests.matrix.scene import broker_arguments
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until

COUNT = 300
MESSAGES = [
    OutgoingMessage(b"", None),
    OutgoingMessage(b"", ""),
    OutgoingMessage(b"hello", "k=v"),
    OutgoingMessage(bytes(range(256)), "\r\n\0 \u6d88\u606f"),
    # Not larger: such puts end the thread that commits the groups of a Java broker.
    OutgoingMessage(b"x" * 400_000, "large" * 1000),
]


class Cluster(NamedTuple):
    """One of each kind, side by side."""

    zookeeper: str
    java: JavaBroker
    ours: BrokerProcess


@pytest.fixture(scope="module")
def cluster(
    server_jars: list[Path],
    new_root: Callable[[], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """Broker 0 is MetaQ's own, broker 1 is ours; topic "both" is on either."""
    root, home = new_root(), tmp_path_factory.mktemp("cluster")
    topics = {"both": {"numPartitions": 2}, "java": {}, "ordered": {}, "wild-*": {}}
    topics["newest"] = {}
    ours_of = {"both": 2, "wild-*": 1}
    with (
        JavaBroker(server_jars, home / "java", root, topics) as java,
        BrokerProcess(
            home / "ours",
            topic="idle",
            arguments=[*broker_arguments(root, 1, ours_of), "--set=hostName=127.0.0.1"],
        ) as ours,
    ):
        yield Cluster(root, java, ours)


def places(results: list[SendResult]) -> list[tuple[str, int, int]]:
    return sorted((str(one.partition), one.offset, one.message_id) for one in results)


def test_messages_come_back_as_they_were_sent(cluster: Cluster) -> None:
    """By `send` and in flight together, with their key; order where promised."""
    with Client(cluster.zookeeper) as client:
        keyed = OutgoingMessage(
            b"keyed", "k=v", b"\xff", headers=[("trace", b"1"), ("trace", b"2")]
        )
        with client.producer() as producer:
            for one in (*MESSAGES, keyed):
                producer.send(
                    "java",
                    one.data,
                    attribute=one.attribute,
                    key=one.key,
                    headers=one.headers,
                )
            producer.send_many("java", [*MESSAGES, keyed])
        found = [
            (one.data, one.attribute, one.key, one.header_pairs)
            for one in client.browse("java")
        ]
        sent = [
            (one.data, one.attribute, one.key, tuple(one.headers))
            for one in (*MESSAGES, keyed)
        ]
        assert found[: len(sent)] == sent
        assert sorted(map(repr, found[len(sent) :])) == sorted(map(repr, sent))


def test_an_ordered_producer_keeps_its_order(cluster: Cluster, tmp_path: Path) -> None:
    """One partition, one message after the other, whatever the broker's threads do."""
    data = [b"%d" % number for number in range(COUNT)]
    with Client(cluster.zookeeper) as client:
        with client.ordered_producer("ordered", ["0-0"], tmp_path) as producer:
            for one in data:
                producer.send(one)
        assert [one.data for one in client.browse("ordered")] == data


def test_one_group_reads_both_kinds_to_the_end(cluster: Cluster) -> None:
    """Every message once, with the id and the offset of its receipt."""
    with Client(cluster.zookeeper) as client:
        with client.producer() as producer:
            data = [b"%d" % number for number in range(COUNT)]
            results = [producer.send("both", one) for one in data]
            results += producer.send_many("both", data)
        assert {one.partition.broker_id for one in results} == {0, 1}
        with client.consumer("readers", ["both"], start="earliest") as consumer:
            found: list[Message] = []
            while len(found) < len(results):
                batch = consumer.receive_many(100, timeout=20)
                assert batch, f"{len(found)} of {len(results)}"
                found += batch
            consumer.commit()
            assert {one.bytes for one in consumer.lag().values()} == {0}
        received = sorted((str(m.partition), m.offset, m.id) for m in found)
        assert received == places(results)
        with client.consumer("readers", ["both"]) as consumer:
            assert consumer.receive(timeout=1) is None


def test_where_messages_begin_is_found_in_a_log_of_java(cluster: Cluster) -> None:
    """It knows no boundaries and no counts: they are found in the bytes."""
    address = f"127.0.0.1:{cluster.java.port}"
    data = [b"%d" % number + bytes(number * 37 % 5_000) for number in range(COUNT)]
    with Client(brokers=[address]) as client:
        with client.producer() as producer:
            offsets = [producer.send("newest", one).offset for one in data]
        found = list(client.browse("newest", last=7))
        assert [one.data for one in found] == data[-7:]
        with client.consumer("movers", ["newest"], start="latest") as consumer:
            wait_until(lambda: bool(consumer.assignment()))
            beside = f"nearest: {offsets[8]}, {offsets[9]}$"
            with pytest.raises(ClientError, match=beside):
                consumer.seek("0-0", Offset(offsets[8] + 1))
            consumer.seek("0-0", offsets[8])
            message = consumer.receive(timeout=20)
            assert message is not None
            assert message.data == data[8]


def test_a_client_that_leaves_is_no_error_of_a_java_broker(cluster: Cluster) -> None:
    """It logs an error for every reset."""
    said = len(cluster.java.read_log())
    for _ in range(3):
        with Client(cluster.zookeeper) as client:
            with client.producer() as producer:
                producer.send("java", b"hello")
            with client.consumer("leavers", ["java"], start="earliest") as consumer:
                assert consumer.receive(timeout=20) is not None
    with cluster.java.talk() as talk:  # whatever it logs of them, it has logged
        talk.ask(b"version 1\r\n")
    assert " ERROR " not in cluster.java.read_log()[said:]


def tree_of(zookeeper: str, broker_id: int) -> dict[str, tuple[object, bool]]:
    """Return the nodes of a broker: what is in them, and whether they are ephemeral."""
    client = KazooClient(zookeeper)
    client.start()
    found: dict[str, tuple[object, bool]] = {}

    def walk(path: str) -> None:
        data, stat = client.get(path)
        role = f"{broker_id}-m"
        is_its_own = role in path or path.startswith(f"/meta/brokers/ids/{broker_id}")
        if is_its_own:
            shown: object = data
            if data.startswith(b"{"):
                shown = decode_registration(data).partition_count
            name = path.replace(role, "N-m").replace(f"/ids/{broker_id}", "/ids/N")
            found[name] = (shown, bool(stat.ephemeralOwner))
        for child in client.get_children(path):
            walk(f"{path}/{child}")

    try:
        walk("/meta/brokers")
    finally:
        client.stop()
        client.close()
    return found


def test_nodes_are_the_same(cluster: Cluster) -> None:
    """Paths, data and kinds, also of a topic that a pattern lets in."""
    for port in (cluster.java.port, cluster.ours.port):
        with (
            Client(brokers=[f"127.0.0.1:{port}"]) as client,
            client.producer() as producer,
        ):
            producer.send("wild-x", b"hello")
    wait_until(
        lambda: "/meta/brokers/topics/wild-x/N-m" in tree_of(cluster.zookeeper, 1)
    )
    theirs, own = (tree_of(cluster.zookeeper, number) for number in (0, 1))
    for tree, its_port in ((theirs, cluster.java.port), (own, cluster.ours.port)):
        for path in ("/meta/brokers/ids/N", "/meta/brokers/ids/N/master"):
            assert tree[path][0] == f"meta://127.0.0.1:{its_port}".encode()
            tree[path] = ("address", tree[path][1])
    checksum = "/meta/brokers/ids/N/master_config_checksum"
    assert theirs[checksum][0] == b"%d" % zlib.crc32(cluster.java.ini.read_bytes())
    own[checksum] = theirs[checksum]
    java_topics = {"java", "ordered", "newest"}
    only_java = {path for path in theirs if java_topics.intersection(path.split("/"))}
    only_ours = {path for path in own if "/idle/" in path}
    assert {path: theirs[path] for path in theirs.keys() - only_java} == {
        path: own[path] for path in own.keys() - only_ours
    }


def test_a_killed_broker_costs_nothing_that_was_acknowledged(
    server_jars: list[Path], new_root: Callable[[], str], tmp_path: Path
) -> None:
    """Producer, ordered producer and a group go on when it is back, by themselves."""
    root = new_root()
    topics = {"test": {"numPartitions": 3}, "one": {}}
    acknowledged: list[bytes] = []
    alone: list[bytes] = []
    received: list[bytes] = []
    is_over = threading.Event()

    def put_together() -> None:
        with Client(root) as client, client.producer(timeout_s=60) as producer:
            for number in range(1_000_000):
                data = [b"%d %d" % (number, part) for part in range(10)]
                producer.send_many("test", data)
                acknowledged.extend(data)
                if is_over.is_set():
                    return

    def put_alone() -> None:
        with Client(root) as client, client.producer(timeout_s=60) as producer:
            for number in range(1_000_000):
                data = b"%d" % number
                producer.send("one", data)
                alone.append(data)
                if is_over.is_set():
                    return

    def read() -> None:
        with (
            Client(root) as client,
            client.consumer("group", ["test"], start="earliest") as consumer,
        ):
            while not is_over.is_set() or not set(acknowledged) <= set(received):
                received.extend(m.data for m in consumer.receive_many(50, timeout=0.2))

    with JavaBroker(server_jars, tmp_path / "java", root, topics) as broker:
        threads = [
            threading.Thread(target=job) for job in (put_together, put_alone, read)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(acknowledged) > 200 and len(alone) > 20)
        broker.kill()
        wait_until(lambda: not is_registered(root))
        broker.start()
        count, count_alone = len(acknowledged), len(alone)
        wait_until(
            lambda: len(acknowledged) > count + 200 and len(alone) > count_alone + 20
        )
        is_over.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert set(acknowledged) <= set(received)
        with Client(root) as client:
            stored = [int(one.data) for one in client.browse("one")]
    # What was in flight may be there twice, never out of order.
    assert stored == sorted(stored)
    assert set(map(int, alone)) <= set(stored)
    assert len(stored) <= len(alone) + 2


def is_registered(zookeeper: str) -> bool:
    client = KazooClient(zookeeper)
    client.start()
    try:
        return client.exists("/meta/brokers/ids/0/master") is not None
    finally:
        client.stop()
        client.close()
