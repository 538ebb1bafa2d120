"""Messages of one XA transaction at several brokers, until it is prepared."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from metaq.client import Client
from metaq.errors import MetaqError, NoBrokerError
from metaq.model import BrokerId, TopicPartition, XaTransactionId
from metaq.spark.sink.exact_sink import BranchSender
from metaq.testing.embedded import EmbeddedBroker
from metaq.testing.zk import MemoryZooKeeper

XID = XaTransactionId(1, b"write", b"task", "sender-test")
FIRST, SECOND = (TopicPartition("test", BrokerId(n), 0) for n in range(2))
TIMEOUT_S = 60.0


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[list[EmbeddedBroker]]:
    """Two brokers with one partition each."""
    zookeeper = MemoryZooKeeper()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                EmbeddedBroker(
                    tmp_path / str(number),
                    topics={"test": 1},
                    zookeeper=zookeeper,
                    settings={"brokerId": str(number)},
                )
            )
            for number in range(2)
        ]


def sender_of(brokers: list[EmbeddedBroker]) -> BranchSender:
    addresses = {BrokerId(n): each.address for n, each in enumerate(brokers)}
    return BranchSender(addresses, XID, timeout_s=TIMEOUT_S)


def stored(broker: EmbeddedBroker) -> list[bytes]:
    with Client(brokers=[broker.address]) as client:
        return [message.data for message in client.browse("test")]


def recovered(broker: EmbeddedBroker) -> int:
    """Return how many prepared transactions of our qualifier a broker has."""
    with (
        Client(brokers=[broker.address]) as client,
        client.xa(qualifier=XID.qualifier) as xa,
    ):
        return len(xa.recover())


@pytest.mark.slow
def test_what_is_prepared_is_committed_by_another(
    brokers: list[EmbeddedBroker],
) -> None:
    """In the order of the calls; nothing can be read before."""
    with sender_of(brokers) as sender:
        for number in range(3):
            sender.send(FIRST, [b"%d" % number, b"more"], [0, 0])
        sender.send(SECOND, [b"other"], [0])
        assert (sender.message_count, sender.size_bytes) == (7, 3 * 5 + 5)
        assert sender.promised_ms == 0
        assert sender.prepare() == (0, 1)
        assert sender.promised_ms > 0
    assert [stored(each) for each in brokers] == [[], []]
    for broker in brokers:
        with (
            Client(brokers=[broker.address]) as client,
            client.xa(qualifier=XID.qualifier) as xa,
        ):
            (xid,) = xa.recover()
            xa.commit(xid)
    assert [stored(each) for each in brokers] == [
        [b"0", b"more", b"1", b"more", b"2", b"more"],
        [b"other"],
    ]


def test_a_rollback_leaves_nothing_to_decide(brokers: list[EmbeddedBroker]) -> None:
    """Before the promise and after it."""
    for is_prepared in (False, True):
        with sender_of(brokers) as sender:
            sender.send(FIRST, [b"x"], [0])
            sender.send(SECOND, [b"x"], [0])
            if is_prepared:
                sender.prepare()
            sender.roll_back()
        assert [recovered(each) for each in brokers] == [0, 0]
    assert [stored(each) for each in brokers] == [[], []]


def test_without_messages_there_is_nothing_to_promise(
    brokers: list[EmbeddedBroker],
) -> None:
    """A task without rows begins no branch."""
    with sender_of(brokers) as sender:
        assert sender.prepare() == ()
    assert [recovered(each) for each in brokers] == [0, 0]


def test_the_first_failure_is_that_of_every_later_call(
    brokers: list[EmbeddedBroker],
) -> None:
    """It is known at the next call: the messages of the one before are waited for."""
    away = TopicPartition("test", BrokerId(7), 0)
    with sender_of(brokers) as sender:
        sender.send(FIRST, [b"x"], [0])
        sender.send(away, [b"x"], [0])
        for call in (lambda: sender.send(FIRST, [b"y"], [0]), sender.prepare):
            with pytest.raises(NoBrokerError, match="7"):
                call()
        sender.roll_back()
    assert [recovered(each) for each in brokers] == [0, 0]


@pytest.mark.slow
def test_a_rollback_that_reaches_nobody_is_logged(
    brokers: list[EmbeddedBroker], caplog: pytest.LogCaptureFixture
) -> None:
    """The branch ends with its time at the broker; the others are rolled back now."""
    caplog.set_level("INFO")
    addresses = {BrokerId(n): each.address for n, each in enumerate(brokers)}
    with BranchSender(addresses, XID, timeout_s=3.0) as sender:
        sender.send(FIRST, [b"x"], [0])
        sender.send(SECOND, [b"x"], [0])
        sender.prepare()
        brokers[1].stop()
        sender.roll_back()
    assert "rollback did not reach a broker: broker=1" in caplog.text
    assert recovered(brokers[0]) == 0
    brokers[1].start()
    assert recovered(brokers[1]) == 1


def test_a_payload_that_no_broker_takes_ends_the_transaction(
    brokers: list[EmbeddedBroker],
) -> None:
    """Some of it may be there: all of it is rolled back."""
    with sender_of(brokers) as sender:
        sender.send(FIRST, [bytes(17 << 20)], [0])
        with pytest.raises(MetaqError, match="bytes"):
            sender.prepare()
        sender.roll_back()
    assert stored(brokers[0]) == []
