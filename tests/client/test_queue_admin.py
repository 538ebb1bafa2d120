"""Queue groups for an administrator."""

import asyncio
import re
from dataclasses import replace

import pytest

from metaq.client import AsyncClient, Client, NoQueuesError
from metaq.client.admin.queue_admin import read_lines
from metaq.client.errors import QueueGroupError
from metaq.errors import ClientError, ConfigError, FilterError, RemoteProtocolError
from metaq.model import BrokerId
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.testing.fake_broker import FakeBroker

ONE_BROKER = {
    "test_a_group_is_described_and_deleted": "MetaQ has no queue groups",
    "test_messages_at_a_broker_of_metaq_1_4_are_no_end_of_a_group": "it has both",
    "test_a_topic_at_brokers_of_metaq_1_4_alone_is_called_that": "likewise",
    "test_a_group_with_a_filter_has_what_matches_alone": "likewise",
    "test_an_altered_group_goes_by_its_options_from_then_on": "likewise",
    "test_an_altered_filter_is_of_what_comes_then": "likewise",
}


def test_a_group_is_described_and_deleted() -> None:
    """By partition, as brokers have it in memory; one that is not there is named."""

    async def main(broker: EmbeddedBroker) -> None:
        async with AsyncClient(**broker.client_options) as client:
            admin = client.admin()
            async with client.producer() as producer:
                for number in range(4):
                    await producer.send("orders", b"%d" % number)
            await admin.create_queue_group("g", "orders", then="drop")
            while not (found := await admin.describe_queue_group("g")).queues:
                await asyncio.sleep(0.01)  # the broker has it within moments
            (one,) = found.queues
            assert (one.ready_count, one.unread_count) == (0, 4)
            async with client.queue("orders", group="g", then="drop") as queue:
                first = await queue.receive(30)
                assert first is not None
                await first.ack()
                found = await admin.describe_queue_group("g")
                assert found.definition.topic == "orders"
                (one,) = found.queues
                assert (one.open_count, one.unread_count) == (3, 0)
                assert (one.done_count, one.floor, one.oldest_s) > (0, 0, 0.0)
                assert one.held == {queue.worker: 3}
                assert found.problems == ()
            assert list(await admin.queue_groups()) == ["g"]
            await admin.delete_queue_group("g")
            with pytest.raises(ClientError, match="no queue group g"):
                await admin.delete_queue_group("g")
            with pytest.raises(ClientError, match="existing groups: none"):
                await admin.describe_queue_group("g")

    with embedded_broker(topics={"orders": 1}) as broker:
        asyncio.run(main(broker))


def test_messages_at_a_broker_of_metaq_1_4_are_no_end_of_a_group() -> None:
    """That broker has no queue of the group: it is named, as one that is away is."""
    with embedded_broker(topics={"orders": 1, "own": 1}) as broker:
        legacy = FakeBroker(
            {"orders": 1}, broker_id=9, coordinator=broker.zookeeper.coordinator
        )
        with legacy, Client(**broker.client_options) as client:
            admin = client.admin()
            for topic in ("orders", "own"):
                admin.create_queue_group(f"{topic}-workers", topic, then="drop")
            (problem,) = admin.describe_queue_group("orders-workers").problems
            assert problem.startswith("broker 9 cannot be asked: it has no queue group")
            assert admin.describe_queue_group("own-workers").problems == ()
            with pytest.raises(
                NoQueuesError, match=r"broker 9 .* does not support queue groups"
            ):
                client.queue("orders", group="orders-workers").__enter__().receive(10)


def test_a_topic_at_brokers_of_metaq_1_4_alone_is_called_that() -> None:
    """It was called missing, with a command that then says that it exists."""
    with embedded_broker(topics={"orders": 1}) as broker:
        legacy = FakeBroker(
            {"old": 1}, broker_id=9, coordinator=broker.zookeeper.coordinator
        )
        with legacy, Client(**broker.client_options) as client:
            create = client.admin().create_queue_group
            at_those = "topic 'old' is only at brokers of MetaQ 1.4"
            with pytest.raises(ConfigError, match=f"^topic: {at_those}"):
                create("g", "old", then="drop")
            with pytest.raises(ConfigError, match=f"^dead_letter_topic: {at_those}"):
                create("g", "orders", dead_letter_topic="old")
            worker = client.queue("old", group="g", then="drop")
            with pytest.raises(ConfigError, match=f"^topic: {at_those}"):
                worker.__enter__()
            # A consumer would be refused a group that a refused worker has left.
            assert client.admin().queue_groups() == {}


