"""Consumers of one group on a broker in this process: nothing lost, nothing read twice.

The broker is real, ZooKeeper is in memory; both worlds.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from metaq.client import AsyncClient, Client
from metaq.client.consume.consumer import AsyncConsumer
from metaq.client.consume.progress import ConsumerState
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.errors import ConfigError, MetaqError, OwnershipLostError
from metaq.model import (
    BrokerAddress,
    BrokerId,
    GroupOffset,
    Message,
    Offset,
    TopicPartition,
)
from metaq.net.own_host import own_host
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.paths import BrokerRole, NodeKind, NodePaths
from metaq.zk.znodes import TopicRegistration, encode_address, encode_registration
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, parts_of
from tests.rigs.waiting import until

PATIENCE_S = 60.0
PARTITIONS = 4
PATHS = NodePaths()


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"t": PARTITIONS})


def part(number: int) -> TopicPartition:
    return TopicPartition("t", BrokerId(0), number)


async def put(client: AsyncClient, texts: list[str]) -> None:
    async with client.producer() as producer:
        await producer.send_many("t", [text.encode() for text in texts])


async def put_each(client: AsyncClient, text: str) -> None:
    """Put one message into each partition."""
    async with client.producer() as producer:
        for number in range(PARTITIONS):
            name = f"0-{number}"
            await producer.send("t", f"{text} {name}".encode(), partition=name)


@asynccontextmanager
async def client_of(broker: AnyBroker, **more: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(**broker.client_options, **more) as client:
        yield client


class Reader:
    """Reads until it is stopped, and keeps its messages."""

    def __init__(self, consumer: AsyncConsumer) -> None:
        self.consumer = consumer
        self.texts: list[str] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.consumer:
            self.texts.append(bytes(message.data).decode())

    async def stop(self) -> None:
        self.consumer.current_batch.count()
        await self.consumer.close()
        await self.task


async def joined(client: AsyncClient, group: str = "g", **options: Any) -> Reader:
    consumer = client.consumer(group, ["t"], **{**IDLE, **options})
    await consumer.start()
    return Reader(consumer)


def stored(broker: AnyBroker, number: int, group: str = "g") -> bytes:
    node = broker.zookeeper.nodes.get(PATHS.group_offset(group, part(number)))
    return b"" if node is None else node.data


@pytest.mark.slow
def test_a_group_shares_and_hands_over(broker: AnyBroker) -> None:
    """Two share; one leaves, the other takes over; a third goes on where they were."""

    async def scenario() -> None:
        async with client_of(broker) as client, client_of(broker) as other:
            first = [f"a{number}" for number in range(400)]
            await put(client, first)
            one, two = await joined(client), await joined(other)
            await until(lambda: len(one.consumer.assignment()) == 2)
            await until(lambda: len(two.consumer.assignment()) == 2)
            assert one.consumer.assignment().isdisjoint(two.consumer.assignment())
            await until(lambda: len(one.texts) + len(two.texts) == 400)
            assert sorted(one.texts + two.texts) == sorted(first)
            # Took all, gave some away.
            await until(lambda: one.consumer.statistics().rebalance_count >= 2)
            await until(lambda: two.consumer.statistics().rebalance_count >= 1)
            await one.stop()
            await until(lambda: len(two.consumer.assignment()) == PARTITIONS)
            second = [f"b{number}" for number in range(100)]
            await put(client, second)
            await until(lambda: len(one.texts) + len(two.texts) == 500)
            assert sorted(two.texts[-100:]) == sorted(second)
            await two.stop()
            assert stored(broker, 0).rpartition(b"-")[2].isdigit()
            three = await joined(client)
            await put(client, ["c"])
            await until(lambda: three.texts)
            assert three.texts == ["c"]
            await three.stop()

    asyncio.run(scenario())


@pytest.mark.slow
def test_members_that_take_nothing_are_named(
    broker: AnyBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that every client may write stop a group; `health` says whose they are."""
    monkeypatch.setattr("metaq.client.group.rebalancer.UNOWNED_S_MIN", 0.0)

    async def scenario() -> None:
        async with (
            client_of(broker, session_timeout_s=0.2) as client,
            client.consumer("g", ["t"]) as consumer,
        ):
            await until(lambda: consumer.health().is_ok)
            for number in range(1000):
                path = PATHS.member("g", f"a{number:03d}")
                broker.zookeeper.put(path, b"t", session_id=99)
            await until(lambda: not consumer.assignment())
            await until(lambda: consumer.health().problems)
            (problem,) = consumer.health().problems
            assert "the 1001 members of the group (a000, a001," in problem

    asyncio.run(scenario())


