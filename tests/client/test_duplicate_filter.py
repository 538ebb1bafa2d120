"""Handled messages are not delivered again, to any member, in both worlds.

The members belong to different clients, and their commits have no effect: they share
only the cache.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

import pytest

from metaq.client import AsyncConsumer, LruDuplicateIds, MemoryOffsets, Message
from metaq.client.consume.duplicate_filter import WAITING_COUNT_MAX, DuplicateFilter
from metaq.client.consume.fetch_buffer import FetchBuffer
from metaq.client.consume.fetched_batch import FetchedBatch
from metaq.client.duplicate_ids import key_of
from metaq.clock import SystemClock
from metaq.model import GroupOffset, MessageId, Offset
from metaq.testing.zk import MemoryCoordinator
from tests.brokers import StartBroker
from tests.client.asking import lacking
from tests.client.test_consumer_groups import PARTITIONS, client_of, joined, put_each
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, parts_of, payloads, take
from tests.rigs.waiting import until, wait_until

ZERO = partition(0)
MakeMember: TypeAlias = Callable[..., Any]


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker()


@pytest.fixture(params=["sync", "async"])
def members(request: pytest.FixtureRequest, broker: Any) -> Iterator[MakeMember]:
    """Return what makes a member of group g, each with a client of its own."""
    with contextlib.ExitStack() as stack:

        def member(ids: Any, **options: Any) -> Any:
            world = WORLDS[request.param]
            quick = {**QUICK, **options.pop("client", {})}
            client = stack.enter_context(world(brokers=[broker.address], **quick))
            options = {"offsets": MemoryOffsets(), **IDLE, **options}
            return client.consumer("g", ["test"], duplicate_ids=ids, **options)

        yield member


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"m%05d" % n for n in range(start, stop)]


def by_loop(consumer: Any, count: int) -> list[bytes]:
    return payloads(take(consumer, count))


def by_lists(consumer: Any, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        many = consumer.receive_many(count - len(found), 20)
        assert many
        found += payloads(many)
    return found


def by_run(consumer: Any, count: int) -> list[bytes]:
    """Handle so many messages; a handler that fails ends it before the next one."""
    found: list[bytes] = []

    def handle(message: Message) -> None:
        if len(found) == count:
            raise ZeroDivisionError
        found.append(bytes(message.data))
        if len(found) == count:
            enough.set()

    async def handle_async(message: Message) -> None:
        handle(message)

    enough = threading.Event()
    is_async = hasattr(consumer, "twin")
    with contextlib.ExitStack() as stack:
        if is_async:
            running = threading.Thread(target=consumer.run, args=(handle_async,))
        else:
            running = threading.Thread(target=consumer.run, args=(handle,))
        running.start()
        stack.callback(running.join, 20)
        stack.callback(consumer.close)
        assert enough.wait(20)
    return found


WAYS = [by_loop, by_lists, by_run]


@pytest.mark.slow
def test_a_batch_that_finds_no_memory_is_delivered_later(
    broker: Any, members: MakeMember
) -> None:
    """Before any other one of its partition."""
    broker.put(*numbered(0, 10))
    with (
        lacking(FetchBuffer, "put", times=2),
        members(LruDuplicateIds(), fetch_bytes=1) as one,
    ):
        assert by_loop(one, 10) == numbered(0, 10)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_another_member_has_handled_is_skipped_and_counted(
    broker: Any, members: MakeMember, way: Callable[[Any, int], list[bytes]]
) -> None:
    """The other one knows of no offset; what is skipped counts as handled."""
    broker.put(*numbered(0, 5))
    ids = LruDuplicateIds()
    with members(ids) as one:
        assert way(one, 5) == numbered(0, 5)
    broker.put(*numbered(5, 8))
    offsets = MemoryOffsets()
    with members(ids, offsets=offsets) as two:
        assert way(two, 3) == numbered(5, 8)
        statistics = two.statistics()
        assert statistics.delivered_count == 3
        assert statistics.duplicates.skipped_count == 5
        assert statistics.duplicates.failure_count == 0
    with members(None, offsets=offsets) as three:
        assert three.receive(0.05) is None
        assert three.statistics().duplicates is None


def test_batches_that_are_asked_about_keep_their_order(
    broker: Any, members: MakeMember
) -> None:
    """A partition is not fetched during the check; each batch is one call."""
    data = [b"%02d" % number * 10_000 for number in range(12)]
    broker.put(*data)
    calls: list[int] = []

    class Counting(LruDuplicateIds):
        def seen(self, keys: Sequence[str]) -> list[str]:
            calls.append(len(keys))
            return super().seen(keys)

    with members(Counting(), fetch_bytes=1) as one:
        assert by_loop(one, 12) == data
    assert sum(calls) == 12
    assert 1 < len(calls) < 12


@pytest.mark.slow
def test_a_batch_of_nothing_new_is_handled_at_once(
    broker: Any, members: MakeMember
) -> None:
    broker.put(*numbered(0, 5))
    ids = LruDuplicateIds()
    with members(ids) as one:
        by_loop(one, 5)
    offsets = MemoryOffsets()
    with members(ids, offsets=offsets) as two:
        wait_until(lambda: two.statistics().duplicates.skipped_count == 5)
        assert two.receive(0.05) is None
    with members(None, offsets=offsets) as three:
        assert three.receive(0.05) is None


def test_who_has_closed_has_added_what_it_handled(
    broker: Any, members: MakeMember
) -> None:
    """However slow the store is, within its time-out; and its thread has ended."""
    broker.put(*numbered(0, 3))

    class Slow(LruDuplicateIds):
        def add(self, keys: Sequence[str]) -> None:
            threading.Event().wait(0.05)
            super().add(keys)

    store = Slow()
    with members(store) as one:
        take(one, 3)
    assert store.statistics().key_count == 3
    wait_until(lambda: not [t for t in threading.enumerate() if "duplicate" in t.name])


def test_other_groups_know_nothing_of_it(broker: Any, members: MakeMember) -> None:
    broker.put(*numbered(0, 2))
    ids = LruDuplicateIds()
    with members(ids) as one:
        messages = take(one, 2)
    keys = [key_of("g", message.id) for message in messages]
    assert ids.seen(keys) == keys
    assert ids.seen([key_of("h", message.id) for message in messages]) == []


def test_a_message_that_is_not_handled_comes_to_the_next_member(
    broker: Any, members: MakeMember
) -> None:
    """The one being handled was never followed by another one."""
    broker.put(*numbered(0, 5))
    ids = LruDuplicateIds()
    with contextlib.suppress(ZeroDivisionError), members(ids) as one:
        take(one, 3)
        raise ZeroDivisionError
    with members(ids) as two:
        assert by_loop(two, 3) == numbered(2, 5)


def test_a_commit_has_the_ids_of_what_is_being_handled_remembered(
    broker: Any, members: MakeMember
) -> None:
    """A process that is killed afterwards takes nothing of them with it."""
    broker.put(*numbered(0, 5))
    ids = LruDuplicateIds()
    with members(ids, commit_interval_s=0.01) as one:
        take(one, 3)
        wait_until(lambda: ids.statistics().key_count == 2)


@pytest.mark.slow
def test_seek_and_rollback_deliver_what_is_known(
    broker: Any, members: MakeMember
) -> None:
    """Until the partition goes; a member that gets it again skips again."""
    offsets = broker.put(*numbered(0, 4))
    ids = LruDuplicateIds()
    with members(ids) as one:
        assert by_loop(one, 4) == numbered(0, 4)
        one.seek(ZERO, offsets[1])
        assert by_loop(one, 3) == numbered(1, 4)
        one.rollback()
        assert by_loop(one, 4) == numbered(0, 4)
    with members(ids, ignore_committed=True) as two:
        assert by_loop(two, 4) == numbered(0, 4)
    with members(ids) as three:
        assert three.receive(0.05) is None


def test_without_commits_of_our_own_ids_wait_for_those_of_the_user(
    broker: Any, members: MakeMember
) -> None:
    """So that a rollback takes everything back that was not committed."""
    broker.put(*numbered(0, 6))
    ids = LruDuplicateIds()
    with (
        contextlib.suppress(ZeroDivisionError),
        members(ids, commit_interval_s=None) as one,
    ):
        messages = take(one, 2)
        one.commit()
        wait_until(lambda: ids.statistics().key_count == 2)
        assert by_loop(one, 3) == numbered(2, 5)
        one.rollback()
        assert by_loop(one, 2) == numbered(2, 4)
        raise ZeroDivisionError
    assert ids.seen([key_of("g", message.id) for message in messages])
    with members(ids) as two:
        assert by_loop(two, 4) == numbered(2, 6)


class Broken:
    """A store that fails on request."""

    def __init__(self) -> None:
        self.inner = LruDuplicateIds()
        self.is_broken = True

    def seen(self, keys: Sequence[str]) -> Collection[str]:
        if self.is_broken:
            raise OSError("no route to the store")
        return self.inner.seen(keys)

    def add(self, keys: Sequence[str]) -> None:
        if self.is_broken:
            raise OSError("no route to the store")
        self.inner.add(keys)


def test_a_store_that_raises_delivers_and_is_told_of_once(
    broker: Any, members: MakeMember, caplog: pytest.LogCaptureFixture
) -> None:
    broker.put(*numbered(0, 5))
    store = Broken()
    with caplog.at_level(logging.ERROR), members(store) as one:
        assert by_loop(one, 5) == numbered(0, 5)
        one.close()
        statistics = one.statistics().duplicates
    assert statistics.failure_count >= 2
    assert statistics.forgotten_count == 4
    logged = [r for r in caplog.records if "duplicate ids failed" in r.message]
    assert len(logged) == 1
    assert "no route to the store" in logged[0].message
    store.is_broken = False
    with members(store) as two:
        assert by_loop(two, 5) == numbered(0, 5)
    with members(store) as three:
        assert three.receive(0.05) is None


def test_a_store_whose_answer_is_none_is_a_failure(
    broker: Any, members: MakeMember
) -> None:
    broker.put(*numbered(0, 2))

    class Silent(Broken):
        def seen(self, keys: Sequence[str]) -> Any:
            return None

    with members(Silent()) as one:
        assert by_loop(one, 2) == numbered(0, 2)
        assert one.statistics().duplicates.failure_count == 1


@pytest.mark.slow
def test_a_store_that_hangs_delays_and_blocks_nobody(
    broker: Any, members: MakeMember
) -> None:
    broker.put(*numbered(0, 5))
    ready = threading.Event()

    class Hanging(Broken):
        def seen(self, keys: Sequence[str]) -> Collection[str]:
            ready.wait(20)
            return []

    try:
        member = members(Hanging(), client={"request_timeout_s": 1.5})
        with member as one:
            assert by_loop(one, 5) == numbered(0, 5)
            assert one.statistics().duplicates.failure_count >= 1
    finally:
        ready.set()


# -- a group --------------------------------------------------------------------------


@pytest.mark.slow
def test_after_an_unclean_take_over_each_message_was_delivered_once(
    start_broker: StartBroker,
) -> None:
    """A session is lost before anything was committed; others have its partitions."""
    broker = start_broker({"t": PARTITIONS})

    async def scenario() -> None:
        options = {"commit_interval_s": 3600.0, "duplicate_ids": LruDuplicateIds()}
        async with client_of(broker) as client, client_of(broker) as other:
            one = await joined(client, **options)
            two = await joined(other, **options)
            await until(lambda: len(one.consumer.assignment()) == 2)
            await until(lambda: len(two.consumer.assignment()) == 2)
            commits = one.consumer.statistics().commit_count
            for number in range(50):
                await put_each(client, f"{number}")
            await until(lambda: len(one.texts + two.texts) == 200)
            one.consumer.current_batch.count()
            coordinator = parts_of(client).coordinator
            assert isinstance(coordinator, MemoryCoordinator)
            broker.zookeeper.expire(coordinator)
            await asyncio.sleep(0)
            assert not one.consumer.assignment()
            await one.consumer.close()
            await one.task
            assert one.consumer.statistics().commit_count == commits
            await until(lambda: skipped_by(two.consumer) == 100)
            await put_each(other, "b")
            await until(lambda: len(one.texts + two.texts) == 204)
            assert len(set(one.texts + two.texts)) == 204
            await two.stop()

    asyncio.run(scenario())


def skipped_by(consumer: AsyncConsumer) -> int:
    statistics = consumer.statistics().duplicates
    assert statistics is not None
    return statistics.skipped_count


# -- the filter alone -----------------------------------------------------------------


def batch_of(*ids: int) -> FetchedBatch:
    messages = [
        Message("t", b"", None, MessageId(id_), ZERO, Offset(id_), Offset(id_ + 1))
        for id_ in ids
    ]
    return FetchedBatch(ZERO, messages, Offset(ids[-1] + 1), 0)


def make_filter(ids: Any, **options: Any) -> DuplicateFilter:
    options = {"waits_for_commit": False, "on_room": lambda: None, **options}
    return DuplicateFilter(
        ids, group="g", clock=SystemClock(), timeout_s=10.0, **options
    )


def test_a_partition_that_went_gets_nothing_of_what_was_asked_about() -> None:
    async def scenario() -> None:
        delivered: list[FetchedBatch] = []
        ids = make_filter(LruDuplicateIds())
        ids.sift(batch_of(1), delivered.append)
        assert ids.is_asking(ZERO)
        ids.stop(ZERO)
        assert not ids.is_asking(ZERO)
        ids.sift(batch_of(2), delivered.append)
        await until(lambda: delivered)
        assert [one.next_offset for one in delivered] == [3]
        await ids.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_what_waits_is_bounded_and_the_rest_counted() -> None:
    async def scenario() -> None:
        last = WAITING_COUNT_MAX
        store = LruDuplicateIds(3 * last)
        ids = make_filter(store, waits_for_commit=True)
        ids.on_handled(batch_of(*range(1, last + 3)).messages)
        assert ids.statistics().forgotten_count == 2
        ids.acknowledge({ZERO: GroupOffset(Offset(3 * last))})
        await until(lambda: store.statistics().key_count == last)
        ids.on_handled(batch_of(last + 4).messages)
        ids.discard()
        ids.on_handled(batch_of(*range(last + 5, 2 * last + 5)).messages)
        ids.acknowledge({ZERO: GroupOffset(Offset(3 * last))})
        await ids.close()
        assert ids.statistics().forgotten_count == 2
        asked = [1, last, *range(last + 1, last + 6), 2 * last + 4]
        known = [1, last, last + 5, 2 * last + 4]
        assert store.seen([f"g{n}" for n in asked]) == [f"g{n}" for n in known]

    asyncio.run(scenario())


def test_what_is_handled_after_the_end_is_only_dropped() -> None:
    """A thread that outlives its client hears no error."""
    store = LruDuplicateIds()

    async def scenario() -> DuplicateFilter:
        ids = make_filter(store)
        await ids.close()
        ids.on_handled(batch_of(1).messages)
        await asyncio.sleep(0)
        return ids

    asyncio.run(scenario()).on_handled(batch_of(2).messages)
    assert store.statistics().key_count == 0
