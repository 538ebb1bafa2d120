"""Absent partitions are reported: by reads, lag, health, names and counts."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from metaq.client import Client, NoBrokerError, PartitionsAwayError
from metaq.client.admin.broker_admin import BrokerDescription
from metaq.client.admin.cluster_admin import AdminGroup
from metaq.client.consume.progress import UNKNOWN_LAG
from metaq.client.errors import BrokerRegisteredError
from metaq.client.session import AsyncClient
from metaq.errors import ClientError
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.testing.zk import MemoryZooKeeper
from tests.brokers import METAQ_1_4, PYTHON, AnyBroker, broker_of
from tests.client.worlds import parts_of
from tests.rigs.waiting import wait_until

ONE_BROKER = {
    "pair": "MetaQ 1.4 records nothing; what a group knows of it is tested with java",
    "java": "of a broker that records nothing, the group's offsets show it",
}

HERE = [TopicPartition("t", BrokerId(0), number) for number in range(2)]
GONE = [TopicPartition("t", BrokerId(1), number) for number in range(2)]


def two_brokers(kind: str, path: Path) -> Iterator[tuple[AnyBroker, AnyBroker]]:
    server = MemoryZooKeeper()
    with (
        broker_of(kind, path / "0", {"t": 2}, zookeeper=server) as first,
        broker_of(
            kind, path / "1", {"t": 2, "u": 1}, zookeeper=server, broker_id=1
        ) as second,
    ):
        first.put(b"here", topic="t")
        second.put(b"gone", topic="t", partition=1)
        yield first, second


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[AnyBroker, AnyBroker]]:
    yield from two_brokers(PYTHON, tmp_path)


@pytest.fixture
def java(tmp_path: Path) -> Iterator[tuple[AnyBroker, AnyBroker]]:
    yield from two_brokers(METAQ_1_4, tmp_path)


def read(client: Client, timeout: float = 30.0, **options: Any) -> list[bytes]:
    return sorted(one.data for one in client.browse("t", timeout=timeout, **options))


@pytest.mark.slow
def test_all_of_a_topic_is_not_less_while_a_broker_is_away(
    pair: tuple[AnyBroker, AnyBroker],
) -> None:
    """It names topic, broker, partitions and cures; `partial` goes on without."""
    first, second = pair
    with Client(**first.client_options) as client:
        assert read(client) == [b"gone", b"here"]
        second.stop()
        with pytest.raises(PartitionsAwayError) as caught:
            read(client, 0.5)
        assert caught.value.partitions == tuple(GONE)
        text = str(caught.value)
        assert "broker 1 is away, and with it t/1-0, t/1-1" in text
        assert "start broker 1" in text
        assert "metaq brokers forget 1" in text
        assert read(client, partial=True) == [b"here"]
        assert read(client, partitions=["0-0"]) == [b"here"]
        assert client.partitions("t") == (*HERE, *GONE)
        second.start()
        wait_until(lambda: len(parts_of(client).metadata.snapshot.brokers) == 2)
        assert read(client) == [b"gone", b"here"]


@pytest.mark.slow
def test_a_topic_of_a_broker_that_is_away_is_not_an_unknown_one(
    pair: tuple[AnyBroker, AnyBroker],
) -> None:
    """It is named, and the error of a read says where it is."""
    first, second = pair
    second.stop()
    with Client(**first.client_options) as client:
        assert client.topics() == ("t", "u")
        assert [str(one) for one in client.partitions("u")] == ["u/1-0"]
        with pytest.raises(PartitionsAwayError, match="with it u/1-0"):
            next(client.browse("u", timeout=0.2))
        with pytest.raises(NoBrokerError, match="no broker serves"):
            next(client.browse("nosuch", timeout=0.2))


@pytest.mark.parametrize("partitions", [0, 1])
def test_a_broker_that_is_about_to_give_gets_is_waited_for(
    java: tuple[AnyBroker, AnyBroker], partitions: int
) -> None:
    """It registers for producers first, also a topic that grows; all of it is read."""
    first, _second = java
    server, path = first.zookeeper, "/meta/brokers/topics-sub/t/1-m"
    registration = server.tree()[path].data
    if partitions:
        server.put(path, registration.replace(b'"numParts":2', b'"numParts":1'))
    else:
        server.remove(path)
    with Client(**first.client_options) as client, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, client, 30.0)
        wait_until(lambda: "t" in parts_of(client).metadata.snapshot.gets)
        server.put(path, registration)
        assert reading.result(30) == [b"gone", b"here"]


@pytest.mark.slow
def test_a_broker_that_is_closed_to_readers_holds_up_no_reading_of_the_others(
    pair: tuple[AnyBroker, AnyBroker],
) -> None:
    """It looks like one that is about to come; half of the time is for the messages."""
    first, _second = pair
    first.zookeeper.put("/meta/brokers/ids/5/master", b"meta://h:1")
    registration = b'{"numParts":1,"broker":"5-m"}'
    first.zookeeper.put("/meta/brokers/topics-pub/t/5-m", registration)
    with Client(**first.client_options) as client:
        assert read(client, 2.0) == [b"gone", b"here"]


def test_an_empty_parent_is_no_topic(pair: tuple[AnyBroker, AnyBroker]) -> None:
    """MetaQ leaves the parents of a topic for ever."""
    first, _second = pair
    for kind in ("topics", "topics-pub", "topics-sub"):
        first.zookeeper.put(f"/meta/brokers/{kind}/once", b"")
    with Client(**first.client_options) as client:
        assert client.topics() == ("t", "u")


@pytest.mark.slow
def test_a_group_goes_on_and_says_what_is_away(
    pair: tuple[AnyBroker, AnyBroker],
) -> None:
    """Health names it, and its lag is unknown and not zero."""
    first, second = pair
    with (
        Client(**first.client_options) as client,
        client.consumer("g", ["t"], start="earliest") as consumer,
    ):
        assert {consumer.receive(30).data for _ in range(2)} == {b"gone", b"here"}
        consumer.commit()
        wait_until(lambda: consumer.health().is_ok)
        second.stop()
        wait_until(lambda: not consumer.assignment().intersection(GONE))
        (problem,) = consumer.health().problems
        assert problem == "broker 1 is away, and with it t/1-0, t/1-1"
        assert not consumer.health().is_ok
        lags = consumer.lag()
        assert [lags[one].bytes for one in HERE] == [0, 0]
        assert [lags[one] for one in GONE] == [UNKNOWN_LAG] * 2
        first.put(b"more", topic="t")
        message = consumer.receive(30)
        assert message is not None
        assert message.data == b"more"
        second.start()
        wait_until(lambda: consumer.health().is_ok)


@pytest.mark.slow
def test_of_a_java_broker_the_offsets_of_the_group_tell(
    java: tuple[AnyBroker, AnyBroker],
) -> None:
    """It leaves no record; what was read of it has a committed offset."""
    first, second = java
    with (
        Client(**first.client_options) as client,
        client.consumer("g", ["t"], start="earliest") as consumer,
    ):
        assert {consumer.receive(30).data for _ in range(2)} == {b"gone", b"here"}
        consumer.commit()
        second.stop()
        wait_until(lambda: not consumer.assignment().intersection(GONE))
        assert consumer.lag()[GONE[1]] == UNKNOWN_LAG

    async def describe(client: AsyncClient, deadline_s: float) -> Any:
        return await AdminGroup(parts_of(client), "g", deadline_s).describe()

    found = {one.partition: one for one in ask(first, describe).partitions}
    assert found[GONE[1]].lag is None
    assert found[GONE[1]].problem == "t/1-1: broker 1 is not registered"


def ask(broker: AnyBroker, work: Callable[[AsyncClient, float], Any]) -> Any:
    async def run() -> Any:
        async with AsyncClient(**broker.client_options) as client:
            deadline_s = parts_of(client).deadline_s(30)
            await parts_of(client).metadata.wait_newer(0, deadline_s=deadline_s)
            return await work(client, deadline_s)

    return asyncio.run(run())


async def look(client: AsyncClient, deadline_s: float) -> Any:
    del deadline_s
    return await client.admin().brokers(30)


def test_brokers_are_told_that_are_there_and_that_are_missing(
    pair: tuple[AnyBroker, AnyBroker],
) -> None:
    """With the address they had, and what they have."""
    first, second = pair
    address = BrokerAddress("127.0.0.1", second.port)
    second.stop()
    here, gone = ask(first, look)
    assert here == BrokerDescription(
        BrokerId(0), BrokerAddress("127.0.0.1", first.port), True, (), 1, 2
    )
    assert gone == BrokerDescription(BrokerId(1), address, False, (), 2, 3)
    assert [here.is_present, gone.is_present] == [True, False]


@pytest.mark.slow
def test_a_broker_that_is_gone_for_good_is_forgotten(
    pair: tuple[AnyBroker, AnyBroker],
) -> None:
    """One that is there is not; one that comes back is recorded again."""
    first, second = pair

    async def forget(client: AsyncClient, deadline_s: float) -> Any:
        del deadline_s
        return await client.admin().forget_broker(1, timeout=30)

    with pytest.raises(BrokerRegisteredError, match="broker 1 is registered at"):
        ask(first, forget)
    second.stop()
    assert ask(first, forget).partition_count == 3
    with pytest.raises(ClientError, match="no record of broker 1; brokers are: 0"):
        ask(first, forget)
    assert len(ask(first, look)) == 1
    with Client(**first.client_options) as client:
        assert read(client) == [b"here"]
        assert client.topics() == ("t",)
        second.start()
        wait_until(lambda: client.topics() == ("t", "u"))
        wait_until(lambda: read(client) == [b"gone", b"here"])


@pytest.mark.slow
def test_a_named_address_that_is_not_there_is_away(
    pair: tuple[AnyBroker, AnyBroker],
) -> None:
    """Its topics are unknown, or were known before it went."""
    first, second = pair
    options: dict[str, Any] = {"metadata_s": 0.05, "reconnect_first_s": 0.005}
    with Client(brokers=[first.address, second.address], **options) as client:
        assert read(client) == [b"gone", b"here"]
        second.stop()
        wait_until(
            lambda: BrokerId(1) not in parts_of(client).metadata.snapshot.brokers
        )
        with pytest.raises(PartitionsAwayError, match="with it t/1-0, t/1-1"):
            read(client, 0.5)
    with Client(brokers=[first.address, second.address], **options) as client:
        wait_until(lambda: BrokerId(0) in parts_of(client).metadata.snapshot.brokers)
        with pytest.raises(PartitionsAwayError) as caught:
            read(client, 0.5)
        assert f"no answer yet from meta://{second.address}" in str(caught.value)
        assert caught.value.partitions == ()
        assert read(client, 3, partial=True) == [b"here"]
