"""A broker in a process of its own that is registered in ZooKeeper."""

from pathlib import Path

from metaq.client import Client, NoBrokerError
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
    """Wait until clients find it."""
    with Client(zookeeper) as client:
        wait_until(lambda: parts_of(client).metadata.snapshot.brokers)


def make_topic(client: Client, topic: str) -> None:
    """Make a topic of one partition as soon as a broker can be given one.

    Its record comes some time after its registration; until then it looks like one of
    MetaQ 1.4, which takes none.
    """

    def is_made() -> bool:
        try:
            client.admin().create_topic(topic, partitions=1)
        except NoBrokerError:
            return False
        return True

    wait_until(is_made)
