"""Handlers: order, failures, delays, dead letters, and effects of cancellation."""

import asyncio
import contextlib
import functools
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metaq.client.consume.consumer import AsyncConsumer
from metaq.client.consume.dead_letters import read_origin
from metaq.client.consume.redelivery import Reject, RetryPolicy
from metaq.client.errors import HandlerFailedError, StuckError
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.client.session import AsyncClient
from metaq.client.sync.client import Client
from metaq.config.topic_rules import TOPIC_BYTES_MAX
from metaq.errors import ClientError, ConfigError
from metaq.model import Message
from tests.brokers import AnyBroker, StartBroker
from tests.client.scripted import TIMEOUT_S
from tests.client.worlds import parts_of
from tests.rigs.inside import twin_of
from tests.rigs.threads import refused_threads
from tests.rigs.waiting import until

SOON = RetryPolicy(attempts_max=3, first_s=0.001, max_s=0.002)
LATER = RetryPolicy(attempts_max=3, first_s=100.0, max_s=100.0)


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    topics = {"test": 2, "test.dead": 1}
    return start_broker(topics)


async def fill(client: AsyncClient, partition: int, *texts: bytes) -> None:
    async with client.producer() as producer:
        for text in texts:
            await producer.send("test", text, partition=f"0-{partition}")


class Log:
    """Messages given to a handler, per partition."""

    def __init__(self) -> None:
        self.seen: dict[int, list[bytes]] = defaultdict(list)

    def add(self, message: Message) -> None:
        self.seen[message.partition.partition].append(message.data)

    @property
    def count(self) -> int:
        return sum(map(len, self.seen.values()))


def handled_everything(consumer: AsyncConsumer, count: int) -> Callable[[], bool]:
    def is_so() -> bool:
        handling = consumer.statistics().handling
        return handling is not None and handling.handled_count >= count

    return is_so


async def run_until(
    consumer: AsyncConsumer,
    handler: Callable,
    condition: Callable[[], object],
    **options: object,
) -> None:
    """Run a handler until a condition holds, then cancel the run."""
    task = asyncio.create_task(consumer.run(handler, **options))
    try:
        await until(lambda: task.done() or condition())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled():
        task.result()


@pytest.mark.slow
def test_each_partition_is_handled_in_order_and_one_at_a_time(
    broker: AnyBroker,
) -> None:
    log, at_work, most_at_work = Log(), [0, 0], [0, 0]

    async def handler(message: Message) -> None:
        number = message.partition.partition
        at_work[number] += 1
        most_at_work[number] = max(most_at_work[number], at_work[number])
        await asyncio.sleep(0.001)
        log.add(message)
        at_work[number] -= 1

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            texts = [b"%d" % n for n in range(20)]
            await fill(client, 0, *texts)
            await fill(client, 1, *texts)
            async with client.consumer("g", ["test"]) as consumer:
                done = handled_everything(consumer, 40)
                await run_until(consumer, handler, done, concurrency=4)
            assert dict(log.seen) == {0: texts, 1: texts}
            assert most_at_work == [1, 1]

    asyncio.run(scenario())


def test_a_failed_message_comes_again_and_the_other_partition_goes_on(
    broker: AnyBroker,
) -> None:
    """With one worker: none waits with a batch taken."""
    log = Log()

    async def handler(message: Message) -> None:
        log.add(message)
        if message.data == b"bad":
            raise ValueError("no number")

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await fill(client, 0, b"bad", b"later")
            await fill(client, 1, *[b"fine"] * 5)
            async with client.consumer("g", ["test"]) as consumer:
                await run_until(consumer, handler, lambda: log.count == 6, retry=LATER)
                assert log.seen == {0: [b"bad"], 1: [b"fine"] * 5}
                # The next run counts from the start, and does not wait.
                log.seen.clear()
                with pytest.raises(HandlerFailedError) as caught:
                    await consumer.run(handler, retry=SOON)
            assert log.seen == {0: [b"bad"] * 3}
            assert caught.value.attempts == 3
            assert caught.value.message.data == b"bad"
            assert "test/0-0" in str(caught.value)
            assert "offset 0" in str(caught.value)
            assert isinstance(caught.value.__cause__, ValueError)

    asyncio.run(scenario())


