"""The producer over sockets."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.app import Broker
from metaq.client.options import ClientOptions, ProducerOptions
from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.batches import SendFuture, SendResult
from metaq.client.produce.producer import AsyncProducer
from metaq.clock import SystemClock
from metaq.errors import ServerError
from metaq.model import BrokerAddress
from metaq.peer.pool import ConnectionPool
from metaq.protocol.commands import Get, Value
from metaq.protocol.texts import put_failed
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.testing.fake_broker import FakeBroker, FaultKind
from tests.brokers import AnyBroker, StartBroker
from tests.client.producing import FixedMetadata, context_of
from tests.rigs.broker import make_config
from tests.rigs.waiting import until

CLOCK = SystemClock()
CLIENT = ClientOptions(reconnect_first_s=0.005, reconnect_max_s=0.05)


ONE_BROKER = {
    "test_a_broker_that_restarts_under_load_loses_nothing": "another port; no doubles",
    "test_a_metaq_1_4_broker_gets_single_puts": "what it must not be sent",
    "test_a_metaq_1_4_broker_that_drops_connections": "connections cut on cue",
    "test_a_metaq_1_4_broker_that_is_about_to_register_gets_puts_again": "its text",
}


class Sending:
    """A producer, its pool and what it knows."""

    def __init__(self, partitions: int, options: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        self.metadata = FixedMetadata({})
        self.partitions = partitions
        self.pool = ConnectionPool(clock=CLOCK, options=CLIENT, loop=loop)
        context = context_of(self.pool, self.metadata, CLOCK)
        self.producer = AsyncProducer(
            context, ProducerOptions(**options), producer_id="tester"
        )

    def tell(self, address: BrokerAddress) -> None:
        self.metadata.tell({0: self.partitions}, {0: address})


@contextlib.asynccontextmanager
async def sending_to(
    address: BrokerAddress, *, partitions: int = 1, **options: Any
) -> AsyncIterator[Sending]:
    sending = Sending(partitions, options)
    sending.tell(address)
    try:
        async with sending.producer:
            yield sending
    finally:
        await sending.pool.close(deadline_s=CLOCK.monotonic_s() + 5)


def address_of(broker: Broker | AnyBroker) -> BrokerAddress:
    return BrokerAddress("127.0.0.1", broker.port)


async def read_log(sending: Sending, address: BrokerAddress) -> list[tuple[int, bytes]]:
    """Return (id, payload) of everything in partition 0."""
    deadline_s = CLOCK.monotonic_s() + 5
    connection = await sending.pool.get(address, deadline_s=deadline_s)
    found, offset = [], 0
    while True:
        opaque = connection.next_opaque()
        command = Get("test", "g", 0, offset, 1 << 20, opaque)
        reply = await connection.call(command, deadline_s=deadline_s)
        if not isinstance(reply, Value):
            return found
        position = 0
        while position + HEADER_BYTES <= len(reply.payload):
            length, _, number, _ = HEADER.unpack_from(reply.payload, position)
            end = position + HEADER_BYTES + length
            if end > len(reply.payload):
                break
            found.append((number, reply.payload[position + HEADER_BYTES : end]))
            position = end
        offset += position


@pytest.mark.slow
def test_results_are_what_the_broker_stored(start_broker: StartBroker) -> None:
    """Ids, offsets and bytes of every message, read back from the log."""

    broker = start_broker()

    async def main() -> None:
        async with sending_to(address_of(broker), batch_count_max=5000) as sending:
            one = [b"%d" % n for n in range(9000)]
            results = await sending.producer.send_many("test", one)
            last = await sending.producer.send("test", b"data", attribute="k=v")
            stored = await read_log(sending, address_of(broker))
            payloads = dict(stored)
            assert [payloads[r.message_id] for r in results] == one
            if broker.has_extensions:
                assert [payload for _, payload in stored[:-1]] == one
                assert last.offset == results[-1].offset + HEADER_BYTES + len(one[-1])
            assert stored[-1] == (last.message_id, b"\0\0\0\3k=vdata")

    asyncio.run(main())


def test_empty_messages_and_mixed_attributes_travel(start_broker: StartBroker) -> None:
    """No data, an empty attribute, and plain bytes in one batch."""

    broker = start_broker()

    async def main() -> None:
        messages = [
            b"",
            OutgoingMessage(b"", attribute=""),
            OutgoingMessage(b"x", attribute="é"),
            bytearray(b"y"),
            memoryview(b"z"),
        ]
        async with sending_to(address_of(broker)) as sending:
            await sending.producer.send_many("test", messages * 4)
            stored = await read_log(sending, address_of(broker))
            payloads = [b"", b"\0\0\0\0", b"\0\0\0\2\xc3\xa9x", b"y", b"z"]
            assert sorted(payload for _, payload in stored) == sorted(payloads * 4)

    asyncio.run(main())


def test_a_refusal_has_the_text_of_the_broker(start_broker: StartBroker) -> None:
    """A partition that the broker does not have: a 500, at once."""

    broker = start_broker()

    async def main() -> None:
        async with sending_to(address_of(broker)) as sending:
            with pytest.raises(ServerError, match="partition"):
                await sending.producer.send("test", b"x", partition="0-77")

    asyncio.run(main())


@pytest.mark.slow
def test_a_broker_that_restarts_under_load_loses_nothing(data_dir: Path) -> None:
    """Stopped and started on another port: every message is there, once, in order."""

    async def main() -> None:
        brokers = [Broker(make_config(data_dir))]
        await brokers[0].start()
        async with sending_to(address_of(brokers[0]), timeout_s=30) as sending:
            futures: list[SendFuture] = []

            async def load() -> None:
                for n in range(3000):
                    name = b"%05d" % n
                    futures.append(await sending.producer.send_nowait("test", name))
                    if n % 10 == 0:
                        await asyncio.sleep(0.001)

            task = asyncio.create_task(load())
            for count in (500, 1000, 1500):
                await until(lambda count=count: len(futures) >= count)  # type: ignore[misc]  # a loop
                await brokers[-1].stop()
                brokers.append(Broker(make_config(data_dir)))
                await brokers[-1].start()
                sending.tell(address_of(brokers[-1]))
            await task
            results = [await future for future in futures]
            found = await read_log(sending, address_of(brokers[-1]))
            stored = dict(found)
            for n, result in enumerate(results):
                assert stored[result.message_id] == b"%05d" % n
            assert [payload for _, payload in found] == [
                b"%05d" % n for n in range(3000)
            ]
        await brokers[-1].stop()

    asyncio.run(main())


def test_threads_send_through_one_accumulator(start_broker: StartBroker) -> None:
    """From any thread, results in any thread; the order of each thread is kept."""

    broker = start_broker()

    async def main() -> None:
        async with sending_to(address_of(broker), buffer_count_max=50) as sending:
            await sending.producer.prepare("test")
            accumulator = sending.producer.accumulator
            found: dict[str, list[SendResult]] = {}

            def work(name: str) -> None:
                futures = []
                for n in range(200):
                    data = f"{name}-{n}".encode()
                    while not accumulator.buffer.wait(30, message_count=5):
                        raise AssertionError("no room")
                    futures.append(accumulator.append("test", data))
                found[name] = [future.result(30) for future in futures]

            threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
            for thread in threads:
                thread.start()
            await until(lambda: not any(thread.is_alive() for thread in threads))
            stored = dict(await read_log(sending, address_of(broker)))
            for name, results in found.items():
                names = [stored[r.message_id].decode() for r in results]
                assert names == [f"{name}-{n}" for n in range(200)]
                if broker.has_extensions:
                    offsets = [r.offset for r in results]
                    assert offsets == sorted(offsets)

    asyncio.run(main())


@pytest.mark.slow
def test_one_in_flight_keeps_the_order_whatever_broker_it_is(
    start_broker: StartBroker,
) -> None:
    """MetaQ 1.4 stores what it has together as it likes."""
    broker = start_broker()
    sent = [b"%d" % n for n in range(100)]

    async def main() -> None:
        async with sending_to(address_of(broker), in_flight_batches_max=1) as sending:
            await sending.producer.send_many("test", sent)

    asyncio.run(main())
    assert broker.stored() == sent


def test_a_closed_partition_is_avoided(start_broker: StartBroker) -> None:
    """403 on one partition: the messages lie in the other."""
    broker = start_broker({"test": 2})
    broker.close_partition("test", 1)

    async def main() -> None:
        async with sending_to(address_of(broker), partitions=2) as sending:
            results = [await sending.producer.send("test", b"x") for _ in range(6)]
            assert {r.partition.partition for r in results} == {0}

    asyncio.run(main())


# -- MetaQ 1.4 ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_metaq_1_4_broker_gets_single_puts() -> None:
    """Pipelined, answered out of order and in pieces; each result is its own record."""

    async def main(fake: FakeBroker) -> None:
        fake.reorder, fake.split_bytes = True, 7
        async with sending_to(fake.address) as sending:
            sent = [b"%04d" % n for n in range(300)]
            results = await sending.producer.send_many("test", sent)
            by_id = {record.id: record.payload for record in fake.records()}
            assert [by_id[r.message_id] for r in results] == sent
            assert sorted(fake.payloads()) == sent
            assert "mput" not in fake.statistics().commands

    with FakeBroker() as fake:
        asyncio.run(main(fake))


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.DROP_STORED])
def test_a_metaq_1_4_broker_that_drops_connections(kind: FaultKind) -> None:
    """All are stored at least once, and every result names a record of its message."""

    async def main(fake: FakeBroker) -> None:
        fake.inject(kind, after=50)
        fake.inject(kind, after=120)
        async with sending_to(fake.address) as sending:
            sent = [b"%04d" % n for n in range(300)]
            results = await sending.producer.send_many("test", sent)
            by_id = {record.id: record.payload for record in fake.records()}
            assert [by_id[r.message_id] for r in results] == sent
            assert set(fake.payloads()) == set(sent)

    with FakeBroker() as fake:
        asyncio.run(main(fake))


@pytest.mark.slow
def test_a_metaq_1_4_broker_that_is_about_to_register_gets_puts_again() -> None:
    """It opens its port first, and refuses puts that register before it does."""
    detail = (
        "org.apache.zookeeper.KeeperException$NodeExistsException: "
        "KeeperErrorCode = NodeExists for /meta/brokers/topics/test/0-m"
    )
    text = put_failed("meta://127.0.0.1:8123", "test", 0, detail)

    async def main(fake: FakeBroker) -> None:
        fake.inject(FaultKind.DROP, after=1)
        fake.inject(FaultKind.REFUSE, after=1, count=3, body=text.encode())
        async with sending_to(fake.address) as sending:
            for data in (b"one", b"two", b"three"):
                await sending.producer.send("test", data)
        assert fake.payloads() == [b"one", b"two", b"three"]

    with FakeBroker() as fake:
        asyncio.run(main(fake))
