"""One-way messages: delivery, order, limits, and drops."""

from typing import Any

import pytest

from metaq.client import OutgoingMessage
from metaq.model import TopicPartition
from tests.brokers import StartBroker
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.waiting import PATIENCE_S


@pytest.mark.parametrize("world", WORLDS)
def test_a_one_way_message_arrives_as_it_was_when_it_was_sent(
    start_broker: StartBroker, world: str
) -> None:
    """As that of any other call; also the first one, which waits for its topic."""
    broker = start_broker({"test": 1})
    words: dict[str, Any] = {"attribute": "a", "key": "k"}
    with WORLDS[world](**broker.client_options, **QUICK) as client:
        with client.producer(in_flight_batches_max=1) as producer:
            for _ in range(2):
                headers = {"h": b"1"}
                producer.send_oneway("test", b"x", **words, headers=headers)
                headers["h"] = b"2"
                producer.send("test", b"x", **words, headers={"h": b"1"})
        found = [
            (one.data, one.attribute, one.key, dict(one.headers))
            for one in client.browse("test")
        ]
    assert found == [(b"x", "a", b"k", {"h": b"1"})] * 4


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_messages_of_both_kinds_keep_the_order_of_the_calls(
    start_broker: StartBroker, world: str
) -> None:
    """Of one caller, before and after their topic is known."""
    broker = start_broker({"test": 1})
    with (
        WORLDS[world](**broker.client_options, **QUICK) as client,
        client.producer(timeout_s=PATIENCE_S, in_flight_batches_max=1) as producer,
    ):
        for number in range(0, 200, 2):
            producer.send_oneway("new", b"%d" % number)
            producer.send_nowait("new", b"%d" % (number + 1))
            if number == 100:
                broker.create_topic("new")
        producer.flush(PATIENCE_S)
    assert broker.stored("new") == [b"%d" % number for number in range(200)]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_waiting_for_a_topic_takes_memory_of_the_buffer_until_it_fails(
    start_broker: StartBroker, world: str
) -> None:
    """More are dropped; those that failed take no room any more."""
    broker = start_broker({"test": 1})
    with (
        WORLDS[world](**broker.client_options, **QUICK) as client,
        client.producer(timeout_s=0.3, buffer_count_max=3) as producer,
    ):
        client.partitions("test")  # ZooKeeper is known to be there
        for round_number in (1, 2):
            for _ in range(5):
                producer.send_oneway("no", b"x")
            producer.flush(PATIENCE_S)
            found = producer.statistics()
            assert found.dropped == {"BufferFullError": 2 * round_number}
            assert found.failed == {"NoTopicError": 3 * round_number}


@pytest.mark.parametrize("world", WORLDS)
def test_a_message_that_a_user_s_selector_fails_on_takes_no_other_along(
    start_broker: StartBroker, world: str
) -> None:
    """Nobody hears its error where it waited for its topic, so it is counted."""

    def select(topic: str, partitions: Any, message: OutgoingMessage) -> TopicPartition:
        if message.data == b"2":
            raise KeyError("as the test says")
        return TopicPartition(topic, partitions[0].broker_id, 0)

    broker = start_broker({"test": 1})
    options = {"selector": select, "in_flight_batches_max": 1}
    with (
        WORLDS[world](**broker.client_options, **QUICK) as client,
        client.producer(**options) as producer,
    ):
        for data in (b"1", b"2", b"3"):
            producer.send_oneway("test", data)
        producer.flush(PATIENCE_S)
        assert producer.statistics().failed == {"MetaqError": 1}
    assert broker.stored("test") == [b"1", b"3"]


@pytest.mark.parametrize("world", WORLDS)
def test_a_selector_that_fails_is_counted_for_the_first_message_and_raised_for_others(
    start_broker: StartBroker, world: str
) -> None:
    """Nobody can hear it for the first one, which waits for its topic."""

    def select(*_message: Any) -> TopicPartition:
        raise KeyError("as the test says")

    broker = start_broker({"test": 1})
    with (
        WORLDS[world](**broker.client_options, **QUICK) as client,
        client.producer(selector=select) as producer,
    ):
        producer.send_oneway("test", b"first")
        producer.flush(PATIENCE_S)
        with pytest.raises(KeyError, match="as the test says"):
            producer.send_oneway("test", b"second")
        producer.flush(PATIENCE_S)
        found = producer.statistics()
        assert (found.failed, found.dropped) == ({"MetaqError": 1}, {})
        assert found.buffered_count == 0
    assert broker.stored("test") == []
