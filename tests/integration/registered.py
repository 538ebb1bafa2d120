"""A broker in a process of its own that is registered in ZooKeeper."""

from pathlib import Path
from typing import Any

from kazoo.client import KazooClient

from metaq.client import Client, NoBrokerError
from metaq.zk.paths import NodePaths
from tests.client.worlds import parts_of
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until


def registered_broker(data: Path, zookeeper: str, **more: int) -> BrokerProcess:
    """Return a broker with a topic "mine", not started yet; `more` are settings."""
    settings = {
        "zk.zkEnable": "true",
        "zk.zkConnect": zookeeper,
        "zk.zkSessionTimeoutMs": "4000",
        "hostName": "127.0.0.1",
        **more,
    }
    words = [w for key, text in settings.items() for w in ("--set", f"{key}={text}")]
    return BrokerProcess(data, topic="mine", arguments=words)


def wait_registered(zookeeper: str) -> None:
    """Wait until clients find it, and may give it topics: see `make_topic`."""
    with Client(zookeeper) as client:
        wait_until(lambda: parts_of(client).metadata.snapshot.brokers)
    records, kazoo = NodePaths().recorded_brokers(), KazooClient(zookeeper)
    kazoo.start()
    try:
        wait_until(lambda: kazoo.exists(records) and kazoo.get_children(records))
    finally:
        kazoo.stop()
        kazoo.close()


def make_topic(client: Client, topic: str, partitions: int = 1, **options: Any) -> None:
    """Make a topic as soon as a broker can be given one.

    Its record comes some time after its registration; until then it looks like one of
    MetaQ 1.4, which takes none.
    """

    def is_made() -> bool:
        try:
            client.admin().create_topic(topic, partitions=partitions, **options)
        except NoBrokerError:
            return False
        return True

    wait_until(is_made)
