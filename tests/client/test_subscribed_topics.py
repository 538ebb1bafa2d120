"""Topics by pattern: matches, new and deleted topics, and the view of members."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

import pytest

from metaq.client import ConfigError, MemoryOffsets, TopicPattern
from metaq.client.consume.redelivery import RetryPolicy
from metaq.client.session import context_of
from metaq.model import BrokerId, Message, TopicPartition
from metaq.net.own_host import own_host
from metaq.routing.match import ExchangeKind
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.exchange_definitions import ExchangeDefinition, encode_exchange
from metaq.zk.paths import NodePaths
from tests.brokers import AnyBroker, StartBroker
from tests.client.group_members import GROUP, ID, Member, owners, part, serve
from tests.client.worlds import IDLE, QUICK, WORLDS, take
from tests.rigs.inside import twin_of
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until, wait_until

PATHS = NodePaths()
SOON_S = 2.0
"""A topic that was made is read, and one that was deleted is gone, after this time."""
PATIENCE_S = 60.0
ORDERS = TopicPattern("orders-*")


def parts_of(topic: str, *numbers: int) -> set[TopicPartition]:
    return {part(number, topic=topic) for number in numbers}


def matching(server: MemoryZooKeeper, *globs: str, consumer_id: str = "c1") -> Member:
    patterns = [TopicPattern(glob) for glob in globs]
    return Member(server, consumer_id, topics=(), patterns=patterns)


# -- members of a group, in virtual time -----------------------------------------------


def test_new_topics_are_read_and_deleted_ones_go() -> None:
    """By watches: within 2 s; and the member node has their names for other members."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        serve(server, 2, topic="orders-1")
        serve(server, 1, topic="others")
        one = await matching(server, "orders-*").join()
        await until(lambda: one.reading == parts_of("orders-1", 0, 1), SOON_S)
        assert server.nodes[ID].data == b"orders-1"
        assert server.calls.count(("create", ID)) == 1, "once, with what there is"
        serve(server, 1, topic="orders-2")
        wanted = parts_of("orders-1", 0, 1) | parts_of("orders-2", 0)
        await until(lambda: one.reading == wanted, SOON_S)
        assert server.nodes[ID].data == b"orders-1,orders-2"
        assert one.sink.called("revoke") == set(), "what was read is read on"
        serve(server, 0, topic="orders-1")
        await until(lambda: one.reading == parts_of("orders-2", 0), SOON_S)
        assert server.nodes[ID].data == b"orders-2"
        assert owners(server, "orders-1") == {}
        serve(server, 1, topic="orders-1")
        wanted = parts_of("orders-1", 0) | parts_of("orders-2", 0)
        await until(lambda: one.reading == wanted, SOON_S)
        await one.leave()

    run_virtually(scenario())


def test_a_pattern_without_a_topic_waits_for_one() -> None:
    """The member has joined, and is settled with nothing."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        one = await matching(server, "orders-*").join()
        await until(lambda: one.is_settled, SOON_S)
        assert one.topics.problems() == ["pattern 'orders-*': no topic matches it"]
        serve(server, 1, topic="orders-1")
        await until(lambda: one.reading == parts_of("orders-1", 0), SOON_S)
        assert one.topics.problems() == []
        await one.leave()

    run_virtually(scenario())


def test_a_pattern_passes_over_an_exchange(caplog: pytest.LogCaptureFixture) -> None:
    """The log names it once, and the member's problem while no topic matches."""

    async def scenario() -> None:
        server, path = MemoryZooKeeper(), PATHS.exchange("orders-all")
        definition = ExchangeDefinition(kind=ExchangeKind.FANOUT)
        server.put(path, encode_exchange(definition))
        one = await matching(server, "orders-*").join()
        await until(lambda: one.is_settled, SOON_S)
        (problem,) = one.topics.problems()
        assert problem.endswith("exchange orders-all, which stores nothing itself")
        serve(server, 1, topic="orders-1")
        await until(lambda: one.reading == parts_of("orders-1", 0), SOON_S)
        assert one.topics.problems() == []
        server.put(path, encode_exchange(replace(definition, is_deleted=True)))
        serve(server, 1, topic="orders-all")
        await until(lambda: len(one.reading) == 2, SOON_S)
        await one.leave()

    caplog.set_level("INFO")
    run_virtually(scenario())
    assert caplog.text.count("takes no exchange: exchange=orders-all") == 1


