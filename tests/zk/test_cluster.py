"""Snapshots of the cluster on an in-memory ZooKeeper, in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import ClosedError
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.routing.match import ExchangeKind
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.children import INCOMPLETE_S_MAX
from metaq.zk.cluster import PARTITIONS_MAX, ClusterWatch
from metaq.zk.errors import CoordinationTimeoutError, NodeNameError
from metaq.zk.exchange_definitions import ExchangeDefinition, encode_exchange
from metaq.zk.paths import NodePaths
from tests.rigs.virtual_time import VirtualClock, run_virtually
from tests.rigs.waiting import until
from tests.zk.meddling import MeddledZooKeeper
from tests.zk.watching import wait_topic

CLOCK = VirtualClock()
B0, B1 = BrokerId(0), BrokerId(1)
DIGITS = 5000 * "1"
"""More than Python makes a number of."""


def in_s(seconds: float = 5.0) -> float:
    return CLOCK.monotonic_s() + seconds


async def settle() -> None:
    await asyncio.sleep(0.1)


def broker(
    server: MemoryZooKeeper, broker_id: int, name: str = "master", *, port: int = 8123
) -> None:
    address = f"meta://h{broker_id}:{port}".encode()
    server.put(f"/meta/brokers/ids/{broker_id}/{name}", address, session_id=50)


def topic(
    server: MemoryZooKeeper,
    name: str,
    role: str,
    count: int,
    kinds: str = "pub sub",
) -> None:
    data = b'{"numParts":%d,"broker":"%s"}' % (count, role.encode())
    for kind in kinds.split():
        server.put(f"/meta/brokers/topics-{kind}/{name}/{role}", data, session_id=50)


@asynccontextmanager
async def watch_on(
    server: MemoryZooKeeper,
) -> AsyncIterator[tuple[ClusterWatch, MemoryCoordinator]]:
    coordinator = server.coordinator(CLOCK)
    watch = ClusterWatch(coordinator, NodePaths(), clock=CLOCK)
    coordinator.start()
    watch.open()
    yield watch, coordinator
    watch.close()
    await coordinator.stop(deadline_s=in_s())


def test_a_snapshot_holds_brokers_and_watched_topics() -> None:
    """Leaders and followers, and what producers and consumers may use."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        broker(server, 0)
        broker(server, 1)
        broker(server, 0, "slave2", port=9)
        broker(server, 0, "slave10", port=8)
        server.put("/meta/brokers/ids/0/master_config_checksum", b"1")
        topic(server, "t", "1-m", 2)
        topic(server, "t", "0-m", 11)
        topic(server, "other", "0-m", 1)
        async with watch_on(server) as (watch, _):
            assert watch.snapshot == ClusterSnapshot()
            snapshot = await wait_topic(watch, "t", deadline_s=in_s())
            assert snapshot.version == 1
            assert watch.snapshot is snapshot
            assert list(snapshot.brokers) == [B0, B1]
            assert snapshot.brokers[B0].leader == BrokerAddress("h0", 8123)
            assert dict(snapshot.brokers[B0].followers) == {
                2: BrokerAddress("h0", 9),
                10: BrokerAddress("h0", 8),
            }
            assert snapshot.puts == {"t": {B0: 11, B1: 2}}
            assert snapshot.gets == {"t": {B0: 11, B1: 2}}
            assert snapshot.topics == {"t"}

    run_virtually(scenario())