@pytest.mark.slow
def test_a_group_with_a_filter_has_what_matches_alone() -> None:
    """Its first worker says it; another one may repeat it, and none says otherwise."""
    paid = "tag = 'paid'"

    async def main(broker: EmbeddedBroker) -> None:
        async with AsyncClient(**broker.client_options) as client:
            async with client.producer() as producer:
                for tag in (b"void", b"paid", b"void"):
                    await producer.send("orders", tag, headers={"tag": tag})
            options = {"group": "g", "then": "drop"}
            with pytest.raises(FilterError, match="column 6: expected"):
                async with client.queue("orders", **options, where="tag ="):
                    pass
            async with client.queue("orders", **options, where=paid) as queue:
                message = await queue.receive(30)
                assert message is not None
                assert message.data == b"paid"
                await message.ack()
                assert await queue.receive(0.2) is None
            admin = client.admin()
            found = await admin.describe_queue_group("g")
            assert found.definition.where == paid
            assert (found.queues[0].done_count, found.queues[0].passed_count) == (3, 2)
            assert found.queues[0].floor == found.queues[0].end
            other = "other options: where is \"tag = 'paid'\", got \"tag = 'x'\""
            with pytest.raises(QueueGroupError, match=re.escape(other)):
                async with client.queue("orders", **options, where="tag = 'x'"):
                    pass
            async with client.queue("orders", **options):
                pass
            altered = await admin.alter_queue_group("g", lease_s=60)
            assert altered.where == paid

    with embedded_broker(topics={"orders": 1}) as broker:
        asyncio.run(main(broker))


@pytest.mark.slow
def test_an_altered_group_goes_by_its_options_from_then_on() -> None:
    """A worker that runs gets its next deliveries by them."""

    async def main(broker: EmbeddedBroker) -> None:
        async with AsyncClient(**broker.client_options) as client:
            admin = client.admin()
            made = await admin.create_queue_group(
                "g", "orders", then="drop", deliveries_max=1000, retry_delays_s=(0.1,)
            )
            assert (made.lease_ms, made.deliveries_max) == (30_000, 1000)
            async with client.producer() as producer:
                await producer.send("orders", b"bad")
            new = await admin.alter_queue_group(
                "g", deliveries_max=1, dead_letter_topic="dead"
            )
            assert new == replace(made, deliveries_max=1, dead_letter_topic="dead")
            letters: list[bytes] = []
            async with client.queue("orders", group="g") as queue:
                while not letters:
                    # Brokers have it within moments.
                    message = await queue.receive(1)
                    if message is not None:
                        await message.nack()
                    letters = [each.data async for each in client.browse("dead")]
            assert letters == [b"bad"]
            with pytest.raises(ClientError, match="no queue group other"):
                await admin.alter_queue_group("other", then="drop")

    with embedded_broker(topics={"orders": 1, "dead": 1}) as broker:
        asyncio.run(main(broker))


@pytest.mark.slow
def test_an_altered_filter_is_of_what_comes_then() -> None:
    """Messages that the old one passed over do not come; "" is no filter."""

    async def main(broker: EmbeddedBroker) -> None:
        async with AsyncClient(**broker.client_options) as client:
            admin, found = client.admin(), list[str | None]()
            await admin.create_queue_group(
                "g", "orders", then="drop", where="key = 'a'"
            )

            async def receive_until(tag: str | None) -> None:
                found.clear()
                while tag not in found:
                    for one in ("new", None):  # brokers have it within moments
                        await producer.send("orders", b"", key="b", tag=one)
                    while (message := await queue.receive(0.2)) is not None:
                        await message.ack()
                        found.append(message.tag)

            async with (
                client.producer() as producer,
                client.queue("orders", group="g") as queue,
            ):
                await producer.send("orders", b"", key="b")
                await producer.send("orders", b"", key="a", tag="old")
                first = await queue.receive()
                assert first is not None
                assert first.tag == "old"
                await first.ack()
                new = await admin.alter_queue_group("g", where="tag = 'new'")
                assert new.where == "tag = 'new'"
                await receive_until("new")
                assert set(found) == {"new"}
                new = await admin.alter_queue_group("g", where="")
                assert new.where is None
                await receive_until(None)
            with pytest.raises(FilterError, match="column 6: expected"):
                await admin.alter_queue_group("g", where="tag =")

    with embedded_broker(topics={"orders": 1}) as broker:
        asyncio.run(main(broker))


@pytest.mark.parametrize(
    "line", ["{", '{"group": "g"}', '{"group": "g", "topic": "t", "partition": 0}']
)
def test_an_answer_that_makes_no_sense_is_named(line: str) -> None:
    """And one of a broker without queue groups has nothing."""
    with pytest.raises(RemoteProtocolError, match="stats queues"):
        list(read_lines(f"STATS\r\n{line}\r\nEND\r\n", BrokerId(0)))
    assert not [*read_lines("STATS\r\nqueues\r\nresultCode 1\r\nEND", BrokerId(0))]
