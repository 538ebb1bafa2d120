"""Queue groups: created by the first user, refused to users with other options."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from metaq.client import AsyncClient, Client
from metaq.client.cluster.queue_groups import QueueGroupDefinitions, reach_queue_groups
from metaq.client.errors import QueueGroupError
from metaq.client.options import QueueOptions
from metaq.client.queue.work_queue import AsyncQueue
from metaq.errors import ClientError, ConfigError, CoordinationError
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.zk.group_definitions import QueueGroupDefinition, decode_group
from tests.client.worlds import parts_of
from tests.rigs.inside import running_inside
from tests.rigs.waiting import wait_until

T = TypeVar("T")
ONE_BROKER = {
    "ack_first": "MetaQ has no queue groups",
    "take_all": "MetaQ has no queue groups",
    "ask": "MetaQ has none",
    "test_the_first_user_defines_a_group_and_others_may_say_less": "MetaQ has none",
    "test_another_definition_is_refused_with_the_difference": "MetaQ has none",
    "test_each_broker_of_the_topic_needs_the_dead_letter_topic": "MetaQ has none",
    "test_a_group_is_made_once": "MetaQ has none",
    "test_an_altered_group_keeps_what_it_is": "MetaQ has none",
    "test_an_alteration_that_cannot_be_changes_nothing": "MetaQ has none",
    "test_a_new_group_says_where_dead_letters_go": "MetaQ has none",
    "test_without_zookeeper_there_are_no_queue_groups": "MetaQ has none",
    "test_a_name_is_a_log_group_or_a_queue_group": "MetaQ has none",
    "test_what_is_done_outlives_a_definition_lost_by_zookeeper": "MetaQ has none",
    "test_what_a_later_generation_has_done_outlives_its_loss": "MetaQ has none",
    "test_a_group_made_again_while_its_broker_was_down_begins_anew": "MetaQ has none",
    "test_a_worker_waits_for_a_broker_that_has_the_group_before": "MetaQ has none",
    "test_a_topic_that_is_made_again_has_none_of_its_acks": "MetaQ has none",
    "test_a_log_consumer_that_was_refused_leaves_the_name_free": "MetaQ has none",
    "test_a_log_consumer_that_joins_at_the_same_moment_is_found": "MetaQ has none",
    "test_a_broker_keeps_its_groups_without_zookeeper": "MetaQ has none",
    "test_a_group_that_a_newer_version_has_made_is_named": "MetaQ has none",
}
DROP = {"then": "drop"}


def ask(
    broker: EmbeddedBroker, work: Callable[[QueueGroupDefinitions], Awaitable[T]]
) -> T:
    async def main() -> T:
        async with AsyncClient(**broker.client_options) as client:
            return await work(await reach_queue_groups(parts_of(client)))

    return asyncio.run(main())


def test_the_first_user_defines_a_group_and_others_may_say_less() -> None:
    """The rest is as it is."""

    async def work(groups: QueueGroupDefinitions) -> None:
        wanted = {"dead_letter_topic": "dead", "lease_ms": 5_000}
        first = await groups.ensure("g", "orders", wanted)
        assert first == QueueGroupDefinition(
            topic="orders", dead_letter_topic="dead", lease_ms=5_000
        )
        assert await groups.ensure("g", "orders", {}) == first
        found = await groups.read()
        assert found == {"g": first}
        await groups.delete_group("g")
        with pytest.raises(ClientError, match="no queue group g"):
            await groups.delete_group("g")

    with embedded_broker(topics={"orders": 1, "dead": 1}) as broker:
        ask(broker, work)


@pytest.mark.parametrize(
    ("topic", "wanted", "text"),
    [
        ("orders", {"lease_ms": 1_000}, "lease_ms is 30000, got 1000"),
        ("dead", {}, "topic is 'orders', got 'dead'"),
        ("orders", {"dead_letter_topic": "dead"}, "dead_letter_topic is None, got"),
    ],
)
def test_another_definition_is_refused_with_the_difference(
    topic: str, wanted: dict[str, object], text: str
) -> None:
    """Theirs, and ours."""

    async def work(groups: QueueGroupDefinitions) -> None:
        await groups.ensure("g", "orders", DROP)
        with pytest.raises(QueueGroupError, match=text):
            await groups.ensure("g", topic, wanted)

    with embedded_broker(topics={"orders": 1, "dead": 1}) as broker:
        ask(broker, work)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({}, "pass dead_letter_topic"),
        ({"dead_letter_topic": "nowhere"}, "there is no topic 'nowhere'"),
        ({"dead_letter_topic": "orders"}, "another topic than 'orders' itself"),
    ],
)
def test_a_new_group_says_where_dead_letters_go(
    wanted: dict[str, object], text: str
) -> None:
    """To a topic that is there, or nowhere."""

    async def work(groups: QueueGroupDefinitions) -> None:
        with pytest.raises(ConfigError, match=text):
            await groups.ensure("g", "orders", wanted)

    with embedded_broker(topics={"orders": 1}) as broker:
        ask(broker, work)


def test_each_broker_of_the_topic_needs_the_dead_letter_topic(tmp_path: Path) -> None:
    """It would keep its rejected messages for ever. Others may lack it."""

    async def work(groups: QueueGroupDefinitions) -> None:
        text = (
            "dead_letter_topic: broker 0 has topic 'orders', and needs 'far' for its"
            " dead letters: 'metaq topics alter far --brokers all'"
        )
        with pytest.raises(ConfigError, match=text):
            await groups.ensure("g", "orders", {"dead_letter_topic": "far"})
        await groups.ensure("g", "orders", {"dead_letter_topic": "dead"})
        with pytest.raises(ConfigError, match=text):
            await groups.alter("g", {"dead_letter_topic": "far"})

    with (
        embedded_broker(topics={"orders": 1, "dead": 1}) as broker,
        embedded_broker(
            topics={"far": 1},
            data_path=tmp_path,
            zookeeper=broker.zookeeper,
            settings={"brokerId": "1"},
        ),
    ):
        ask(broker, work)


def test_a_group_is_made_once() -> None:
    """Of a topic that is there; after a deletion it is another one."""

    async def work(groups: QueueGroupDefinitions) -> None:
        with pytest.raises(ConfigError, match="topic: there is no topic 'nowhere'"):
            await groups.create("g", "nowhere", DROP)
        made = await groups.create("g", "orders", DROP)
        assert made == QueueGroupDefinition(topic="orders")
        with pytest.raises(QueueGroupError, match="'g' exists, of topic 'orders'"):
            await groups.create("g", "orders", DROP)
        await groups.delete_group("g")
        assert (await groups.create("g", "orders", DROP)).generation == 1

    with embedded_broker(topics={"orders": 1}) as broker:
        ask(broker, work)


def test_an_altered_group_keeps_what_it_is() -> None:
    """Topic, order, start and generation, and what is not named."""

    async def work(groups: QueueGroupDefinitions) -> None:
        wanted = {**DROP, "ordered_by": "key", "start": "latest"}
        old = await groups.ensure("g", "orders", wanted)
        new = await groups.alter("g", {"dead_letter_topic": "dead", "lease_ms": 5_000})
        assert new == replace(old, dead_letter_topic="dead", lease_ms=5_000)
        assert await groups.alter("g", DROP) == replace(old, lease_ms=5_000)
        found = await groups.read()
        assert found == {"g": replace(old, lease_ms=5_000)}
        with pytest.raises(ClientError, match="no queue group other"):
            await groups.alter("other", DROP)

    with embedded_broker(topics={"orders": 1, "dead": 1}) as broker:
        ask(broker, work)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({}, "expected at least one option"),
        ({"dead_letter_topic": "nowhere"}, "there is no topic 'nowhere'"),
        ({"dead_letter_topic": "orders"}, "another topic than 'orders' itself"),
        ({"then": "dead_letter"}, "expected a topic with then='dead_letter'"),
    ],
)
def test_an_alteration_that_cannot_be_changes_nothing(
    wanted: dict[str, object], text: str
) -> None:
    """One sentence says why."""

    async def work(groups: QueueGroupDefinitions) -> None:
        old = await groups.ensure("g", "orders", DROP)
        with pytest.raises(ConfigError, match=text):
            await groups.alter("g", wanted)
        found = await groups.read()
        assert found == {"g": old}

    with embedded_broker(topics={"orders": 1}) as broker:
        ask(broker, work)


def test_without_zookeeper_there_are_no_queue_groups() -> None:
    """The sentence says what is expected."""

    async def main(broker: EmbeddedBroker) -> None:
        async with AsyncClient(brokers=[broker.address]) as client:
            with pytest.raises(ConfigError, match="queue groups are kept in ZooKeeper"):
                await reach_queue_groups(parts_of(client))

    with embedded_broker(topics={"orders": 1}) as broker:
        asyncio.run(main(broker))


def test_a_name_is_a_log_group_or_a_queue_group() -> None:
    """Whichever came first."""

    async def main(broker: EmbeddedBroker) -> None:
        async with AsyncClient(**broker.client_options) as client:
            groups = await reach_queue_groups(parts_of(client))
            async with client.consumer("log", ["orders"]):
                pass
            with pytest.raises(QueueGroupError, match="group 'log' is a log group"):
                await groups.ensure("log", "orders", DROP)
            await groups.ensure("queue", "orders", DROP)
            with pytest.raises(QueueGroupError, match="'queue' is a queue group"):
                async with client.consumer("queue", ["orders"]):
                    pass

    with embedded_broker(topics={"orders": 1}) as broker:
        asyncio.run(main(broker))


@pytest.mark.slow
def test_a_topic_that_is_made_again_has_none_of_its_acks() -> None:
    """The group stays, and gets what is put to the new topic, at the same offsets."""
    with (
        embedded_broker(topics={"mine": 1}) as broker,
        Client(**broker.client_options) as client,
    ):
        admin = client.admin()
        for count in (2, 3):
            admin.create_topic("orders", partitions=1)
            with client.producer() as producer:
                for number in range(count):
                    producer.send("orders", b"%d" % number)
            with client.queue("orders", group="g", then="drop") as queue:
                got = [queue.receive(30) for _ in range(count)]
                assert [each.data for each in got] == [b"0", b"1", b"2"][:count]
                assert {each.deliveries for each in got} == {1}
                queue.ack_many(got)
            admin.delete_topic("orders")


def test_a_log_consumer_that_was_refused_leaves_the_name_free() -> None:
    """Its node in ZooKeeper has neither members nor offsets: there is no log group."""

    async def main(broker: EmbeddedBroker) -> None:
        async with AsyncClient(**broker.client_options) as client:
            groups = await reach_queue_groups(parts_of(client))
            await groups.ensure("g", "orders", DROP)
            with pytest.raises(QueueGroupError, match="'g' is a queue group"):
                async with client.consumer("g", ["orders"]):
                    pass
            await client.admin().delete_queue_group("g")
            groups = await reach_queue_groups(parts_of(client))
            again = await groups.ensure("g", "orders", DROP)
            assert again.generation == 1

    with embedded_broker(topics={"orders": 1}) as broker:
        asyncio.run(main(broker))


def test_a_log_consumer_that_joins_at_the_same_moment_is_found() -> None:
    """It has registered after the first look, and before the group was written."""

    async def main(broker: EmbeddedBroker) -> None:
        async with AsyncClient(**broker.client_options) as client:
            context = parts_of(client)
            groups = await reach_queue_groups(context)
            write, instead = groups.write, cast("Any", groups)

            async def join_first(path: str, data: bytes, **options: Any) -> None:
                broker.zookeeper.put(context.paths.member("g", "m"), b"orders")
                await write(path, data, **options)

            instead.write = join_first
            with pytest.raises(QueueGroupError, match="'g' is a log group"):
                await groups.ensure("g", "orders", DROP)
            assert await groups.read() == {}

    with embedded_broker(topics={"orders": 1}) as broker:
        asyncio.run(main(broker))


def test_a_broker_keeps_its_groups_without_zookeeper() -> None:
    """From the copy on its disk."""

    async def work(groups: QueueGroupDefinitions) -> None:
        await groups.ensure("g", "orders", DROP)

    with embedded_broker(topics={"orders": 1}) as broker:
        ask(broker, work)
        copy = broker.data_path / "groups.json"
        wait_until(copy.exists)
        assert '"topic":"orders"' in copy.read_text()


def ack_first(broker: EmbeddedBroker) -> None:
    """Send two messages, and have the first one acknowledged."""
    with Client(**broker.client_options) as client:
        with client.producer() as producer:
            for data in (b"first", b"second"):
                producer.send("orders", data)
        with client.queue("orders", group="g", then="drop") as queue:
            message = queue.receive(30)
            assert message is not None
            message.ack()


def take_all(broker: EmbeddedBroker, count: int) -> list[tuple[bytes, int]]:
    """Return data and deliveries of what comes, acknowledged."""
    found = []
    with (
        Client(**broker.client_options) as client,
        client.queue("orders", group="g", then="drop") as queue,
    ):
        while len(found) < count:
            message = queue.receive(30)
            assert message is not None
            found.append((message.data, message.deliveries))
            message.ack()
        assert queue.receive(0.3) is None
    return found


@pytest.mark.slow
def test_what_is_done_outlives_a_definition_lost_by_zookeeper() -> None:
    """The group stays in effect, with an alarm; its next worker writes it again."""
    with embedded_broker(topics={"orders": 1}) as broker:
        ack_first(broker)
        broker.zookeeper.remove("/meta/catalog/groups/g")
        broker.restart()
        status = running_inside(broker).control.status
        wait_until(lambda: status().definition_problems)
        assert "its next worker writes it again" in status().definition_problems[0]
        assert take_all(broker, 1) == [(b"second", 1)]
        wait_until(lambda: not status().definition_problems)


@pytest.mark.slow
@pytest.mark.parametrize("is_written", [False, True])
def test_what_a_later_generation_has_done_outlives_its_loss(is_written: bool) -> None:
    """Also where a worker has written the first generation before the broker."""
    path = "/meta/catalog/groups/g"

    async def remake(groups: QueueGroupDefinitions) -> None:
        await groups.delete_group("g")
        assert (await groups.ensure("g", "orders", DROP)).generation == 1

    async def define(groups: QueueGroupDefinitions) -> None:
        assert (await groups.ensure("g", "orders", DROP)).generation == 0

    with embedded_broker(topics={"orders": 1}) as broker:
        ack_first(broker)
        ask(broker, remake)
        assert take_all(broker, 2) == [(b"first", 1), (b"second", 1)]
        with Client(**broker.client_options) as client, client.producer() as producer:
            producer.send("orders", b"third")
        broker.stop()
        broker.zookeeper.remove(path)
        if is_written:
            ask(broker, define)
        broker.start()

        def is_there() -> bool:
            node = broker.zookeeper.nodes.get(path)
            return node is not None and decode_group(node.data).generation == 1

        wait_until(is_there)
        assert take_all(broker, 1) == [(b"third", 1)]


@pytest.mark.slow
def test_a_group_made_again_while_its_broker_was_down_begins_anew() -> None:
    """It is another group of that name."""

    async def remake(groups: QueueGroupDefinitions) -> None:
        await groups.delete_group("g")
        found = await groups.ensure("g", "orders", DROP)
        assert found.generation == 1

    with embedded_broker(topics={"orders": 1}) as broker:
        ack_first(broker)
        broker.stop()
        ask(broker, remake)
        broker.start()
        assert take_all(broker, 2) == [(b"first", 1), (b"second", 1)]


def test_a_group_that_a_newer_version_has_made_is_named() -> None:
    """In every call that names it, and in lists; not as one that is missing."""
    newer = b'{"type":"stream","topic":"orders"}'
    with (
        embedded_broker(topics={"orders": 1}) as broker,
        Client(**broker.client_options) as client,
    ):
        broker.zookeeper.put("/meta/catalog/groups/g", newer)
        admin = client.admin()
        assert admin.queue_groups() == {}
        (sentence,) = admin.unread_definitions()
        assert sentence.startswith("definition of queue group 'g' cannot be read: ")

        def work() -> None:
            with client.queue("orders", group="g", then="drop"):
                pass

        for call in (
            lambda: admin.describe_queue_group("g"),
            lambda: admin.delete_queue_group("g"),
            work,
        ):
            with pytest.raises(CoordinationError, match="made by a newer version"):
                call()


@pytest.mark.slow
def test_a_worker_waits_for_a_broker_that_has_the_group_before() -> None:
    """A message that it would ack there would come again from the group made since."""
    made = QueueGroupDefinition(topic="orders", generation=1)

    async def define() -> QueueGroupDefinition:
        return made

    async def main(broker: EmbeddedBroker) -> None:
        async with AsyncClient(**broker.client_options) as client:
            context, options = parts_of(client), QueueOptions()
            groups = await reach_queue_groups(context)
            async with AsyncQueue(
                context, define, topic="orders", group="g", options=options
            ) as queue:
                assert await queue.receive(0.5) is None
                await groups.delete_group("g")
                assert await groups.ensure("g", "orders", DROP) == made
                message = await queue.receive(30)
                assert message is not None
                assert (message.data, message.deliveries) == (b"first", 1)
                await message.ack()

    with embedded_broker(topics={"orders": 1}) as broker:
        ack_first(broker)
        asyncio.run(main(broker))