def test_what_a_failing_run_handled_is_committed_and_the_rest_comes_again(
    broker: AnyBroker,
) -> None:
    log = Log()

    async def handler(message: Message) -> None:
        log.add(message)
        if message.data == b"bad":
            raise Reject("never")

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await fill(client, 0, b"a", b"b", b"bad", b"c")
            async with client.consumer("g", ["test"]) as consumer:
                with pytest.raises(HandlerFailedError):
                    await consumer.run(handler, retry=LATER, concurrency=2)
                assert log.seen[0] == [b"a", b"b", b"bad"]
                # The iterator finds what is not handled.
                message = await consumer.receive(TIMEOUT_S)
            assert message is not None
            assert message.data == b"bad"

    asyncio.run(scenario())


def test_a_message_given_up_becomes_a_dead_letter_and_reading_goes_on(
    broker: AnyBroker,
) -> None:
    log = Log()
    policy = RetryPolicy(attempts_max=2, first_s=0.001, max_s=0.001, then="dead_letter")

    async def handler(message: Message) -> None:
        log.add(message)
        if message.data == b"bad":
            raise ValueError("no number")

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            async with client.producer() as producer:
                result = await producer.send(
                    "test",
                    b"bad",
                    attribute="k=v",
                    key="key-1",
                    headers={"trace": b"1"},
                    partition="0-1",
                )
            await fill(client, 1, b"good")
            async with client.consumer("g", ["test"]) as consumer:
                done = handled_everything(consumer, 2)
                await run_until(consumer, handler, done, retry=policy)
                counts = consumer.statistics().handling
            assert log.seen == {1: [b"bad", b"bad", b"good"]}
            assert counts is not None
            assert (counts.dead_letter_count, counts.failure_count) == (1, 2)
            async with client.consumer("g", ["test.dead"]) as dead:
                letter = await dead.receive(TIMEOUT_S)
            assert letter is not None
            assert letter.data == b"bad"
            origin = read_origin(letter)
            assert origin is not None
            assert origin.partition == result.partition
            assert (origin.offset, origin.id) == (result.offset, result.message_id)
            assert (letter.attribute, letter.key) == ("k=v", b"key-1")
            assert letter.header_pairs[:1] == (("trace", b"1"),)
            assert origin.group == "g"
            assert (origin.error, origin.text) == ("ValueError", "no number")
            assert origin.attempts == 2

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_dead_letter_that_nobody_takes_waits_and_health_tells(
    broker: AnyBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler gets the message no more; the letter is sent when it can be."""
    log = Log()
    policy = RetryPolicy(
        attempts_max=1, then="dead_letter", dead_letter_topic="not.yet"
    )
    monkeypatch.setattr(
        "metaq.client.consume.handling.GIVING_UP.__class__.delay_s", lambda *_: 0.01
    )

    async def handler(message: Message) -> None:
        log.add(message)
        raise ValueError("no number")

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await fill(client, 0, b"bad")
            await asyncio.to_thread(broker.create_topic, "not.yet")
            await asyncio.to_thread(broker.close_partition, "not.yet")
            async with client.consumer("g", ["test"]) as consumer:
                context = parts_of(client)
                monkeypatch.setattr(
                    consumer,
                    "_context",
                    _with_short_sends(context),
                )
                task = asyncio.create_task(consumer.run(handler, retry=policy))
                await until(lambda: any("takes it" in p for p in problems(consumer)))
                assert not consumer.health().is_ok
                assert "test/0-0" in problems(consumer)[0]
                await asyncio.to_thread(broker.open_partition, "not.yet")
                await until(handled_everything(consumer, 1))
                assert consumer.health().is_ok
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert log.seen == {0: [b"bad"]}

    asyncio.run(scenario())


def test_health_tells_that_a_message_waits_for_its_dead_letter_to_be_stored(
    broker: AnyBroker,
) -> None:
    """Before the first refusal, which takes as long as a send may."""
    broker.close_partition("test.dead")
    policy = RetryPolicy(attempts_max=1, then="dead_letter")

    async def fail(_message: Message) -> None:
        raise ValueError("no number")

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await fill(client, 0, b"bad")
            async with client.consumer("g", ["test"]) as consumer:
                task = asyncio.create_task(consumer.run(fail, retry=policy))
                await until(lambda: bool(problems(consumer)))
                await until(
                    lambda: problems(consumer)[0].endswith(
                        "failed 1 times: ValueError('no number'); it is given up, and"
                        " waits for a broker or disk to take it"
                    )
                )
                await asyncio.to_thread(broker.open_partition, "test.dead")
                await until(handled_everything(consumer, 1))
                assert consumer.health().is_ok
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())


def _with_short_sends(context):
    from dataclasses import replace

    def make(options, selector):
        return context.make_producer(replace(options, timeout_s=0.05), selector)

    return replace(context, make_producer=make)


def problems(consumer: AsyncConsumer) -> tuple[str, ...]:
    return consumer.health().problems


def test_dead_letters_that_can_never_be_taken_are_refused_by_the_run(
    start_broker: StartBroker,
) -> None:
    """An error, not silence: with what is added the name is too long for a topic."""
    topic = "x" * TOPIC_BYTES_MAX
    broker = start_broker({topic: 1})

    async def handler(message: Message) -> None:
        raise Reject("never")

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            async with client.producer() as producer:
                await producer.send(topic, b"a")
            async with client.consumer("g", [topic]) as consumer:
                with pytest.raises(ConfigError, match="dead-letter topic: expected"):
                    await consumer.run(handler, retry=RetryPolicy(then="dead_letter"))

    asyncio.run(scenario())


def test_dropped_messages_are_counted(broker: AnyBroker) -> None:
    async def handler(message: Message) -> None:
        raise Reject("never")

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await fill(client, 0, b"a", b"b")
            async with client.consumer("g", ["test"]) as consumer:
                done = handled_everything(consumer, 2)
                policy = RetryPolicy(then="drop")
                await run_until(consumer, handler, done, retry=policy)
                counts = consumer.statistics().handling
                assert counts is not None
                assert counts.dropped_count == 2

    asyncio.run(scenario())


def test_cancelling_a_run_leaves_its_message_unhandled(
    broker: AnyBroker,
) -> None:
    begun = asyncio.Event()

    async def handler(message: Message) -> None:
        if message.data == b"second":
            begun.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await fill(client, 0, b"first", b"second", b"third")
            async with client.consumer("g", ["test"]) as consumer:
                await run_until(consumer, handler, begun.is_set)
                texts = []
                for _ in range(2):
                    message = await consumer.receive(TIMEOUT_S)
                    assert message is not None
                    texts.append(message.data)
            assert texts == [b"second", b"third"]

    asyncio.run(scenario())


def test_a_handler_that_swallows_its_cancellation_is_the_last(
    broker: AnyBroker,
) -> None:
    begun, seen = asyncio.Event(), []

    async def handler(message: Message) -> None:
        seen.append(message.data)
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await fill(client, 0, b"first", b"second")
            async with client.consumer("g", ["test"]) as consumer:
                await run_until(consumer, handler, begun.is_set)
                message = await consumer.receive(TIMEOUT_S)
            assert seen == [b"first"]
            assert message is not None
            assert message.data == b"second"

    asyncio.run(scenario())


def test_what_is_cancelled_inside_a_handler_is_a_failure_of_it(
    broker: AnyBroker,
) -> None:
    async def handler(message: Message) -> None:
        inner = asyncio.ensure_future(asyncio.sleep(100))
        inner.cancel()
        await inner

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await fill(client, 0, b"a")
            async with client.consumer("g", ["test"]) as consumer:
                with pytest.raises(HandlerFailedError) as caught:
                    await consumer.run(handler, retry=SOON)
                assert isinstance(caught.value.__cause__, asyncio.CancelledError)

    asyncio.run(scenario())


def test_closing_the_consumer_waits_for_the_handler_and_ends_the_run(
    broker: AnyBroker,
) -> None:
    begun, released = asyncio.Event(), asyncio.Event()

    async def handler(message: Message) -> None:
        begun.set()
        await released.wait()

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await fill(client, 0, b"a", b"b")
            consumer = client.consumer("g", ["test"])
            await consumer.start()
            task = asyncio.create_task(consumer.run(handler))
            await begun.wait()
            closing = asyncio.create_task(consumer.close())
            await until(lambda: not consumer.assignment())
            assert not closing.done()
            released.set()
            await closing
            await task
            counts = consumer.statistics().handling
            assert counts is not None
            assert counts.handled_count == 1  # the second was not begun

    asyncio.run(scenario())


def test_a_partition_that_waits_after_a_failure_goes_at_once(
    broker: AnyBroker,
) -> None:
    async def handler(message: Message) -> None:
        raise ValueError("no number")

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await fill(client, 0, b"a")
            consumer = client.consumer("g", ["test"], revoke_timeout_s=1000)
            await consumer.start()
            task = asyncio.create_task(consumer.run(handler, retry=LATER))
            await until(lambda: problems(consumer))
            assert "failed 1 times" in problems(consumer)[0]
            async with asyncio.timeout(TIMEOUT_S):
                await consumer.close()
                await task

    asyncio.run(scenario())


def test_a_consumer_is_run_by_one_at_a_time(broker: AnyBroker) -> None:
    async def handler(message: Message) -> None: ...

    async def scenario() -> None:
        async with (
            AsyncClient(**broker.client_options) as client,
            client.consumer("g", ["test"]) as consumer,
        ):
            task = asyncio.create_task(consumer.run(handler))
            await asyncio.sleep(0)
            with pytest.raises(ClientError, match="'g' is already being run"):
                await consumer.run(handler)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())


def test_a_consumer_that_is_not_started_is_not_run(broker: AnyBroker) -> None:
    """It would wait for ever."""

    async def handler(message: Message) -> None: ...

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            consumer = client.consumer("g", ["test"])
            with pytest.raises(ClientError, match="not started"):
                await consumer.run(handler)
            async with consumer:
                with pytest.raises(ConfigError, match="expected 1 to 10000, got 0"):
                    await consumer.run(handler, concurrency=0)

    asyncio.run(scenario())


def test_a_handler_that_is_too_late_has_handled_nothing(
    broker: AnyBroker,
) -> None:
    """Its partition went without it, and another member has the message."""
    begun, released = asyncio.Event(), asyncio.Event()
    offsets = MemoryOffsets()

    async def handler(message: Message) -> None:
        begun.set()
        await released.wait()

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await fill(client, 0, b"a")
            slow = client.consumer(
                "g", ["test"], offsets=offsets, revoke_timeout_s=0.01
            )
            await slow.start()
            task = asyncio.create_task(slow.run(handler))
            await begun.wait()
            await slow.close()
            released.set()
            await task
            async with client.consumer("g", ["test"], offsets=offsets) as other:
                message = await other.receive(TIMEOUT_S)
            assert message is not None
            assert message.data == b"a"

    asyncio.run(scenario())


@pytest.mark.slow
def test_partitions_that_move_lose_and_repeat_nothing(
    broker: AnyBroker, rng: random.Random
) -> None:
    """Members come and go while handlers are at work and fail now and then."""
    broker.create_topic("many", 4)
    count = 60
    seen: dict[int, list[int]] = defaultdict(list)
    policy = RetryPolicy(attempts_max=100, first_s=0.001, max_s=0.005)

    async def handler(message: Message) -> None:
        await asyncio.sleep(rng.random() / 200)
        if rng.random() < 0.1:
            raise ValueError("now and then")
        seen[message.partition.partition].append(int(message.data))

    def is_over() -> bool:
        return sum(map(len, seen.values())) >= 4 * count

    async def member(stay_s: float) -> None:
        async with AsyncClient(**broker.client_options) as client:
            consumer = client.consumer("g", ["many"])
            await consumer.start()
            task = asyncio.create_task(
                consumer.run(handler, concurrency=2, retry=policy)
            )
            deadline_s = asyncio.get_running_loop().time() + stay_s
            while not is_over() and asyncio.get_running_loop().time() < deadline_s:
                await asyncio.sleep(0.005)
            await consumer.close()
            await task

    async def come_and_go() -> None:
        # One after the other: those that come too soon share and read nothing.
        while not is_over():
            await member(0.2 + rng.random() / 5)

    async def scenario() -> None:
        async with (
            AsyncClient(**broker.client_options) as client,
            client.producer() as producer,
        ):
            for number in range(count):
                for partition in range(4):
                    await producer.send(
                        "many", b"%d" % number, partition=f"0-{partition}"
                    )
        async with asyncio.timeout(240), asyncio.TaskGroup() as group:
            group.create_task(member(1000))
            for _ in range(2):
                group.create_task(come_and_go())

    asyncio.run(scenario())
    assert dict(seen) == {partition: list(range(count)) for partition in range(4)}


# -- the sync world -------------------------------------------------------------------


@pytest.mark.slow
def test_threads_handle_each_partition_in_order(broker: AnyBroker) -> None:
    texts = [b"%d" % n for n in range(20)]
    log, names = Log(), set()

    with Client(**broker.client_options) as client:
        with client.producer() as producer:
            for text in texts:
                producer.send("test", text, partition="0-0")
                producer.send("test", text, partition="0-1")
        failures = iter([True, True])
        consumer = client.consumer("g", ["test"])
        consumer.start()

        def handler(message: Message) -> None:
            if message.data == b"7" and next(failures, False):
                raise ValueError("twice")
            names.add(threading.current_thread().name)
            log.add(message)
            if log.count == 40:
                threading.Thread(target=consumer.close).start()

        consumer.run(handler, concurrency=3, retry=SOON)
        counts = consumer.statistics().handling
        assert counts is not None
        assert counts.failure_count == 2
    assert dict(log.seen) == {0: texts, 1: texts}
    assert all(name.startswith("metaq-handler-") for name in names)


def test_threads_stop_at_a_message_given_up(broker: AnyBroker) -> None:
    log = Log()

    def handler(message: Message) -> None:
        log.add(message)
        raise ValueError("no number")

    with Client(**broker.client_options) as client:
        with client.producer() as producer:
            producer.send("test", b"bad", partition="0-0")
        with client.consumer("g", ["test"]) as consumer:
            with pytest.raises(HandlerFailedError) as caught:
                consumer.run(handler, retry=SOON, concurrency=2)
            assert caught.value.attempts == 3
            message = consumer.receive(TIMEOUT_S)
            assert message is not None
            assert message.data == b"bad"
    assert log.seen == {0: [b"bad"] * 3}


@pytest.mark.slow
def test_a_thread_that_cannot_be_started_is_not_waited_for(broker: AnyBroker) -> None:
    """The others end, and the call says what the system said."""
    ends: list[BaseException] = []

    def run(consumer: Any) -> None:
        try:
            consumer.run(lambda _message: None, concurrency=2)
        except RuntimeError as error:
            ends.append(error)

    with (
        Client(**broker.client_options) as client,
        client.consumer("g", ["test"], revoke_timeout_s=3600) as consumer,
        refused_threads(lambda thread: thread.name == "metaq-handler-1"),
    ):
        caller = threading.Thread(target=run, args=[consumer], daemon=True)
        caller.start()
        caller.join(TIMEOUT_S)
        assert "can't start" in str(ends)


def test_the_failure_of_a_consumer_ends_its_run(broker: AnyBroker) -> None:
    """In both worlds."""

    async def handler(message: Message) -> None: ...

    async def scenario() -> None:
        async with (
            AsyncClient(**broker.client_options) as client,
            client.consumer("g", ["test"]) as consumer,
        ):
            consumer.fetch_buffer.fail(StuckError("stuck"))
            with pytest.raises(StuckError, match="stuck"):
                await consumer.run(handler, concurrency=3)

    asyncio.run(scenario())
    with (
        Client(**broker.client_options) as client,
        client.consumer("g", ["test"]) as consumer,
    ):
        twin_of(consumer).fetch_buffer.fail(StuckError("stuck"))
        with pytest.raises(StuckError, match="stuck"):
            consumer.run(lambda _: None, concurrency=3)


@pytest.mark.slow
def test_a_handler_that_fails_after_its_run_decides_nothing(broker: AnyBroker) -> None:
    """The next run is handed the message; no producer is left open."""
    begun, go_on = threading.Event(), threading.Event()
    seen: list[bytes] = []

    def late(_message: Message) -> None:
        begun.set()
        go_on.wait(TIMEOUT_S)
        raise Reject("too late")

    with Client(**broker.client_options) as client:
        with client.producer() as producer:
            producer.send("test", b"x", partition="0-0")
        with client.consumer("g", ["test"], revoke_timeout_s=0.01) as consumer:
            while not begun.is_set():
                consumer.run(late, retry=RetryPolicy(then="dead_letter"), timeout=0.05)
            go_on.set()
            while not seen:
                consumer.run(lambda message: seen.append(message.data), timeout=0.05)
            assert client.statistics().producers == ()
    assert seen == [b"x"]
    assert broker.stored("test.dead") == []


async def _async(message: Message) -> None:
    """Do nothing, once it is awaited."""
    del message


class _Async:
    async def __call__(self, message: Message) -> None:
        """Do nothing, once it is awaited."""


def _generator(message: Message) -> Iterator[Message]:
    yield message


HANDLERS = {
    "async": _async,
    "object": _Async(),
    "partial": functools.partial(_async),
    "generator": _generator,
    "returned": lambda message: _async(message=message),
}


@pytest.mark.parametrize("kind", HANDLERS)
def test_threads_count_nothing_as_handled_that_nobody_awaits(
    broker: AnyBroker, kind: str
) -> None:
    """The coroutine of an async function has done nothing yet."""
    with Client(**broker.client_options) as client:
        with client.producer() as producer:
            producer.send("test", b"x", partition="0-0")
        with client.consumer("g", ["test"]) as consumer:
            with pytest.raises(ConfigError, match="handler: "):
                consumer.run(HANDLERS[kind], timeout=TIMEOUT_S)
            message = consumer.receive(TIMEOUT_S)
            assert message is not None
            assert message.data == b"x"


@pytest.mark.parametrize("kind", ["async", "object", "partial", "generator"])
def test_a_filter_or_selector_decides_when_it_is_called(
    broker: AnyBroker, kind: str
) -> None:
    """An async filter would let everything pass."""
    with Client(**broker.client_options) as client:
        with pytest.raises(ConfigError, match=r"message_filter: .* neither async"):
            client.consumer("g", ["test"], message_filter=HANDLERS[kind])
        with pytest.raises(ConfigError, match=r"selector: .* neither async"):
            client.producer(selector=HANDLERS[kind])


def test_threads_send_dead_letters(broker: AnyBroker) -> None:
    def handler(message: Message) -> None:
        if message.data == b"good":
            threading.Thread(target=consumer.close).start()
        else:
            raise Reject("never")

    with Client(**broker.client_options) as client:
        with client.producer() as producer:
            producer.send("test", b"bad", partition="0-0")
            producer.send("test", b"good", partition="0-0")
        consumer = client.consumer("g", ["test"])
        consumer.start()
        consumer.run(handler, retry=RetryPolicy(then="dead_letter"))
        with client.consumer("g", ["test.dead"]) as dead:
            letter = dead.receive(TIMEOUT_S)
        assert letter is not None
        origin = read_origin(letter)
        assert origin is not None
        assert (letter.data, origin.error) == (b"bad", "Reject")
