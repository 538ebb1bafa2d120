"""The conformance checklist of a MetaQ client (docs/metaq-1.4/client.md 24).

docs/compatibility.md names the tests of each item, and the differences; this module
checks that each of those tests exists. It also tests what no other test does, and the
facts of MetaQ's own integration tests (docs/metaq-1.4/client.md 22.3).
"""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from metaq.client import AsyncClient, ClientOptions, ConsumerOptions
from metaq.client.consume.consumer import AsyncConsumer
from metaq.client.consume.progress import ConsumerState
from metaq.client.consume.redelivery import RetryPolicy
from metaq.model import Message
from tests.brokers import AnyBroker, StartBroker
from tests.rigs.waiting import until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
ITEMS = range(1, 21)
PATIENCE_S = 60.0

ROWS = {
    int(row[1]): row[0] for row in re.finditer(r"^\| (\d+) \|.*$", PAGE, re.MULTILINE)
}
REFERENCES = re.findall(r"`(tests/\S+?\.py)(?:::(\w+))?`", PAGE)

DEFAULTS: Mapping[str, object] = {
    "root": "/meta",
    "session_timeout_s": 30.0,
    "heartbeat_s": 10.0,
    "request_timeout_s": 10.0,
    "start": "earliest",
    "commit_interval_s": 5.0,
    "idle_step_s": 0.5,
    "idle_max_s": 5.0,
    "strategy": "DEFAULT",
    "consumer_id": None,
}
"""Options that MetaQ has as well (docs/metaq-1.4/client.md 5, 16.3)."""


# -- the page --------------------------------------------------------------------------


def test_the_page_has_every_item_of_the_checklist() -> None:
    """In order, each once."""
    assert list(ROWS) == list(ITEMS)


@pytest.mark.parametrize("item", ITEMS)
def test_every_item_is_tested_or_said_to_be_left_out(item: int) -> None:
    """A row names a test, or says in so many words that the thing is not there."""
    row = ROWS[item]
    assert "`tests/" in row or "not yet" in row, row


def test_the_tests_that_the_page_names_exist() -> None:
    """By file and by function."""
    assert REFERENCES
    missing = [
        f"{path}::{name}"
        for path, name in REFERENCES
        if not (ROOT / path).is_file()
        or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]
    assert missing == []


def test_defaults_are_those_of_metaq() -> None:
    """Users who move find the same times."""
    client, consumer = ClientOptions(), ConsumerOptions()
    for name, value in DEFAULTS.items():
        owner = client if hasattr(client, name) else consumer
        assert getattr(owner, name) == value, name
    policy = RetryPolicy()
    assert policy.attempts_max == 6
    assert (policy.replay_first_s, policy.replay_interval_s) == (5.0, 300.0)


# -- item 20: the order of a clean end -------------------------------------------------


def test_a_consumer_commits_then_releases_then_leaves(
    start_broker: StartBroker,
) -> None:
    """The next owner finds the offset, for any order of events."""

    async def scenario(broker: AnyBroker) -> None:
        async with AsyncClient(**broker.client_options) as client:
            async with client.producer() as producer:
                await producer.send("t", b"x")
            async with client.consumer("g", ["t"], consumer_id="c") as consumer:
                assert await consumer.receive(PATIENCE_S) is not None
                broker.zookeeper.calls.clear()

    broker = start_broker({"t": 1})
    asyncio.run(scenario(broker))
    group = "/meta/consumers/g"
    changes = {"replace", "delete", "set", "create"}
    assert [call for call in broker.zookeeper.calls if call[0] in changes] == [
        ("replace", f"{group}/offsets/t/0-0"),
        ("delete", f"{group}/owners/t/0-0"),
        ("delete", f"{group}/ids/g_c"),
    ]


# -- the facts of MetaQ's integration tests --------------------------------------------


@pytest.fixture
def brokers(start_broker: StartBroker) -> AnyBroker:
    """Two brokers with two topics; returns the one whose ZooKeeper both share."""
    topics = {"one": 3, "two": 2}
    first = start_broker(topics)
    start_broker(topics, zookeeper=first.zookeeper, broker_id=1)
    return first


@contextlib.asynccontextmanager
async def consumers_of(
    client: AsyncClient, groups: list[str], found: list[list[bytes]]
) -> AsyncIterator[list[AsyncConsumer]]:
    """A consumer for each group; each fills its own list."""

    async def read(consumer: AsyncConsumer, mine: list[bytes]) -> None:
        async for message in consumer:
            assert message.attribute == f"of {bytes(message.data).decode()}"
            mine.append(bytes(message.data))

    async with contextlib.AsyncExitStack() as stack:
        consumers = [
            await stack.enter_async_context(client.consumer(group, ["one", "two"]))
            for group in groups
        ]
        tasks = [
            asyncio.create_task(read(consumer, mine))
            for consumer, mine in zip(consumers, found, strict=True)
        ]
        yield consumers
        for consumer in consumers:
            await consumer.close()
        await asyncio.gather(*tasks)


async def send_and_collect(
    broker: AnyBroker, groups: list[str], expected_count: int
) -> tuple[list[bytes], list[list[bytes]]]:
    """Send a hundred messages over both topics while the groups read."""
    sent = [f"message {number}".encode() for number in range(100)]
    found: list[list[bytes]] = [[] for _ in groups]
    async with (
        AsyncClient(**broker.client_options) as client,
        client.producer() as producer,
        consumers_of(client, groups, found) as consumers,
    ):
        for number, data in enumerate(sent):
            topic = ("one", "two")[number % 2]
            await producer.send(topic, data, attribute=f"of {data.decode()}")
        await until(lambda: sum(map(len, found)) >= expected_count)
        held = Counter(p for consumer in consumers for p in consumer.assignment())
        assert set(held.values()) == {len(set(groups))}
    return sent, found