def test_a_name_is_that_of_an_exchange_unless_there_is_a_topic() -> None:
    """It comes and goes with its definition, also with one that makes no sense."""

    async def scenario() -> None:
        server, path = MemoryZooKeeper(), NodePaths().exchange("e")
        async with watch_on(server) as (watch, _):
            watch.watch_topic("e")
            seen = list[bool]()

            async def look() -> None:
                await settle()
                seen.append("e" in watch.snapshot.exchanges)

            await look()
            exchange = ExchangeDefinition(kind=ExchangeKind.TOPIC)
            server.put(path, encode_exchange(exchange))
            topic(server, "e", "0-m", 1, "pub")
            await look()
            server.put(path, b"{")
            await look()
            server.put(path, encode_exchange(exchange))
            topic(server, "e", "0-m", 1, "sub")
            await look()
            server.remove("/meta/brokers/topics-sub/e/0-m")
            await look()
            server.put(path, encode_exchange(replace(exchange, is_deleted=True)))
            await look()
            assert seen == [False, True, True, False, True, False]

    run_virtually(scenario())


def test_the_names_of_all_topics_are_watched_on_demand() -> None:
    """New ones come at once; of one that is gone a parent may be left."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        topic(server, "t", "0-m", 1)
        async with watch_on(server) as (watch, _):
            snapshot = await wait_topic(watch, "t", deadline_s=in_s())
            assert snapshot.names is None
            watch.watch_names()
            watch.watch_names()
            await until(lambda: watch.snapshot.names == {"t"})
            topic(server, "u", "0-m", 1)
            server.put("/meta/catalog/partitions/v/0", b"1")
            await until(lambda: watch.snapshot.names == {"t", "u", "v"})
            assert watch.snapshot.topics == {"t"}
            watch.close()
            with pytest.raises(ClosedError):
                watch.watch_names()

    run_virtually(scenario())


def test_producers_get_numbers_and_consumers_strings() -> None:
    """The same partitions in the two orders that MetaQ's clients use."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        topic(server, "t", "10-m", 1)
        topic(server, "t", "2-m", 11)
        async with watch_on(server) as (watch, _):
            snapshot = await wait_topic(watch, "t", deadline_s=in_s())
        numbers = [*((2, number) for number in range(11)), (10, 0)]
        assert snapshot.put_partitions("t") == tuple(
            TopicPartition("t", BrokerId(b), p) for b, p in numbers
        )
        names = [p.name for p in snapshot.get_partitions("t")]
        assert names[:4] == ["10-0", "2-0", "2-1", "2-10"]
        assert names == sorted(names)
        assert snapshot.put_partitions("x") == snapshot.get_partitions("x") == ()

    run_virtually(scenario())


def test_gets_are_the_union_of_leader_and_followers_and_puts_are_the_leader() -> None:
    """A broker whose leader is gone can still be read, and takes no puts."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        broker(server, 0, "slave1")
        topic(server, "t", "0-s1", 3)
        topic(server, "t", "0-s2", 1)
        topic(server, "t", "1-m", 1)
        topic(server, "t", "1-s1", 2)
        async with watch_on(server) as (watch, _):
            snapshot = await wait_topic(watch, "t", deadline_s=in_s())
        assert snapshot.puts == {"t": {B1: 1}}
        assert snapshot.gets == {"t": {B0: 3, B1: 2}}
        assert snapshot.brokers[B0].leader is None

    run_virtually(scenario())


def test_the_two_topic_nodes_are_independent() -> None:
    """A broker may take puts without gets, and gets without puts."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        topic(server, "t", "0-m", 1, "pub")
        topic(server, "t", "1-m", 1, "sub")
        async with watch_on(server) as (watch, _):
            snapshot = await wait_topic(watch, "t", deadline_s=in_s())
        assert (snapshot.puts, snapshot.gets) == ({"t": {B0: 1}}, {"t": {B1: 1}})

    run_virtually(scenario())


def record(
    server: MemoryZooKeeper, name: str, broker_id: int, data: bytes | int
) -> None:
    text = data if isinstance(data, bytes) else b"%d" % data
    server.write(f"/meta/catalog/partitions/{name}/{broker_id}", text)


