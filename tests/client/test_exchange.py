"""Sending to an exchange: unroutable messages, old brokers, order, batches."""

import datetime as dt
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from metaq.client import (
    Client,
    ConfigError,
    ExchangeError,
    MemoryOffsets,
    NoExchangesError,
    Scheduled,
    TopicPartition,
    TopicPattern,
    UnroutableError,
)
from metaq.model import BrokerId
from metaq.testing.embedded import embedded_broker
from tests.brokers import StartBroker
from tests.client.producing import OURS, StandInBroker, producing
from tests.client.queue_user import data_of
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import wait_until

ONE_BROKER = {
    "client": "MetaQ has no exchanges",
    "test_a_client_of_named_brokers_hears_of_exchanges": "likewise",
}
TOPICS = {"orders": 2, "paid": 1}


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    with (
        embedded_broker(topics=TOPICS) as broker,
        WORLDS[request.param](**broker.client_options, **QUICK) as one,
    ):
        admin = one.admin()
        admin.create_exchange("events")
        admin.bind("events", "orders", key="order.#")
        admin.bind("events", "paid", key="*.paid")
        yield one


def test_a_message_goes_to_each_topic_with_its_key_and_headers(client: Any) -> None:
    """The routing key is a header of it, the first one."""
    with client.exchange("events") as events:
        sent = events.send("order.paid", b"a", key="k", headers={"trace": b"1"})
        events.flush()
        assert events.statistics().acknowledged_bytes > 0
    assert sent.partition == TopicPartition("events", BrokerId(0), 0)
    assert sent.offset == -1
    for topic in TOPICS:
        (message,) = client.browse(topic)
        assert (message.data, message.key, message.id) == (b"a", b"k", sent.message_id)
        assert message.header_pairs == (
            ("routing-key", b"order.paid"),
            ("trace", b"1"),
        )


def test_a_message_that_is_sent_on_has_one_routing_key(client: Any) -> None:
    """That of its new exchange; a tag is a header, as with a producer."""
    with client.exchange("events") as events:
        events.send("order.paid", b"a", headers={"trace": b"1"})
        (message,) = client.browse("paid")
        events.send("else.paid", b"b", headers=message.headers, tag="t")
    _, second = client.browse("paid")
    assert second.header_pairs == (
        ("routing-key", b"else.paid"),
        ("trace", b"1"),
        ("tag", b"t"),
    )


@pytest.mark.slow
def test_a_message_with_a_time_waits_for_each_of_its_topics(client: Any) -> None:
    """Its receipt can be kept, and takes nothing back: it is of several messages."""
    admin = client.admin()
    with client.exchange("events") as events, client.producer() as producer:
        sent = events.send("order.paid", b"a", delay="1h")
        assert (sent.tier, sent.offset) == (-1, -1)
        assert Scheduled.parse(str(sent)) == sent
        assert not producer.cancel(sent)
        with producer.transaction() as tx:
            tx.send("events", b"b", attribute="order.paid", delay="1h")
        assert [admin.scheduled(each).message_count for each in TOPICS] == [2, 2]
        assert admin.cancel_scheduled("orders") == 2
        passed = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=1)
        events.send("order.new", b"c", deliver_at=passed)
        assert data_of(client, "orders") == [b"c"]
        events.send("order.paid", b"d", delay=0.1)
        wait_until(lambda: data_of(client, "orders") == [b"c", b"d"])
    assert [admin.scheduled(each).message_count for each in TOPICS] == [0, 2]
    with (
        client.exchange("events", mandatory=False) as events,
        pytest.raises(UnroutableError),
    ):
        events.send("nothing", b"a", delay="1h")


@pytest.mark.slow
def test_what_goes_nowhere_keeps_no_neighbour_from_its_topics(client: Any) -> None:
    """In a batch of many, each has its own outcome; the order is kept."""
    keys = [f"order.{n}" if n % 7 else "nothing" for n in range(100)]
    # Until the flush: a busy machine takes a while for these calls.
    with client.exchange("events", linger_s=20) as events:
        futures = [events.send_nowait(key, b"%d" % n) for n, key in enumerate(keys)]
        events.flush()
    failed = [n for n, future in enumerate(futures) if future.exception()]
    assert failed == list(range(0, 100, 7))
    assert {type(futures[n].exception()) for n in failed} == {UnroutableError}
    with pytest.raises(UnroutableError, match="matches routing key 'nothing'"):
        futures[0].result()
    expected = [b"%d" % n for n in range(100) if n % 7]
    assert sorted(data_of(client, "orders"), key=int) == expected
    # One refusal names all: then each run of the others is a request.
    assert events.statistics().retried_count == 15
    ids = {future.result().message_id for n, future in enumerate(futures) if n % 7}
    assert ids == {message.id for message in client.browse("orders")}


