"""Metadata of the cluster: from ZooKeeper, and from brokers by address."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from metaq.client import AsyncClient
from metaq.client.cluster.broker_facts import BrokerFacts
from metaq.client.cluster.metadata import (
    AddressMetadata,
    Metadata,
    ZooKeeperMetadata,
    make_snapshot,
)
from metaq.client.errors import NoTopicError
from metaq.client.names import parse_address
from metaq.client.options import ClientOptions
from metaq.client.timeouts import NOTICE_S
from metaq.clock import SystemClock
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.config.topic_rules import TopicRules
from metaq.errors import ClosedError, CoordinationError, NoBrokerError
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.peer.pool import ConnectionPool
from metaq.protocol.commands import Command, Reply, Result, Stats
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.errors import NodeNameError
from metaq.zk.paths import NodePaths
from tests.brokers import StartBroker
from tests.client.scripted import ScriptedBroker, free_address, ok
from tests.client.worlds import parts_of
from tests.rigs.waiting import until
from tests.zk.scripted_server import (
    NO_NODE,
    Greeted,
    Link,
    ScriptedServer,
    answer,
    greeting,
    scripted_server,
)

ONE_BROKER = {"ScriptedBroker": "brokers change what they tell, or fall silent"}

CLOCK = SystemClock()
OPTIONS = ClientOptions(metadata_s=0.01, reconnect_first_s=0.005, reconnect_max_s=0.01)
RARELY = ClientOptions(reconnect_first_s=0.005, reconnect_max_s=0.01)


Scenario = Callable[[ScriptedBroker, ScriptedBroker, AddressMetadata], Awaitable[None]]


def soon(seconds: float = 30.0) -> float:
    return CLOCK.monotonic_s() + seconds


class Tells:
    """A broker's `stats`: its id, and topic → partitions that have a log."""

    def __init__(self, broker_id: int, counts: Mapping[str, int], *names: str) -> None:
        self.broker_id = broker_id
        self.counts = dict(counts)
        self.names = names

    def __call__(self, command: Command) -> Reply | None:
        if not isinstance(command, Stats):
            return ok(command)
        match command.item:
            case "":
                lines = [f"broker_id {self.broker_id}"]
            case "topics":
                lines = [f"{name} *Empty*" for name in (*self.counts, *self.names)]
            case "offsets":
                lines = [
                    f"{topic} part {number} min_offset 0 max_offset 0"
                    for topic, count in self.counts.items()
                    for number in range(count)
                ]
            case _:
                return Result(500, b"Config file not found", command.opaque)
        body = "\r\n".join(["STATS", *lines, "END", ""])
        return Result(200, body.encode(), command.opaque)


def run(
    scenario: Callable[
        [ScriptedBroker, ScriptedBroker, AddressMetadata], Awaitable[None]
    ],
    options: ClientOptions = OPTIONS,
    **bounds_s: float,
) -> None:
    """Run with two brokers, 0 and 1, and metadata that was told of both."""

    async def main() -> None:
        async with ScriptedBroker() as zero, ScriptedBroker() as one:
            zero.answer = Tells(0, {"t": 2})
            one.answer = Tells(1, {"t": 1, "u": 1})
            await with_addresses(
                [zero.address, one.address],
                lambda metadata: scenario(zero, one, metadata),
                options,
                **bounds_s,
            )

    asyncio.run(main())


async def with_addresses(
    addresses: list[BrokerAddress],
    scenario: Callable[[AddressMetadata], Awaitable[None]],
    options: ClientOptions = OPTIONS,
    **bounds_s: float,
) -> None:
    loop = asyncio.get_running_loop()
    pool = ConnectionPool(clock=CLOCK, options=options, loop=loop)
    metadata = AddressMetadata(
        addresses, pool=pool, clock=CLOCK, options=options, **bounds_s
    )
    await metadata.start()
    try:
        await scenario(metadata)
    finally:
        await metadata.stop()
        await pool.close(deadline_s=soon())
    assert metadata.failure is None


