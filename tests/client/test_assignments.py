"""Fixed partitions: read as soon as possible, and reported once until then."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import pytest

from metaq.client.group.assignments import FixedSource, listed_source, topic_source
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import NoBrokerError, RequestTimeoutError
from metaq.model import BrokerId, TopicPartition
from metaq.testing.clock import ManualClock
from tests.client import group_members
from tests.client.worlds import partition
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until


class Sink:
    """Reads partition 0 at once, and partition 1 when `refusals` are used up."""

    def __init__(self, refusals: list[Exception]) -> None:
        self.refusals = refusals
        self.done = asyncio.Event()

    async def assign(self, partitions: Collection[TopicPartition]) -> None:
        if partitions == [partition(1)]:
            if self.refusals:
                raise self.refusals.pop(0)
            self.done.set()

    def announce(self, partitions: Collection[TopicPartition]) -> None:
        pass

    async def revoke(self, partitions: Collection[TopicPartition]) -> None:
        assert set(partitions) == {partition(0), partition(1)}

    def fence(self, partitions: Collection[TopicPartition]) -> None:
        raise AssertionError(partitions)


def test_a_partition_that_cannot_be_read_is_told_once_for_each_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A broker that is away for an hour is not a line every five seconds."""
    away, late = NoBrokerError("away"), RequestTimeoutError("late")

    async def scenario() -> None:
        source = listed_source([partition(0), partition(1)], clock=ManualClock())
        sink = Sink([away] * 20 + [late] * 20)
        await source.start(sink)
        assert source.last_error is away
        await sink.done.wait()
        await until(lambda: source.last_error is None)
        assert source.unsettled_since_s is None
        await source.stop()

    run_virtually(scenario())
    assert caplog.messages == [
        "some partitions cannot be read yet: away",
        "some partitions cannot be read yet: late",
    ]


def test_a_sink_that_is_broken_is_told_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Users write offset stores: what theirs raises may not end reading in silence."""

    async def scenario() -> None:
        source = listed_source([partition(0), partition(1)], clock=ManualClock())
        sink = Sink([NoBrokerError("away"), KeyError("mine")])
        await source.start(sink)
        async with asyncio.timeout(1000):
            await sink.done.wait()
        await source.stop()

    run_virtually(scenario())
    raised = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [type(error) for error in raised] == [KeyError]


def test_news_of_the_cluster_end_a_pause() -> None:
    """A partition that is back, or new, is read when the cluster shows it."""

    async def scenario() -> None:
        found = [partition(0), partition(1)]
        listeners: list[Callable[[], None]] = []

        def listen(callback: Callable[[], None]) -> Callable[[], None]:
            listeners.append(callback)
            return listeners.clear

        source = FixedSource(lambda: found, listen, clock=ManualClock())
        sink = Sink([NoBrokerError("away")] * 100)
        await source.start(sink)
        await asyncio.sleep(100)
        assert sink.refusals
        sink.refusals.clear()
        listeners[0]()
        async with asyncio.timeout(0.01):
            await sink.done.wait()
        await source.stop()

    run_virtually(scenario())


class Snapshots:
    """Metadata of the cluster, as a source of topics needs it."""

    def __init__(self, *counts: tuple[str, int]) -> None:
        self.listeners: list[Callable[[object], None]] = []
        self.snapshot = snapshot_of(*counts)

    def add_listener(self, listener: Callable[[object], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def change(self, *counts: tuple[str, int]) -> None:
        self.snapshot = snapshot_of(*counts)
        for listener in self.listeners:
            listener(self.snapshot)


def snapshot_of(*counts: tuple[str, int]) -> ClusterSnapshot:
    return ClusterSnapshot(
        version=1, gets={topic: {BrokerId(0): count} for topic, count in counts}
    )


def test_a_topic_that_is_not_wanted_any_more_is_revoked() -> None:
    """One that is wanted and has no partitions now is read on when it has them."""

    async def scenario() -> None:
        metadata: Any = Snapshots(("a", 1), ("b", 1))
        topics = ["a", "b"]
        sink = group_members.Sink()
        source = topic_source(metadata, topics, clock=ManualClock())
        await source.start(sink)
        a, b = partition(0, "a"), partition(0, "b")
        assert sink.reading == {a, b}
        assert sink.announced == [frozenset({a, b})]
        metadata.change()
        await asyncio.sleep(0.01)
        assert sink.reading == {a, b}
        topics.remove("a")
        metadata.change(("b", 2))
        await until(lambda: sink.reading == {b, partition(1, "b")})
        assert sink.called("revoke") == {a}
        topics.append("a")
        metadata.change(("a", 1), ("b", 2))
        await until(lambda: sink.reading == {a, b, partition(1, "b")})
        await source.stop()
        assert sink.reading == set()

    asyncio.run(scenario())


def test_a_restart_reads_again_without_a_change_of_the_cluster() -> None:
    """Only what it names, and what was read."""

    async def scenario() -> None:
        sink = group_members.Sink()
        one, two = partition(0), partition(1)
        source = listed_source([one, two], clock=ManualClock())
        await source.start(sink)
        source.restart([one, partition(7)])
        assert (sink.reading, sink.called("fence")) == ({two}, {one})
        await until(lambda: sink.reading == {one, two})
        await source.stop()

    asyncio.run(scenario())