@pytest.mark.parametrize("is_group", [True, False])
def test_a_topic_that_nobody_serves_is_told(
    broker: AnyBroker, is_group: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By one line for each consumer: names are mistyped."""

    async def scenario() -> None:
        named = AsyncClient(brokers=[broker.address], metadata_s=0.05)
        async with client_of(broker) if is_group else named as client:
            for count in (1, 2):
                async with client.consumer("g", ["t", "tt"]) as consumer:
                    await until(lambda now=count: len(logged()) == now)
                    assert "tt: no broker serves it" in consumer.health().problems

    def logged() -> list[str]:
        line = "no broker serves the topic: group=g topic="
        return [text for text in caplog.messages if text.startswith(line)]

    asyncio.run(scenario())
    assert set(logged()) == {"no broker serves the topic: group=g topic=tt"}


@pytest.mark.parametrize("has_zookeeper", [True, False])
def test_partitions_that_nobody_serves_are_told(
    broker: AnyBroker, has_zookeeper: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a consumer that was given its partitions by name: names are mistyped."""

    async def scenario() -> None:
        named = AsyncClient(brokers=[broker.address], metadata_s=0.05)
        async with (
            client_of(broker) if has_zookeeper else named as client,
            client.consumer("g", ["t", "tt"], partitions=["0-0", "0-9"]) as consumer,
        ):
            await until(lambda: len(logged()) == 2)
            assert consumer.health().problems == (
                "tt: no broker serves it",
                "t/0-9: no broker serves it",
            )

    def logged() -> list[str]:
        return [text for text in caplog.messages if text.startswith("no broker serves")]

    asyncio.run(scenario())
    assert set(logged()) == {
        "no broker serves the topic: group=g topic=tt",
        "no broker serves the partition: group=g t/0-9",
    }


def test_a_lost_session_loses_and_repeats_nothing(broker: AnyBroker) -> None:
    """Handled messages without a commit are not handed to this process again."""

    async def scenario() -> None:
        async with client_of(broker) as client:
            reader = await joined(client, commit_interval_s=3600.0)
            await put(client, [f"a{number}" for number in range(50)])
            await until(lambda: len(reader.texts) == 50)
            coordinator = parts_of(client).coordinator
            assert isinstance(coordinator, MemoryCoordinator)
            broker.zookeeper.expire(coordinator)
            await asyncio.sleep(0)
            assert reader.consumer.health().state is ConsumerState.JOINING
            assert reader.consumer.assignment() == frozenset()
            await put(client, [f"b{number}" for number in range(50)])
            await until(lambda: len(reader.texts) == 100)
            await until(lambda: reader.consumer.health().is_ok)
            expected = [f"{mark}{number}" for mark in "ab" for number in range(50)]
            assert sorted(reader.texts) == sorted(expected)
            await reader.stop()

    asyncio.run(scenario())


def test_what_the_user_set_back_comes_again_after_a_lost_session(
    broker: AnyBroker,
) -> None:
    """Handled or not: he wants it once more, and it is not skipped as a repeat."""

    async def scenario() -> None:
        options = {"commit_interval_s": 3600.0, **IDLE}
        async with (
            client_of(broker) as client,
            client.consumer("g", ["t"], **options) as consumer,
        ):
            await put_each(client, "a")
            found = await consumer.receive_many(PARTITIONS, PATIENCE_S, fill=True)
            assert len(found) == PARTITIONS
            await consumer.commit()
            await consumer.commit({"0-1": Offset(0)})
            coordinator = parts_of(client).coordinator
            assert isinstance(coordinator, MemoryCoordinator)
            broker.zookeeper.expire(coordinator)
            again = await consumer.receive(PATIENCE_S)
            assert again is not None
            assert bytes(again.data) == b"a 0-1"

    asyncio.run(scenario())


@pytest.mark.slow
def test_what_is_set_back_long_after_a_lost_session_comes_again(
    broker: AnyBroker,
) -> None:
    """A lost session has no say in what is read when all of it was committed."""

    async def scenario() -> None:
        options = {"commit_interval_s": 3600.0, **IDLE}
        async with client_of(broker) as client:
            await put_each(client, "a")
            async with client.consumer("g", ["t"], **options) as consumer:
                found = await consumer.receive_many(PARTITIONS, PATIENCE_S, fill=True)
                await consumer.commit()
                coordinator = parts_of(client).coordinator
                assert isinstance(coordinator, MemoryCoordinator)
                broker.zookeeper.stop()
                broker.zookeeper.expire(coordinator)
                await until(lambda: not consumer.assignment())
                broker.zookeeper.start()
                await until(lambda: len(consumer.assignment()) == PARTITIONS)
                await consumer.commit({one.partition: Offset(0) for one in found})
            async with client.consumer("g", ["t"], **options) as consumer:
                again = await consumer.receive_many(PARTITIONS, PATIENCE_S, fill=True)
                assert sorted(again) == sorted(found)

    asyncio.run(scenario())


class FullOffsets(MemoryOffsets):
    """Takes no commits."""

    async def commit(self, *_args: object, **_more: object) -> Any:
        raise MetaqError("full")


def test_what_the_user_could_not_commit_comes_again_after_a_lost_session(
    broker: AnyBroker,
) -> None:
    """It was named, and neither handled nor written."""

    async def scenario() -> None:
        store = FullOffsets()
        options = {"commit_interval_s": 3600.0, "offsets": store, **IDLE}
        async with (
            client_of(broker) as client,
            client.consumer("g", ["t"], **options) as consumer,
        ):
            await put_each(client, "a")
            found = await consumer.receive_many(PARTITIONS, PATIENCE_S, fill=True)
            with pytest.raises(MetaqError, match="full"):
                await consumer.commit({one.partition: one.next_offset for one in found})
            coordinator = parts_of(client).coordinator
            assert isinstance(coordinator, MemoryCoordinator)
            broker.zookeeper.expire(coordinator)
            async with asyncio.timeout(PATIENCE_S):
                while consumer.assignment():
                    await asyncio.sleep(0)  # each turn: they are away for some only
            again = await consumer.receive_many(PARTITIONS, PATIENCE_S, fill=True)
            assert sorted(again) == sorted(found)

    asyncio.run(scenario())


class SlowOffsets(MemoryOffsets):
    """Reads that begin while it is slow end when it is quick again."""

    def __init__(self) -> None:
        super().__init__()
        self.is_quick = asyncio.Event()
        self.is_quick.set()
        self.waiting_count = 0

    async def load(
        self, group: str, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        found = await super().load(group, partition, deadline_s=deadline_s)
        is_quick = self.is_quick
        self.waiting_count += not is_quick.is_set()
        await is_quick.wait()
        return found


def test_a_rollback_leaves_what_was_assigned_again_where_it_begins(
    broker: AnyBroker,
) -> None:
    """Messages that it had read belong to the claim before; others went back since."""

    async def scenario() -> None:
        store = SlowOffsets()
        options = {"commit_interval_s": None, "offsets": store, **IDLE}
        async with (
            client_of(broker) as client,
            client.consumer("g", ["t"], **options) as consumer,
        ):
            await put_each(client, "a")
            await consumer.receive_many(PARTITIONS, PATIENCE_S, fill=True)
            await consumer.commit()
            quick, slow = store.is_quick, asyncio.Event()
            store.is_quick = slow
            rollback = asyncio.create_task(consumer.rollback())
            await until(lambda: store.waiting_count == PARTITIONS)
            store.is_quick = quick
            coordinator = parts_of(client).coordinator
            assert isinstance(coordinator, MemoryCoordinator)
            broker.zookeeper.stop()
            broker.zookeeper.expire(coordinator)
            back = {part(1): GroupOffset(Offset(0))}
            await store.commit("g", back, fence=None, deadline_s=0.0)
            await until(lambda: not consumer.assignment())
            broker.zookeeper.start()
            await until(lambda: len(consumer.assignment()) == PARTITIONS)
            slow.set()
            await rollback
            again = await consumer.receive(PATIENCE_S)
            assert again is not None
            assert bytes(again.data) == b"a 0-1"

    asyncio.run(scenario())


@pytest.mark.parametrize("ignore_committed", [False, True])
def test_a_session_lost_before_the_first_commit_passes_over_nothing(
    broker: AnyBroker, ignore_committed: bool
) -> None:
    """Later messages are before the latest offset of the restart."""

    async def scenario() -> None:
        async with client_of(broker) as client:
            await put_each(client, "a")
            reader = await joined(
                client,
                start="latest",
                commit_interval_s=None,
                ignore_committed=ignore_committed,
            )
            coordinator = parts_of(client).coordinator
            assert isinstance(coordinator, MemoryCoordinator)
            broker.zookeeper.stop()
            broker.zookeeper.expire(coordinator)
            await until(lambda: not reader.consumer.assignment())
            await put_each(client, "b")
            broker.zookeeper.start()
            await until(lambda: len(reader.texts) == PARTITIONS)
            assert sorted(reader.texts) == [f"b 0-{n}" for n in range(PARTITIONS)]
            await reader.stop()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_message_being_handled_is_waited_for_and_committed(
    broker: AnyBroker,
) -> None:
    """The next owner gets the later messages."""

    async def scenario() -> None:
        async with client_of(broker) as client, client_of(broker) as other:
            await put_each(client, "a")
            await put_each(client, "b")
            one = client.consumer("g", ["t"], consumer_id="c1", **IDLE)
            await one.start()
            held: Message | None = None
            while held is None or held.partition != part(PARTITIONS - 1):
                held = await one.receive(PATIENCE_S)
                assert held is not None
            two = await joined(other, consumer_id="c2")
            await until(lambda: "owned by other" in str(two.consumer.health()))
            path = PATHS.owner("g", part(PARTITIONS - 1))
            assert broker.zookeeper.nodes[path].data == b"g_c1"
            assert two.texts == []
            await until(lambda: part(PARTITIONS - 1) not in one.assignment())
            more = asyncio.create_task(one.receive(0.01))
            await until(lambda: part(PARTITIONS - 1) in two.consumer.assignment())
            await more
            await until(lambda: "b 0-3" in two.texts)
            assert "a 0-3" not in two.texts
            await one.close()
            await two.stop()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_late_commit_of_a_former_owner_is_refused(broker: AnyBroker) -> None:
    """A handler that takes longer than the bound loses its partition, with an error."""

    async def scenario() -> None:
        async with client_of(broker) as client, client_of(broker) as other:
            await put_each(client, "a")
            one = client.consumer(
                "g",
                ["t"],
                consumer_id="c1",
                revoke_timeout_s=0.1,
                start="earliest",
                **IDLE,
            )
            await one.start()
            held: Message | None = None
            while held is None or held.partition != part(PARTITIONS - 1):
                held = await one.receive(PATIENCE_S)
            two = await joined(other, consumer_id="c2", commit_interval_s=0.05)
            await until(lambda: "a 0-3" in two.texts)
            with pytest.raises(OwnershipLostError, match="will be delivered again"):
                await one.commit()
            await one.close()
            await two.stop()

    asyncio.run(scenario())


def test_a_server_that_restarts_is_not_noticed_by_readers(
    broker: AnyBroker,
) -> None:
    """They read on while it is away; what they commit afterwards is stored."""

    async def scenario() -> None:
        async with client_of(broker) as client:
            reader = await joined(client, commit_interval_s=0.05)
            broker.zookeeper.stop()
            async with client.producer() as producer:
                await producer.send("t", b"a", partition="0-1")
            await until(lambda: reader.texts == ["a"])
            assert stored(broker, 1) == b""
            broker.zookeeper.start()
            await until(lambda: stored(broker, 1))
            await reader.stop()

    asyncio.run(scenario())


def test_fixed_partitions_are_read_without_a_group(broker: AnyBroker) -> None:
    """No member, no owner; two read the same; offsets are stored all the same."""

    async def scenario() -> None:
        async with client_of(broker) as client:
            await put_each(client, "a")
            one = await joined(client, partitions=["0-1", "0-2"])
            two = await joined(client, partitions=["0-2"])
            await until(lambda: len(one.texts) == 2 and len(two.texts) == 1)
            assert sorted(one.texts) == ["a 0-1", "a 0-2"]
            assert two.texts == ["a 0-2"]
            assert one.consumer.assignment() == {part(1), part(2)}
            names = [path for path in broker.zookeeper.nodes if "/consumers/g/" in path]
            assert not [path for path in names if "/ids/" in path or "/owners/" in path]
            await one.stop()
            await two.stop()
            assert stored(broker, 1).rpartition(b"-")[2] != b"0"
            again = await joined(client, partitions=["0-1"])
            await put_each(client, "b")
            await until(lambda: again.texts)
            assert again.texts == ["b 0-1"]
            await again.stop()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_broadcast_reaches_every_machine(
    broker: AnyBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each machine is a group of its own, named after its address.

    Its offsets stay on the machine, where MetaQ's consumers keep them.
    """
    monkeypatch.setenv("HOME", str(tmp_path))

    async def scenario() -> None:
        async with client_of(broker) as client:
            readers = []
            for host in ("10.0.0.7", "fe80::1"):
                monkeypatch.setattr("metaq.client.session.own_host", lambda h=host: h)
                readers.append(await joined(client, broadcast=True))
            assert [r.consumer.group for r in readers] == ["g-10-0-0-7", "g-fe80--1"]
            await put_each(client, "a")
            for reader in readers:
                await until(lambda r=reader: len(r.texts) == PARTITIONS)
                await reader.stop()
            assert stored(broker, 0, "g-10-0-0-7") == b""
            assert '"g-10-0-0-7"' in (tmp_path / ".meta_offsets").read_text()

    asyncio.run(scenario())


def test_a_follower_is_read_when_the_leader_is_gone(broker: AnyBroker) -> None:
    """The group shares what followers serve; the leader is preferred when it is back.

    The broker plays both: its address is in another tree.
    """

    async def scenario() -> None:
        server = MemoryZooKeeper()
        follower = BrokerRole(BrokerId(0), 0)
        address = encode_address(BrokerAddress("127.0.0.1", broker.port))
        server.put(PATHS.role(follower), address)
        data = encode_registration(TopicRegistration(PARTITIONS, follower))
        server.put(PATHS.topic(NodeKind.TOPIC_SUB, "t", follower), data)
        async with client_of(broker) as client:
            await put_each(client, "a")
        async with AsyncClient(coordinator=server.coordinator) as client:
            reader = await joined(client)
            await until(lambda: len(reader.texts) == PARTITIONS)
            await reader.stop()
        member_nodes = [path for path in server.nodes if "/offsets/t/" in path]
        assert len(member_nodes) == PARTITIONS

    asyncio.run(scenario())


def test_both_worlds_share_a_group(broker: AnyBroker) -> None:
    """A consumer of threads and one of a loop."""
    with Client(**broker.client_options) as client:
        with client.consumer("g", ["t"], consumer_id="sync") as consumer:
            assert len(consumer.assignment()) == PARTITIONS

            async def scenario() -> None:
                async with client_of(broker) as other:
                    reader = await joined(other, consumer_id="async")
                    await until(lambda: len(reader.consumer.assignment()) == 2)
                    assert len(consumer.assignment()) == 2
                    await reader.stop()

            asyncio.run(scenario())
        names = list(broker.zookeeper.nodes)
        assert not [path for path in names if "/ids/g_" in path]


@pytest.mark.parametrize(
    ("group", "topics", "options", "error"),
    [
        ("a.b", ["t"], {}, ConfigError),
        ("g", "t", {}, TypeError),
        ("g", [], {}, ConfigError),
        ("g", ["t"], {"partitions": ["x"]}, ConfigError),
        ("g", ["t"], {"strategy": "STICKY"}, ConfigError),
    ],
)
def test_what_no_consumer_is_made_of(
    broker: AnyBroker,
    group: str,
    topics: Any,
    options: dict[str, Any],
    error: type[Exception],
) -> None:
    """The error comes at once, before anything is written."""

    async def scenario() -> None:
        async with client_of(broker) as client:
            with pytest.raises(error):
                client.consumer(group, topics, **options)

    asyncio.run(scenario())


def test_a_member_is_named_as_metaq_names_it(broker: AnyBroker) -> None:
    """`<group>_<ip>-<pid>-<uuid>`, or with the id that was asked for."""

    async def scenario() -> None:
        async with client_of(broker) as client:
            for consumer_id in (None, "mine"):
                await client.consumer("g", ["t"], consumer_id=consumer_id).start()
            names = broker.zookeeper.names(PATHS.members("g")) or ()
            [made, chosen] = sorted(names)
            assert chosen == "g_mine"
            host, _, rest = made.removeprefix("g_").partition("-")
            pid, _, unique = rest.partition("-")
            assert host == own_host()
            assert pid.isdigit()
            assert len(unique) == 36

    asyncio.run(scenario())