def partitions(snapshot: ClusterSnapshot, topic: str) -> list[str]:
    return [str(partition) for partition in snapshot.put_partitions(topic)]


def test_brokers_tell_their_ids_and_partitions() -> None:
    """One snapshot of all brokers, with where each of them is."""

    async def scenario(
        zero: ScriptedBroker, one: ScriptedBroker, metadata: AddressMetadata
    ) -> None:
        assert metadata.snapshot.version == 0
        snapshot = await metadata.topic("t", deadline_s=soon())
        assert snapshot.version == 1
        assert partitions(snapshot, "t") == ["t/0-0", "t/0-1", "t/1-0"]
        assert snapshot.get_partitions("u") == (TopicPartition("u", BrokerId(1), 0),)
        leaders = {key: copies.leader for key, copies in snapshot.brokers.items()}
        assert leaders == {0: zero.address, 1: one.address}
        assert snapshot.topics == {"t"}

    run(scenario, RARELY)


def test_brokers_are_asked_again_and_only_changes_are_news() -> None:
    """Every `metadata_s`; a snapshot that says the same is none."""

    async def scenario(
        zero: ScriptedBroker, one: ScriptedBroker, metadata: AddressMetadata
    ) -> None:
        first = await metadata.topic("t", deadline_s=soon())
        heard: list[ClusterSnapshot] = []
        cancel = metadata.add_listener(heard.append)
        asked = len(zero.commands)
        await until(lambda: len(zero.commands) > asked + 12)
        assert metadata.snapshot is first
        zero.answer = Tells(0, {"t": 3})
        second = await metadata.wait_newer(first.version, deadline_s=soon())
        assert len(partitions(second, "t")) == 4
        await until(lambda: heard)
        assert heard == [second]
        cancel()
        cancel()
        zero.answer = Tells(0, {"t": 4})
        third = await metadata.wait_newer(second.version, deadline_s=soon())
        await asyncio.sleep(0)
        assert third.version == 3
        assert heard == [second]
        assert zero.accepted_count == 1

    run(scenario)


def test_a_refresh_is_soon_and_not_at_once() -> None:
    """A thousand requests for news get one answer per pause."""

    async def scenario(
        zero: ScriptedBroker, one: ScriptedBroker, metadata: AddressMetadata
    ) -> None:
        first = await metadata.topic("t", deadline_s=soon())
        start_s = CLOCK.monotonic_s()
        asked = len(zero.commands)
        zero.answer = Tells(0, {"t": 3})
        while metadata.snapshot is first:
            metadata.request_refresh()
            await asyncio.sleep(0)
        rounds = (len(zero.commands) - asked) / 4
        assert 1 <= rounds <= 1 + (CLOCK.monotonic_s() - start_s) / 0.02

    run(scenario, RARELY, ask_pause_s=0.02)


