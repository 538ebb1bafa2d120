"""The async client: start, objects that it closes, and cancellation."""

import asyncio
import gc
import math
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from metaq.client import AsyncClient
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.errors import ClosedError, ConfigError
from metaq.model import Offset, TopicPartition
from metaq.testing.fake_broker import FakeBroker, FaultKind
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.session import SessionState
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, QUICK, parts_of
from tests.rigs.inside import sleepers_of, subscription_of
from tests.rigs.waiting import until

ONE_BROKER = {
    "test_a_cancelled_close_of_a_client_closes_all_of_it": "a put that is not answered"
}


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker()


def run(broker: AnyBroker, scenario: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            async with AsyncClient(brokers=[broker.address], **QUICK) as client:
                await scenario(client)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        assert not rest, rest

    asyncio.run(main())


def test_before_and_after_its_block_a_client_makes_nothing(broker: AnyBroker) -> None:
    async def scenario() -> None:
        client = AsyncClient(brokers=[broker.address], **QUICK)
        with pytest.raises(ClosedError, match="not started"):
            client.producer()
        async with client:
            pass
        with pytest.raises(ClosedError, match="closed"):
            client.consumer("g", ["test"])
        with pytest.raises(ClosedError, match="started only once"):
            await client.start()
        await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_client_that_was_not_closed_is_reported(*, is_closed: bool) -> None:
    """As files and sockets of Python are; not one that was never started."""

    async def scenario() -> None:
        AsyncClient(brokers=["127.0.0.1:1"])
        client = AsyncClient(brokers=["127.0.0.1:1"])
        await client.start()
        if is_closed:
            await client.close()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(scenario())
        gc.collect()
    texts = [str(one.message) for one in found]
    reports = [text for text in texts if "AsyncClient of brokers" in text]
    assert ["was not closed" in text for text in reports] == [True] * (not is_closed)


def test_closing_the_client_closes_what_was_made_from_it(broker: AnyBroker) -> None:
    broker.put(b"0", b"1", b"2")
    store = MemoryOffsets()

    async def scenario(client: AsyncClient) -> None:
        producer = client.producer()
        consumer = client.consumer("g", ["test"], offsets=store, **IDLE)
        await consumer.start()
        assert len(await consumer.receive_many(2, 30)) >= 1
        await client.close()
        assert consumer.is_closed
        assert producer.is_closed
        with pytest.raises(ClosedError):
            await consumer.receive(1)

    run(broker, scenario)


def test_consumers_are_closed_before_producers(broker: AnyBroker) -> None:
    """A handler at work may still want to send."""
    order: list[str] = []

    async def scenario(client: AsyncClient) -> None:
        consumer = client.consumer("g", ["test"], **IDLE)
        producer = client.producer()
        for name, child in (("consumer", consumer), ("producer", producer)):
            _note_close(child, name, order)

    run(broker, scenario)
    assert order == ["consumer", "producer"]


def _note_close(child: Any, name: str, order: list[str]) -> None:
    close = child.close

    async def note(timeout: float | None = None) -> None:
        order.append(name)
        await close(timeout)

    child.close = note


def test_a_cancelled_receive_loses_nothing(broker: AnyBroker) -> None:
    """Cancelled at every point of its way, over and over."""
    count = 300

    async def scenario(client: AsyncClient) -> None:
        found: list[int] = []
        ends: list[int] = []
        async with client.consumer("g", ["test"], fetch_bytes=65536, **IDLE) as one:
            cancelled = 0
            while len(found) < count:
                if len(found) + cancelled < count:
                    text = b"%d" % (len(found) + cancelled)
                    ends += await asyncio.to_thread(broker.put, text)
                task = asyncio.ensure_future(one.receive(30))
                for _ in range(cancelled % 7):
                    await asyncio.sleep(0)
                if cancelled < count - 1 and cancelled % 2:
                    task.cancel()
                results = await asyncio.gather(task, return_exceptions=True)
                if isinstance(results[0], asyncio.CancelledError):
                    cancelled += 1
                    continue
                message = results[0]
                assert message is not None
                assert not isinstance(message, BaseException)
                found.append(int(message.data))
                cancelled += 1
                if ends[-1] == message.offset:
                    break
        assert found == sorted(found)
        written = [int(data) for data in await asyncio.to_thread(broker.stored)]
        assert found == written

    run(broker, scenario)


def test_a_rollback_meets_a_partition_that_goes_before_it_or_behind_it(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never in the middle, where some partitions would be moved and others not."""
    broker = start_broker({"test": 2})
    broker.put(b"0", partition=0)
    broker.put(b"1", partition=1)

    async def scenario(client: AsyncClient) -> None:
        async with client.consumer(
            "g", ["test"], commit_interval_s=None, **IDLE
        ) as consumer:
            first, second = await consumer.receive(), await consumer.receive()
            assert first is not None
            assert second is not None
            reading = subscription_of(consumer)
            last_commits = reading.last_commits

            async def lose_one(deadline_s: float) -> dict[TopicPartition, Offset]:
                found = await last_commits(deadline_s)
                loop = asyncio.get_running_loop()
                loop.call_soon(reading.fence, [max(found)])
                return found

            monkeypatch.setattr(reading, "last_commits", lose_one)
            await consumer.rollback()
            kept = min(first, second, key=lambda message: message.partition)
            assert await consumer.receive(20) == kept

    run(broker, scenario)


def test_a_cancelled_loop_loses_nothing(broker: AnyBroker) -> None:
    broker.put(b"0", b"1", b"2")

    async def scenario(client: AsyncClient) -> None:
        found: list[bytes] = []
        async with client.consumer("g", ["test"], **IDLE) as consumer:

            async def loop() -> None:
                async for message in consumer:
                    found.append(message.data)
                    await asyncio.sleep(0)

            task = asyncio.ensure_future(loop())
            await until(lambda: len(found) == 3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            broker.put(b"3")
            message = await consumer.receive(30)
            assert message is not None
            assert message.data == b"3"

    run(broker, scenario)


def test_closing_inside_the_loop_ends_it_at_once(broker: AnyBroker) -> None:
    broker.put(b"0", b"1")

    async def scenario(client: AsyncClient) -> None:
        consumer = client.consumer("g", ["test"], revoke_timeout_s=3600, **IDLE)
        await consumer.start()
        found = []
        async for message in consumer:
            found.append(message.data)
            await consumer.close()
        assert found == [b"0"]

    run(broker, scenario)


def test_closing_waits_for_a_message_that_another_task_handles(
    broker: AnyBroker,
) -> None:
    broker.put(b"0", b"1")
    store = MemoryOffsets()

    async def scenario(client: AsyncClient) -> None:
        consumer = client.consumer("g", ["test"], offsets=store, **IDLE)
        await consumer.start()
        at_work, go_on = asyncio.Event(), asyncio.Event()
        found = []

        async def loop() -> None:
            async for message in consumer:
                found.append(message)
                at_work.set()
                await go_on.wait()

        task = asyncio.ensure_future(loop())
        await at_work.wait()
        closing = asyncio.ensure_future(consumer.close())
        await until(lambda: not consumer.assignment())
        assert not closing.done()
        go_on.set()
        await closing
        await task
        offset = await store.load("g", found[0].partition, deadline_s=math.inf)
        assert offset is not None
        assert [m.data for m in found] == [b"0"]
        assert offset.offset == found[0].next_offset

    run(broker, scenario)


@pytest.mark.parametrize("is_client_twice", [False, True])
def test_a_client_waits_for_a_close_that_is_under_way(
    broker: AnyBroker, *, is_client_twice: bool
) -> None:
    """Its own, or a consumer's: neither is left without connections half way."""
    broker.put(b"0", b"1")
    committing, go_on = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    class Slow(MemoryOffsets):
        async def commit(self, *args: Any, **named: Any) -> Any:
            committing.set()
            await go_on.wait()
            done.append("commit")
            return await super().commit(*args, **named)

    async def scenario(client: AsyncClient) -> None:
        consumer = client.consumer(
            "g", ["test"], offsets=Slow(), commit_interval_s=3600.0, **IDLE
        )
        await consumer.start()
        pool = parts_of(client).pool
        await consumer.receive_many(2)
        consumer.current_batch.count()
        one = client if is_client_twice else consumer
        first = asyncio.ensure_future(one.close())
        await committing.wait()
        if is_client_twice:
            await client.close(timeout=0.001)
        else:
            client.producer()  # closed ones are forgotten by and by
        second = asyncio.ensure_future(client.close())
        second.add_done_callback(lambda _: done.append("client"))
        for _ in range(10):  # it needs no more turns than that
            await asyncio.sleep(0)
        assert not pool.is_closed  # what the first one needs still
        go_on.set()
        await asyncio.gather(first, second)
        assert done == ["commit", "client"]
        assert pool.is_closed

    run(broker, scenario)


def test_a_second_close_of_a_producer_waits_for_the_first(broker: AnyBroker) -> None:
    async def scenario(client: AsyncClient) -> None:
        producer = client.producer(linger_s=0.05)
        future = await producer.send_nowait("test", b"x")
        first = asyncio.ensure_future(producer.close())
        await asyncio.sleep(0)
        await producer.close()
        assert future.done()
        await first

    run(broker, scenario)


def test_a_cancelled_close_waits_for_nobody_and_leaves_nothing_open(
    broker: AnyBroker,
) -> None:
    """The message being handled comes again; who waits for others hears of the end."""
    broker.put(b"0", b"1")
    closed = asyncio.Event()

    class Store(MemoryOffsets):
        async def close(self) -> None:
            closed.set()

    async def scenario(client: AsyncClient) -> None:
        consumer = client.consumer("g", ["test"], offsets=Store(), **IDLE)
        await consumer.start()
        at_work = asyncio.Event()

        async def loop() -> None:
            async for _message in consumer:
                at_work.set()
                await asyncio.Event().wait()

        task = asyncio.ensure_future(loop())
        await at_work.wait()
        closing = asyncio.ensure_future(consumer.close())
        await until(lambda: not consumer.assignment())
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert closed.is_set()
        with pytest.raises(ClosedError):
            await consumer.fetch_buffer.take_async()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(broker, scenario)


@pytest.mark.parametrize("what", ["consumer", "producer"])
def test_a_cancelled_close_of_a_client_closes_all_of_it(what: str) -> None:
    """A session that went on would keep the partitions of a group from all others."""
    committing = asyncio.Event()

    class Stuck(MemoryOffsets):
        async def close(self) -> None:
            committing.set()
            await asyncio.Event().wait()

    async def main() -> None:
        zookeeper = MemoryZooKeeper()
        with FakeBroker({"test": 1}, coordinator=zookeeper.coordinator) as broker:
            client = AsyncClient(coordinator=zookeeper.coordinator, **QUICK)
            await client.start()
            context = parts_of(client)
            producer = client.producer()
            await producer.send("test", b"0")
            consumer = client.consumer("g", ["test"], offsets=Stuck(), **IDLE)
            if what == "consumer":
                await consumer.start()
            else:
                broker.inject(FaultKind.SWALLOW)
            future = await producer.send_nowait("test", b"1")
            closing = asyncio.ensure_future(client.close())
            await until(lambda: committing.is_set() or producer.is_closed)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert context.pool.is_closed
            assert context.coordinator is not None
            assert context.coordinator.status.state is SessionState.LOST
            assert producer.is_closed
            assert consumer.is_closed
            assert future.done()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        assert not rest, rest

    asyncio.run(main())


def test_a_wake_up_that_meets_a_cancelled_waiter_goes_to_the_next_one(
    broker: AnyBroker,
) -> None:
    """Else a message would wait although a worker waits for it."""

    async def scenario(client: AsyncClient) -> None:
        async with client.consumer("g", ["test"], **IDLE) as consumer:
            buffer = consumer.fetch_buffer
            waiters = [asyncio.ensure_future(buffer.take_async()) for _ in range(2)]
            await asyncio.sleep(0)
            assert len(sleepers_of(buffer)) == 2
            broker.put(b"m")
            while len(sleepers_of(buffer)) == 2:
                await asyncio.sleep(0)
            # One is woken: cancel it before it runs.
            asleep = next(iter(sleepers_of(buffer)))
            woken = [
                w for w in waiters if getattr(w, "_fut_waiter", None) is not asleep
            ]
            woken[0].cancel()
            rest = [w for w in waiters if w is not woken[0]]
            batch = await asyncio.wait_for(rest[0], 30)
            assert batch.messages[0].data == b"m"
            buffer.done(batch)

    run(broker, scenario)


def test_a_task_that_broke_out_of_its_loop_is_not_waited_for(
    broker: AnyBroker,
) -> None:
    """Its iterator ends only after it: it is as if it had ended with it."""
    broker.put(b"0", b"1")
    store = MemoryOffsets()

    async def scenario(client: AsyncClient) -> None:
        options: dict[str, Any] = {"offsets": store, **IDLE}
        consumer = client.consumer("g", ["test"], revoke_timeout_s=3600, **options)
        await consumer.start()

        async def read() -> None:
            async for _message in consumer:
                break

        await asyncio.create_task(read())
        await consumer.close()
        async with client.consumer("g", ["test"], **options) as consumer:
            message = await consumer.receive(30)
            assert message is not None
            assert message.data == b"0"

    run(broker, scenario)


def test_closing_a_consumer_that_is_starting_ends_the_start(
    broker: AnyBroker,
) -> None:
    """Nothing of it goes on: `run` looks for tasks that are left."""
    loading, go_on = asyncio.Event(), asyncio.Event()

    class Slow(MemoryOffsets):
        async def load(self, *args: Any, **named: Any) -> Any:
            loading.set()
            await go_on.wait()
            return await super().load(*args, **named)

    async def scenario(client: AsyncClient) -> None:
        consumer = client.consumer(
            "g", ["test"], partitions=["0-0"], offsets=Slow(), **IDLE
        )
        starting = asyncio.create_task(consumer.start())
        await loading.wait()
        await consumer.close()
        go_on.set()
        with pytest.raises(ClosedError):
            await starting
        assert consumer.is_closed
        assert not consumer.assignment()

    run(broker, scenario)


def test_a_broadcast_of_a_user_without_a_home_names_the_way_out(
    broker: AnyBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the users of containers often are."""

    async def scenario(client: AsyncClient) -> None:
        with pytest.raises(ConfigError, match="no home directory; name another place"):
            client.consumer("g", ["test"], broadcast=True)

    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    run(broker, scenario)
