"""Exchanges for an administrator, with a broker and ZooKeeper."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from metaq.client import (
    AsyncClient,
    Binding,
    Client,
    ConfigError,
    CoordinationError,
    ExchangeError,
    MetaqError,
    NoBrokerError,
    NoExchangesError,
    NoTopicError,
    RequestTimeoutError,
    TopicExistsError,
    UnroutableError,
)
from metaq.client.admin.topic_admin import AsyncAdmin
from metaq.client.errors import TopicRefusedError
from metaq.errors import ClientError
from metaq.routing.match import BINDINGS_MAX
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.testing.fake_broker import FakeBroker
from metaq.testing.servers import reserve_port
from metaq.zk.exchange_definitions import binding_name, encode_binding
from tests.cases import for_each
from tests.client.worlds import parts_of
from tests.rigs.inside import running_inside
from tests.rigs.waiting import wait_until

ONE_BROKER = {
    "rig": "MetaQ has no exchanges",
    "test_a_broker_of_metaq_1_4_has_no_exchange_made_or_bound": "it has both",
    "test_a_broker_keeps_its_exchanges_without_zookeeper": "likewise",
    "test_a_bound_topic_is_on_all_brokers": "likewise",
    "test_a_topic_of_a_java_broker_with_the_name_of_an_exchange_is_an_alarm": "both",
    "test_a_broker_that_is_drained_is_sent_no_message_of_an_exchange": "likewise",
}
TOPICS = {"orders": 2, "paid": 1, "other": 1}


@pytest.fixture
def rig() -> Iterator[tuple[EmbeddedBroker, Client]]:
    with (
        embedded_broker(topics=TOPICS) as broker,
        Client(**broker.client_options) as client,
    ):
        yield broker, client


Rig = tuple[EmbeddedBroker, Client]


@pytest.mark.slow
def test_an_exchange_is_made_bound_and_deleted(rig: Rig) -> None:
    """Each call returns when the broker has it, and the topics list none of it."""
    _, client = rig
    admin = client.admin()
    made = admin.create_exchange("events", alternate="other")
    assert made.alternate == "other"
    with client.exchange("events") as events:
        with pytest.raises(UnroutableError, match="matches routing key 'order"):
            events.send("order.a", b"1")
        bound = admin.bind("events", "orders", key="order.#")
        admin.bind("events", "orders", key="order.#")
        assert bound == Binding("orders", "order.#")
        assert events.send("order.a", b"2").offset == -1
        assert list(admin.exchanges()["events"].bindings.values()) == [bound]
        assert admin.route("events", "order.x.y") == (bound,)
        assert "events" not in client.topics()
        assert admin.unbind("events", "orders", key="order.#")
        assert not admin.unbind("events", "orders", key="order.#")
        with pytest.raises(UnroutableError):
            events.send("order.a", b"3")
    assert [each.data for each in client.browse("orders")] == [b"2"]
    admin.delete_exchange("events")
    assert admin.exchanges() == {}
    with pytest.raises(ExchangeError, match="no exchange 'events'"):
        admin.route("events", "a")
    assert admin.create_exchange("events", "fanout").kind.value == "fanout"
    assert admin.exchanges()["events"].bindings == {}


def test_a_name_is_a_topics_or_an_exchanges(rig: Rig) -> None:
    """Refused both ways."""
    _, client = rig
    admin = client.admin()
    with pytest.raises(ConfigError, match="exchange: expected a name of at most 244"):
        admin.create_exchange("x" * 245)
    with pytest.raises(ExchangeError, match="'orders': a topic has that name"):
        admin.create_exchange("orders")
    admin.create_exchange("events")
    with pytest.raises(TopicExistsError, match="the name of an exchange"):
        admin.create_topic("events", partitions=1)
    with pytest.raises(ExchangeError, match="exists"):
        admin.create_exchange("events")


@pytest.mark.slow
def test_a_broker_of_metaq_1_4_has_no_exchange_made_or_bound(rig: Rig) -> None:
    """An exchange of its topic's name would get that topic's messages.

    One that there is already is unbound and deleted all the same.
    """
    broker, client = rig
    admin = client.admin()
    admin.create_exchange("events")
    admin.bind("events", "orders", key="#")
    legacy = FakeBroker(
        {"legacy": 1}, broker_id=9, coordinator=broker.zookeeper.coordinator
    )
    refusal = r"does not support exchanges: its version is 1\.4.*; nothing was changed"
    with legacy, client.producer() as producer:
        wait_until(lambda: 9 in parts_of(client).metadata.snapshot.leaders())
        for call in (
            lambda: admin.create_exchange("legacy"),
            lambda: admin.create_exchange("other-events"),
            lambda: admin.bind("events", "paid", key="#"),
        ):
            with pytest.raises(NoExchangesError, match=refusal):
                call()
        (events,) = admin.exchanges().values()
        assert [each.topic for each in events.bindings.values()] == ["orders"]
        producer.send("legacy", b"stays a topic")
        assert [each.data for each in client.browse("legacy")] == [b"stays a topic"]
        assert admin.unbind("events", "orders", key="#")
        admin.delete_exchange("events")
        assert admin.exchanges() == {}


@pytest.mark.slow
def test_a_send_while_no_broker_is_there_says_so(rig: Rig) -> None:
    """It reads nothing, and is not advised to read other topics."""
    broker, client = rig
    client.admin().create_exchange("events")
    broker.stop()
    wait_until(lambda: not parts_of(client).metadata.snapshot.brokers)
    with (
        client.exchange("events") as events,
        pytest.raises(NoBrokerError, match="no broker serves exchange 'events'"),
    ):
        events.send("a", b"x", timeout=0.3)


@pytest.mark.slow
def test_a_change_does_not_wait_for_a_broker_that_has_gone(rig: Rig) -> None:
    """It is named by ZooKeeper for a while yet, and refuses connections."""
    broker, client = rig
    admin = client.admin()
    admin.create_exchange("events")
    admin.bind("events", "orders", key="#")
    path, gone = (
        "/meta/brokers/ids/9/master",
        f"meta://127.0.0.1:{reserve_port(broker)}",
    )
    broker.zookeeper.put(path, gone.encode())
    wait_until(lambda: 9 in parts_of(client).metadata.snapshot.brokers)
    with pytest.raises(RequestTimeoutError, match=r"not have the change yet: .*9"):
        admin.unbind("events", "orders", key="#", timeout=0.3)
    end = threading.Timer(0.2, broker.zookeeper.remove, [path])
    end.start()
    assert admin.unbind("events", "orders", key="#") is False
    end.join()


@pytest.mark.slow
def test_the_bindings_of_an_exchange_that_zookeeper_lost_can_be_found(rig: Rig) -> None:
    """The alarm says where: it is in effect still, and no command lists it."""
    broker, client = rig
    admin, inner = client.admin(), running_inside(broker)
    admin.create_exchange("events")
    bound = admin.bind("events", "orders", key="order.#")
    broker.zookeeper.remove("/meta/catalog/exchanges/events")
    wait_until(lambda: inner.control.status().definition_problems)
    (problem,) = inner.control.status().definition_problems
    assert "exchanges.json of the data directory" in problem
    assert admin.exchanges() == {}
    copy = (broker.data_path / "exchanges.json").read_text()
    assert binding_name(bound) in copy
    # What it says to do ends it.
    admin.create_exchange("events")
    assert admin.bind("events", "orders", key="order.#") == bound
    wait_until(lambda: not inner.control.status().definition_problems)
    with client.exchange("events") as events:
        events.send("order.a", b"1")
    assert [each.data for each in client.browse("orders")] == [b"1"]
    broker.zookeeper.remove("/meta/catalog/exchanges/events")
    wait_until(lambda: inner.control.status().definition_problems)
    admin.create_exchange("events")
    admin.delete_exchange("events")
    wait_until(lambda: not inner.control.status().definition_problems)


def test_an_exchange_is_not_altered_as_a_topic(rig: Rig) -> None:
    """That would define a topic of its name, in whose place it is not served."""
    admin = rig[1].admin()
    admin.create_exchange("events")
    for call in (
        lambda: admin.alter_topic("events", partitions=2),
        lambda: admin.delete_topic("events"),
        lambda: admin.describe_topic("events"),
    ):
        with pytest.raises(NoTopicError, match="'events' is an exchange"):
            call()
    assert "events" in admin.exchanges()


@pytest.mark.slow
def test_an_exchange_is_no_topic_of_a_queue_group(rig: Rig) -> None:
    """Neither its own nor that of its dead letters."""
    admin = rig[1].admin()
    admin.create_exchange("events")
    with pytest.raises(ExchangeError, match="topic: 'events' is an exchange, which"):
        admin.create_queue_group("g", "events", then="drop")
    with pytest.raises(ExchangeError, match="dead_letter_topic: 'events' is an exch"):
        admin.create_queue_group("g", "orders", dead_letter_topic="events")
    admin.delete_exchange("events")
    with pytest.raises(ConfigError, match="there is no topic 'events'"):
        admin.create_queue_group("g", "events", then="drop")


@pytest.mark.slow
def test_a_topic_is_not_deleted_under_an_exchange(rig: Rig) -> None:
    """Neither a bound one nor the alternate, until nothing goes there."""
    admin = rig[1].admin()
    for name in ("made", "left"):
        admin.create_topic(name, partitions=1)
    admin.create_exchange("events", "fanout", alternate="left")
    admin.bind("events", "made")
    for name in ("made", "left"):
        with pytest.raises(
            TopicRefusedError, match=f"'{name}' is not deleted: exchange e"
        ):
            admin.delete_topic(name)
        assert name in rig[1].topics()
    admin.unbind("events", "made")
    admin.delete_topic("made")
    admin.delete_exchange("events")
    admin.delete_topic("left")


@pytest.mark.slow
def test_a_topic_is_not_deleted_under_what_a_newer_version_has_bound(rig: Rig) -> None:
    """Its version would send there, and be refused; other topics are deleted."""
    broker, client = rig
    admin = client.admin()
    for name in ("bound", "rest", "free", "known"):
        admin.create_topic(name, partitions=1)
    admin.create_exchange("events")
    for path, data in {
        "bindings/events/b1": b'{"topic":"bound","where":"tag = 1"}',
        "exchanges/odd": b'{"alternate":"rest","kind":"hash","state":"active"}',
        "bindings/odd/b2": b'{"key":"a","topic":"known"}',
    }.items():
        broker.zookeeper.put(f"/meta/catalog/{path}", data)
    for name, exchange in (("bound", "events"), ("rest", "odd"), ("known", "odd")):
        with pytest.raises(TopicRefusedError, match=f"exchange {exchange} sends"):
            admin.delete_topic(name)
    admin.delete_topic("free")
    admin.delete_exchange("events")
    admin.delete_topic("bound")


class Interrupted:
    """A coordinator; before the first request of a kind, something else is done."""

    def __init__(
        self, coordinator: Any, kind: str, work: Callable[[], Awaitable[object]]
    ) -> None:
        self.coordinator, self.kind, self.left = coordinator, kind, [work]

    def __getattr__(self, name: str) -> Any:
        request = getattr(self.coordinator, name)

        async def ask(*args: Any, **keywords: Any) -> Any:
            if self.left:
                await self.left.pop()()
            return await request(*args, **keywords)

        return ask if name == self.kind else request


class Crowded:
    """A coordinator that lists so many bindings."""

    def __init__(self, coordinator: Any, count: int) -> None:
        self.coordinator, self.names = coordinator, tuple(map(str, range(count)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coordinator, name)

    async def children(self, path: str, **keywords: Any) -> tuple[str, ...]:
        """Return names where bindings are asked for."""
        if "/bindings/" in path:
            return self.names
        return await self.coordinator.children(path, **keywords)


def test_an_exchange_has_so_many_bindings_at_most(rig: Rig) -> None:
    """One more is refused, and not written."""

    async def main() -> None:
        async with AsyncClient(**rig[0].client_options) as client:
            await client.admin().create_exchange("events", "fanout")
            context = parts_of(client)
            coordinator: Any = Crowded(context.coordinator, BINDINGS_MAX)
            admin = AsyncAdmin(replace(context, coordinator=coordinator))
            with pytest.raises(ExchangeError, match=f"at most {BINDINGS_MAX} bindings"):
                await admin.bind("events", "orders")
            (events,) = (await client.admin().exchanges()).values()
            assert events.bindings == {}

    asyncio.run(main())


async def bind(admin: AsyncAdmin, topic: str) -> None:
    await admin.bind("events", topic)


async def send_the_rest(admin: AsyncAdmin, topic: str) -> None:
    await admin.create_exchange(f"else-{topic}", alternate=topic)


@pytest.mark.slow
@pytest.mark.parametrize("send_to", [bind, send_the_rest])
def test_a_topic_is_sent_to_or_deleted_but_not_both(
    rig: Rig, send_to: Callable[[AsyncAdmin, str], Awaitable[None]]
) -> None:
    """Each comes between what the other reads and what it writes."""

    async def main() -> None:
        async with AsyncClient(**rig[0].client_options) as client:
            admin, context = client.admin(), parts_of(client)

            def interrupted(kind: str, work: Any) -> AsyncAdmin:
                coordinator: Any = Interrupted(context.coordinator, kind, work)
                return AsyncAdmin(replace(context, coordinator=coordinator))

            await admin.create_exchange("events", "fanout")
            for name in ("first", "second"):
                await admin.create_topic(name, partitions=1)
            deleting = interrupted("replace", lambda: send_to(admin, "first"))
            with pytest.raises(ClientError, match="'first' was altered or bound by"):
                await deleting.delete_topic("first")
            with pytest.raises(TopicRefusedError, match="unbind it"):
                await admin.delete_topic("first")
            sending = interrupted("transact", lambda: admin.delete_topic("second"))
            with pytest.raises(ConfigError, match="there is no topic 'second'"):
                await send_to(sending, "second")
            found = await admin.exchanges()
            used = str([(each.alternate, each.bindings) for each in found.values()])
            assert "first" in used
            assert "second" not in used

    asyncio.run(main())


@pytest.mark.slow
def test_a_deleted_exchange_takes_nothing_and_begins_anew(rig: Rig) -> None:
    """At once; bindings that its deletion has left are not those of the next one."""
    broker, client = rig
    admin = client.admin()
    admin.create_exchange("events")
    admin.bind("events", "orders", key="#")
    with client.exchange("events", timeout_s=2) as events:
        events.send("a", b"1")
        admin.delete_exchange("events")
        with pytest.raises(MetaqError):
            events.send("a", b"2")
    left = Binding("orders", "left")
    path = f"/meta/catalog/bindings/events/{binding_name(left)}"
    broker.zookeeper.put(path, encode_binding(left))
    admin.create_exchange("events")
    assert admin.exchanges()["events"].bindings == {}
    assert [each.data for each in client.browse("orders")] == [b"1"]


@for_each(
    "call, arguments, words",
    [
        ("create_exchange", {"exchange": "__x"}, "reserved for brokers"),
        ("create_exchange", {"exchange": "x", "kind": "any"}, "expected direct, fanou"),
        ("create_exchange", {"exchange": "x", "alternate": "no"}, "there is no topic"),
        ("bind", {"exchange": "events", "topic": "no"}, "there is no topic 'no'"),
        ("bind", {"exchange": "events", "topic": "paid", "key": "a*"}, "got 'a"),
        ("bind", {"exchange": "events", "topic": "paid", "match": "one"}, "'all' or"),
        (
            "bind",
            {"exchange": "events", "topic": "paid", "headers": {"x": "1"}},
            "a topic exchange takes no headers",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    rig: Rig, call: str, arguments: dict[str, Any], words: str
) -> None:
    """Nothing is changed."""
    admin = rig[1].admin()
    if "events" not in admin.exchanges():
        admin.create_exchange("events")
    with pytest.raises(ConfigError, match=words):
        getattr(admin, call)(**arguments)
    assert admin.exchanges()["events"].bindings == {}


@pytest.mark.slow
def test_headers_are_matched_all_or_any(rig: Rig) -> None:
    """A value of None is any value."""
    _, client = rig
    admin = client.admin()
    admin.create_exchange("events", "headers")
    admin.bind("events", "orders", headers={"region": "eu", "vip": None})
    admin.bind("events", "paid", headers={"region": "us", "vip": "1"}, match="any")
    with client.exchange("events", mandatory=False) as events:
        events.send("", b"a", headers={"region": b"eu", "vip": b"1"})
        events.send("", b"b", headers={"region": b"us"})
        events.send("", b"c", headers={"region": b"eu"})
    assert [each.data for each in client.browse("orders")] == [b"a"]
    assert [each.data for each in client.browse("paid")] == [b"a", b"b"]


@pytest.mark.slow
def test_what_a_newer_version_has_made_is_named_and_is_no_topic(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """By the health of its broker, once in its log, by lists, and to who uses it."""
    broker, client = rig
    admin, inner = client.admin(), running_inside(broker)
    admin.create_exchange("events")
    admin.bind("events", "orders", key="#")
    newer = b'{"alternate":null,"kind":"hash","state":"active"}'
    broker.zookeeper.put("/meta/catalog/exchanges/odd", newer)
    bound = b'{"key":"a","topic":"orders","where":"tag = 1"}'
    broker.zookeeper.put("/meta/catalog/bindings/events/b1", bound)

    def problems() -> tuple[str, ...]:
        return inner.control.status().definition_problems

    wait_until(lambda: len(problems()) == 2)
    assert all("made by a newer version" in each for each in problems())
    admin.create_exchange("third")  # the definitions are looked at again
    assert [caplog.messages.count(each) for each in problems()] == [1, 1]
    unread = admin.unread_definitions()
    assert ["'odd'" in unread[0], "b1 of exchange 'events'" in unread[1]] == [True] * 2
    assert all("made by a newer version" in each for each in unread)
    assert list(admin.exchanges()["events"].unread) == ["b1"]
    with pytest.raises(ExchangeError, match="newer version"):
        admin.route("events", "a")
    with pytest.raises(CoordinationError, match="newer version"):
        admin.route("odd", "a")
    with pytest.raises(ExchangeError, match="'odd' is an exchange"):
        list(client.browse("odd"))
    with (
        client.exchange("odd") as odd,
        pytest.raises(NoBrokerError, match="newer version"),
    ):
        odd.send("a", b"x", timeout=0.5)
    with client.exchange("events") as events:
        with pytest.raises(NoBrokerError, match=r"binding b1 cannot .*newer version"):
            events.send("a", b"x", timeout=0.5)
        broker.zookeeper.remove("/meta/catalog/bindings/events/b1")
        events.send("a", b"y")
    assert [each.data for each in client.browse("orders")] == [b"y"]


def test_a_topic_of_a_java_broker_with_the_name_of_an_exchange_is_an_alarm(
    rig: Rig,
) -> None:
    """It was away when the exchange was made, and is back; producers reach both."""
    broker, client = rig
    admin, inner = client.admin(), running_inside(broker)
    admin.create_exchange("events")

    def problems() -> tuple[str, ...]:
        return inner.control.status().definition_problems

    coordinator = broker.zookeeper.coordinator
    with FakeBroker({"events": 1}, broker_id=9, coordinator=coordinator):
        wait_until(problems)
        (problem,) = problems()
        assert problem == (
            "exchange 'events' has the name of a topic on broker 9, where messages go"
            " to that: delete one of the two ('metaq exchanges delete events')"
        )
    wait_until(lambda: not problems())
    # With `acceptSubscribe=false` there, consumers do not see it, and producers do.
    closed = "/meta/brokers/topics-pub/events/8-m"
    broker.zookeeper.put(closed, b'{"numParts":1,"broker":"8-m"}')
    wait_until(problems)
    assert "a topic on broker 8, where" in problems()[0]
    broker.zookeeper.remove(closed)
    wait_until(lambda: not problems())


def test_a_second_broker_with_the_exchange_is_no_topic_of_its_name(rig: Rig) -> None:
    """It takes messages for it as well, and its record says that it is of ours."""
    broker, client = rig
    client.admin().create_exchange("events")
    broker.zookeeper.put("/meta/catalog/brokers/8", b"meta://127.0.0.1:1")
    ours = "/meta/brokers/topics-pub/events/8-m"
    broker.zookeeper.put(ours, b'{"numParts":1,"broker":"8-m"}')
    closed = "/meta/brokers/topics-pub/events/9-m"
    broker.zookeeper.put(closed, b'{"numParts":1,"broker":"9-m"}')
    status = running_inside(broker).control.status
    wait_until(lambda: status().definition_problems)
    assert "a topic on broker 9, where" in status().definition_problems[0]


@pytest.mark.slow
def test_a_deleted_exchange_is_refused_as_one_after_a_restart(rig: Rig) -> None:
    """By its broker, whose copy of the definitions has it."""
    broker, client = rig
    admin = client.admin()
    admin.create_exchange("events")
    admin.delete_exchange("events")
    broker.restart()
    topics = running_inside(broker).context.topics
    with pytest.raises(MetaqError, match="'events' is no exchange on this broker"):
        topics.resolve_put("events", 0)


@pytest.mark.slow
def test_a_broker_keeps_its_exchanges_without_zookeeper() -> None:
    """The copy on its disk has them before a client can put."""
    with embedded_broker(topics=TOPICS) as broker:
        with Client(**broker.client_options) as client:
            client.admin().create_exchange("events")
            client.admin().bind("events", "orders", key="#")
        copy = broker.data_path / "exchanges.json"
        wait_until(lambda: copy.exists() and b"orders" in copy.read_bytes())
        broker.zookeeper.remove("/meta/catalog/exchanges/events")
        broker.restart()
        with Client(**broker.client_options) as client, client.exchange("events") as e:
            e.send("a", b"1")
            assert [each.data for each in client.browse("orders")] == [b"1"]


@pytest.mark.slow
def test_a_broker_that_is_drained_is_sent_no_message_of_an_exchange() -> None:
    """It is drained of all topics of the exchange; else it is to be found there.

    What was sent to it after its groups had read all would be lost with it.
    """
    with (
        embedded_broker() as first,
        embedded_broker(settings={"brokerId": "1"}, zookeeper=first.zookeeper),
        Client(**first.client_options) as client,
    ):
        admin = client.admin()
        admin.create_exchange("events")
        for topic in ("one", "other"):
            admin.create_topic(topic, partitions=1)
            admin.bind("events", topic, key="#")
        with client.exchange("events") as events:

            def sent_to() -> set[int]:
                keys = [f"k{n}" for n in range(9)]
                sent = [events.send("a", b"", key=key) for key in keys]
                return {each.partition.broker_id for each in sent}

            assert sent_to() == {0, 1}
            admin.alter_topic("one", brokers=[0])
            assert sent_to() == {0, 1}
            admin.alter_topic("other", brokers=[0])
            wait_until(lambda: sent_to() == {0})
            admin.unbind("events", "one", key="#")
            assert sent_to() == {0}
            admin.alter_topic("other", brokers="all")
            wait_until(lambda: sent_to() == {0, 1})


@pytest.mark.slow
def test_a_bound_topic_is_on_all_brokers() -> None:
    """A producer may send to any of them, and each of them has a change."""
    with (
        embedded_broker(topics={"orders": 1, "both": 1}) as first,
        embedded_broker(
            topics={"both": 1}, settings={"brokerId": "1"}, zookeeper=first.zookeeper
        ),
        Client(**first.client_options) as client,
    ):
        wait_until(lambda: len(client.partitions("both")) == 2)
        admin = client.admin()
        admin.create_exchange("events")
        with pytest.raises(ConfigError, match="not on all brokers: not on 1"):
            admin.bind("events", "orders", key="#")
        admin.bind("events", "both", key="#")
        with client.exchange("events") as events:
            sent = {
                events.send("a", b"%d" % n, key=f"k{n}").partition for n in range(9)
            }
        assert len(sent) == 2
        found = {message.partition.broker_id for message in client.browse("both")}
        assert found == {0, 1}