def test_what_is_recorded_and_not_served_is_away() -> None:
    """A broker that is gone, or serves fewer, leaves partitions that are away."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        broker(server, 0)
        topic(server, "t", "0-m", 2)
        topic(server, "t", "2-m", 1)
        record(server, "t", 0, 3)
        record(server, "t", 10, 11)
        record(server, "t", 2, 1)
        record(server, "t", 3, b"junk")
        async with watch_on(server) as (watch, _):
            snapshot = await wait_topic(watch, "t", deadline_s=in_s())
            assert snapshot.recorded == {"t": {B0: 3, BrokerId(2): 1, BrokerId(10): 11}}
            away = [(p.broker_id, p.partition) for p in snapshot.away("t")]
            # Broker 2 has its topic's node, and no node that says where it is.
            assert away == [(0, 2), (2, 0), *((10, number) for number in range(11))]
            assert snapshot.away("x") == ()
            topic(server, "t", "10-s1", 11, kinds="sub")
            broker(server, 10, "slave1")
            record(server, "t", 0, 2)
            await settle()
            assert watch.snapshot.away("t") == (TopicPartition("t", BrokerId(2), 0),)

    run_virtually(scenario())


def test_what_a_broker_takes_puts_for_is_not_away() -> None:
    """A topic that is closed to consumers is there."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        broker(server, 0)
        topic(server, "t", "0-m", 2, kinds="pub")
        record(server, "t", 0, 2)
        async with watch_on(server) as (watch, _):
            snapshot = await wait_topic(watch, "t", deadline_s=in_s())
            assert snapshot.away("t") == ()

    run_virtually(scenario())


def test_a_burst_of_changes_is_one_snapshot_and_no_change_is_none() -> None:
    """Versions count what differs, not what happened."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with watch_on(server) as (watch, _):
            seen: list[ClusterSnapshot] = []
            deaf: list[ClusterSnapshot] = []
            watch.add_listener(seen.append)
            cancel = watch.add_listener(deaf.append)
            cancel()
            cancel()
            watch.watch_topic("t")
            watch.watch_topic("t")
            await settle()
            assert [snapshot.version for snapshot in seen] == [1]
            for number in range(20):
                broker(server, number)
                topic(server, "t", f"{number}-m", 4)
            await settle()
            assert [snapshot.version for snapshot in seen] == [1, 2]
            assert len(seen[-1].brokers) == len(seen[-1].gets["t"]) == 20
            broker(server, 0, port=9)
            await asyncio.sleep(0)
            broker(server, 0)
            topic(server, "unwatched", "0-m", 4)
            await settle()
            assert [snapshot.version for snapshot in seen] == [1, 2]
            server.remove("/meta/brokers/ids/19/master")
            server.remove("/meta/brokers/ids/19")
            await settle()
            assert seen[-1].version == 3
            assert seen[-1].brokers.keys() == set(range(19))
            server.reap(50)
            await settle()
            assert seen[-1].version == 4
            assert (seen[-1].brokers, seen[-1].gets) == ({}, {})
            assert seen[-1].topics == {"t"}
            assert deaf == []

    run_virtually(scenario())


def test_a_count_that_changes_in_place_is_seen() -> None:
    """The list of children stays the same; MetaQ's clients miss it."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        topic(server, "t", "0-m", 1)
        async with watch_on(server) as (watch, _):
            first = await wait_topic(watch, "t", deadline_s=in_s())
            server.write(
                "/meta/brokers/topics-sub/t/0-m", b'{"numParts":5,"broker":"0-m"}'
            )
            second = await watch.wait_newer(first.version, deadline_s=in_s())
            assert second.gets == {"t": {B0: 5}}
            assert second.puts == {"t": {B0: 1}}

    run_virtually(scenario())