def test_a_broker_that_leaves_keeps_its_partitions_and_loses_its_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its partitions are not gone: their address is unknown at the moment."""

    async def scenario(
        zero: ScriptedBroker, one: ScriptedBroker, metadata: AddressMetadata
    ) -> None:
        # So soon they need not be there for the first snapshot.
        await until(lambda: set(metadata.snapshot.brokers) == {0, 1})
        first = metadata.snapshot
        caplog.clear()
        one.stop_listening()
        one.cut()
        await until(lambda: set(metadata.snapshot.brokers) == {0})
        assert metadata.snapshot.puts == first.puts
        async with ScriptedBroker(one.address.port) as again:
            again.answer = one.answer
            await until(lambda: set(metadata.snapshot.brokers) == {0, 1})
            # Later it leaves once more, before the metadata is stopped.
            assert caplog.text.count("broker did not report its metadata") == 1

    run(scenario, unreachable_s=0.02)


def test_another_broker_at_the_same_address_takes_the_place() -> None:
    """The topics of the former one are forgotten with its id."""

    async def scenario(
        zero: ScriptedBroker, one: ScriptedBroker, metadata: AddressMetadata
    ) -> None:
        first = await metadata.topic("u", deadline_s=soon())
        one.answer = Tells(5, {"t": 1})
        second = await metadata.wait_newer(first.version, deadline_s=soon())
        assert set(second.brokers) == {0, 5}
        assert second.put_partitions("u") == ()

    run(scenario)


@pytest.mark.slow
def test_a_silent_broker_does_not_delay_the_others_for_ever() -> None:
    """The first snapshot waits a bounded time, then speaks of those that answered."""

    async def scenario(
        zero: ScriptedBroker, one: ScriptedBroker, metadata: AddressMetadata
    ) -> None:
        told = one.answer
        one.answer = lambda command: None if isinstance(command, Stats) else ok(command)
        first = await metadata.topic("t", deadline_s=soon())
        assert set(first.brokers) == {0}
        one.answer = told
        await until(lambda: set(metadata.snapshot.brokers) == {0, 1})

    options = ClientOptions(metadata_s=0.01, request_timeout_s=0.2)
    run(scenario, options, settle_s=0.05)


def test_a_topic_that_only_a_pattern_takes_has_one_partition_when_asked_for() -> None:
    """It is in no list of any broker before its first put."""

    async def scenario(
        zero: ScriptedBroker, one: ScriptedBroker, metadata: AddressMetadata
    ) -> None:
        zero.answer = Tells(0, {}, "wild-*")
        snapshot = await metadata.topic("wild-x", deadline_s=soon())
        assert partitions(snapshot, "wild-x") == ["wild-x/0-0"]
        assert "wild-x" in snapshot.topics

    run(scenario)


@pytest.mark.slow
def test_a_topic_that_nobody_serves_is_an_error_at_the_deadline() -> None:
    """It names the topic, the time and the brokers there are."""

    async def scenario(
        zero: ScriptedBroker, one: ScriptedBroker, metadata: AddressMetadata
    ) -> None:
        await until(lambda: set(metadata.snapshot.brokers) == {0, 1})
        with pytest.raises(NoBrokerError, match=r"'nope' \(waited .*: 0, 1"):
            await metadata.topic("nope", deadline_s=soon(0.5))
        assert "nope" in metadata.snapshot.topics
        with pytest.raises(NoBrokerError, match="nothing changed"):
            await metadata.wait_newer(metadata.snapshot.version, deadline_s=soon(0.01))

    run(scenario)


def test_a_name_that_no_topic_can_have_is_refused_at_once() -> None:
    """As with ZooKeeper; the text forges no line of a log, and moves no cursor."""

    async def scenario(
        zero: ScriptedBroker, one: ScriptedBroker, metadata: AddressMetadata
    ) -> None:
        for name in ("t\nINFO all is well", "t\x1b[2J", "t\x85x", "a/b", ""):
            with pytest.raises(NodeNameError) as caught:
                await metadata.topic(name, deadline_s=soon())
            assert repr(name) in str(caught.value)
            assert str(caught.value).isprintable()

    run(scenario)


@pytest.mark.slow
def test_nobody_there_is_no_snapshot_and_no_busy_loop() -> None:
    """Nothing is known, which is not the same as "there are no brokers"."""

    async def scenario(metadata: AddressMetadata) -> None:
        # Whether the topic is served is unknown.
        with pytest.raises(
            NoBrokerError,
            match=r"no broker answers at meta://.* \(waited 0\.[45]\d* s\)$",
        ):
            await metadata.topic("t", deadline_s=soon(0.5))
        assert metadata.snapshot.version == 0

    with free_address() as address:
        asyncio.run(with_addresses([address], scenario))


def test_stopping_wakes_who_waits() -> None:
    """A client that closes leaves no waiter behind."""

    async def scenario(
        zero: ScriptedBroker, one: ScriptedBroker, metadata: AddressMetadata
    ) -> None:
        first = await metadata.topic("t", deadline_s=soon())
        waiting = asyncio.ensure_future(
            metadata.wait_newer(first.version, deadline_s=soon())
        )
        await asyncio.sleep(0)
        await metadata.stop()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            metadata.watch_topic("u")

    run(scenario)


def test_a_broker_tells_what_zookeeper_would(start_broker: StartBroker) -> None:
    """Configured counts and patterns come from its configuration file."""
    broker = start_broker({"test": 2, "wild-*": 1}, broker_id=4)

    async def scenario(metadata: AddressMetadata) -> None:
        snapshot = await metadata.topic("test", deadline_s=soon())
        assert partitions(snapshot, "test") == ["test/4-0", "test/4-1"]
        leader = snapshot.brokers[BrokerId(4)].leader
        assert str(leader) == f"meta://{broker.address}"
        snapshot = await metadata.topic("wild-1", deadline_s=soon())
        assert partitions(snapshot, "wild-1") == ["wild-1/4-0"]

    asyncio.run(with_addresses([parse_address(broker.address)], scenario))


def facts(broker_id: int, *, is_follower: bool = False, epoch: int = 0) -> BrokerFacts:
    return BrokerFacts(
        broker_id=BrokerId(broker_id),
        is_follower=is_follower,
        counts={"t": 2},
        refused_puts=frozenset(),
        refused_gets=frozenset(),
        rules=TopicRules(),
        config=None,
        epoch=epoch,
    )


def test_the_leader_of_the_greater_epoch_counts() -> None:
    """In any order; one that was cut off may not know that its term is over."""
    a, b, c = (BrokerAddress("h", port) for port in (1, 2, 3))
    replies = [(b, facts(3, epoch=7), True), (a, facts(3, epoch=6), True)]
    replies.append((c, facts(3, epoch=8), False))
    for order in (replies, replies[::-1]):
        assert make_snapshot(order, []).brokers[BrokerId(3)].leader == b


def test_two_addresses_of_one_broker_are_one() -> None:
    """The first leader counts; copies are followers, which take no puts."""
    a, b, c = (BrokerAddress("h", port) for port in (1, 2, 3))
    snapshot = make_snapshot(
        [
            (c, facts(3, is_follower=True), True),
            (a, facts(3), True),
            (b, facts(3), True),
            (a, facts(2, is_follower=True), True),
            (b, facts(1), False),
        ],
        ["nowhere"],
    )
    assert list(snapshot.brokers) == [2, 3]
    assert snapshot.brokers[BrokerId(3)].leader == a
    assert snapshot.brokers[BrokerId(3)].followers == {0: c}
    assert snapshot.brokers[BrokerId(2)].leader is None
    assert snapshot.puts == {"t": {1: 2, 3: 2}}
    assert snapshot.gets == {"t": {1: 2, 2: 2, 3: 2}}
    assert snapshot.topics == {"nowhere"}


# -- ZooKeeper ------------------------------------------------------------------------


def with_zookeeper(
    scenario: Callable[[MemoryZooKeeper, Metadata], Awaitable[None]],
) -> None:
    async def main() -> None:
        server = MemoryZooKeeper()
        coordinator = server.coordinator(CLOCK)
        metadata = ZooKeeperMetadata(coordinator, NodePaths(), clock=CLOCK)
        await metadata.start()
        coordinator.start()
        try:
            await scenario(server, metadata)
        finally:
            await metadata.stop()
            await coordinator.stop(deadline_s=soon())

    asyncio.run(main())


def test_zookeeper_tells_of_a_topic_when_it_appears() -> None:
    """The same calls as on addresses; an address that changes is news."""

    async def scenario(server: MemoryZooKeeper, metadata: Metadata) -> None:
        waiting = asyncio.ensure_future(metadata.topic("t", deadline_s=soon()))
        await until(lambda: "t" in metadata.snapshot.topics)
        assert not waiting.done()
        server.put("/meta/brokers/ids/3/master", b"meta://h:1")
        registration = b'{"numParts":2,"broker":"3-m"}'
        server.put("/meta/brokers/topics-pub/t/3-m", registration)
        snapshot = await waiting
        assert partitions(snapshot, "t") == ["t/3-0", "t/3-1"]
        heard: list[ClusterSnapshot] = []
        metadata.add_listener(heard.append)
        server.put("/meta/brokers/ids/3/master", b"meta://h:2")
        await until(
            lambda: (
                metadata.snapshot.brokers
                and metadata.snapshot.brokers[BrokerId(3)].leader
                == BrokerAddress("h", 2)
            )
        )
        await until(lambda: heard and heard[-1] is metadata.snapshot)
        metadata.request_refresh()

    with_zookeeper(scenario)


@pytest.mark.slow
def test_zookeeper_without_the_topic_is_an_error_at_the_deadline() -> None:
    """The same error with and without ZooKeeper."""

    async def scenario(server: MemoryZooKeeper, metadata: Metadata) -> None:
        await metadata.reach(deadline_s=soon())
        with pytest.raises(NoBrokerError, match=r"'t' \(waited"):
            await metadata.topic("t", deadline_s=soon(0.5))
        with pytest.raises(NoBrokerError, match="nothing changed"):
            await metadata.wait_newer(metadata.snapshot.version, deadline_s=soon(0.01))

    with_zookeeper(scenario)


def put_topic(server: MemoryZooKeeper, name: str, role: str) -> None:
    """Register a broker and its topic; a follower for gets alone."""
    broker_id, _, copy = role.partition("-")
    node = "master" if copy == "m" else f"slave{copy[1:]}"
    server.put(f"/meta/brokers/ids/{broker_id}/{node}", b"meta://h:1")
    for kind in ("pub", "sub") if copy == "m" else ("sub",):
        text = f'{{"numParts":2,"broker":"{role}"}}'
        server.put(f"/meta/brokers/topics-{kind}/{name}/{role}", text.encode())


def test_a_topic_of_a_follower_alone_takes_no_puts_and_is_waited_for() -> None:
    """Until its leader comes, or to the deadline."""

    async def scenario(server: MemoryZooKeeper, metadata: Metadata) -> None:
        put_topic(server, "t", "0-s1")
        await metadata.topic("t", deadline_s=soon())
        wanted = r"no broker takes puts to topic 't' \(waited .*\); ids of .*: 0$"
        with pytest.raises(NoBrokerError, match=wanted):
            await metadata.topic("t", deadline_s=soon(0.05), takes_puts=True)
        waiting = asyncio.ensure_future(
            metadata.topic("t", deadline_s=soon(), takes_puts=True)
        )
        await asyncio.sleep(0)
        assert not waiting.done()
        put_topic(server, "t", "0-m")
        assert partitions(await waiting, "t") == ["t/0-0", "t/0-1"]

    with_zookeeper(scenario)


@pytest.mark.slow
def test_a_send_to_a_topic_of_a_follower_alone_takes_its_time() -> None:
    """It fails as one without any broker does, and not at once."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        put_topic(server, "t", "0-s1")
        async with AsyncClient(coordinator=server.coordinator) as client:
            await client.topics()  # ZooKeeper is known to be there
            producer = client.producer()
            with pytest.raises(
                NoBrokerError, match=r"takes puts to topic 't' \(waited"
            ):
                await producer.send("t", b"x", timeout=0.2)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_topic_that_there_is_not_has_near_names_and_a_command() -> None:
    """A typing mistake is seen, and a new topic can be made."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        for name in ("orders", "payments"):
            put_topic(server, name, "0-m")
        async with AsyncClient(coordinator=server.coordinator) as client:
            await client.topics()  # ZooKeeper is known to be there
            for topic, wanted in (
                ("oders", "did you mean orders? 'metaq topics create oders"),
                ("xyz", "brokers present: 0; 'metaq topics create xyz"),
            ):
                with pytest.raises(NoBrokerError) as missing:
                    await client.producer().send(topic, b"x", timeout=0.2)
                text = f"{wanted} --partitions 1' creates it"
                assert str(missing.value).endswith(text)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_cluster_without_a_broker_is_no_reason_to_make_a_topic() -> None:
    """It is not started, or the root is another: making the topic would fail too."""

    async def scenario(server: MemoryZooKeeper, metadata: Metadata) -> None:
        await metadata.reach(deadline_s=soon())
        with pytest.raises(
            NoTopicError, match=r"'t' \(waited .*\); no broker is there: "
        ):
            await metadata.topic("t", deadline_s=soon(0.1))
        async with AsyncClient(coordinator=server.coordinator) as client:
            with pytest.raises(
                NoBrokerError, match=r"'t' at the .*; no broker is there: "
            ):
                await client.admin().describe_partitions(["t"])

    with_zookeeper(scenario)


@pytest.mark.slow
def test_a_first_send_that_waits_for_its_topic_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, however many wait: 30 s without a word look like a hang."""

    async def scenario(*, is_there: bool) -> None:
        server = MemoryZooKeeper()
        if not is_there:
            server.stop()
        async with AsyncClient(coordinator=server.coordinator) as client:
            producer, timeout = client.producer(), NOTICE_S + 0.5
            sends = (producer.send("t", b"x", timeout=timeout) for _each in range(5))
            found = await asyncio.gather(*sends, return_exceptions=True)
        assert {type(each) for each in found} < {NoTopicError, CoordinationError}

    async def both() -> None:
        await asyncio.gather(scenario(is_there=True), scenario(is_there=False))

    asyncio.run(both())
    assert sorted(each for each in caplog.messages if "sends wait" in each) == [
        "sends wait, no broker serves the topic: topic=t",
        "sends wait: topic=t error=cannot reach ZooKeeper (waited 2 s)",
    ]


