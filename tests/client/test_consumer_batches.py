"""Batches and full lists: over gets and partitions, until count, bytes or time."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from metaq.client import AsyncConsumer, Consumer, ConsumerState
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.errors import ClientError, ConfigError, MetaqError, OwnershipLostError
from tests.brokers import StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, payloads
from tests.rigs.inside import redeliver, twin_of
from tests.rigs.waiting import PATIENCE_S, wait_until

ZERO, ONE = partition(0, "two"), partition(1, "two")
MANUAL: dict[str, Any] = {"commit_interval_s": None, **IDLE}
FEW: dict[str, Any] = {"fetch_bytes": 65536, **IDLE}
"""A get brings three of the `wide` messages."""


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker({"test": 1, "two": 2})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"m%05d" % n for n in range(start, stop)]


def wide(start: int, stop: int) -> list[bytes]:
    return [text + bytes(20_000) for text in numbered(start, stop)]


def async_of(consumer: Any) -> AsyncConsumer:
    """Return the async consumer of either world."""
    is_sync = isinstance(consumer, Consumer)
    twin: AsyncConsumer = twin_of(consumer) if is_sync else consumer.twin
    return twin


# -- full lists -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_list_is_of_several_gets(broker: Any, client: Any) -> None:
    """In order, and handled when the next one is requested."""
    broker.put(*wide(0, 60))
    with client.consumer("g", ["test"], **FEW) as consumer:
        assert payloads(consumer.receive_many(50, 60, fill=True)) == wide(0, 50)
        assert payloads(consumer.receive_many(9, 60, fill=True)) == wide(50, 59)
        assert payloads(consumer.receive_many(9, 0.02, fill=True)) == wide(59, 60)
        assert consumer.receive_many(9, 0.02, fill=True) == []


def test_a_full_list_is_of_several_partitions(broker: Any, client: Any) -> None:
    for number in (0, 1):
        broker.put(*wide(0, 30), topic="two", partition=number)
    with client.consumer("g", ["two"], **FEW) as consumer:
        found = consumer.receive_many(60, 60, fill=True)
    for one in (ZERO, ONE):
        part = [message for message in found if message.partition == one]
        assert payloads(part) == wide(0, 30)


def test_one_commit_is_for_the_whole_list(broker: Any, client: Any) -> None:
    """Without it all of them come again, from every partition."""
    for number in (0, 1):
        broker.put(*numbered(0, 10), topic="two", partition=number)
    store = MemoryOffsets()
    options = {"offsets": store, **MANUAL}
    with (
        contextlib.suppress(ZeroDivisionError),
        client.consumer("g", ["two"], **options) as consumer,
    ):
        assert len(consumer.receive_many(20, 60, fill=True)) == 20
        raise ZeroDivisionError
    with client.consumer("g", ["two"], **options) as consumer:
        assert len(consumer.receive_many(20, 60, fill=True)) == 20
        consumer.commit()
    with client.consumer("g", ["two"], **options) as consumer:
        assert consumer.receive_many(20, 0.02, fill=True) == []


def test_a_list_that_waits_is_filled_by_what_comes(broker: Any, client: Any) -> None:
    """Also when it comes in the partition of which the list has messages."""
    broker.put(*numbered(0, 3))
    with (
        client.consumer("g", ["test"], **IDLE) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        filling = pool.submit(consumer.receive_many, 6, 60, fill=True)
        fetch_buffer = async_of(consumer).fetch_buffer
        wait_until(lambda: fetch_buffer.has_waiters)
        broker.put(*numbered(3, 6))
        assert payloads(filling.result()) == numbered(0, 6)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_partition_that_goes_while_a_list_is_filled_is_left_out(
    broker: Any, client: Any, is_lost: bool
) -> None:
    """It is given back at once: nobody works on its messages."""
    for number in (0, 1):
        broker.put(*numbered(0, 3), topic="two", partition=number)
    with (
        client.consumer("g", ["two"], **IDLE) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        filling = pool.submit(consumer.receive_many, 7, PATIENCE_S, fill=True)
        fetch_buffer = async_of(consumer).fetch_buffer
        wait_until(
            lambda: (
                [one.is_taken for one in fetch_buffer.statistics().values()]
                == [True] * 2
                and fetch_buffer.has_waiters
            )
        )
        if is_lost:
            fetch_buffer.fence(ZERO)
        else:
            consumer.pause(ZERO)
            wait_until(lambda: not fetch_buffer.statistics()[ZERO].is_taken)
        broker.put(*numbered(3, 7), topic="two", partition=1)
        assert {message.partition for message in filling.result()} == {ONE}
        assert is_lost or fetch_buffer.handled()[ZERO].offset == 0


# -- brokers that come and go ---------------------------------------------------------


def fill_list(consumer: Any, count: int) -> list[bytes]:
    return payloads(consumer.receive_many(count, 60, fill=True))


def next_batch(consumer: Any, count: int) -> list[bytes]:
    batches = consumer.batches(max_count=count, max_wait_s=60)
    found = [message.data for message in next(batches)]
    batches.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("read", [fill_list, next_batch])
@pytest.mark.parametrize("world", WORLDS)
def test_a_wait_ends_with_the_messages_of_a_broker_that_comes_late(
    start_broker: StartBroker, world: str, read: Callable[[Any, int], list[bytes]]
) -> None:
    """Nobody has to ask again."""
    broker = start_broker({"test": 1})
    broker.stop()
    with (
        WORLDS[world](**broker.client_options, **QUICK) as client,
        client.consumer("g", ["test"], **IDLE) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(read, consumer, 3)
        wait_until(lambda: async_of(consumer).fetch_buffer.has_waiters)
        broker.start()
        broker.put(*numbered(0, 3))
        assert waiting.result() == numbered(0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("read", [fill_list, next_batch])
def test_a_wait_ends_with_the_messages_of_a_broker_that_refused_gets(
    broker: Any, client: Any, read: Callable[[Any, int], list[bytes]]
) -> None:
    """A refusal is no end of the wait, nor an error of it; `health` has it."""
    broker.put(*numbered(0, 2))
    broker.close_partition()
    with (
        client.consumer("g", ["test"], **IDLE) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(read, consumer, 3)
        wait_until(lambda: consumer.health().problems)
        assert consumer.health().state is ConsumerState.RUNNING
        assert not waiting.done()
        broker.open_partition()
        broker.put(*numbered(2, 3))
        assert waiting.result() == numbered(0, 3)


# -- batches --------------------------------------------------------------------------


def test_batches_have_counts_and_the_offsets_where_they_begin_and_end(
    broker: Any, client: Any
) -> None:
    """The next batch begins where the one before ended."""
    offsets = broker.put(*wide(0, 25))
    where = partition(0)
    with client.consumer("g", ["test"], **FEW) as consumer:
        sizes, ends, found = [], [offsets[0]], []
        for batch in consumer.batches(max_count=10, max_wait_s=0.05):
            sizes.append(len(batch))
            assert batch.begins == {where: ends[-1]}
            ends.append(batch.offsets[where])
            found += [message.data for message in batch]
            assert batch[0].data == found[-len(batch)]
            assert payloads(batch[:]) == found[-len(batch) :]
            assert "messages: test/0-0" in repr(batch)
            if len(found) == 25:
                break
    assert found == wide(0, 25)
    assert max(sizes) <= 10
    assert set(offsets) >= set(ends[:-1])


def test_a_batch_is_bounded_in_bytes_and_has_one_message_at_least(
    broker: Any, client: Any
) -> None:
    broker.put(b"a", b"b", bytes(3000), b"c")
    with client.consumer("g", ["test"], **IDLE) as consumer:
        batches = consumer.batches(max_bytes=1000, max_wait_s=60)
        sizes = [list(map(len, payloads(next(batches)))) for _ in range(2)]
    assert sizes == [[1, 1], [3000]]


def test_a_batch_is_handed_out_when_its_time_is_over(broker: Any, client: Any) -> None:
    """The time runs from the first message; without messages there is no batch."""
    with (
        client.consumer("g", ["test"], **IDLE) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        batches = consumer.batches(max_count=10, max_wait_s=0.01)
        first = pool.submit(next, batches)
        fetch_buffer = async_of(consumer).fetch_buffer
        wait_until(lambda: fetch_buffer.has_waiters)
        broker.put(b"a")
        assert payloads(first.result()) == [b"a"]
        pool.submit(batches.close).result()


def test_messages_of_a_batch_are_handled_when_the_next_is_requested(
    broker: Any, client: Any
) -> None:
    broker.put(*numbered(0, 10))
    store = MemoryOffsets()
    options = {"offsets": store, **IDLE}
    with (
        contextlib.suppress(ZeroDivisionError),
        client.consumer("g", ["test"], **options) as consumer,
    ):
        for number, batch in enumerate(consumer.batches(max_count=4, max_wait_s=60)):
            assert payloads(batch) == numbered(4 * number, 4 * number + 4)
            if number == 1:
                raise ZeroDivisionError
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(consumer.receive_many(6, 60, fill=True)) == numbered(4, 10)


def test_the_commit_of_a_batch_is_of_its_messages_alone(
    broker: Any, client: Any
) -> None:
    """Also when the next ones were requested: those are not handled."""
    broker.put(*numbered(0, 10))
    store = MemoryOffsets()
    options = {"offsets": store, **MANUAL}
    with (
        contextlib.suppress(ZeroDivisionError),
        client.consumer("g", ["test"], **options) as consumer,
    ):
        batches = consumer.batches(max_count=3, max_wait_s=60)
        first = next(batches)
        first.commit()
        assert consumer.committed() == first.offsets
        second = next(batches)
        third = next(batches)
        assert third.is_last
        second.commit()
        assert consumer.committed() == second.offsets
        raise ZeroDivisionError
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(consumer.receive_many(4, 60, fill=True)) == numbered(6, 10)


def test_a_lost_partition_is_reported_and_the_others_are_committed(
    broker: Any, client: Any
) -> None:
    for number in (0, 1):
        broker.put(*numbered(0, 5), topic="two", partition=number)
    store = MemoryOffsets()
    options = {"offsets": store, **MANUAL}
    with client.consumer("g", ["two"], **options) as consumer:
        batch = next(consumer.batches(max_count=10, max_wait_s=60))
        assert set(batch.offsets) == {ZERO, ONE}
        async_of(consumer).fetch_buffer.fence(ZERO)
        with pytest.raises(OwnershipLostError, match="two/0-0: lost"):
            batch.commit()
    with client.consumer("g", ["two"], **options) as consumer:
        again = consumer.receive_many(5, 60, fill=True)
        assert {message.partition for message in again} == {ZERO}
        assert consumer.receive_many(5, 0.02, fill=True) == []


def test_a_batch_that_is_given_back_comes_again(broker: Any, client: Any) -> None:
    """Without the partitions that were taken away."""
    for number in (0, 1):
        broker.put(*numbered(0, 5), topic="two", partition=number)
    with client.consumer("g", ["two"], **MANUAL) as consumer:
        twin = async_of(consumer)
        batches = consumer.batches(max_count=10, max_wait_s=60)
        first = next(batches)
        redeliver(twin, first)
        second = next(batches)
        assert sorted(second) == sorted(first)
        twin.fetch_buffer.fence(ONE)
        redeliver(twin, second)
        third = consumer.receive_many(10, 0.02, fill=True)
        assert third == [each for each in first if each.partition == ZERO]


def test_batches_end_with_the_consumer_after_what_was_fetched(
    broker: Any, client: Any
) -> None:
    """A failure comes after the messages fetched before it."""
    broker.put(*numbered(0, 3))
    with client.consumer("g", ["test"], **IDLE) as consumer:
        batches = consumer.batches(max_count=2, max_wait_s=60)
        assert len(next(batches)) == 2
        async_of(consumer).fetch_buffer.fail(MetaqError("over"))
        assert payloads(next(batches)) == numbered(2, 3)
        with pytest.raises(MetaqError, match="over"):
            next(batches)
    with client.consumer("g", ["test"], **IDLE) as consumer:
        batches = consumer.batches()
        consumer.close()
        assert list(batches) == []


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"max_count": 0}, "max_count: expected 1 or more, got 0"),
        ({"max_bytes": 0}, "max_bytes: expected 1 or more, got 0"),
        ({"max_wait_s": -1}, "max_wait_s: expected 0 to"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(
    client: Any, bounds: dict[str, Any], text: str
) -> None:
    with (
        client.consumer("g", ["test"], **IDLE) as consumer,
        pytest.raises(ConfigError, match=text),
    ):
        next(consumer.batches(**bounds))


def test_a_second_reader_beside_batches_is_refused(broker: Any, client: Any) -> None:
    broker.put(*numbered(0, 3))
    with (
        client.consumer("g", ["test"], **IDLE) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        filling = pool.submit(consumer.receive_many, 4, 60, fill=True)
        fetch_buffer = async_of(consumer).fetch_buffer
        wait_until(lambda: fetch_buffer.has_waiters)
        with pytest.raises(ClientError, match="two tasks or threads read this"):
            consumer.receive_many(1, 60, fill=True)
        broker.put(b"last")
        assert len(filling.result()) == 4