def test_a_topic_that_does_not_exist_is_known_and_nothing_is_created() -> None:
    """The watch waits for it in ZooKeeper without leaving a trace there."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with watch_on(server) as (watch, _):
            first = await wait_topic(watch, "t", deadline_s=in_s())
            assert first.topics == {"t"}
            assert first.get_partitions("t") == ()
            assert server.nodes == {}
            topic(server, "t", "0-m", 1)
            second = await watch.wait_newer(first.version, deadline_s=in_s())
            assert second.gets == {"t": {B0: 1}}

    run_virtually(scenario())


def test_what_nobody_can_read_is_left_out_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Foreign names are none of our business; bad payloads are told about."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        for name in ("x", "01", "٣", DIGITS):
            server.put(f"/meta/brokers/ids/{name}/master", b"meta://h:1")
        server.put("/meta/brokers/ids/0/master", b"nonsense")
        server.put("/meta/brokers/ids/1/slavex", b"meta://h:1")
        server.put(f"/meta/brokers/ids/1/slave{DIGITS}", b"meta://h:1")
        for kind in ("pub", "sub"):
            node = f"/meta/brokers/topics-{kind}/t"
            server.put(f"{node}/0-x", b"nonsense")
            server.put(f"{node}/{DIGITS}-m", b"nonsense")
            server.put(f"{node}/1-m", b"nonsense")
            server.put(
                f"{node}/2-m",
                b'{"numParts":%d,"broker":"2-m"}' % (PARTITIONS_MAX + 1),
            )
        topic(server, "t", "0-m", 1)
        async with watch_on(server) as (watch, coordinator):
            snapshot = await wait_topic(watch, "t", deadline_s=in_s())
            assert (snapshot.brokers, snapshot.gets) == ({}, {"t": {B0: 1}})
            server.suspend(coordinator)
            server.resume(coordinator)
            broker(server, 5)
            await watch.wait_newer(snapshot.version, deadline_s=in_s())

    run_virtually(scenario())
    left_out = [record.getMessage() for record in caplog.records]
    for path in ("ids/0/master", "topics-pub/t/1-m", "topics-sub/t/2-m"):
        assert sum(path in text for text in left_out) == 1
    assert len(left_out) == 5


@pytest.mark.parametrize("fault", ["suspend", "expire", "stop"])
def test_the_last_snapshot_holds_while_zookeeper_is_away(fault: str) -> None:
    """Clients go on with what they know, and learn what changed afterwards."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        broker(server, 0)
        topic(server, "t", "0-m", 1)
        async with watch_on(server) as (watch, coordinator):
            before = await wait_topic(watch, "t", deadline_s=in_s())
            if fault == "suspend":
                server.suspend(coordinator)
            else:
                server.stop()
            if fault == "expire":
                server.expire(coordinator)
            topic(server, "t", "0-m", 2)
            await asyncio.sleep(60)
            assert watch.snapshot is before
            if fault == "suspend":
                server.resume(coordinator)
            else:
                server.start()
            after = await watch.wait_newer(before.version, deadline_s=in_s())
            assert after.version == before.version + 1
            assert after.gets == {"t": {B0: 2}}

    run_virtually(scenario())


def test_a_node_that_cannot_be_read_does_not_hide_the_others() -> None:
    """Without rights for one node, the snapshot comes late, and without it."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        broker(server, 0)
        broker(server, 1)
        server.is_barred = lambda path: path.endswith("/0/master")
        async with watch_on(server) as (watch, _coordinator):
            begin_s = CLOCK.monotonic_s()
            snapshot = await watch.wait_newer(0, deadline_s=in_s(60))
            waited_s = CLOCK.monotonic_s() - begin_s
            assert waited_s == pytest.approx(INCOMPLETE_S_MAX, abs=0.1)
            assert list(snapshot.brokers) == [B1]

    run_virtually(scenario())


@pytest.mark.parametrize("barred", ["/brokers/ids", "/topics-sub/t"])
def test_a_list_that_cannot_be_read_is_not_an_empty_list(
    barred: str,
) -> None:
    """The rest comes late, and of the topic nothing is said."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        broker(server, 0)
        topic(server, "t", "0-m", 1)
        server.is_barred = lambda path: path.endswith(barred)
        async with watch_on(server) as (watch, _):
            begin_s = CLOCK.monotonic_s()
            watch.watch_topic("t")
            snapshot = await watch.wait_newer(0, deadline_s=in_s(60))
            assert CLOCK.monotonic_s() - begin_s >= INCOMPLETE_S_MAX
            assert snapshot.topics == ({"t"} if barred == "/brokers/ids" else set())

    run_virtually(scenario())


