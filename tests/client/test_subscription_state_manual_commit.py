"""With `commit_interval_s=None` only `commit()` commits, however reading ends.

On our broker and on MetaQ 1.4's, in both worlds.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from metaq.client import AsyncClient, Client, LruDuplicateIds, MemoryOffsets, Message
from metaq.client.consume.redelivery import RetryPolicy
from metaq.client.errors import HandlerFailedError
from metaq.model import GroupOffset, TopicPartition
from metaq.testing.zk import MemoryCoordinator
from metaq.zk.paths import NodePaths
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, parts_of, payloads, take
from tests.rigs.inside import twin_of
from tests.rigs.waiting import until, wait_until

ZERO = partition(0)
MANUAL: dict[str, Any] = {"commit_interval_s": None, **IDLE}
SIX = [b"%d" % number for number in range(6)]
PATHS = NodePaths()
PATIENCE_S = 60.0

Read: TypeAlias = Callable[[Any, int], list[bytes]]


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 2})


@pytest.fixture(params=["sync", "async"])
def world(request: pytest.FixtureRequest) -> Any:
    return WORLDS[request.param]


@pytest.fixture
def client(world: Any, broker: AnyBroker) -> Iterator[Any]:
    with world(**broker.client_options, **QUICK) as one:
        yield one


def by_loop(consumer: Any, count: int) -> list[bytes]:
    return payloads(take(consumer, count))


def by_receive(consumer: Any, count: int) -> list[bytes]:
    return [consumer.receive(PATIENCE_S).data for _ in range(count)]


def by_pairs(consumer: Any, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        many = consumer.receive_many(min(2, count - len(found)), PATIENCE_S)
        assert many
        found += payloads(many)
    return found


WAYS = [by_loop, by_receive, by_pairs]


def handler_of(client: Any, handle: Callable[[Message], object]) -> Any:
    if isinstance(client, Client):
        return handle

    async def handle_async(message: Message) -> None:
        await asyncio.to_thread(handle, message)

    return handle_async


def committed(store: MemoryOffsets, which: TopicPartition = ZERO) -> GroupOffset | None:
    return asyncio.run(store.load("g", which, deadline_s=math.inf))


def stored(broker: AnyBroker, which: TopicPartition) -> bytes:
    """Return the group's node of a partition, "" without one."""
    node = broker.zookeeper.nodes.get(PATHS.group_offset("g", which))
    return b"" if node is None else node.data


# -- the end of reading ---------------------------------------------------------------


@pytest.mark.parametrize("read", WAYS)
@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_an_end_without_a_commit_commits_nothing(
    broker: AnyBroker, client: Any, read: Read, error: type[Exception] | None
) -> None:
    """Neither a clean end of the block, nor an exception; the next one has it all."""
    broker.put(*SIX)
    options = {"offsets": MemoryOffsets(), **MANUAL}
    for _ in range(2):
        with (
            contextlib.suppress(ZeroDivisionError),
            client.consumer("g", ["test"], **options) as consumer,
        ):
            assert read(consumer, 4) == SIX[:4]
            if error is not None:
                raise error
        assert committed(options["offsets"]) is None
        assert committed(options["offsets"], partition(1)) is None


@pytest.mark.parametrize("read", WAYS)
def test_an_end_behind_a_commit_leaves_the_offset_at_it(
    broker: AnyBroker, client: Any, read: Read
) -> None:
    broker.put(*SIX)
    options = {"offsets": MemoryOffsets(), **MANUAL}
    with client.consumer("g", ["test"], **options) as consumer:
        assert read(consumer, 2) == SIX[:2]
        consumer.commit()
        assert read(consumer, 3) == SIX[2:5]
    with client.consumer("g", ["test"], **options) as consumer:
        assert read(consumer, 4) == SIX[2:]


def test_a_run_commits_nothing(broker: AnyBroker, client: Any) -> None:
    """Handlers return, one fails for good, the consumer is closed."""
    broker.put(*SIX)
    store = MemoryOffsets()

    def handle(message: Message) -> None:
        if message.data == SIX[4]:
            raise ZeroDivisionError

    with client.consumer("g", ["test"], offsets=store, **MANUAL) as consumer:
        with pytest.raises(HandlerFailedError):
            consumer.run(handler_of(client, handle), retry=RetryPolicy(attempts_max=1))
        assert consumer.statistics().handling.handled_count == 4
    assert committed(store) is None


def test_a_commit_in_a_handler_is_of_those_that_have_returned(
    broker: AnyBroker, client: Any
) -> None:
    """Not of the message that it is at."""
    offsets = broker.put(*SIX)
    store = MemoryOffsets()

    def handle(message: Message) -> None:
        if message.data == SIX[3]:
            commit()
        if message.data == SIX[5]:
            raise ZeroDivisionError

    with client.consumer("g", ["test"], offsets=store, **MANUAL) as consumer:
        commit = consumer.commit
        with pytest.raises(HandlerFailedError):
            consumer.run(handler_of(client, handle), retry=RetryPolicy(attempts_max=1))
        found = committed(store)
        assert found is not None
        assert found.offset == offsets[3]
        consumer.commit()
    found = committed(store)
    assert found is not None
    assert found.offset == offsets[5]


