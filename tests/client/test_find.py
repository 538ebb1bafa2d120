"""Finding messages by key, header and id: both kinds of broker, both worlds."""

import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from metaq.client import OutgoingMessage
from metaq.client.consume.find import KEPT_MAX, PAGE, together
from metaq.client.errors import CannotAnswerError
from metaq.errors import ConfigError, NoBrokerError
from metaq.model import BrokerId, Message, TopicPartition
from tests.brokers import StartBroker
from tests.client.worlds import QUICK, WORLDS

KEYS = ("a", "b&%", "é", "")
NAMES = ("order-id", "k=1")


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker({"test": 1, "two": 2})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


def send(client: Any, count: int, seed: int) -> list[Message]:
    """Send messages with keys and headers; return them, the newest first."""
    rng = random.Random(seed)
    with client.producer() as producer:
        for number in range(count):
            headers = [(rng.choice(NAMES), rng.choice((b"7", b"\0"))) for _ in "xy"]
            producer.send(
                "two",
                b"%d" % number,
                key=rng.choice((None, *KEYS)),
                headers=headers[: rng.randrange(3)],
                attribute=rng.choice((None, "key=a")),
            )
    return sorted(client.browse("two"), key=order)


def order(message: Message) -> tuple[int, Any, int]:
    """Return the order in which messages are found."""
    return -(message.timestamp_ms or 0), message.partition, -message.offset


@pytest.mark.slow
def test_what_is_found_is_what_reading_finds(client: Any, seed: int) -> None:
    """Each key and header, the newest first, all of it or so many."""
    messages = send(client, 60, seed)
    for key in (*KEYS, "none"):
        expected = [each for each in messages if each.key == key.encode()]
        assert list(client.find("two", key=key)) == expected
        assert list(client.find("two", key=key.encode(), limit=3)) == expected[:3]
    for name in NAMES:
        for value in (b"7", b"\0", b"none"):
            expected = [each for each in messages if (name, value) in each.header_pairs]
            assert list(client.find("two", header=(name, value))) == expected
    (first, *_) = messages
    of_one = client.find("two", key="a", partitions=[first.partition])
    expected = [m for m in messages if m.key == b"a" and m.partition == first.partition]
    assert list(of_one) == expected


@pytest.mark.slow
def test_an_iteration_goes_on_over_pages_and_may_end_early(client: Any) -> None:
    """Without a limit it ends at the log start."""
    with client.producer() as producer:
        for number in range(PAGE + 50):
            producer.send("test", b"%d" % number, key="same")
    found = client.find("test", key="same")
    assert next(iter(found)).data == b"%d" % (PAGE + 49)
    numbers = [int(each.data) for each in client.find("test", key="same")]
    assert numbers == list(reversed(range(PAGE + 50)))


@pytest.mark.slow
def test_messages_are_found_within_times(broker: Any, client: Any) -> None:
    """A MetaQ 1.4 broker's have none, and are all in time."""
    send(client, 5, 1)
    messages = list(client.find("two", key="a")) or send(client, 20, 2)
    messages = list(client.find("two", key="a"))
    now = datetime.now(UTC)
    hour = timedelta(hours=1)
    all_of = [] if broker.has_extensions else messages
    assert list(client.find("two", key="a", since=now + hour)) == all_of
    assert list(client.find("two", key="a", until=now - hour)) == all_of
    before_1970 = datetime.min.replace(tzinfo=UTC)
    assert list(client.find("two", key="a", until=before_1970)) == all_of
    assert list(client.find("two", key="a", since=now - hour, until=now + hour)) == (
        messages
    )


@pytest.mark.slow
def test_a_message_is_found_by_its_id(broker: Any, client: Any) -> None:
    """Only its millisecond is read; an id of a Java broker tells none."""
    messages = send(client, 30, 3)
    wanted = messages[7]
    if not broker.has_extensions:
        with pytest.raises((ConfigError, CannotAnswerError)):
            list(client.find("two", id=wanted.id))
        return
    assert list(client.find("two", id=wanted.id)) == [wanted]
    assert list(client.find("two", id=wanted.id + (1 << 40))) == []
    with pytest.raises(ConfigError, match="has no time"):
        list(client.find("two", id=-5))