def test_an_empty_cluster_is_known_to_be_empty() -> None:
    """Nothing known yet, and known to be nothing, are two things."""

    async def scenario() -> None:
        async with watch_on(MemoryZooKeeper()) as (watch, _):
            snapshot = await watch.wait_newer(0, deadline_s=in_s())
            assert snapshot == ClusterSnapshot(version=1)

    run_virtually(scenario())


def test_waiting_ends_at_the_deadline_and_at_the_close() -> None:
    """No waiter is left for a snapshot that will not come."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.stop()
        async with watch_on(server) as (watch, _):
            begin_s = CLOCK.monotonic_s()
            with pytest.raises(CoordinationTimeoutError, match="version 0"):
                await wait_topic(watch, "t", deadline_s=in_s(3))
            assert CLOCK.monotonic_s() - begin_s == pytest.approx(3, abs=0.1)
            waiting = asyncio.ensure_future(watch.wait_newer(0, deadline_s=in_s(99)))
            await settle()
            watch.close()
            watch.close()
            with pytest.raises(ClosedError):
                await waiting
            with pytest.raises(ClosedError):
                watch.watch_topic("u")

    run_virtually(scenario())


def test_a_closed_watch_is_silent() -> None:
    """No snapshot follows the close, and no watch stays behind."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        broker(server, 0)
        topic(server, "t", "0-m", 1)
        async with watch_on(server) as (watch, coordinator):
            seen: list[ClusterSnapshot] = []
            watch.add_listener(seen.append)
            broker(server, 2)
            await wait_topic(watch, "t", deadline_s=in_s())
            await settle()
            assert len(seen) == 1
            server.remove("/meta/brokers/ids/2/master")
            server.remove("/meta/brokers/ids/2")
            await settle()
            assert len(seen) == 2
            broker(server, 1)
            await asyncio.sleep(0)
            watch.close()
            await settle()
            assert len(seen) == 2
            server.calls.clear()
            broker(server, 3)
            await settle()
            assert server.calls == []
            ClusterWatch(coordinator, NodePaths(), clock=CLOCK).close()

    run_virtually(scenario())


def test_a_name_that_zookeeper_refuses_is_refused_at_once() -> None:
    """It can never have partitions."""

    async def scenario() -> None:
        async with watch_on(MemoryZooKeeper()) as (watch, _):
            with pytest.raises(NodeNameError, match="a/b"):
                watch.watch_topic("a/b")
            await wait_topic(watch, "fine", deadline_s=in_s())

    run_virtually(scenario())


def test_all_topics_can_be_asked_for() -> None:
    """Names from both topic trees, as a set.

    Those of exchanges are none, unless a topic of another broker has such a name: one
    of MetaQ 1.4 keeps no record.
    """

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with watch_on(server) as (watch, _):
            await settle()
            assert await watch.topics(deadline_s=in_s()) == frozenset()
            topic(server, "a", "0-m", 1, "pub")
            topic(server, "b", "0-m", 1, "sub")
            topic(server, "c", "0-m", 1)
            exchange = ExchangeDefinition(kind=ExchangeKind.TOPIC)
            for name, is_deleted in (("d", False), ("e", True)):
                data = encode_exchange(replace(exchange, is_deleted=is_deleted))
                server.put(NodePaths().exchange(name), data)
            topic(server, "d", "0-m", 1, "pub")
            topic(server, "e", "9-m", 1)
            assert await watch.topics(deadline_s=in_s()) == {"a", "b", "c", "e"}

    run_virtually(scenario())
