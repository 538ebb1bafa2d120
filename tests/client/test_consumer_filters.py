"""Consumers and browsers with `where`: what comes, what is committed, what is said.

A broker of ours sends matches alone, one of MetaQ 1.4 everything: users see no
difference.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import Consumer, MemoryOffsets, OutgoingMessage
from metaq.client.errors import GroupInUseError
from metaq.model import Message
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, payloads, take
from tests.rigs.inside import subscription_of, twin_of
from tests.rigs.waiting import wait_until

ZERO = partition()
WHERE = "tag IN ('paid', 'void') AND amount > 10"


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 1, "two": 2})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options, **QUICK) as one:
        yield one


def order(number: int) -> OutgoingMessage:
    """Return a message: every fifth one is paid, every tenth one for more than 10."""
    tag = "paid" if number % 5 == 0 else None
    amount = {"amount": b"25"} if number % 10 == 0 else {"amount": b"9"}
    return OutgoingMessage(b"%d" % number, headers=amount, tag=tag)


def send(client: Any, numbers: range, topic: str = "test") -> None:
    with client.producer(in_flight_batches_max=1) as producer:
        producer.send_many(topic, [order(number) for number in numbers])


def matches(numbers: range) -> list[bytes]:
    return [b"%d" % number for number in numbers if number % 10 == 0]


def wait_no_lag(consumer: Any) -> None:
    wait_until(lambda: all(each.bytes == 0 for each in consumer.lag().values()))


def test_what_matches_comes_in_order_and_the_rest_is_committed_past(
    client: Any,
) -> None:
    """The next member of the group gets what came since."""
    store = MemoryOffsets()
    options = {"where": WHERE, "offsets": store, **IDLE}
    send(client, range(100))
    with client.consumer("g", ["test"], **options) as consumer:
        found = take(consumer, 10)
        assert payloads(found) == matches(range(100))
        assert consumer.receive(0.05) is None
        wait_no_lag(consumer)
        statistics = consumer.statistics()
        assert statistics.delivered_count == 10
        assert statistics.missing_bytes == 0
        assert consumer.health().problems == ()
    send(client, range(100, 120))
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(take(consumer, 2)) == matches(range(100, 120))


def test_a_partition_without_a_match_is_neither_behind_nor_stuck(
    client: Any,
) -> None:
    """Also while it is written to, and for longer than the watchdog waits."""
    options = {"where": "tag = 'none'", "watchdog_s": 0.1, **IDLE}
    with (
        client.consumer("g", ["test"], offsets=MemoryOffsets(), **options) as consumer,
        client.producer() as producer,
    ):
        for number in range(40):
            producer.send("test", b"%d" % number, tag="some")
            assert consumer.receive(0.02) is None
        wait_no_lag(consumer)
        health = consumer.health()
        assert (health.state.value, health.problems) == ("running", ())
        assert consumer.statistics().missing_bytes == 0
        assert consumer.statistics().delivered_count == 0


def test_a_message_that_is_handled_long_holds_back_what_does_not_match(
    client: Any,
) -> None:
    """Its offset is committed before those of others that came and were passed over."""
    send(client, range(1))
    store = MemoryOffsets()
    options = {"where": WHERE, "offsets": store, "commit_interval_s": 0.02, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        (first,) = take(consumer, 1)
        send(client, range(1, 10))
        twin = twin_of(consumer) if isinstance(consumer, Consumer) else consumer.twin
        end = [*client.browse("test")][-1].next_offset
        wait_until(lambda: reached(twin) == end)
        assert handled(twin) == first.offset
        assert consumer.receive(0.05) is None
        wait_until(lambda: handled(twin) == end)


def reached(consumer: Any) -> int:
    return int(subscription_of(consumer).status_of(ZERO).reached)


def handled(consumer: Any) -> int:
    return int(consumer.fetch_buffer.handled()[ZERO].offset)


def test_a_filter_of_ones_own_sees_what_matches(client: Any) -> None:
    """And its refusals count as handled, too."""
    send(client, range(100))
    seen = list[Message]()

    def is_late(message: Message) -> bool:
        seen.append(message)
        return int(message.data) >= 50

    with client.consumer(
        "g", ["test"], where=WHERE, message_filter=is_late, **IDLE
    ) as consumer:
        assert payloads(take(consumer, 5)) == matches(range(50, 100))
        assert payloads(seen) == matches(range(100))
        assert consumer.statistics().filtered_count >= 5


def test_lists_and_batches_have_matches_alone(client: Any) -> None:
    """A batch of one partition after the other is committed past the rest."""
    for topic in ("test", "two"):
        send(client, range(60), topic)
    store = MemoryOffsets()
    manual = {"where": WHERE, "offsets": store, "commit_interval_s": None, **IDLE}
    with client.consumer("g", ["test"], **manual) as consumer:
        many = consumer.receive_many(6, 10, fill=True)
        assert payloads(many) == matches(range(60))
    with client.consumer("g", ["two"], **manual) as consumer:
        for batch in consumer.batches(max_count=6, max_wait_s=30):
            assert sorted(payloads(batch), key=int) == matches(range(60))
            batch.commit()
            break
    with client.consumer("g", ["two"], **manual) as consumer:
        assert consumer.receive(0.05) is None


def test_a_seek_goes_on_with_the_next_match(client: Any) -> None:
    """To the start, or to a message that does not match."""
    send(client, range(30))
    fifteenth = [*client.browse("test")][15]
    with client.consumer("g", ["test"], where=WHERE, **IDLE) as consumer:
        assert payloads(take(consumer, 3)) == matches(range(30))
        consumer.seek(ZERO, fifteenth.offset)
        assert payloads(take(consumer, 1)) == [b"20"]
        consumer.seek(ZERO, "earliest")
        assert payloads(take(consumer, 3)) == matches(range(30))


def test_browse_yields_what_matches(client: Any) -> None:
    """Up to the end, from one partition or all, and for ever."""
    send(client, range(50))
    send(client, range(50), "two")
    assert payloads(client.browse("test", where=WHERE)) == matches(range(50))
    both = payloads(client.browse("two", where=WHERE))
    assert sorted(both, key=int) == matches(range(50))
    assert [*client.browse("test", where="tag = 'none'")] == []
    following = client.browse("test", where=WHERE, stop_at_end=False)
    assert [next(following).data for _ in range(5)] == matches(range(50))
    send(client, range(50, 61))
    assert [next(following).data for _ in range(2)] == [b"50", b"60"]
    following.close()


@pytest.mark.parametrize("count", [0, 1, 3, 5, 9])
def test_the_newest_are_the_newest_that_match(client: Any, count: int) -> None:
    """However far back they lie; all of them, where there are no more."""
    send(client, range(50))
    wanted = matches(range(50))[-count:] if count else []
    assert payloads(client.browse("test", last=count, where=WHERE)) == wanted
    if count:
        following = client.browse("test", last=count, where=WHERE, stop_at_end=False)
        assert [next(following).data for _ in wanted] == wanted
        send(client, range(50, 51))
        assert next(following).data == b"50"
        following.close()


def test_the_newest_that_match_are_of_all_partitions(
    client: Any, broker: AnyBroker
) -> None:
    """By their times; ids of MetaQ 1.4 tell none, and one broker has an order."""
    with client.producer(in_flight_batches_max=1) as producer:
        for number in range(40):
            tag = "paid" if number % 4 == 0 else None
            place = f"0-{number % 8 // 4}"
            producer.send("two", b"%d" % number, tag=tag, partition=place)
    newest = client.browse("two", last=3, where="tag = 'paid'")
    assert payloads(newest) == [b"28", b"32", b"36"]


def test_members_have_one_filter(client: Any) -> None:
    """Another member is refused with both; the first one reads on."""
    send(client, range(10))
    with client.consumer("g", ["test"], where=WHERE, **IDLE) as consumer:
        text = 'reads with where="tag IN .*, and this member with where="tag = \'x\'"'
        with pytest.raises(GroupInUseError, match=text):
            client.consumer("g", ["test"], where="tag = 'x'", **IDLE).__enter__()
        with pytest.raises(GroupInUseError, match="this member with no filter"):
            client.consumer("g", ["test"], **IDLE).__enter__()
        assert take(consumer, 1)[0].data == b"0"
    with client.consumer("g", ["test"], **IDLE) as consumer:
        send(client, range(11, 12))
        assert take(consumer, 1)[0].data == b"11"
