"""A worker takes, hands out and runs handlers; in both worlds."""

import math
import threading
from typing import Any

import pytest

from metaq.client.consume.redelivery import Reject
from metaq.errors import ConfigError
from metaq.testing.embedded import EmbeddedBroker
from tests.client.queue.conftest import run_until, send
from tests.client.worlds import QUICK, WORLDS, AsyncWorldPart

DROP: dict[str, Any] = {"group": "g", "then": "drop"}
WAIT_S = 60.0


@pytest.mark.slow
def test_a_loop_gets_each_message_once(client: Any) -> None:
    """Of all partitions; what was acked does not come again."""
    wanted = [b"%d" % n for n in range(9)]
    send(client, "orders", *wanted)
    with client.queue("orders", **DROP) as queue:
        found = []
        for message in queue:
            assert message.deliveries == 1
            found.append(message.data)
            message.ack()
            if len(found) == len(wanted):
                break
        assert sorted(found) == wanted
        assert queue.statistics().acked_count == 9
    with client.queue("orders", group="g") as queue:
        assert queue.receive(0.3) is None


def test_workers_share_a_partition(client: Any) -> None:
    """Any number of them, more than partitions."""
    send(client, "single", *[b"%d" % n for n in range(6)])
    with (
        client.queue("single", prefetch=1, **DROP) as first,
        client.queue("single", group="g", prefetch=1) as second,
    ):
        found = []
        for queue in (first, second, first, second):
            message = queue.receive(WAIT_S)
            found.append(message.data)
            message.ack()
        assert sorted(found) == [b"0", b"1", b"2", b"3"]


def test_a_worker_gets_more_while_it_has_less_than_its_prefetch(client: Any) -> None:
    """Not only once it has settled half of it."""
    send(client, "single", *[b"%d" % n for n in range(6)])
    with client.queue("single", prefetch=4, **DROP) as queue:
        many = [queue.receive(WAIT_S) for _ in range(3)]
        many.pop().ack()
        many += [queue.receive(WAIT_S) for _ in range(2)]
        assert [one.data for one in many] == [b"0", b"1", b"3", b"4"]
        assert queue.receive(0.05) is None
        queue.ack_many(many)


@pytest.mark.slow
def test_receive_many_gives_what_is_here(client: Any) -> None:
    """It waits for the first one alone, and for none longer than it is told."""
    send(client, "single", b"a", b"b", b"c")
    with client.queue("single", **DROP) as queue:
        many = queue.receive_many(2, WAIT_S)
        assert [one.data for one in many] == [b"a", b"b"]
        queue.ack_many(many)
        (last,) = queue.receive_many(2, WAIT_S)
        assert queue.receive_many(2, 0.05) == []
        last.ack()
        assert queue.statistics().acked_count == 3
        with pytest.raises(ConfigError, match="count_max"):
            queue.receive_many(0)


@pytest.mark.slow
def test_run_acks_returns_and_gives_up(client: Any) -> None:
    """By what its handler does; several at once."""
    send(client, "single", b"good", b"again", b"bad")
    seen, lock = list[tuple[bytes, int]](), threading.Lock()

    def handler(message: Any) -> None:
        with lock:
            seen.append((message.data, message.deliveries))
        if message.data == b"bad":
            raise Reject("no number")
        if message.data == b"again" and message.deliveries == 1:
            raise ValueError("not yet")

    options: dict[str, Any] = {"dead_letter_topic": "dead", "retry_delays_s": [0.1]}
    with client.queue("single", group="g", **options) as queue:
        run_until(
            queue,
            handler,
            lambda each: each.acked_count + each.rejected_count == 3,
            concurrency=2,
        )
        counts = queue.statistics()
        assert (counts.acked_count, counts.rejected_count) == (2, 1)
        assert counts.failure_count == 2
    assert sorted(seen) == [(b"again", 1), (b"again", 2), (b"bad", 1), (b"good", 1)]
    (letter,) = client.browse("dead")
    assert dict(letter.header_pairs)["dead-letter.cause"] == b"rejected: no number"


@pytest.mark.slow
def test_a_handler_may_settle_by_itself(client: Any) -> None:
    """Then its return says nothing more."""
    send(client, "single", b"a")
    with client.queue("single", **DROP) as queue:
        run_until(
            queue,
            lambda message: message.reject("x"),
            lambda each: each.rejected_count == 1,
        )
        assert queue.receive(0.1) is None


NO_TIMES = (-1, math.nan, math.inf, "5", True)
NO_COUNTS = (0, -1, 1.5, "1", True, None)
QUEUE_CALLS: dict[str, dict[str, tuple[object, ...]]] = {
    "receive": {"timeout": NO_TIMES},
    "receive_many": {"count_max": NO_COUNTS, "timeout": NO_TIMES},
    "run": {
        "handler": (5, "handle", None),
        "concurrency": NO_COUNTS,
        "timeout": NO_TIMES,
    },
    "ack_many": {"messages": ([b"x"], [None]), "timeout": NO_TIMES},
    "close": {"timeout": NO_TIMES},
}
MESSAGE_CALLS: dict[str, dict[str, tuple[object, ...]]] = {
    "ack": {"timeout": NO_TIMES},
    "nack": {"delay": (-1, math.nan, "5", 86_401), "timeout": NO_TIMES},
    "release": {"timeout": NO_TIMES},
    "extend": {"seconds": (0.5, -1, math.nan, "5", 43_201), "timeout": NO_TIMES},
    "reject": {"reason": (5, None, b"x"), "timeout": NO_TIMES},
}
RIGHT: dict[str, dict[str, Any]] = {
    "receive_many": {"count_max": 1},
    "run": {"handler": print},
    "ack_many": {"messages": []},
    "extend": {"seconds": 5},
    "reject": {"reason": "x"},
}


@pytest.mark.parametrize("world", ["sync", "async"])
def test_every_call_refuses_what_it_cannot_use(
    world: str, broker: EmbeddedBroker
) -> None:
    """By type or by value, before anything is said; the message is still there."""
    with WORLDS[world](**broker.client_options, **QUICK) as client:
        send(client, "single", b"a")
        with client.queue("single", **DROP) as queue:
            message = queue.receive(WAIT_S)
            # The calls of the twin: those of a rig take what they are given.
            for part, calls in ((queue, QUEUE_CALLS), (message, MESSAGE_CALLS)):
                for name, wrong in calls.items():
                    for argument, values in wrong.items():
                        for value in values:
                            given = {**RIGHT.get(name, {}), argument: value}
                            with pytest.raises((TypeError, ConfigError)):
                                call_twin(client, part, name, given)
            message.ack()


def call_twin(client: Any, part: Any, name: str, given: dict[str, Any]) -> Any:
    """Make a call as a user of that world does."""
    if isinstance(part, AsyncWorldPart):
        return client.run(getattr(part.twin, name)(**given))
    return getattr(part, name)(**given)
