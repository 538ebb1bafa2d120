"""Queue groups as an administrator sees them."""

import asyncio

import pytest

from metaq.client import AsyncClient
from metaq.errors import ClientError
from metaq.testing.embedded import EmbeddedBroker, embedded_broker

ONE_BROKER = {
    "test_a_group_is_described_and_deleted": "MetaQ has no queue groups",
}


def test_a_group_is_described_and_deleted() -> None:
    """By partition, as brokers have it in memory; one that is not there is named."""

    async def main(broker: EmbeddedBroker) -> None:
        async with AsyncClient(**broker.client_options) as client:
            admin = client.admin()
            async with client.producer() as producer:
                for number in range(4):
                    await producer.send("orders", b"%d" % number)
            async with client.queue("orders", group="g", then="drop") as queue:
                first = await queue.receive(30)
                assert first is not None
                await first.ack()
                found = await admin.describe_queue_group("g")
                assert found.definition.topic == "orders"
                (one,) = found.queues
                assert (one.open_count, one.worker_count, one.lost_count) == (3, 1, 0)
                assert (one.done_count, one.floor, one.oldest_s) > (0, 0, 0.0)
                assert one.held == {queue.worker: 3}
                assert found.problems == ()
            assert list(await admin.queue_groups()) == ["g"]
            await admin.delete_queue_group("g")
            with pytest.raises(ClientError, match="no queue group g"):
                await admin.delete_queue_group("g")
            with pytest.raises(ClientError, match="groups there are: none"):
                await admin.describe_queue_group("g")

    with embedded_broker(topics={"orders": 1}) as broker:
        asyncio.run(main(broker))
