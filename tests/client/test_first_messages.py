"""Sends to an unknown topic: a future at once, an outcome by the deadline."""

import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import BufferFullError, Client, OutgoingMessage, SendFuture
from metaq.client.errors import NoTopicError
from metaq.errors import ClosedError, CoordinationError, MetaqError
from metaq.model import TopicPartition
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.waiting import PATIENCE_S, wait_until


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 1})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options, **QUICK) as one:
        yield one


def know_cluster(client: Any) -> None:
    """Leave nothing to be learned of it in the short time of a send that fails."""
    client.partitions("test")


@pytest.mark.slow
def test_a_topic_that_there_is_not_fails_the_future_and_its_callback_hears(
    client: Any,
) -> None:
    """One error, which names the topic, a near one, and nothing of ZooKeeper."""
    heard: list[SendFuture] = []
    know_cluster(client)
    with client.producer() as producer:
        future = producer.send_nowait("tets", b"x", timeout=0.5)
        assert not future.done()
        future.add_done_callback(heard.append)
        with pytest.raises(
            NoTopicError, match=r"'tets' \(waited .*mean test\?"
        ) as error:
            future.result(PATIENCE_S)
        wait_until(lambda: heard == [future])
        text = "".join(traceback.format_exception(error.value))
        assert text.count("Error:") == 1
        assert "ZooKeeper" not in text
        with pytest.raises(NoTopicError, match="no broker serves topic 'tets'"):
            producer.send("tets", b"x", timeout=0.1)
        assert producer.statistics().buffered_count == 0


@pytest.mark.slow
def test_messages_wait_for_their_topic_and_keep_their_order(
    client: Any, broker: AnyBroker
) -> None:
    """Those that are sent when it is known are after them; keys have their own."""
    with client.producer(timeout_s=PATIENCE_S, in_flight_batches_max=1) as producer:
        waiting = [producer.send_nowait("new", b"%d" % n) for n in range(20)]
        keyed = producer.send_nowait("new", b"20", key="k", headers={"h": b"1"})
        assert producer.statistics().buffered_count == 21
        broker.create_topic("new")
        later: list[SendFuture] = []
        while not waiting[0].done() or len(later) < 5:
            later.append(producer.send_nowait("new", b"%d" % (21 + len(later))))
            time.sleep(0.001)
        producer.flush(PATIENCE_S)
        futures = [*waiting, keyed, *later]
        offsets = [future.result(PATIENCE_S).offset for future in futures]
    assert offsets == sorted(offsets)
    assert broker.stored("new") == [b"%d" % n for n in range(len(futures))]


@pytest.mark.slow
def test_waiting_messages_take_memory_and_nothing_else_blocks(client: Any) -> None:
    know_cluster(client)
    with client.producer(when_full="raise", buffer_count_max=2) as producer:
        first = [producer.send_nowait("no", b"x", timeout=0.3) for _ in range(2)]
        with pytest.raises(BufferFullError):
            producer.send_nowait("no", b"x")
        for future in first:
            assert isinstance(future.exception(PATIENCE_S), NoTopicError)
        producer.send("test", b"y", timeout=PATIENCE_S)


@pytest.mark.slow
def test_a_shorter_deadline_of_a_later_message_counts(client: Any) -> None:
    know_cluster(client)
    with client.producer() as producer:
        slow = producer.send_nowait("no", b"x", timeout=PATIENCE_S)
        fast = producer.send_nowait("no", b"y", timeout=0.05)
        assert isinstance(fast.exception(PATIENCE_S), NoTopicError)
        assert not slow.done()
        producer.close(0.05)
        with pytest.raises(ClosedError, match="before topic 'no' was found"):
            slow.result(PATIENCE_S)


def test_the_error_of_a_selector_is_in_the_future(
    client: Any, broker: AnyBroker
) -> None:
    """The others are sent."""

    def select(topic: str, partitions: Any, message: OutgoingMessage) -> TopicPartition:
        if message.data == b"bad":
            raise ZeroDivisionError
        return TopicPartition(topic, partitions[0].broker_id, 0)

    with client.producer(selector=select) as producer:
        bad = producer.send_nowait("new", b"bad", timeout=PATIENCE_S)
        good = producer.send_nowait("new", b"good", timeout=PATIENCE_S)
        broker.create_topic("new")
        with pytest.raises(MetaqError, match=r"selector failed: ZeroDivisionError"):
            bad.result(PATIENCE_S)
        good.result(PATIENCE_S)
    assert broker.stored("new") == [b"good"]


def test_what_can_never_be_sent_is_refused_at_the_call(client: Any) -> None:
    with client.producer(buffer_bytes_max=1000) as producer:
        for wrong in ({"key": 5}, {"partition": 0}, {"headers": 5}):
            with pytest.raises(TypeError):
                producer.send_nowait("no", b"x", **wrong)
        with pytest.raises(MetaqError, match="at most 1000 bytes"):
            producer.send_nowait("no", b"x" * 1000)
        assert producer.statistics().buffered_count == 0


def test_a_zookeeper_that_is_away_fails_the_future_as_that(broker: AnyBroker) -> None:
    broker.zookeeper.stop()
    with Client(**broker.client_options) as client, client.producer() as producer:
        future = producer.send_nowait("test", b"x", timeout=0.05)
        assert isinstance(future.exception(PATIENCE_S), CoordinationError)
    broker.zookeeper.start()


def test_threads_that_send_first_lose_nothing(broker: AnyBroker) -> None:
    """Each one's messages keep their order."""
    with (
        Client(**broker.client_options, **QUICK) as client,
        client.producer(timeout_s=PATIENCE_S) as producer,
    ):

        def send(name: bytes) -> None:
            for number in range(200):
                producer.send_nowait("new", name + b"-%d" % number)

        threads = [threading.Thread(target=send, args=(n,)) for n in (b"a", b"b")]
        for thread in threads:
            thread.start()
        broker.create_topic("new")
        for thread in threads:
            thread.join()
        producer.flush(PATIENCE_S)
    found = broker.stored("new")
    for name in (b"a", b"b"):
        mine = [data for data in found if data.startswith(name)]
        wanted = [name + b"-%d" % number for number in range(200)]
        assert (
            mine == wanted if broker.has_extensions else sorted(mine) == sorted(wanted)
        )
