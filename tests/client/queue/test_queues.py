"""Workers of the sync world: threads take, handle and settle."""

import threading
from collections import Counter
from typing import Any

import pytest

from metaq.client import Client, ClosedError, ConfigError, RequestTimeoutError
from metaq.testing.embedded import EmbeddedBroker
from tests.client.queue.conftest import send
from tests.client.worlds import QUICK
from tests.rigs.waiting import wait_until

OPTIONS: dict[str, Any] = {"group": "workers", "then": "drop"}


@pytest.fixture
def threads_client(broker: EmbeddedBroker) -> Any:
    with Client(**broker.client_options, **QUICK) as client:
        yield client


@pytest.mark.slow
def test_threads_share_one_queue_object(threads_client: Client) -> None:
    """Each message is with one of them, and acked from where it is."""
    count = 200
    send(threads_client, "orders", *(b"%d" % number for number in range(count)))
    found: list[bytes] = []
    with threads_client.queue("orders", **OPTIONS) as queue:

        def work() -> None:
            for message in queue:
                found.append(message.data)
                message.ack()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: queue.statistics().acked_count == count)
    for thread in threads:
        thread.join(30)
    assert set(Counter(found).values()) == {1}
    assert len(found) == count


def test_a_thread_that_waits_ends_with_its_queue(threads_client: Client) -> None:
    """Without a message; the loop ends as one that is through."""
    ended = threading.Event()
    with threads_client.queue("orders", **OPTIONS) as queue:

        def work() -> None:
            assert list(queue) == []
            ended.set()

        thread = threading.Thread(target=work)
        thread.start()
    assert ended.wait(30)
    thread.join(30)


@pytest.mark.slow
def test_run_handles_several_messages_at_once(threads_client: Client) -> None:
    """As many as it is asked for, though the prefetch is less."""
    send(threads_client, "single", b"a", b"b", b"c")
    together = threading.Barrier(3, timeout=30)
    with threads_client.queue("single", prefetch=1, **OPTIONS) as queue:
        running = threading.Thread(
            target=queue.run,
            args=(lambda _message: together.wait(),),
            kwargs={"concurrency": 3},
        )
        running.start()
        wait_until(lambda: queue.statistics().acked_count == 3)
    running.join(30)


def test_a_handler_that_is_async_is_refused(threads_client: Client) -> None:
    """It would never be awaited."""

    async def handle(_message: object) -> None: ...

    text = "handler: expected a plain function"
    with (
        threads_client.queue("orders", **OPTIONS) as queue,
        pytest.raises(ConfigError, match=text),
    ):
        queue.run(handle)


@pytest.mark.slow
def test_an_ack_on_the_own_thread_of_the_client_is_refused(
    threads_client: Client,
) -> None:
    """In a callback, say: it would wait for itself. `ack_nowait` does not wait."""
    send(threads_client, "single", b"a", b"b")
    errors: list[Exception] = []
    with threads_client.queue("single", **OPTIONS) as queue:
        first, second = queue.receive(10), queue.receive(10)
        assert first is not None
        assert second is not None

        def ack_other(_future: object) -> None:
            try:
                second.ack()
            except ClosedError as error:
                errors.append(error)
                second.ack_nowait()

        first.ack_nowait().add_done_callback(ack_other)
        wait_until(lambda: queue.statistics().acked_count == 2)
    assert "would wait for itself" in str(errors)


@pytest.mark.slow
def test_counters_of_workers_are_those_of_the_client(threads_client: Client) -> None:
    """By group, closed workers included."""
    send(threads_client, "single", b"a", b"b")
    with threads_client.queue("single", **OPTIONS) as queue:
        first = queue.receive(10)
        assert first is not None
        first.ack()
        (found,) = threads_client.statistics().queues
        assert (found.group, found.acked_count, found.taken_count) == ("workers", 1, 2)
        assert found.held_count == 1
    statistics = threads_client.statistics()
    assert statistics.queues == ()
    closed = statistics.closed_queues["workers"]
    assert (closed.acked_count, closed.returned_count, closed.held_count) == (1, 1, 0)


def test_a_settle_is_waited_for_no_longer_than_said(
    broker: EmbeddedBroker, threads_client: Client
) -> None:
    """It goes on: the message is done when the broker answers again."""
    send(threads_client, "single", b"a")
    with threads_client.queue("single", **OPTIONS) as queue:
        message = queue.receive(10)
        assert message is not None
        with pytest.raises(RequestTimeoutError, match=r"single/0-0: message at .* ack"):
            message.ack(timeout=0.0)
        wait_until(lambda: queue.statistics().acked_count == 1)
