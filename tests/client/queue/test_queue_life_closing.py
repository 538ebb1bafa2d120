"""A worker that is closed while handlers of its run are at work."""

import gc
import threading
from typing import Any

import pytest

from metaq.client import Client
from metaq.client.queue.broker_link import BrokerLink
from metaq.testing.embedded import EmbeddedBroker
from tests.client.queue.conftest import send
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.inside import change_settings
from tests.rigs.waiting import wait_until

DROP: dict[str, Any] = {"group": "g", "then": "drop", "retry_delays_s": [0]}
WAIT_S = 60.0


class Slow:
    """A handler that waits until it may go on."""

    def __init__(self) -> None:
        self.data = list[bytes]()
        self.may_go_on = threading.Event()

    def __call__(self, message: Any) -> None:
        self.data.append(message.data)
        self.may_go_on.wait(WAIT_S)


def left(client: Any, count: int = 1) -> list[tuple[bytes, int]]:
    """Return what the next worker of the group gets: so much, and what is more."""
    with client.queue("single", group="g") as queue:
        found = list[tuple[bytes, int]]()
        while (
            message := queue.receive(1.0 if len(found) >= count else WAIT_S)
        ) is not None:
            found.append((message.data, message.deliveries))
            message.ack()
    return found


def in_thread(work: Any, *args: Any, **named: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, kwargs=named, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_handlers_end_before_their_worker_does(client: Any) -> None:
    """Their messages are done; no other worker had them while they were handled."""
    send(client, "single", b"a", b"b", b"c")
    handler = Slow()
    with client.queue("single", **DROP) as queue:
        running = in_thread(queue.run, handler, concurrency=2)
        wait_until(lambda: len(handler.data) == 2)
        closing = in_thread(queue.close)
        assert left(client) == [(b"c", 1)]  # it was not begun
        assert closing.is_alive()
        handler.may_go_on.set()
        closing.join(WAIT_S)
        running.join(WAIT_S)
        assert not closing.is_alive()
        assert not running.is_alive()
        assert queue.statistics().acked_count == 2
    assert left(client, 0) == []


@pytest.mark.slow
def test_a_handler_that_does_not_end_is_not_waited_for_longer(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its message is returned, as far as the time of the close allows."""
    send(client, "single", b"a")
    handler = Slow()
    with client.queue("single", **DROP) as queue:
        running = in_thread(queue.run, handler)
        wait_until(lambda: handler.data)
        queue.close(1.0)
        assert left(client) == [(b"a", 2)]
        assert (
            "handlers did not end in time, and their messages are returned"
            in caplog.text
        )
        handler.may_go_on.set()
        running.join(WAIT_S)


@pytest.mark.slow
def test_a_handler_may_close_its_worker(client: Any) -> None:
    """A message that it has not settled is returned; the close does not wait for it."""
    send(client, "single", b"a")
    with client.queue("single", **DROP) as queue:
        running = in_thread(queue.run, lambda _message: queue.close())
        running.join(WAIT_S)
        assert not running.is_alive()
    assert left(client) == [(b"a", 2)]


@pytest.mark.slow
def test_a_handler_that_a_run_gave_up_is_not_waited_for_again(
    broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Its time was that of the run's end."""
    options = {**broker.client_options, **QUICK, "close_timeout_s": 0.2}
    with Client(**options) as client:
        send(client, "single", b"a")
        handler = Slow()
        with client.queue("single", **DROP) as queue:
            while not handler.data:
                queue.run(handler, timeout=1.0)
        assert "handlers did not end" not in caplog.text
        assert left(client) == [(b"a", 2)]
        handler.may_go_on.set()


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sync", "async"])
def test_what_handlers_say_at_the_end_outlives_a_lost_connection(
    world: str, broker: EmbeddedBroker
) -> None:
    """The worker connects again for it."""
    with WORLDS[world](**broker.client_options, **QUICK) as client:
        send(client, "single", b"a")
        handler = Slow()
        with client.queue("single", **DROP) as queue:
            running = in_thread(queue.run, handler)
            wait_until(lambda: handler.data)
            closing = in_thread(queue.close)
            wait_until(lambda: queue.is_closed)
            # However long the worker takes to find it again.
            change_settings(broker, queueReclaimMs="60000")
            broker.restart()
            handler.may_go_on.set()
            closing.join(WAIT_S)
            running.join(WAIT_S)
            assert queue.statistics().acked_count == 1
        assert left(client, 0) == []


def test_a_closed_queue_is_not_kept_by_its_client(client: Any) -> None:
    """A program may open one for each job; the connection outlives them all."""

    def links() -> list[BrokerLink]:
        gc.collect()
        return [one for one in gc.get_objects() if isinstance(one, BrokerLink)]

    send(client, "single", b"a")
    before = links()  # of other tests
    for _ in range(3):
        with client.queue("single", **DROP) as queue:
            message = queue.receive(WAIT_S)
            assert message is not None
            message.nack(0)
    # The variables above, and the frames of ended tasks, may hold the last one.
    wait_until(lambda: len([one for one in links() if one not in before]) < 2)
