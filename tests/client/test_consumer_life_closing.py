"""A consumer that is closed while other tasks or threads wait for messages."""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from metaq.client import AsyncClient, Client, MemoryOffsets
from metaq.client.consume.consumer import AsyncConsumer
from metaq.errors import ClosedError
from metaq.model import GroupOffset, Message
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, QUICK
from tests.rigs.inside import loop_thread_of
from tests.rigs.waiting import until

KIB = 1024
OPTIONS: dict[str, Any] = {
    "fetch_bytes": 64 * KIB,
    "commit_interval_s": 3600.0,
    "revoke_timeout_s": 0.1,
    **IDLE,
}
"""Gets bring two of these tests' messages each, and close alone commits."""


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    broker = start_broker()
    broker.put(*(b"%d" % number + bytes(24 * KIB) for number in range(8)))
    return broker


class Store(MemoryOffsets):
    """Keeps the last commit to be looked at."""

    def committed(self) -> GroupOffset:
        return next(iter(self._offsets.values()))


def lost(seen: list[Message], committed: GroupOffset) -> int:
    """Return how many messages before a group offset were never handed out."""
    (first, *_), known = seen, {message.offset for message in seen}
    size_bytes = first.next_offset - first.offset
    return len(set(range(0, committed.offset, size_bytes)) - known)


def buffered(consumer: AsyncConsumer) -> int:
    buffers = consumer.fetch_buffer.statistics().values()
    return sum(buffer.buffered_count for buffer in buffers)


def test_what_is_received_while_a_consumer_closes_leaves_nothing_out(
    broker: AnyBroker,
) -> None:
    """A receive in another task, while the group takes its time to be left."""
    store, seen = Store(), list[Message]()

    async def scenario() -> None:
        async with AsyncClient(brokers=[broker.address], **QUICK) as client:
            consumer = client.consumer("g", ["test"], offsets=store, **OPTIONS)
            await consumer.start()
            seen.extend(await consumer.receive_many(1))
            await until(lambda: buffered(consumer) >= 2)
            stop = consumer._source.stop

            async def stop_slowly(**named: Any) -> None:
                for _ in range(3):
                    seen.extend(await consumer.receive_many(1, 0.01))
                await stop(**named)

            consumer._source.stop = stop_slowly
            await consumer.close()

    asyncio.run(scenario())
    assert lost(seen, store.committed()) == 0


def on_loop(client: Client, call: Callable[[], object]) -> BaseException | None:
    """Call something on the client's own thread; return what it raised."""
    ended, errors = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            call()
        except BaseException as error:  # handed to the test
            errors.append(error)
        ended.set()

    loop_thread_of(client).loop.call_soon_threadsafe(work)
    assert ended.wait(20)
    return errors[0] if errors else None


def test_a_callback_that_exits_leaves_the_client_at_work(broker: AnyBroker) -> None:
    """The thread that it ends would be shared: no send had an outcome any more."""
    with Client(**broker.client_options) as client, client.producer() as producer:
        producer.send_nowait("test", b"a").add_done_callback(lambda _: sys.exit(1))
        for _ in range(3):
            assert producer.send("test", b"b").offset


def test_a_close_that_is_refused_takes_no_messages(broker: AnyBroker) -> None:
    """On the client's own thread nothing can be closed, and nothing goes."""
    with Client(brokers=[broker.address], **QUICK) as client:
        consumer = client.consumer("g", ["test"], **OPTIONS)
        consumer.start()
        first = consumer.receive(20)
        assert isinstance(on_loop(client, consumer.close), ClosedError)
        second = consumer.receive(20)
        assert second.offset == first.next_offset
