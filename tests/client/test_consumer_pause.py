"""A paused partition is neither fetched nor handed out, and is not called stuck."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import AsyncConsumer, Consumer
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.errors import ClosedError, ConfigError, MetaqError
from metaq.model import Message
from tests.brokers import StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, payloads
from tests.rigs.inside import fetchers_of, twin_of
from tests.rigs.waiting import wait_until

ZERO, ONE = partition(0, "two"), partition(1, "two")


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker({"test": 1, "two": 2})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"m%05d" % n for n in range(start, stop)]


def async_of(consumer: Any) -> AsyncConsumer:
    """Return the async consumer of either world."""
    is_sync = isinstance(consumer, Consumer)
    twin: AsyncConsumer = twin_of(consumer) if is_sync else consumer.twin
    return twin


def test_a_paused_partition_stays_and_the_others_go_on(
    broker: Any, client: Any
) -> None:
    for number in (0, 1):
        broker.put(*numbered(0, 20), topic="two", partition=number)
    with client.consumer("g", ["two"], **IDLE) as consumer:
        wait_until(lambda: len(consumer.assignment()) == 2)
        consumer.pause(["0-1"])
        assert consumer.paused() == {ONE}
        found = consumer.receive_many(20, 60, fill=True)
        assert {message.partition for message in found} == {ZERO}
        assert consumer.receive(0.02) is None
        consumer.resume([ONE])
        assert consumer.paused() == frozenset()
        assert payloads(consumer.receive_many(20, 60, fill=True)) == numbered(0, 20)


@pytest.mark.slow
def test_no_get_is_sent_for_a_paused_partition(broker: Any, client: Any) -> None:
    """The answer to a get that was in flight stays in the buffer."""
    with client.consumer("g", ["test"], **IDLE) as consumer:
        where = partition(0)
        wait_until(lambda: consumer.assignment() == {where})
        consumer.pause("0-0")
        fetches = consumer.statistics
        broker.put(*numbered(0, 3))
        assert consumer.receive_many(3, 0.05, fill=True) == []
        count = fetches().fetches[where].get_count
        assert consumer.receive(0.05) is None
        assert fetches().fetches[where].get_count == count
        consumer.resume("0-0")
        assert payloads(consumer.receive_many(3, 60, fill=True)) == numbered(0, 3)


def test_a_loop_in_the_middle_of_a_batch_hands_out_no_more(
    broker: Any, client: Any
) -> None:
    """The present message is handled when the next one is requested, as always."""
    store = MemoryOffsets()
    broker.put(*numbered(0, 10))
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        seen = []
        for message in consumer:
            seen.append(message.data)
            if len(seen) == 3:
                consumer.pause(message.partition)
                assert consumer.receive(0.02) is None
                assert (
                    async_of(consumer).fetch_buffer.handled()[message.partition].offset
                    == message.next_offset
                )
                consumer.resume(message.partition)
            if len(seen) == 10:
                break
        assert seen == numbered(0, 10)


def test_handlers_get_nothing_of_a_paused_partition(broker: Any) -> None:
    """Also not what their worker has taken; it comes when it is resumed."""
    broker.put(*numbered(0, 10))
    for name, world in WORLDS.items():
        with world(brokers=[broker.address], **QUICK) as client:
            consumer = client.consumer(f"g-{name}", ["test"], **IDLE)
            with consumer:
                run_and_pause(consumer, is_async=name == "async")


def run_and_pause(consumer: Any, *, is_async: bool) -> None:
    twin = async_of(consumer)
    seen: list[bytes] = []
    is_paused = threading.Event()

    def handle(message: Message) -> None:
        seen.append(message.data)
        if len(seen) == 4:
            twin.pause("0-0")
            is_paused.set()

    async def handle_async(message: Message) -> None:
        handle(message)

    running = threading.Thread(
        target=consumer.run, args=[handle_async if is_async else handle]
    )
    running.start()
    is_paused.wait(60)
    buffer = twin.fetch_buffer
    wait_until(lambda: not buffer.statistics()[partition(0)].is_taken)
    assert seen == numbered(0, 4)
    last = buffer.handled()[partition(0)].offset
    consumer.resume("0-0")
    wait_until(lambda: len(seen) == 10)
    assert seen == numbered(0, 10)
    assert last < buffer.handled()[partition(0)].offset
    consumer.close()
    running.join(60)


def test_a_seek_keeps_a_pause_and_a_loss_ends_it(broker: Any, client: Any) -> None:
    offsets = broker.put(*numbered(0, 5))
    where = partition(0)
    with client.consumer("g", ["test"], **IDLE) as consumer:
        assert consumer.receive(60).data == b"m00000"
        consumer.pause(where)
        consumer.seek(where, offsets[0])
        assert consumer.paused() == {where}
        assert consumer.receive(0.02) is None
        consumer.resume(where)
        assert consumer.receive(60).data == b"m00000"
        consumer.pause(where)
        buffer = async_of(consumer).fetch_buffer
        handled = buffer.fence(where)
        assert handled is not None
        buffer.add(where, handled)
        assert consumer.paused() == frozenset()


def test_health_names_what_is_paused_and_it_is_no_problem(client: Any) -> None:
    with client.consumer("g", ["two"], **IDLE) as consumer:
        wait_until(lambda: len(consumer.assignment()) == 2)
        assert consumer.health().waiting_for is None
        consumer.pause([ZERO, "0-1"])
        health = consumer.health()
        assert health.waiting_for == "partitions two/0-0, two/0-1 paused"
        assert health.is_ok
        consumer.resume([ZERO, ONE])
        assert consumer.health().waiting_for is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"buffer_count_max": 1},
            "buffer_count_max=1 messages fetched and not handed out",
        ),
        (
            {"buffer_bytes_max": 1},
            "buffer_bytes_max=1 bytes fetched and not handed out",
        ),
        ({"fetch_bytes": 65536}, "2 gets of test/0-0 fetched and not handed out"),
    ],
)
def test_health_names_the_bound_of_the_buffer(
    broker: Any, client: Any, options: dict[str, Any], text: str
) -> None:
    broker.put(*([bytes(20_000)] * 20))
    with client.consumer("g", ["test"], **options, **IDLE) as consumer:
        wait_until(lambda: consumer.health().waiting_for == text)
        assert consumer.health().is_ok


def test_health_names_handlers_that_are_all_at_work(broker: Any, client: Any) -> None:
    """A bound is reached because they are."""
    broker.put(*([bytes(20_000)] * 20))
    is_over = threading.Event()
    is_async = not isinstance(client, WORLDS["sync"])

    def handle(_message: Message) -> None:
        is_over.wait(60)

    async def handle_async(message: Message) -> None:
        await asyncio.to_thread(handle, message)

    options = {"buffer_count_max": 1, "fetch_bytes": 65536, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        running = threading.Thread(
            target=consumer.run, args=[handle_async if is_async else handle]
        )
        running.start()
        wait_until(
            lambda: (consumer.health().waiting_for or "").endswith(
                "fetched and not handed out; handlers (concurrency=1)"
            )
        )
        is_over.set()
        consumer.close()
        running.join(60)


def test_what_is_no_partition_of_ours_is_refused(client: Any) -> None:
    with client.consumer("g", ["test", "two"], **IDLE) as consumer:
        wait_until(lambda: len(consumer.assignment()) == 3)
        other = partition(7, "two")
        with pytest.raises(ClosedError, match="two/0-7: not assigned"):
            consumer.pause([ZERO, other])
        assert consumer.paused() == frozenset()
        consumer.resume([other])
        with pytest.raises(ConfigError, match="'0-0' may be of any of 2 topics"):
            consumer.pause("0-0")
        with pytest.raises(TypeError, match="expected TopicPartition or str, got int"):
            consumer.pause([1])
        with pytest.raises(ConfigError, match="expected a name as '0-3', got 'x'"):
            consumer.resume(["x"])


@pytest.mark.slow
def test_a_paused_partition_with_data_is_not_stuck_until_it_is_resumed(
    broker: Any, client: Any
) -> None:
    """A fetcher that stopped is found by the watchdog, but not during the pause."""
    where = partition(0)
    with client.consumer("g", ["test"], watchdog_s=0.1, **IDLE) as consumer:
        wait_until(lambda: consumer.assignment() == {where})
        consumer.pause(where)
        fetchers_of(async_of(consumer))[where].stop()
        broker.put(*numbered(0, 3))
        assert consumer.receive(0.6) is None
        assert consumer.health().is_ok
        consumer.resume(where)
        with pytest.raises(MetaqError, match="test/0-0: no progress"):
            consumer.receive(30)
