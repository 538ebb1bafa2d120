"""Fixed partitions: read as soon as they can be, and reported once until then."""

import asyncio
from collections.abc import Callable, Collection

import pytest

from metaq.client.group.assignments import FixedSource, listed_source
from metaq.errors import NoBrokerError, RequestTimeoutError
from metaq.model import TopicPartition
from metaq.testing.clock import ManualClock
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
