"""Producers of the sync world: work on the caller's own thread."""

import threading
from pathlib import Path
from typing import Any

import pytest

from metaq.client import BufferFullError, Client, SendResult
from metaq.errors import NoBrokerError
from tests.brokers import AnyBroker, StartBroker


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 1, "other": 1})


def test_messages_of_many_threads_are_all_stored(broker: AnyBroker) -> None:
    """Each thread has the places of its own messages."""
    places: dict[int, list[SendResult]] = {}
    with Client(**broker.client_options) as client, client.producer() as producer:

        def send(thread: int) -> None:
            places[thread] = [
                producer.send("test", b"%d-%d" % (thread, number))
                for number in range(20)
            ]

        threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    found = sorted(
        (r.offset, t, n) for t, rs in places.items() for n, r in enumerate(rs)
    )
    stored = broker.stored()
    assert sorted(stored) == sorted(b"%d-%d" % (t, n) for _, t, n in found)
    if broker.has_extensions:
        assert stored == [b"%d-%d" % (t, n) for _, t, n in found]


@pytest.mark.slow
def test_a_full_buffer_is_refused_where_that_is_wanted(broker: AnyBroker) -> None:
    """The error says what was asked for; nothing of the message is stored."""
    with (
        Client(**broker.client_options) as client,
        client.producer(buffer_count_max=2, when_full="raise") as producer,
    ):
        producer.send("test", b"first")
        broker.stop()
        held = [producer.send_nowait("test", b"held") for _ in range(2)]
        with pytest.raises(BufferFullError) as caught:
            producer.send_nowait("test", b"refused")
        assert caught.value.message_count == 1
        assert caught.value.size_bytes >= len(b"refused")
        broker.start()
        for future in held:
            future.result()
    assert broker.stored() == [b"first", b"held", b"held"]


@pytest.mark.slow
def test_a_full_buffer_is_waited_for_until_the_message_is_late(
    broker: AnyBroker,
) -> None:
    """The error of a message that finds no space is that of a full buffer."""
    with (
        Client(**broker.client_options) as client,
        client.producer(buffer_count_max=2, timeout_s=60) as producer,
    ):
        producer.send("test", b"first")
        broker.stop()
        held = [producer.send_nowait("test", b"held") for _ in range(2)]
        with pytest.raises(BufferFullError):
            producer.send_nowait("test", b"refused", timeout=0.2)
        broker.start()
        held.append(producer.send_nowait("test", b"late"))
        for future in held:
            future.result()
    broker.assert_stored([b"first", b"held", b"held", b"late"])


@pytest.mark.slow
def test_the_first_message_of_a_topic_waits_for_what_is_known_of_it(
    broker: AnyBroker,
) -> None:
    """It is an error at the deadline where nobody has the topic."""
    with Client(**broker.client_options) as client, client.producer() as producer:
        client.partitions("test")  # the cluster is known
        with pytest.raises(NoBrokerError):
            producer.send_nowait("nobody", b"x", timeout=0.2).result()
        with pytest.raises(NoBrokerError):
            producer.send_many("nobody", [b"x"], timeout=0.2)
        assert producer.send("test", b"x").partition.topic == "test"


def test_a_topic_that_is_no_text_is_refused_as_that(broker: AnyBroker) -> None:
    """Not as an error of the dictionary that has no such key."""
    wrong: Any = ["test"]
    with Client(**broker.client_options) as client, client.producer() as producer:
        for send in (producer.send, producer.send_nowait):
            with pytest.raises(TypeError, match="topic: expected str, got list"):
                send(wrong, b"x")
        with pytest.raises(TypeError, match="topic: expected str, got list"):
            producer.send_many(wrong, [b"x"])


def test_one_way_messages_are_stored_before_the_close_returns(
    broker: AnyBroker,
) -> None:
    """In the caller's thread nothing is waited for."""
    with Client(**broker.client_options) as client, client.producer() as producer:
        for number in range(10):
            producer.send_oneway("test", b"%d" % number)
    broker.assert_stored([b"%d" % number for number in range(10)])


def test_a_transaction_has_an_id_and_states(broker: AnyBroker) -> None:
    """A block that ends well commits it."""
    with Client(**broker.client_options) as client, client.producer() as producer:
        with producer.transaction() as transaction:
            assert transaction.id
            transaction.send("test", b"x")
            before = transaction.state
        assert transaction.state is not before
    assert broker.stored() == [b"x"]


def test_an_ordered_producer_starts_with_its_block(
    broker: AnyBroker, tmp_path: Path
) -> None:
    """Its topic and layout are those that it was made with."""
    with (
        Client(**broker.client_options) as client,
        client.ordered_producer("test", ["0-0"], tmp_path) as producer,
    ):
        assert producer.topic == "test"
        assert [each.name for each in producer.partitions] == ["0-0"]
        assert producer.send(b"x", key="k") is not None
    assert broker.stored() == [b"x"]
