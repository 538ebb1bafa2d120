"""A run that sends dead letters first checks their topics, in both worlds."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import AsyncClient, Client, RetryPolicy, TopicPattern
from metaq.client.errors import NoTopicError
from metaq.errors import ConfigError, MetaqError
from metaq.model import Message
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS
from tests.rigs.waiting import wait_until

DEAD = RetryPolicy(attempts_max=1, then="dead_letter")
MAKES = RetryPolicy(attempts_max=1, then="dead_letter", create_dead_letter_topic=True)


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 1})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options, **QUICK) as one:
        yield one


def failing(client: Any) -> Any:
    def fail(message: Message) -> None:
        raise ValueError(message.offset)

    async def fail_async(message: Message) -> None:
        fail(message)

    return fail if isinstance(client, Client) else fail_async


@pytest.mark.slow
def test_a_run_without_its_topic_of_dead_letters_does_not_begin(
    client: Any, broker: AnyBroker
) -> None:
    """Nothing is handled; it begins when the topic was made."""
    broker.put(b"0")
    with client.consumer("g", ["test"], **IDLE) as consumer:
        with pytest.raises(NoTopicError) as refused:
            consumer.run(failing(client), retry=DEAD, timeout=5)
        assert str(refused.value) == (
            "dead-letter topic 'test.dead' does not exist; 'metaq topics create"
            " test.dead --partitions 1' creates it"
        )
        assert consumer.statistics().handling.failure_count == 0
        broker.create_topic("test.dead")
        wait_until(lambda: client.partitions("test.dead"))
        while not broker.stored("test.dead"):
            consumer.run(failing(client), retry=DEAD, timeout=0.05)
    assert broker.stored("test.dead") == [b"0"]


@pytest.mark.slow
def test_a_run_makes_its_topic_of_dead_letters_on_request(
    client: Any, broker: AnyBroker
) -> None:
    """A broker of MetaQ 1.4 takes no topic, and the run says so."""
    broker.put(b"0")
    with client.consumer("g", ["test"], **IDLE) as consumer:
        if not broker.has_extensions:
            with pytest.raises(MetaqError, match=r"read topics from their server\.ini"):
                consumer.run(failing(client), retry=MAKES, timeout=0.5)
            return
        while not client.partitions("test.dead") or not broker.stored("test.dead"):
            consumer.run(failing(client), retry=MAKES, timeout=0.5)
    assert broker.stored("test.dead") == [b"0"]


@pytest.mark.slow
def test_a_run_begins_where_the_cluster_cannot_be_asked(
    client: Any, broker: AnyBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages that are handled well need no dead letters."""
    with client.consumer("g", ["test"], **IDLE) as consumer:
        broker.zookeeper.stop()
        consumer.run(failing(client), retry=DEAD, timeout=0.05)
        assert "cannot look for dead-letter topics" in caplog.text
        broker.zookeeper.start()


@contextlib.contextmanager
def running(consumer: Any, handler: Any, retry: RetryPolicy) -> Iterator[None]:
    """Run handlers in a thread, until the end of the block closes the consumer."""
    thread = threading.Thread(
        target=consumer.run, args=[handler], kwargs={"retry": retry}
    )
    thread.start()
    try:
        yield
    finally:
        consumer.close()
        thread.join()


@pytest.mark.slow
def test_a_topic_that_matches_during_a_run_has_its_missing_one_named_by_health(
    client: Any, broker: AnyBroker
) -> None:
    """The run goes on with the other topics; the problem ends when it is made."""
    broker.create_topic("test.dead")
    wait_until(lambda: client.partitions("test.dead"))
    pattern = TopicPattern("te*")
    with (
        client.consumer("g", pattern, **IDLE) as consumer,
        running(consumer, failing(client), DEAD),
    ):
        wait_until(lambda: consumer.health().is_ok)
        broker.put(b"0")
        wait_until(lambda: broker.stored("test.dead") == [b"0"])  # the run has begun
        broker.create_topic("tent")
        wait_until(lambda: any("dead-letter" in p for p in consumer.health().problems))
        wait_until(lambda: len(consumer.health().problems) == 1)
        (problem,) = consumer.health().problems
        assert problem == (
            "dead-letter topic 'tent.dead' does not exist; 'metaq topics create"
            " tent.dead --partitions 1' creates it"
        )
        broker.put(b"1")
        wait_until(lambda: broker.stored("test.dead") == [b"0", b"1"])
        broker.create_topic("tent.dead")
        wait_until(lambda: consumer.health().is_ok)