def test_without_mandatory_what_goes_nowhere_is_dropped(client: Any) -> None:
    """So the sender hears of nothing."""
    with client.exchange("events", mandatory=False) as events:
        assert events.send("nothing", b"a").offset == -1
    assert data_of(client, "orders") == []


def test_a_producer_and_a_transaction_may_send_to_an_exchange(client: Any) -> None:
    """By its name, as to a topic; the attribute is the routing key, too."""
    with client.producer() as producer:
        assert producer.send("events", b"a", attribute="order.a").offset == -1
        with producer.transaction() as tx:
            tx.send("events", b"b", attribute="order.paid")
            tx.send("paid", b"c")
        ended = producer.transaction()
        ended.send("events", b"d", attribute="order.paid")
        ended.rollback()
    assert sorted(data_of(client, "orders")) == [b"a", b"b"]
    assert data_of(client, "paid") == [b"b", b"c"]


@pytest.mark.slow
def test_a_producer_hears_of_what_goes_nowhere(client: Any) -> None:
    """Single puts, a batch, a transaction: an alternate topic takes them otherwise."""
    admin = client.admin()
    nowhere = pytest.raises(UnroutableError, match="no binding")
    with client.producer(linger_s=0.02) as producer:
        with nowhere:
            producer.send("events", b"a", attribute="x")
        keys = ["order.new", "x"] * 20
        futures = [producer.send_nowait("events", b"b", attribute=k) for k in keys]
        producer.flush()
        errors = [type(each.exception()) for each in futures]
        assert errors == [type(None), UnroutableError] * 20
        for messages in ([b"c"], [b"c"] * 100):
            with nowhere, producer.transaction() as tx:
                tx.send_many("events", messages)
        assert data_of(client, "orders") == [b"b"] * 20
        admin.create_exchange("others", alternate="paid")
        producer.send("others", b"d")
        producer.send_many("others", [b"d"] * 2)
    assert data_of(client, "paid") == [b"d"] * 3


def receive_one(client: Any) -> object:
    with client.consumer("g", ["events"], partitions=["0-0"]) as consumer:
        return consumer.receive(10.0)


READS: dict[str, Callable[[Any], object]] = {
    "browse": lambda client: list(client.browse("events")),
    "partial": lambda client: list(client.browse("events", partial=True)),
    "named": lambda client: list(client.browse("events", partitions=["0-0"])),
    "follow": lambda client: next(iter(client.browse("events", stop_at_end=False))),
    "find": lambda client: list(client.find("events", key="k")),
    "find named": lambda client: list(
        client.find("events", key="k", partitions=["0-0"])
    ),
    "get": lambda client: client.get("events", "0-0", 0),
    "consumer": lambda client: client.consumer("g", ["paid", "events"]).__enter__(),
    "alone": receive_one,
    "queue": lambda client: client.queue("events", group="q", then="drop").__enter__(),
    "responder": lambda client: client.responder("events", group="r").run(bytes),
    "request": lambda client: client.request("events", b"x"),
    "reset": lambda client: client.admin().reset_offsets(
        "g", to="earliest", topics=["events"]
    ),
}


@pytest.mark.parametrize("read", READS)
def test_an_exchange_is_not_read_as_an_empty_topic(client: Any, read: str) -> None:
    """Each way to read says so at once, and a request is not routed as an event."""
    with pytest.raises(ExchangeError, match="'events' is an exchange; it stores not"):
        READS[read](client)
    assert data_of(client, "orders") == []


def test_sends_to_an_exchange_that_was_deleted_are_refused(client: Any) -> None:
    """With the error of one that never was, although it was there for this sender; a
    producer and a transaction that name it hear of the same."""
    refused = partial(pytest.raises, ExchangeError, match="'events' is no exchange")
    with client.exchange("events") as events, client.producer() as producer:
        events.send("order.new", b"a")
        tx = producer.transaction()
        tx.send("events", b"c", attribute="order.new")
        client.admin().delete_exchange("events")
        with refused():
            events.send("order.new", b"b")
        with refused():
            producer.send("events", b"b")
        with refused():
            tx.send("events", b"d")
        tx.rollback()
        for messages in ([b"e"], [b"e"] * 100):
            with refused(), producer.transaction() as tx:
                tx.send_many("events", messages)