# -- a group --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_member_that_joins_is_handed_what_the_former_owner_did_not_commit(
    broker: AnyBroker, client: Any, world: Any
) -> None:
    """A partition moves with nothing committed; what stays is committed by commit."""
    for number in range(2):
        broker.put(*SIX[:3], partition=number)
    with (
        client.consumer("g", ["test"], consumer_id="a", **MANUAL) as one,
        world(**broker.client_options, **QUICK) as other,
    ):
        assert sorted(by_receive(one, 6)) == sorted(SIX[:3] * 2)
        assert one.receive(0.01) is None  # it holds none of them any more
        with other.consumer("g", ["test"], consumer_id="b", **MANUAL) as two:
            wait_until(lambda: two.assignment() == {partition(1)})
            assert by_receive(two, 3) == SIX[:3]
            assert [stored(broker, partition(n)) for n in range(2)] == [b"", b""]
            one.commit()
            assert stored(broker, partition(0))
            assert stored(broker, partition(1)) == b""
        wait_until(lambda: len(one.assignment()) == 2)
        assert by_receive(one, 3) == SIX[:3]


def test_a_first_commit_is_of_where_a_member_begins(
    broker: AnyBroker, client: Any, world: Any
) -> None:
    """The next owner would else pass over what came before its own latest offset."""
    broker.put(b"old")
    options = {"start": "latest", **MANUAL}
    with client.consumer("g", ["test"], **options) as one:
        one.commit()
        broker.put(*SIX)
        assert by_receive(one, 6) == SIX
    with (
        world(**broker.client_options, **QUICK) as other,
        other.consumer("g", ["test"], **options) as two,
    ):
        assert by_receive(two, 6) == SIX


def test_a_lost_session_has_what_was_not_committed_delivered_again(
    broker: AnyBroker, client: Any
) -> None:
    """To the same consumer, and to the next one of the same client."""
    broker.put(*SIX)
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        assert by_receive(consumer, 2) == SIX[:2]
        consumer.commit()
        node = stored(broker, ZERO)
        assert by_receive(consumer, 3) == SIX[2:5]
        expire(broker, client)
        wait_until(lambda: consumer.statistics().rebalance_count >= 2)
        assert by_receive(consumer, 3) == SIX[2:5]
        expire(broker, client)
    assert stored(broker, ZERO) == node
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        assert by_receive(consumer, 4) == SIX[2:]


def expire(broker: AnyBroker, client: Any) -> None:
    twin = twin_of(client) if isinstance(client, Client) else client.twin
    coordinator = parts_of(twin).coordinator
    assert isinstance(coordinator, MemoryCoordinator)
    broker.zookeeper.expire(coordinator)


# -- beside it ------------------------------------------------------------------------


def test_ids_of_what_was_not_committed_are_not_remembered(
    broker: AnyBroker, client: Any
) -> None:
    """A member that shares the cache would pass over these messages."""
    broker.put(*SIX)
    ids = LruDuplicateIds()
    options = {"offsets": MemoryOffsets(), "duplicate_ids": ids, **MANUAL}
    for _ in range(2):
        with client.consumer("g", ["test"], **options) as consumer:
            assert by_receive(consumer, 4) == SIX[:4]
    assert ids.statistics().key_count == 0


def test_a_commit_that_is_under_way_ends_before_its_partitions_go(
    broker: AnyBroker,
) -> None:
    """Its owner has asked for it: the next reader begins at its offset."""
    broker.put(*SIX)
    committing, go_on = asyncio.Event(), asyncio.Event()
    closed: list[str] = []

    class Slow(MemoryOffsets):
        async def commit(self, *args: Any, **named: Any) -> Any:
            committing.set()
            await go_on.wait()
            return await super().commit(*args, **named)

        async def close(self) -> None:
            closed.append("store")

    async def scenario() -> None:
        store = Slow()
        async with AsyncClient(brokers=[broker.address], **QUICK) as client:
            consumer = client.consumer("g", ["test"], offsets=store, **MANUAL)
            await consumer.start()
            (message,) = await consumer.receive_many(1)
            commit = asyncio.ensure_future(consumer.commit())
            await committing.wait()
            closing = asyncio.ensure_future(consumer.close())
            await until(lambda: not consumer.assignment())
            for _ in range(10):
                await asyncio.sleep(0)
            assert closed == []
            go_on.set()
            await commit
            await closing
            assert closed == ["store"]
            found = await store.load("g", message.partition, deadline_s=math.inf)
            assert found is not None
            assert found.offset == message.next_offset

    asyncio.run(scenario())