@pytest.mark.slow
def test_a_topic_that_matches_during_a_run_has_its_own_made_with_the_first_letter(
    client: Any, broker: AnyBroker
) -> None:
    """A policy that makes topics makes this one too; a broker of MetaQ 1.4 takes
    none.
    """
    broker.create_topic("test.dead")
    wait_until(lambda: client.partitions("test.dead"))
    with (
        client.consumer("g", TopicPattern("te*"), **IDLE) as consumer,
        running(consumer, failing(client), MAKES),
    ):
        broker.put(b"0")
        wait_until(lambda: broker.stored("test.dead") == [b"0"])  # the run has begun
        broker.create_topic("tent")
        wait_until(lambda: "tent" in consumer.topics)
        # It may not know yet that a broker serves it.
        wait_until(lambda: consumer.health().problems == ())
        broker.put(b"0", topic="tent")
        if not broker.has_extensions:
            text = "read topics from their server.ini"
            wait_until(lambda: text in str(consumer.health().problems))
            return
        wait_until(lambda: client.partitions("tent.dead"))
        wait_until(lambda: broker.stored("tent.dead") == [b"0"])


@pytest.mark.slow
def test_a_topic_of_dead_letters_that_is_deleted_during_a_run_is_made_again(
    client: Any, broker: AnyBroker
) -> None:
    if not broker.has_extensions:
        return
    with (
        client.consumer("g", ["test"], **IDLE) as consumer,
        running(consumer, failing(client), MAKES),
    ):
        broker.put(b"0")
        wait_until(lambda: consumer.statistics().handling.dead_letter_count == 1)
        client.admin().delete_topic("test.dead", timeout=30)
        broker.put(b"1")
        wait_until(lambda: consumer.statistics().handling.dead_letter_count == 2)
        assert broker.stored("test.dead") == [b"1"]


@pytest.mark.slow
def test_a_topic_of_dead_letters_that_is_deleted_during_a_run_is_named_by_health(
    client: Any, broker: AnyBroker
) -> None:
    """With the command that makes it again; a broker of MetaQ 1.4 deletes none."""
    if not broker.has_extensions:
        return
    admin = client.admin()
    admin.create_topic("test.dead", partitions=1)
    with (
        client.consumer("g", ["test"], **IDLE) as consumer,
        running(consumer, failing(client), DEAD),
    ):
        broker.put(b"0")
        wait_until(lambda: broker.stored("test.dead") == [b"0"])
        admin.delete_topic("test.dead")
        broker.put(b"1")
        text = "metaq topics create test.dead --partitions 1"
        wait_until(lambda: any(text in each for each in consumer.health().problems))
        admin.create_topic("test.dead", partitions=1)
        wait_until(lambda: broker.stored("test.dead") == [b"1"])
        wait_until(lambda: consumer.health().is_ok)


def test_a_topic_is_made_for_dead_letters_alone() -> None:
    with pytest.raises(ConfigError, match="create_dead_letter_topic: expected then="):
        RetryPolicy(create_dead_letter_topic=True)


@pytest.mark.slow
def test_a_run_ends_though_a_handler_does_not(broker: AnyBroker) -> None:
    """It swallows its cancellation; its partition stays with it until it ends."""
    broker.put(b"0")
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def stubborn(_message: Message) -> None:
        begun.set()
        while not go_on.is_set():
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                continue

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options, **QUICK) as client:
            options: dict[str, Any] = {"revoke_timeout_s": 0.01, **IDLE}
            async with client.consumer("g", ["test"], **options) as consumer:
                while not begun.is_set():
                    await asyncio.wait_for(consumer.run(stubborn, timeout=0.05), 30)
                assert consumer.statistics().handling.handled_count == 0
                go_on.set()

    asyncio.run(scenario())