@pytest.mark.slow
def test_ten_consumers_of_one_group_have_each_message_once(
    brokers: AnyBroker,
) -> None:
    """Two brokers, two topics, attributes: exactly a hundred, by whichever members."""
    sent, found = asyncio.run(send_and_collect(brokers, ["g"] * 10, 100))
    assert Counter(data for mine in found for data in mine) == Counter(sent)


@pytest.mark.slow
def test_each_of_ten_groups_has_every_message_once(brokers: AnyBroker) -> None:
    """Groups know nothing of each other."""
    groups = [f"g{number}" for number in range(10)]
    sent, found = asyncio.run(send_and_collect(brokers, groups, 1000))
    for mine in found:
        assert sorted(mine) == sorted(sent)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 50, b"\r\nput t 0 5 0 1\r\nhello", "§ 数据 \u2028".encode(), b"\xff"],
)
def test_payloads_of_any_bytes_come_back(
    start_broker: StartBroker, data: bytes
) -> None:
    """Empty ones, control characters, what looks like a command."""

    async def scenario(broker: AnyBroker) -> None:
        async with AsyncClient(**broker.client_options) as client:
            async with client.producer() as producer:
                await producer.send("t", data)
            async with client.consumer("g", ["t"]) as consumer:
                message = await consumer.receive(PATIENCE_S)
                assert message is not None
                assert (bytes(message.data), message.attribute) == (data, None)

    asyncio.run(scenario(start_broker({"t": 1})))


def test_gets_of_one_byte_grow_until_messages_fit(start_broker: StartBroker) -> None:
    """MetaQ's client delivers nothing at first; this one asks for what it needs."""

    async def scenario(broker: AnyBroker) -> None:
        async with AsyncClient(**broker.client_options) as client:
            async with client.producer() as producer:
                await producer.send_many("t", [b"x" * 200, b"y" * 100_000])
            async with client.consumer("g", ["t"], fetch_bytes=1) as consumer:
                for size in (200, 100_000):
                    message = await consumer.receive(PATIENCE_S)
                    assert message is not None
                    assert len(message.data) == size

    asyncio.run(scenario(start_broker({"t": 1})))


def test_a_topic_that_nobody_serves_delivers_nothing_and_ends_nothing(
    start_broker: StartBroker,
) -> None:
    """Subscribing comes first, the topic may come later; `health` reports it."""

    async def scenario(broker: AnyBroker) -> None:
        async with (
            AsyncClient(**broker.client_options) as client,
            client.consumer("g", ["nobody"]) as consumer,
        ):
            assert await consumer.receive(0.05) is None
            assert consumer.assignment() == frozenset()
            health = consumer.health()
            assert health.state is ConsumerState.RUNNING
            assert health.problems == ("nobody: no broker serves it",)

    asyncio.run(scenario(start_broker({"t": 1})))


def handle(
    start_broker: StartBroker,
    data: list[bytes],
    handler: Any,
    policy: RetryPolicy,
    count: int,
) -> None:
    """Have messages handled until the handler was called so many times."""

    async def scenario(broker: AnyBroker) -> None:
        seen = asyncio.Event()
        calls = 0

        async def counted(message: Message) -> None:
            nonlocal calls
            calls += 1
            if calls >= count:
                seen.set()
            await handler(message)

        async with AsyncClient(**broker.client_options) as client:
            async with client.producer() as producer:
                for one in data:
                    await producer.send("t", one)
            async with client.consumer("g", ["t"]) as consumer:
                task = asyncio.create_task(consumer.run(counted, retry=policy))

                async def is_all_committed() -> bool:
                    return not sum(lag.bytes for lag in await lags(consumer))

                await until(seen.is_set)
                await until(is_all_committed)
                await consumer.close()
                await task
        assert calls == count

    asyncio.run(scenario(start_broker({"t": 1})))


async def lags(consumer: AsyncConsumer) -> list[Any]:
    """Return each partition's lag."""
    return list((await consumer.lag()).values())


def test_messages_refused_twice_are_handled_three_times(
    start_broker: StartBroker,
) -> None:
    """Five messages, fifteen deliveries, in order."""
    data = [f"message {number}".encode() for number in range(5)]
    found: list[bytes] = []

    async def refuse_twice(message: Message) -> None:
        found.append(bytes(message.data))
        if found.count(message.data) < 3:
            raise ValueError("again")

    handle(
        start_broker, data, refuse_twice, RetryPolicy(first_s=0.001, max_s=0.001), 15
    )
    assert found == [text for text in data for _ in range(3)]


@pytest.mark.slow
def test_a_message_that_always_fails_is_parked_and_the_others_go_on(
    start_broker: StartBroker,
    tmp_path: Path,
) -> None:
    """Six deliveries, two more from the local store, and the healthy one once."""
    found: list[bytes] = []

    async def fail(message: Message) -> None:
        found.append(bytes(message.data))
        if message.data == b"bad" and found.count(b"bad") < 8:
            raise ValueError("never")

    policy = RetryPolicy(
        first_s=0.001,
        max_s=0.001,
        then="park",
        park_dir=tmp_path / "parked",
        replay_first_s=0.05,
        replay_interval_s=0.05,
    )
    handle(start_broker, [b"bad", b"good"], fail, policy, 9)
    assert Counter(found) == {b"bad": 8, b"good": 1}
    assert found[:6] == [b"bad"] * 6
