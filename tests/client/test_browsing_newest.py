"""Browsing the newest messages of a topic, and those of a period of time."""

import datetime as dt
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import Client
from metaq.client.errors import CannotAnswerError
from metaq.errors import ConfigError
from metaq.testing.zk import MemoryZooKeeper
from tests.brokers import METAQ_1_4, PYTHON, StartBroker, broker_of
from tests.client.worlds import QUICK, WORLDS, payloads

ONE_BROKER = {
    "test_messages_without_a_time_are_of_one_broker": "one of each kind",
    "test_messages_of_several_brokers_come_in_the_order_of_time": "it knows times",
}


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker({"test": 1, "two": 3})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options, **QUICK) as one:
        yield one


@pytest.mark.slow
def test_the_newest_of_a_topic_come_oldest_first(broker: Any, client: Any) -> None:
    """As `tail` shows them, whichever partitions they are of."""
    wanted = [b"%d" % number for number in range(12)]
    for number, data in enumerate(wanted):
        broker.put(data, topic="two", partition=number * number % 3)
    for count in (0, 1, 5, 12, 50):
        newest = list(client.browse("two", last=count))
        assert payloads(newest) == wanted[max(0, 12 - count) :]
    found = list(client.browse("two", last=2, partitions=["0-0"]))
    assert payloads(found) == [b"6", b"9"]


def test_a_topic_without_messages_has_no_newest(broker: Any, client: Any) -> None:
    """It is empty, and no error."""
    assert list(client.browse("two", last=3)) == []


@pytest.mark.slow
def test_following_begins_with_the_newest(broker: Any, client: Any) -> None:
    """Then comes what is put later, in any partition."""
    for number in range(6):
        broker.put(b"%d" % number, topic="two", partition=number % 3)
    messages = client.browse("two", last=2, stop_at_end=False)
    found = list(itertools.islice(messages, 2))
    broker.put(b"6", topic="two", partition=0)
    found.append(next(messages))
    broker.put(b"7", topic="two", partition=1)
    found.append(next(messages))
    messages.close()
    assert payloads(found) == [b"4", b"5", b"6", b"7"]


@pytest.mark.slow
def test_a_span_of_time_has_a_beginning_and_an_end(broker: Any, client: Any) -> None:
    """Of each partition; the end is left out."""
    moments = []
    for number in range(9):
        time.sleep(0.003)
        moments.append(dt.datetime.now(dt.UTC))
        broker.put(b"%d" % number, topic="two", partition=number % 3)
    if not broker.has_extensions:
        for span in ({"since": moments[0]}, {"until": moments[0]}):
            with pytest.raises(CannotAnswerError, match="no times"):
                list(client.browse("two", **span))
        return
    spans: list[tuple[dict[str, Any], bytes]] = [
        ({"since": moments[2], "until": moments[7]}, b"36425"),
        ({"since": moments[7]}, b"78"),
        ({"until": moments[2]}, b"01"),
        ({"until": moments[4], "last": 2}, b"23"),
        ({"since": moments[5], "until": moments[3]}, b""),
    ]
    for span, wanted in spans:
        assert b"".join(payloads(list(client.browse("two", **span)))) == wanted


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"last": -1}, ConfigError, "last: expected 0 or more, got -1"),
        ({"last": 2, "start": "latest"}, ConfigError, "one of start, last and since"),
        (
            {"last": 2, "since": dt.datetime.now(dt.UTC)},
            ConfigError,
            "one of start, last and since",
        ),
        (
            {"until": dt.datetime.now(dt.UTC), "stop_at_end": False},
            ConfigError,
            "until: expected a reader that stops at the end",
        ),
        ({"since": "yesterday"}, TypeError, "since: expected datetime, got str"),
        ({"until": 5}, TypeError, "until: expected datetime, got int 5"),
    ],
)
def test_what_does_not_go_together_is_refused(
    client: Any, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    """Before anything is asked."""
    with pytest.raises(kind, match=text):
        list(client.browse("two", **options))


@pytest.mark.slow
def test_the_newest_of_many_are_read_alone(start_broker: StartBroker) -> None:
    """Ten of 60 MB: what the brokers send is a few windows."""
    broker = start_broker({"test": 1})
    for at in range(0, 6_000, 1_000):
        broker.put(*(b"%06d" % (at + one) + bytes(9_974) for one in range(1_000)))
    with Client(**broker.client_options, **QUICK) as client:
        found = list(client.browse("test", last=10))
        (connection,) = client.statistics().pool.connections
    assert [int(one.data[:6]) for one in found] == list(range(5_990, 6_000))
    assert connection.received_bytes < 5_000_000


@pytest.mark.slow
def test_messages_of_several_brokers_come_in_the_order_of_time(tmp_path: Any) -> None:
    """Brokers number by the wall clock."""
    zookeeper = MemoryZooKeeper()
    with (
        broker_of(PYTHON, tmp_path / "0", zookeeper=zookeeper, broker_id=0) as one,
        broker_of(PYTHON, tmp_path / "1", zookeeper=zookeeper, broker_id=1) as two,
    ):
        for number in range(8):
            time.sleep(0.002)
            (one, two)[number % 3 == 0].put(b"%d" % number)
        with Client(**one.client_options, **QUICK) as client:
            found = payloads(list(client.browse("test", last=6)))
    assert b"".join(found) == b"234567"


def test_messages_without_a_time_are_of_one_broker(tmp_path: Any) -> None:
    """Each MetaQ 1.4 broker numbers as it likes: they have no common order."""
    zookeeper = MemoryZooKeeper()
    with (
        broker_of(PYTHON, tmp_path / "0", zookeeper=zookeeper, broker_id=0) as ours,
        broker_of(METAQ_1_4, tmp_path / "1", zookeeper=zookeeper, broker_id=1) as java,
        Client(**ours.client_options, **QUICK) as client,
    ):
        ours.put(b"a", b"b")
        assert payloads(list(client.browse("test", last=2))) == [b"a", b"b"]
        java.put(b"c", b"d")
        with pytest.raises(CannotAnswerError, match="partitions of one broker"):
            list(client.browse("test", last=2))
        found = list(client.browse("test", last=1, partitions=["1-0"]))
    assert payloads(found) == [b"d"]