def test_a_consumer_that_is_refused_leaves_its_group(client: Any) -> None:
    """Else it would keep partitions of its other topics, and read none of them."""
    with pytest.raises(ExchangeError):
        client.consumer("g", ["orders", "events"]).start()
    assert client.admin().describe_group("g").members == {}


@pytest.mark.slow
def test_a_reader_hears_of_an_exchange_that_is_made_later(client: Any) -> None:
    """A consumer that waits for its topic, and a worker whose topic went."""
    admin = client.admin()
    admin.create_topic("gone", partitions=1)
    with (
        client.consumer("g", ["late"]) as consumer,
        client.queue("gone", group="q", then="drop") as queue,
    ):
        assert consumer.receive_many(1, 0.1) == []
        admin.create_exchange("late")
        with pytest.raises(ExchangeError, match="'late' is an exchange"):
            consumer.receive(10.0)
        assert not consumer.health().is_ok
        admin.delete_topic("gone")
        admin.create_exchange("gone")
        with pytest.raises(ExchangeError, match="'gone' is an exchange"):
            queue.receive(10.0)


@pytest.mark.slow
def test_a_client_of_named_brokers_hears_of_exchanges() -> None:
    """It sends to them, and is refused where they are read; a pattern skips them."""
    with (
        embedded_broker(topics={"orders": 1, "ev*": 1}) as broker,
        Client(**broker.client_options) as client,
        Client(brokers=[broker.address], **QUICK) as named,
    ):
        admin = client.admin()
        admin.create_exchange("events", "fanout")
        admin.bind("events", "orders")
        wait_until(lambda: is_refused(READS["browse"], named))
        for read in ("browse", "find", "get", "request"):
            assert is_refused(READS[read], named)
        with named.exchange("events") as events:
            assert events.send("x", b"a").offset == -1
        assert data_of(named, "orders") == [b"a"]
        assert "events" not in named.topics()
        options: Any = {"broadcast": True, "offsets": MemoryOffsets()}
        with named.consumer("g", TopicPattern("even*"), **options) as consumer:
            wait_until(lambda: consumer.health().problems)
            (problem,) = consumer.health().problems
            assert "but exchange events, which stores nothing" in problem
        admin.delete_exchange("events")
        wait_until(lambda: not is_refused(READS["browse"], named))


def is_refused(read: Callable[[Any], object], client: Client) -> bool:
    try:
        read(client)
    except ExchangeError:
        return True
    return False


@pytest.mark.slow
def test_a_name_that_is_free_again_is_read_as_a_topic(client: Any) -> None:
    """The exchange was deleted; its node is left."""
    admin = client.admin()
    admin.delete_exchange("events")
    admin.create_topic("events", partitions=1)
    with client.producer() as producer:
        producer.send("events", b"x")
    assert data_of(client, "events") == [b"x"]


def test_wrong_arguments_are_named(client: Any) -> None:
    """Nothing is sent."""
    with pytest.raises(ConfigError, match="topic: expected a name"):
        client.exchange("a b")
    with pytest.raises(TypeError, match="mandatory: expected True or False"):
        client.exchange("events", mandatory=1)
    with client.exchange("events") as events, pytest.raises(TypeError, match="routing"):
        events.send(5, b"a")


@pytest.mark.slow
def test_an_exchange_that_there_is_not_is_named(client: Any) -> None:
    """As an exchange, and not as a topic that could be made."""
    with (
        client.exchange("event") as events,
        pytest.raises(ExchangeError, match=r"no exchange 'event' .*exchanges create"),
    ):
        events.send("a", b"x", timeout=0.5)


def test_a_broker_without_exchanges_is_named_and_gets_nothing(
    start_broker: StartBroker,
) -> None:
    """A topic is no exchange at a broker that has them."""
    broker = start_broker(topics={"test": 1})
    with Client(**broker.client_options, **QUICK) as client:
        with client.exchange("test") as events:
            if broker.has_extensions:
                with pytest.raises(ExchangeError, match="'test' is no exchange"):
                    events.send("a", b"x")
            else:
                with pytest.raises(
                    NoExchangesError, match=r"broker 0 .*not support exchanges"
                ):
                    events.send("a", b"x")
        assert broker.stored() == []


def test_the_world_of_a_stand_in_broker() -> None:
    """One of ours that announces none is named with its version."""

    async def main() -> None:
        broker = StandInBroker(capabilities=OURS)
        async with producing(broker, is_mandatory=False) as world:
            with pytest.raises(NoExchangesError, match=r"its version is 1\.0"):
                await world.producer.send("test", b"x")
        assert broker.commands == []

    run_virtually(main())