@pytest.mark.slow
def test_a_call_that_waits_for_zookeeper_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ten seconds without a word look like a hang, too."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.stop()
        async with AsyncClient(coordinator=server.coordinator) as client:
            admin = client.admin()
            calls = (admin.topics(timeout=NOTICE_S + 0.5) for _each in range(5))
            found = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in found} == {CoordinationError}

    asyncio.run(scenario())
    assert [each for each in caplog.messages if each.startswith("calls wait")] == [
        "calls wait: error=cannot reach ZooKeeper (waited 2 s)"
    ]


def test_a_closed_client_administers_nothing() -> None:
    """At once: it has no session that could come back."""

    async def scenario() -> None:
        async with AsyncClient(coordinator=MemoryZooKeeper().coordinator) as client:
            admin = client.admin()
        for call in (
            admin.topics(),
            admin.groups(),
            admin.create_topic("t", partitions=1),
        ):
            async with asyncio.timeout(1):
                with pytest.raises(ClosedError):
                    await call

    asyncio.run(scenario())


def test_zookeeper_that_nobody_reaches_is_told_as_that() -> None:
    """Whether the topic is served is unknown."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.stop()
        async with AsyncClient(coordinator=server.coordinator) as client:
            with pytest.raises(
                CoordinationError, match=r"^cannot reach ZooKeeper \(waited .* s\)$"
            ):
                await parts_of(client).metadata.topic("t", deadline_s=soon(0.05))

    asyncio.run(scenario())


@pytest.mark.slow
def test_zookeeper_that_stops_to_answer_is_told_as_that() -> None:
    """Its session goes on, and nothing of the topic was read."""

    async def script(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
        link.send(greeting(60_000, 0x51))
        while True:
            request = await link.receive()
            if b"/brokers/ids" in request:
                number = int.from_bytes(request[:4])
                link.send(answer(number, zxid=7, error=NO_NODE))

    async def scenario() -> None:
        async with (
            scripted_server(script) as server,
            AsyncClient(f"127.0.0.1:{server.port}") as client,
        ):
            await parts_of(client).metadata.reach(deadline_s=soon())
            with pytest.raises(CoordinationError, match=r"^cannot reach ZooKeeper at"):
                await client.partitions("t", timeout=0.3)

    asyncio.run(scenario())


def test_zookeeper_that_stops_wakes_who_waits() -> None:
    """Stopping is heard at once."""

    async def scenario(server: MemoryZooKeeper, metadata: Metadata) -> None:
        waiting = asyncio.ensure_future(metadata.topic("t", deadline_s=soon()))
        await until(lambda: "t" in metadata.snapshot.topics)
        await metadata.stop()
        with pytest.raises(ClosedError):
            await waiting

    with_zookeeper(scenario)
