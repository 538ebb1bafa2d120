"""Topics and partitions of a cluster: found, awaited, or refused by name."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from metaq.client import AsyncClient
from metaq.client.cluster import catalog
from metaq.client.cluster.context import ClientContext
from metaq.client.errors import PartitionsAwayError
from metaq.errors import NoBrokerError
from metaq.model import BrokerId, TopicPartition
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import parts_of
from tests.rigs.waiting import wait_until

T = TypeVar("T")
PATIENCE_S = 60.0
SHORT_S = 0.5
"""Of waits that are bound to time out."""
FIRST, SECOND, THIRD = (TopicPartition("test", BrokerId(0), n) for n in range(3))


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 2, "tests": 1, "other": 1, "wild-*": 1})


def ask(
    broker: AnyBroker,
    work: Callable[[ClientContext], Awaitable[T]],
    **options: Any,
) -> T:
    async def main() -> T:
        async with AsyncClient(**(options or broker.client_options)) as client:
            return await work(parts_of(client))

    return asyncio.run(main())


def late(context: ClientContext, seconds: float = PATIENCE_S) -> float:
    return context.clock.monotonic_s() + seconds


def register(broker: AnyBroker, kind: str, topic: str, count: int) -> None:
    """Write what a broker of number 0 writes, as if it had the topic."""
    data = json.dumps({"numParts": count, "broker": "0-m"}).encode()
    path = f"/meta/brokers/topics-{kind}/{topic}/0-m"
    broker.zookeeper.put(path, data, session_id=99)


@pytest.mark.parametrize("way", ["zookeeper", "address"])
def test_topics_whose_whole_name_matches_are_found(way: str, broker: AnyBroker) -> None:
    """Ascending; the section that is a pattern itself is none."""
    options = {"brokers": [broker.address]} if way == "address" else {}

    async def find(context: ClientContext) -> list[tuple[str, ...]]:
        for topic in ("test", "tests", "other"):
            await context.metadata.topic(topic, deadline_s=late(context))
        return [
            await catalog.find_topics(context, pattern, deadline_s=late(context))
            for pattern in ("test", "test.?", ".*")
        ]

    assert ask(broker, find, **options) == [
        ("test",),
        ("test", "tests"),
        ("other", "test", "tests"),
    ]


def test_partitions_of_topics_are_in_order_and_each_once(broker: AnyBroker) -> None:
    """A topic that is named twice has its partitions once."""

    async def find(context: ClientContext) -> tuple[TopicPartition, ...]:
        names = ["test", "other", "test"]
        return await catalog.find_partitions(context, names, deadline_s=late(context))

    other = TopicPartition("other", BrokerId(0), 0)
    assert ask(broker, find) == (other, FIRST, SECOND)


def test_a_partition_that_its_broker_lacks_is_refused_at_once(
    broker: AnyBroker,
) -> None:
    """Those that exist are named; no time makes it appear."""

    async def require(context: ClientContext) -> None:
        deadline_s = late(context)
        both = [SECOND, FIRST]
        await catalog.require_partitions(context, both, deadline_s=deadline_s)
        with pytest.raises(NoBrokerError) as caught:
            await catalog.require_partitions(
                context, [THIRD, FIRST], deadline_s=deadline_s
            )
        assert str(caught.value).endswith("of topic 'test' there are: 0-0, 0-1")
        assert context.clock.monotonic_s() < deadline_s

    ask(broker, require)


@pytest.mark.slow
def test_a_partition_of_a_broker_that_is_away_is_waited_for(
    broker: AnyBroker,
) -> None:
    """Until the deadline, which names it; until it comes, where that is before."""
    far = TopicPartition("test", BrokerId(7), 0)

    async def require(context: ClientContext) -> None:
        await context.metadata.topic("test", deadline_s=late(context))
        with pytest.raises(NoBrokerError, match=r"no broker has .*7-0"):
            await catalog.require_partitions(
                context, [far], deadline_s=late(context, SHORT_S)
            )
        wait = asyncio.create_task(
            catalog.require_partitions(context, [far], deadline_s=late(context))
        )
        await asyncio.sleep(0)
        zookeeper = broker.zookeeper
        zookeeper.put("/meta/brokers/ids/7/master", b"meta://h:1", session_id=99)
        registered = b'{"numParts":1,"broker":"7-m"}'
        node = "/meta/brokers/topics-sub/test/7-m"
        zookeeper.put(node, registered, session_id=99)
        await wait

    ask(broker, require)


def test_a_topic_that_is_half_registered_is_waited_for(broker: AnyBroker) -> None:
    """A broker registers for producers first, and for readers a moment later."""
    register(broker, "pub", "new", 2)

    async def wait(context: ClientContext) -> tuple[int, int]:
        deadline_s = late(context)
        half = await catalog.read_cluster(context, ["new"], deadline_s=deadline_s)
        task = asyncio.create_task(
            catalog.wait_for_readers(context, half, ["new"], deadline_s=deadline_s)
        )
        await asyncio.sleep(0)
        register(broker, "sub", "new", 2)
        whole = await task
        return len(half.get_partitions("new")), len(whole.get_partitions("new"))

    assert ask(broker, wait) == (0, 2)


@pytest.mark.slow
def test_a_topic_that_is_closed_to_readers_takes_half_of_the_time(
    broker: AnyBroker,
) -> None:
    """It looks like one that is half registered; the rest is for the next question."""
    register(broker, "pub", "closed", 1)
    seconds = SHORT_S

    async def wait(context: ClientContext) -> float:
        deadline_s = late(context, seconds)
        half = await catalog.read_cluster(context, ["closed"], deadline_s=deadline_s)
        found = await catalog.wait_for_readers(
            context, half, ["closed"], deadline_s=deadline_s
        )
        assert found.get_partitions("closed") == ()
        return deadline_s - context.clock.monotonic_s()

    def is_time_left() -> bool:
        nonlocal seconds
        seconds *= 2
        return ask(broker, wait) > 0

    # A busy machine may take the rest of a short time.
    wait_until(is_time_left)


@pytest.mark.slow
def test_a_whole_cluster_is_waited_for(broker: AnyBroker) -> None:
    """At the deadline the error names what is recorded and not served."""
    broker.zookeeper.write("/meta/catalog/partitions/test/7", b"1")

    async def read(context: ClientContext) -> None:
        names = ["test"]
        snapshot = await catalog.read_cluster(context, names, deadline_s=late(context))
        away = snapshot.away("test")
        assert away == (TopicPartition("test", BrokerId(7), 0),)
        with pytest.raises(PartitionsAwayError) as caught:
            await catalog.read_whole(context, names, deadline_s=late(context, SHORT_S))
        assert caught.value.partitions == away

    ask(broker, read)


@pytest.mark.slow
def test_a_topic_that_takes_no_puts_is_named(broker: AnyBroker) -> None:
    """Known to readers, so it is waited for; one that nobody has had is not."""
    register(broker, "sub", "old", 1)
    register(broker, "pub", "empty", 0)

    async def read(context: ClientContext) -> None:
        taken = await catalog.read_takers(context, ["test"], deadline_s=late(context))
        assert taken.put_partitions("test") == (FIRST, SECOND)
        with pytest.raises(NoBrokerError, match="takes puts to topic 'empty'"):
            await catalog.read_takers(
                context, ["test", "empty"], deadline_s=late(context, SHORT_S)
            )

    ask(broker, read)


def test_brokers_leave_a_record_of_where_they_were(broker: AnyBroker) -> None:
    """Of MetaQ's brokers none, and a client of named brokers does not look."""

    async def recorded(context: ClientContext) -> dict[BrokerId, str]:
        await context.metadata.topic("test", deadline_s=late(context))
        found = await catalog.recorded_addresses(context, deadline_s=late(context))
        return {broker_id: str(address) for broker_id, address in found.items()}

    assert ask(broker, recorded, brokers=[broker.address]) == {}
    found = ask(broker, recorded)
    if broker.has_extensions:
        assert [address.rpartition(":")[2] for address in found.values()] == [
            str(broker.port)
        ]
    else:
        assert found == {}
