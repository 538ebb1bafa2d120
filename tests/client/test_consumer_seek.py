"""Seeks: checked offsets, times, and both ends of a log."""

import datetime as dt
import time
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import MemoryOffsets
from metaq.client.errors import CannotAnswerError
from metaq.errors import ClientError, ClosedError, ConfigError
from metaq.model import Offset
from tests.brokers import StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, payloads, take

ZERO = partition()


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker({"test": 1, "two": 2})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options, **QUICK) as one:
        yield one


def test_an_offset_within_a_message_names_those_beside_it(
    broker: Any, client: Any
) -> None:
    """Nothing moves, and the consumer reads on."""
    broker.put(b"a", b"b", b"c")
    with client.consumer("g", ["test"], **IDLE) as consumer:
        assert payloads(take(consumer, 1)) == [b"a"]
        with pytest.raises(
            ClientError, match="test/0-0: 5 is not a message boundary; nearest: 0, 21"
        ):
            consumer.seek("0-0", Offset(5))
        with pytest.raises(ClientError, match="expected an offset from 0 to 63, got 6"):
            consumer.seek("0-0", Offset(64))
        assert payloads(take(consumer, 2)) == [b"b", b"c"]
        consumer.seek("0-0", Offset(21))
        assert payloads(take(consumer, 2)) == [b"b", b"c"]


def test_both_ends_of_a_log_are_places(broker: Any, client: Any) -> None:
    """As they are now."""
    broker.put(b"a", b"b")
    with client.consumer("g", ["test"], **IDLE) as consumer:
        take(consumer, 1)
        consumer.seek(ZERO, "latest")
        broker.put(b"c")
        assert consumer.receive(30).data == b"c"
        consumer.seek(ZERO, "earliest")
        assert payloads(take(consumer, 3)) == [b"a", b"b", b"c"]


def test_a_time_is_a_place_where_the_broker_knows_times(
    broker: Any, client: Any
) -> None:
    """The first message of that time or later."""
    broker.put(b"a", b"b")
    time.sleep(0.01)
    moment = dt.datetime.now(dt.UTC)
    broker.put(b"c", b"d")
    with client.consumer("g", ["test"], **IDLE) as consumer:
        take(consumer, 4)
        if not broker.has_extensions:
            with pytest.raises(CannotAnswerError, match="no times"):
                consumer.seek(ZERO, moment)
            return
        consumer.seek(ZERO, moment)
        assert payloads(take(consumer, 2)) == [b"c", b"d"]


@pytest.mark.parametrize(
    ("to", "kind", "text"),
    [
        (0.5, TypeError, "to: expected an offset, a datetime, 'earliest' or 'latest'"),
        (None, TypeError, ", got NoneType None"),
        ({}, TypeError, ", got dict {}"),
        ("begin", ConfigError, "to: expected 'earliest' or 'latest', got 'begin'"),
        (-1, ConfigError, "offset: expected 0"),
    ],
)
def test_what_is_no_place_is_refused(
    broker: Any, client: Any, to: Any, kind: type[Exception], text: str
) -> None:
    """A wrong type names the types that are wanted."""
    broker.put(b"a")
    with client.consumer("g", ["test"], **IDLE) as consumer:
        take(consumer, 1)
        with pytest.raises(kind, match=text):
            consumer.seek(ZERO, to)


def test_a_name_is_enough_where_there_is_one_topic(broker: Any, client: Any) -> None:
    """Of several, the partition itself is needed; it has to be ours."""
    broker.put(b"a")
    with client.consumer(
        "g", ["test", "two"], offsets=MemoryOffsets(), **IDLE
    ) as consumer:
        take(consumer, 1)
        with pytest.raises(ConfigError, match="'0-0' may be of any of 2 topics"):
            consumer.seek("0-0", "earliest")
        with pytest.raises(ClosedError, match="test/0-7: not assigned"):
            consumer.seek(partition(7), "earliest")
        with pytest.raises(TypeError, match="expected TopicPartition or str, got int"):
            consumer.seek(0, "earliest")
        consumer.seek(ZERO, "earliest")
        assert payloads(take(consumer, 1)) == [b"a"]


def test_partitions_are_read_by_name_or_as_what_they_are(
    broker: Any, client: Any
) -> None:
    """The partition of a message is good for any call."""
    one = partition(1, "two")
    with client.producer() as producer:
        at = producer.send("two", b"a", partition=one).offset
    found = [
        client.get("two", one, at).messages,
        list(client.browse("two", partitions=[one])),
    ]
    with client.consumer("g", ["two"], partitions=[one], **IDLE) as consumer:
        found.append(take(consumer, 1))
    assert list(map(payloads, found)) == [[b"a"]] * 3
