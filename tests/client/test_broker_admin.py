"""Brokers and partitions through `client.admin()`, in both worlds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.client import NoBrokerError, PartitionDescription, PartitionsAwayError
from metaq.client.errors import BrokerRegisteredError
from metaq.errors import ClientError
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.testing.zk import MemoryZooKeeper
from tests.brokers import BROKERS, PYTHON, AnyBroker, StartBroker, broker_of
from tests.client.worlds import WORLDS
from tests.rigs.waiting import wait_until

RECORD_BYTES = 20 + 4
ONE_BROKER = {"pair": "MetaQ 1.4 records nothing"}


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Any:
    return WORLDS[request.param]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[AnyBroker, AnyBroker]]:
    server = MemoryZooKeeper()
    with (
        broker_of(PYTHON, tmp_path / "0", {"t": 1}, zookeeper=server) as first,
        broker_of(
            PYTHON, tmp_path / "1", {"t": 1}, zookeeper=server, broker_id=1
        ) as second,
    ):
        first.put(b"here", topic="t")
        yield first, second


def test_partitions_are_described_with_their_logs(
    start_broker: StartBroker, world: Any
) -> None:
    """Address, what it takes, log start and log end; closed ones are marked."""
    broker = start_broker({"b": 1, "a": 2})
    broker.put(b"1234", topic="a")
    address = BrokerAddress("127.0.0.1", broker.port)
    broker.close_partition("a", 1)
    with world(**broker.client_options) as client:
        admin = client.admin()
        first, second = admin.describe_partitions(["a"])
        assert first == PartitionDescription(
            partition=TopicPartition("a", BrokerId(0), 0),
            address=address,
            takes_puts=True,
            gives_gets=True,
            is_away=False,
            log_start=0,
            log_end=RECORD_BYTES,
            is_closed=False if broker.has_extensions else None,
        )
        assert second.is_closed == (True if broker.has_extensions else None)
        names = [each.partition.topic for each in admin.describe_partitions()]
        assert names == ["a", "a", "b"]
        names = [each.partition.topic for each in admin.describe_partitions(["b", "a"])]
        assert names == ["b", "a", "a"]
        plain = admin.describe_partitions(["a"], with_logs=False)[0]
        assert (plain.log_end, plain.is_closed, plain.takes_puts) == (None, None, True)


def test_a_topic_that_there_is_not_is_an_error(
    start_broker: StartBroker, world: Any
) -> None:
    """It names near ones, and the command that makes one."""
    broker = start_broker({"orders": 1})
    with world(**broker.client_options) as client:
        with pytest.raises(NoBrokerError, match="did you mean orders"):
            client.admin().describe_partitions(["ordres"])
        with pytest.raises(TypeError, match="topics: expected a list of names"):
            client.admin().describe_partitions(3)


def test_partitions_that_are_away_are_named_and_waited_for(
    pair: tuple[AnyBroker, AnyBroker], world: Any
) -> None:
    first, second = pair
    with world(**first.client_options) as client:
        admin = client.admin()
        admin.wait_until_there(["t"], timeout=30)
        second.stop()
        wait_until(lambda: admin.describe_partitions(["t"], with_logs=False)[1].is_away)
        here, gone = admin.describe_partitions(["t"])
        assert (here.log_end, here.is_away) == (RECORD_BYTES, False)
        assert (gone.address, gone.log_end, gone.problem) == (None, None, "")
        with pytest.raises(PartitionsAwayError, match="'metaq brokers forget 1'"):
            admin.wait_until_there(["t"], timeout=0)
        second.start()
        admin.wait_until_there(["t"], timeout=30)


def test_forgetting_a_broker_is_planned_first(
    pair: tuple[AnyBroker, AnyBroker], world: Any
) -> None:
    """The plan changes nothing, and refuses what the call refuses."""
    first, second = pair
    with world(**first.client_options) as client:
        admin = client.admin()
        with pytest.raises(BrokerRegisteredError, match="stop it before"):
            admin.forget_broker(1, plan=True)
        second.stop()
        wait_until(lambda: not admin.brokers()[1].is_present)
        before = first.zookeeper.tree()
        planned = admin.forget_broker(1, plan=True)
        assert (planned.broker_id, planned.partition_count) == (1, 1)
        assert first.zookeeper.tree() == before
        assert admin.forget_broker(1) == planned
        wait_until(lambda: len(admin.brokers()) == 1)  # this client hears of it, too
        with pytest.raises(ClientError, match="no record of broker 1"):
            admin.forget_broker(1, plan=True)


@pytest.mark.parametrize("kind", BROKERS)
def test_one_broker_says_what_it_counts(tmp_path: Path, world: Any, kind: str) -> None:
    """In its own words; one that is not there is an error."""
    with (
        broker_of(kind, tmp_path / "data", {"t": 1}, broker_id=7) as broker,
        world(**broker.client_options) as client,
    ):
        text = client.admin().broker_stats(7)
        assert "broker_id 7" in text.splitlines()
        assert "[system]" in client.admin().broker_stats(7, "config")
        with pytest.raises(NoBrokerError, match="broker 3 is not registered"):
            client.admin().broker_stats(3)