def test_a_message_of_a_transaction_is_found_by_its_id(
    broker: Any, client: Any
) -> None:
    """Also long after the time in it: it is appended by the commit."""
    if not broker.has_extensions:
        return  # of Java, whose ids have no time
    with client.producer() as producer:
        with producer.transaction() as transaction:
            transaction.send("test", b"in it")
            for number in range(5):
                time.sleep(0.01)
                producer.send("test", b"%d" % number)
        time.sleep(0.01)
        producer.send("test", b"after it")
    (wanted,) = (each for each in client.browse("test") if each.data == b"in it")
    counts = list[int]()
    assert list(client.find("test", id=wanted.id, on_read=counts.append)) == [wanted]
    assert counts
    with pytest.raises(CannotAnswerError, match=r"at most 10 bytes.*: give a larger"):
        list(client.find("test", id=wanted.id + 1, read_bytes_max=10))


@pytest.mark.slow
def test_reading_without_an_index_is_counted_and_bounded(client: Any) -> None:
    """The count grows to the bytes of the log; more than the bound is an error."""
    messages = send(client, 30, 4)
    counts = list[int]()
    list(client.find("two", key="none", on_read=counts.append))
    ends = {each.partition: each.next_offset for each in reversed(messages)}
    assert counts == sorted(counts)
    assert counts[-1] == sum(ends.values())
    with pytest.raises(CannotAnswerError, match="read at most 10 bytes"):
        list(client.find("two", key="none", read_bytes_max=10))


@pytest.mark.slow
def test_an_empty_topic_has_nothing_and_an_unknown_one_no_broker(client: Any) -> None:
    """A partition without a log is none of an error."""
    assert list(client.find("two", key="a")) == []
    with pytest.raises(NoBrokerError):
        list(client.find("nothing", key="a", timeout=0.3))


def test_one_thing_is_looked_for(client: Any) -> None:
    """Not none, and not two."""
    for wrong in ({}, {"key": "a", "id": 5}, {"key": "a", "header": ("b", b"")}):
        with pytest.raises(ConfigError, match="one of key, header and id"):
            list(client.find("two", **wrong))


def test_a_partition_that_no_broker_serves_is_refused(client: Any) -> None:
    """As `browse` does: nothing found would be no answer."""
    with pytest.raises(NoBrokerError, match="0-9"):
        list(client.find("two", key="a", partitions=["0-9"], timeout=0.5))


@pytest.mark.slow
def test_more_than_is_kept_of_a_partition_is_found(client: Any) -> None:
    """A broker that looks nothing up leaves nothing out."""
    with client.producer() as producer:
        message = OutgoingMessage(b"", key="same")
        producer.send_many("test", [message] * (KEPT_MAX + 1))
    newest = client.find("test", key="same", limit=KEPT_MAX + 1)
    offsets = [message.offset for message in newest]
    assert len(offsets) == KEPT_MAX + 1
    found = client.find("test", key="same")
    assert [message.offset for message in found] == offsets


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ((), []),
        ((1,), []),
        ((2,), [2]),
        ((64,), [64]),
        ((65,), [64]),
        ((130,), [64, 64, 2]),
        ((3, 1, 66), [3, 64, 2]),
    ],
)
def test_each_partition_but_a_last_one_alone_is_asked_for_with_others(
    counts: tuple[int, ...], sizes: list[int]
) -> None:
    """Of the same broker, and at most as many as it takes."""
    partitions = [
        TopicPartition("test", BrokerId(broker), number)
        for broker, count in enumerate(counts)
        for number in range(count)
    ]
    groups = together(partitions)
    assert [len(each) for each in groups] == sizes
    assert all(len({one.broker_id for one in each}) == 1 for each in groups)
    asked = [one for each in groups for one in each]
    assert len({*asked}) == len(asked)
