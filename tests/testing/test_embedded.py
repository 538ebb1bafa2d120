"""A real broker in a test: it serves, survives restarts, takes topics at run time."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from metaq.client import AsyncClient
from metaq.client.cluster.catalog import read_cluster
from metaq.clock import SystemClock
from metaq.errors import ConfigError, LogDirLockedError
from metaq.fs import SystemFileSystem
from metaq.model import BrokerAddress, BrokerId
from metaq.protocol.commands import Get, Put, Result, Value, Version
from metaq.protocol.version import decode_version_body
from metaq.testing import pytest_plugin
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.testing.zk import MemoryZooKeeper
from tests.client.worlds import parts_of
from tests.rigs.waiting import wait_until
from tests.testing.sockets import Wire

metaq_broker = pytest_plugin.metaq_broker

CLOCK = SystemClock()
PATIENCE_S = 60.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={"test": 2}, data_path=tmp_path / "data") as made:
        yield made


def wire(broker: EmbeddedBroker) -> Wire:
    return Wire(BrokerAddress("127.0.0.1", broker.port))


def put(broker: EmbeddedBroker, topic: str, partition: int, payload: bytes) -> str:
    with wire(broker) as peer:
        reply = peer.ask(Put(topic, partition, payload, 0, -1, 1))
    assert isinstance(reply, Result)
    assert reply.status == 200, reply
    return reply.text


def get(broker: EmbeddedBroker, topic: str, partition: int) -> bytes:
    with wire(broker) as peer:
        reply = peer.ask(Get(topic, "g", partition, 0, 1 << 20, 1))
    assert isinstance(reply, Value), reply
    return reply.payload


@dataclass
class Found:
    """Nodes of a broker that clients find in ZooKeeper."""

    brokers: dict[BrokerId, BrokerAddress | None]
    puts: Mapping[str, Mapping[BrokerId, int]]
    gets: Mapping[str, Mapping[BrokerId, int]]

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(sorted(self.puts))


def find_cluster(broker: EmbeddedBroker) -> Found:
    """Read what clients read, through the options that clients are given."""

    async def read() -> Found:
        async with AsyncClient(**broker.client_options) as client:
            context = parts_of(client)
            deadline_s = CLOCK.monotonic_s() + PATIENCE_S
            await context.metadata.wait_newer(0, deadline_s=deadline_s)
            names = await context.metadata.topics(deadline_s=deadline_s)
            cluster = await read_cluster(context, names, deadline_s=deadline_s)
            brokers = {n: copies.leader for n, copies in cluster.brokers.items()}
            return Found(brokers, cluster.puts, cluster.gets)

    return asyncio.run(read())


def test_it_is_a_real_broker_that_clients_find(broker: EmbeddedBroker) -> None:
    """With every extension, at the address in its ZooKeeper."""
    with wire(broker) as peer:
        version = peer.ask(Version(1))
    assert isinstance(version, Result)
    assert decode_version_body(version.text).has_mput
    cluster = find_cluster(broker)
    found = cluster.brokers[BrokerId(0)]
    assert f"{found.host}:{found.port}" == broker.address
    assert cluster.puts == cluster.gets == {"test": {0: 2}}
    assert broker.client_options["coordinator"] == broker.coordinator_factory


@pytest.mark.slow
def test_what_was_put_survives_a_restart(broker: EmbeddedBroker) -> None:
    """Same port, same data; while it is stopped, clients do not find it."""
    put(broker, "test", 1, b"kept")
    port = broker.port
    broker.stop()
    broker.stop()
    assert find_cluster(broker).brokers == {}
    broker.start()
    broker.restart()
    assert broker.port == port
    assert get(broker, "test", 1).endswith(b"kept")
    assert find_cluster(broker).brokers == {0: BrokerAddress("127.0.0.1", port)}


@pytest.mark.slow
def test_topics_are_created_at_run_time(broker: EmbeddedBroker) -> None:
    """Found when the call returns, changed by another one, kept by a restart."""
    broker.create_topic("more", partitions=3)
    assert find_cluster(broker).puts["more"] == {0: 3}
    put(broker, "more", 2, b"x")
    broker.create_topic("more", partitions=4)
    assert find_cluster(broker).puts["more"] == {0: 4}
    broker.stop()
    broker.create_topic("later")
    broker.start()
    assert find_cluster(broker).puts == {
        "later": {0: 1},
        "more": {0: 4},
        "test": {0: 2},
    }


def test_a_topic_that_cannot_be_changes_nothing(broker: EmbeddedBroker) -> None:
    """The error names the value; the broker and its settings stay as they were."""
    with pytest.raises(ConfigError, match="numPartitions"):
        broker.create_topic("bad", partitions=0)
    broker.restart()
    assert find_cluster(broker).topics == ("test",)


def test_a_temporary_directory_goes_with_the_broker() -> None:
    """No place has to be named; the default topic is there."""
    with embedded_broker() as broker:
        put(broker, "test", 0, b"x")
        path = broker.data_path
        assert (path / "test-0").is_dir()
    assert not path.exists()


@pytest.mark.slow
def test_two_brokers_share_a_zookeeper(tmp_path: Path) -> None:
    """Each under its own number."""
    zookeeper = MemoryZooKeeper()
    with (
        embedded_broker(zookeeper=zookeeper) as one,
        embedded_broker(zookeeper=zookeeper, settings={"brokerId": "1"}),
    ):
        assert find_cluster(one).puts == {"test": {0: 1, 1: 1}}


def test_a_start_that_fails_leaves_nothing_behind(data_dir: Path) -> None:
    """A second broker on the same data is refused, and its threads end."""
    first = SystemFileSystem().lock_directory(data_dir)
    before = set(threading.enumerate())
    second = EmbeddedBroker(data_dir)
    with pytest.raises(LogDirLockedError):
        second.start()
    second.stop()
    wait_until(lambda: set(threading.enumerate()) <= before)
    first.release()


def test_the_fixture_gives_a_broker_to_each_test(
    metaq_broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Running, with the topic `test`, and its data below the test's directory."""
    put(metaq_broker, "test", 0, b"x")
    assert metaq_broker.data_path == tmp_path / "metaq"


def test_a_data_path_may_be_a_text(tmp_path: Path) -> None:
    """As `open` takes one."""
    with embedded_broker(data_path=str(tmp_path / "data")) as broker:
        put(broker, "test", 0, b"abc")
        assert broker.data_path == tmp_path / "data"
    with EmbeddedBroker(str(tmp_path / "data")) as again:
        assert b"abc" in get(again, "test", 0)