def test_members_with_different_patterns_share_what_both_match() -> None:
    """Each topic among those whose patterns match it, and no one else."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        for topic in ("orders-1", "orders-2", "bills-1"):
            serve(server, 2, topic=topic)
        one = await matching(server, "orders-*", "bills-*").join()
        two = await matching(server, "orders-2", "none-*", consumer_id="c2").join()
        orders, bills = parts_of("orders-1", 0, 1), parts_of("bills-1", 0, 1)
        await until(
            lambda: one.reading == orders | bills | parts_of("orders-2", 0), SOON_S
        )
        await until(lambda: two.reading == parts_of("orders-2", 1), SOON_S)
        await two.leave()
        await until(
            lambda: one.reading == orders | bills | parts_of("orders-2", 0, 1), SOON_S
        )
        await one.leave()

    run_virtually(scenario())


def test_members_of_java_see_names_and_have_their_share() -> None:
    """One of them that names a topic has its part of it, and nothing of the others."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        serve(server, 2, topic="orders-1")
        serve(server, 2, topic="orders-2")
        java = PATHS.member(GROUP, "g_zjava")
        server.put(java, b"orders-1", session_id=77)
        one = await matching(server, "orders-*").join()
        wanted = parts_of("orders-1", 0) | parts_of("orders-2", 0, 1)
        await until(lambda: one.reading == wanted, SOON_S)
        server.put(PATHS.owner(GROUP, part(1, topic="orders-1")), b"g_zjava")
        server.put(java, b"orders-1,orders-2", session_id=77)
        wanted = parts_of("orders-1", 0) | parts_of("orders-2", 0)
        await until(lambda: one.reading == wanted, SOON_S)
        server.remove(java)
        server.remove(PATHS.owner(GROUP, part(1, topic="orders-1")))
        wanted = parts_of("orders-1", 0, 1) | parts_of("orders-2", 0, 1)
        await until(lambda: one.reading == wanted, SOON_S)
        await one.leave()

    run_virtually(scenario())


