"""Both brokers behind one door: a client test is written once, and runs against each.

`start_broker` (a fixture, tests/conftest.py) starts one of the kind that the test runs
with. MetaQ 1.4's answers come out of order and in pieces that end anywhere.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from metaq.client import Client
from metaq.clock import Clock
from metaq.model import Offset
from metaq.record.flags import decode_payload
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.testing.fake_broker import FakeBroker
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.paths import BrokerRole, NodeKind, NodePaths
from metaq.zk.session import Coordinator
from metaq.zk.znodes import decode_registration
from tests.rigs.inside import order_inside
from tests.rigs.waiting import wait_until

PYTHON = "metaq-python"
"""The real broker, in this process."""
METAQ_1_4 = "metaq-1.4"
"""The fake MetaQ 1.4 broker: no batches, no long poll, no counts, no times, and
no order among puts that are in flight together."""
BROKERS = (PYTHON, METAQ_1_4)

DEFAULT_TOPICS: Mapping[str, int] = {"test": 1}


class AnyBroker(Protocol):
    """Interface of either broker for tests."""

    kind: str
    zookeeper: MemoryZooKeeper

    @property
    def has_extensions(self) -> bool:
        """Whether it knows batches, producers' names, long polls, counts and times."""
        return self.kind == PYTHON

    @property
    @abstractmethod
    def port(self) -> int: ...

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def coordinator_factory(self) -> Callable[[Clock], Coordinator]:
        return self.zookeeper.coordinator

    @property
    def client_options(self) -> dict[str, Any]:
        """Keyword arguments that lead a client here, by ZooKeeper."""
        return {"coordinator": self.coordinator_factory}

    @abstractmethod
    def put(
        self, *data: bytes, topic: str = "test", partition: int = 0
    ) -> list[Offset]:
        """Append messages; return their offsets."""

    @abstractmethod
    def stored(self, topic: str = "test", partition: int = 0) -> list[bytes]:
        """Return the data of every message, oldest first."""

    def assert_stored(
        self, wanted: Sequence[bytes], topic: str = "test", partition: int = 0
    ) -> None:
        """Compare what is stored with what was sent, in flight together."""
        found = self.stored(topic, partition)
        if self.has_extensions:
            assert found == wanted
        else:
            assert sorted(found) == sorted(wanted)

    @abstractmethod
    def create_topic(self, topic: str, partitions: int = 1) -> None:
        """Add a topic, or change its partitions; returns when clients can find it."""

    @abstractmethod
    def close_partition(self, topic: str = "test", partition: int = 0) -> None: ...

    @abstractmethod
    def open_partition(self, topic: str = "test", partition: int = 0) -> None: ...

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None:
        """Withdraw and hang up; messages and port stay."""

    def restart(self) -> None:
        self.stop()
        self.start()


class PythonBroker(AnyBroker):
    """The real broker, with its storage and sync."""

    kind = PYTHON

    def __init__(self, broker: EmbeddedBroker, broker_id: int) -> None:
        self.inner = broker
        self.zookeeper = broker.zookeeper
        self._broker_id = broker_id

    @property
    def port(self) -> int:
        return self.inner.port

    def put(
        self, *data: bytes, topic: str = "test", partition: int = 0
    ) -> list[Offset]:
        with Client(brokers=[self.address]) as client, client.producer() as producer:
            place = f"{self._broker_id}-{partition}"
            futures = [
                producer.send_nowait(topic, one, partition=place) for one in data
            ]
            return [future.result().offset for future in futures]

    def stored(self, topic: str = "test", partition: int = 0) -> list[bytes]:
        name = f"{self._broker_id}-{partition}"
        with Client(brokers=[self.address]) as client:
            return [one.data for one in client.browse(topic, partitions=[name])]

    def create_topic(self, topic: str, partitions: int = 1) -> None:
        self.inner.create_topic(topic, partitions)

    def close_partition(self, topic: str = "test", partition: int = 0) -> None:
        self._order("close_partitions", topic, partition)

    def open_partition(self, topic: str = "test", partition: int = 0) -> None:
        self._order("open_partitions", topic, partition)

    def _order(self, command: str, topic: str, partition: int) -> None:
        order_inside(self.inner, command, topic=topic, start=partition, end=partition)

    def start(self) -> None:
        self.inner.start()

    def stop(self) -> None:
        self.inner.stop()


class Metaq14Broker(AnyBroker):
    """The fake MetaQ 1.4 broker; `inner` has its knobs and faults."""

    kind = METAQ_1_4

    def __init__(self, broker: FakeBroker, zookeeper: MemoryZooKeeper) -> None:
        self.inner = broker
        self.zookeeper = zookeeper

    @property
    def port(self) -> int:
        return self.inner.port

    def put(
        self, *data: bytes, topic: str = "test", partition: int = 0
    ) -> list[Offset]:
        return [self.inner.add(one, topic=topic, partition=partition) for one in data]

    def stored(self, topic: str = "test", partition: int = 0) -> list[bytes]:
        records = self.inner.records(topic, partition)
        return [decode_payload(one.payload, one.flag)[0] for one in records]

    def create_topic(self, topic: str, partitions: int = 1) -> None:
        self.inner.create_topic(topic, partitions)
        role = BrokerRole(self.inner.broker_id)
        path = NodePaths().topic(NodeKind.TOPIC_PUB, topic, role)

        def is_registered() -> bool:
            node = self.zookeeper.nodes.get(path)
            if node is None:
                return False
            return decode_registration(node.data).partition_count == partitions

        wait_until(is_registered)

    def close_partition(self, topic: str = "test", partition: int = 0) -> None:
        self.inner.close_partition(topic, partition)

    def open_partition(self, topic: str = "test", partition: int = 0) -> None:
        self.inner.open_partition(topic, partition)

    def start(self) -> None:
        self.inner.come_back()

    def stop(self) -> None:
        self.inner.go_away()


StartBroker: TypeAlias = Callable[..., AnyBroker]
"""`broker_of`, with the kind of the test; stopped behind it."""


@contextlib.contextmanager
def broker_of(
    kind: str,
    data_path: Path,
    topics: Mapping[str, int] = DEFAULT_TOPICS,
    *,
    zookeeper: MemoryZooKeeper | None = None,
    broker_id: int = 0,
    seed: int = 0,
    settings: Mapping[str, str] | None = None,
) -> Iterator[AnyBroker]:
    """Run a broker of a kind.

    Args:
        seed: of MetaQ 1.4's disorder.
        settings: of the real broker.
    """
    assert kind in BROKERS, kind
    if kind == PYTHON:
        # A scrub would find what a test damages before the test looks, or not.
        quiet = {"brokerId": str(broker_id), "scrubBytesPerS": "0"}
        settings = {**quiet, **(settings or {})}
        with embedded_broker(
            topics=topics, data_path=data_path, zookeeper=zookeeper, settings=settings
        ) as ours:
            yield PythonBroker(ours, broker_id)
        return
    zookeeper = zookeeper or MemoryZooKeeper()
    fake = FakeBroker(
        topics, broker_id=broker_id, coordinator=zookeeper.coordinator, seed=seed
    )
    fake.reorder = fake.splits_anywhere = fake.misorders_puts = True
    with fake:
        yield Metaq14Broker(fake, zookeeper)
