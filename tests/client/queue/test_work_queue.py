"""A worker takes, hands out and runs handlers; in both worlds."""

import threading
from typing import Any

import pytest

from metaq.client.consume.redelivery import Reject
from metaq.errors import ConfigError
from tests.client.queue.conftest import send

DROP: dict[str, Any] = {"group": "g", "then": "drop"}
WAIT_S = 20.0


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
        with pytest.raises(ConfigError, match="count_max"):
            queue.receive_many(0)


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
        queue.run(handler, concurrency=2, timeout=1.0)
        counts = queue.statistics()
        assert (counts.acked_count, counts.rejected_count) == (2, 1)
        assert counts.failure_count == 2
    assert sorted(seen) == [(b"again", 1), (b"again", 2), (b"bad", 1), (b"good", 1)]
    (letter,) = client.browse("dead")
    assert dict(letter.header_pairs)["dead-letter.cause"] == b"rejected: no number"


def test_a_handler_may_settle_by_itself(client: Any) -> None:
    """Then its return says nothing more."""
    send(client, "single", b"a")
    with client.queue("single", **DROP) as queue:
        queue.run(lambda message: message.reject("x"), timeout=0.5)
        assert queue.statistics().rejected_count == 1
        assert queue.receive(0.1) is None