def test_a_topic_whose_brokers_are_away_stays() -> None:
    """It is recorded: reading goes on when they come back."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        serve(server, 1, topic="orders-1")
        record = PATHS.recorded_partitions("orders-1", BrokerId(0))
        server.put(record, b"1")
        one = await matching(server, "orders-*").join()
        await until(lambda: one.reading == parts_of("orders-1", 0), SOON_S)
        serve(server, 0, topic="orders-1")
        await until(lambda: not one.reading, SOON_S)
        assert list(one.topics) == ["orders-1"]
        assert server.nodes[ID].data == b"orders-1"
        server.remove(record)
        await until(lambda: not one.topics.names, SOON_S)
        await one.leave()

    run_virtually(scenario())


# -- consumers, in both worlds ---------------------------------------------------------


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"orders-1": 1, "other": 1, "orders-1.dead": 1})


@pytest.fixture(params=["sync", "async"])
def world(request: pytest.FixtureRequest) -> Any:
    return WORLDS[request.param]


@pytest.fixture(params=["zookeeper", "brokers"])
def client(
    world: Any, broker: AnyBroker, request: pytest.FixtureRequest
) -> Iterator[Any]:
    where = (
        broker.client_options
        if request.param == "zookeeper"
        else {"brokers": [broker.address]}
    )
    with world(**where, **QUICK) as one:
        yield one


@pytest.fixture
def group_client(world: Any, broker: AnyBroker) -> Iterator[Any]:
    with world(**broker.client_options, **QUICK) as one:
        yield one


@pytest.mark.slow
def test_a_consumer_reads_what_matches(client: Any, broker: AnyBroker) -> None:
    """Now and later; names of topics may be in the list as well."""
    broker.put(b"a", topic="orders-1")
    broker.put(b"x", topic="other")
    broker.put(b"dead", topic="orders-1.dead")
    topics = ["other", ORDERS]
    with client.consumer("g", topics, **IDLE) as consumer:
        assert {one.data for one in take(consumer, 2)} == {b"a", b"x"}
        assert consumer.topics == ("other", "orders-1")
        broker.create_topic("orders-2")
        broker.put(b"b", topic="orders-2")
        assert consumer.receive(PATIENCE_S).data == b"b"
        assert consumer.topics == ("other", "orders-1", "orders-2")
        assert consumer.health().problems == ()


def test_a_consumer_of_nothing_starts_and_says_so(
    client: Any, broker: AnyBroker
) -> None:
    """`health` names the pattern; the consumer is not one that waits to join."""
    with client.consumer("g", TopicPattern("bills-*"), **IDLE) as consumer:
        said = ("pattern 'bills-*': no topic matches it",)
        wait_until(lambda: consumer.health().problems == said)
        wait_until(lambda: consumer.health().state.value == "running")
        assert "bills-*" in repr(getattr(consumer, "twin", consumer))
        broker.create_topic("bills-1")
        broker.put(b"b", topic="bills-1")
        assert consumer.receive(PATIENCE_S).data == b"b"
        wait_until(lambda: consumer.health().is_ok)


def test_partitions_by_name_need_topics_by_name(group_client: Any) -> None:
    """Topics that match have partitions of their own."""
    with pytest.raises(ConfigError, match="partitions: expected topics by name, got"):
        group_client.consumer("g", ["other", ORDERS], partitions=["0-0"])


@pytest.mark.slow
def test_messages_of_a_later_topic_are_parked(
    group_client: Any, broker: AnyBroker, world: Any, tmp_path: Any
) -> None:
    """The local retry store takes topics that came after the run had begun."""
    policy = RetryPolicy(attempts_max=1, then="park", park_dir=tmp_path)

    def fail(_message: Message) -> None:
        raise LookupError("no")

    async def fail_async(message: Message) -> None:
        fail(message)

    def count() -> int:
        handling = consumer.statistics().handling
        return 0 if handling is None else int(handling.parked_count)

    handler = fail if world is WORLDS["sync"] else fail_async
    with group_client.consumer("g", TopicPattern("bills-*"), **IDLE) as consumer:
        running = threading.Thread(
            target=consumer.run, args=(handler,), kwargs={"retry": policy}
        )
        running.start()
        wait_until(lambda: consumer.statistics().handling is not None)
        broker.create_topic("bills-1")
        broker.put(b"b", topic="bills-1")
        wait_until(lambda: count() == 1)
        consumer.close()
        running.join(PATIENCE_S)


def test_a_broadcast_may_have_a_pattern(group_client: Any, broker: AnyBroker) -> None:
    """It is a group of its own."""
    if ip_address(own_host()).is_loopback:
        pytest.skip("this machine has no address but loopback")
    broker.put(b"a", topic="orders-1")
    options = {"broadcast": True, "offsets": MemoryOffsets(), **IDLE}
    with group_client.consumer("g", ORDERS, **options) as consumer:
        assert consumer.receive(PATIENCE_S).data == b"a"
        assert consumer.group.startswith("g-")


# -- what matches ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("glob", "topic", "is_match"),
    [
        ("orders-*", "orders-1", True),
        ("orders-*", "orders-", True),
        ("orders-*", "my-orders-1", False),
        ("orders-*", "Orders-1", False),
        ("orders-?", "orders-12", False),
        ("orders-[12]", "orders-2", True),
        ("orders", "orders", True),
        ("*", "orders", True),
        ("*", "__offsets", False),
        ("__*", "__offsets", False),
        ("orders-*", "orders-1.dead", False),
        ("orders-*.dead", "orders-1.dead", True),
        ("*", "log*", False),
        ("*", "a,b", False),
    ],
)
def test_a_pattern_matches_whole_names(glob: str, topic: str, is_match: bool) -> None:
    """Internal topics, dead letters and what is no topic are left out."""
    assert TopicPattern(glob).matches(topic) is is_match


@pytest.mark.parametrize("glob", ["", "a b", "a,b", "a/b"])
def test_a_pattern_that_no_topic_matches_is_refused(glob: str) -> None:
    """At once; else a consumer would wait for ever."""
    with pytest.raises(ConfigError, match="pattern: expected text"):
        TopicPattern(glob)


def test_names_and_patterns_are_told_apart(group_client: Any) -> None:
    """Anything else is refused, and so is an empty list."""
    with pytest.raises(TypeError, match="pattern: expected str, got int"):
        TopicPattern(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="topics: expected"):
        group_client.consumer("g", [ORDERS, 3])
    with pytest.raises(ConfigError, match="at least one"):
        group_client.consumer("g", [])


def test_names_stay_as_they_are_without_a_pattern(group_client: Any) -> None:
    """Nothing of the cluster is looked at for them, and nothing watched but them."""
    consumer = group_client.consumer("g", ["other", "orders-1", "other"])
    assert consumer.topics == ("other", "orders-1")
    client = getattr(group_client, "twin", None) or twin_of(group_client)
    assert context_of(client).metadata.snapshot.names is None
