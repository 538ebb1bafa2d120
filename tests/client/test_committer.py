"""Committing: a failure is reported until its offsets are committed."""

import asyncio
import logging
from collections.abc import Iterable, Mapping

import pytest

from metaq.client.group.assignments import Fence
from metaq.client.offsets.committer import Committer
from metaq.client.offsets.offset_store import MemoryOffsets, OffsetStore
from metaq.clock import SystemClock
from metaq.errors import MetaqError, SessionSuspendedError
from metaq.model import BrokerId, GroupOffset, MessageId, Offset, TopicPartition

PARTITION = TopicPartition("t", BrokerId(0), 0)
HANDLED = {PARTITION: GroupOffset(Offset(7), MessageId(1))}


class _Refusing(MemoryOffsets):
    """A store that cannot be reached."""

    async def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, GroupOffset],
        *,
        fence: Fence | None,
        deadline_s: float,
    ) -> Mapping[TopicPartition, MetaqError]:
        return dict.fromkeys(offsets, SessionSuspendedError("away"))


def make_committer(
    store: OffsetStore | None = None,
    *,
    partitions: Iterable[TopicPartition] = (PARTITION,),
) -> Committer:
    committer = Committer(
        store or _Refusing(),
        group="g",
        clock=SystemClock(),
        timeout_s=5.0,
        fence=lambda: None,
    )
    for partition in partitions:
        committer.admit(partition)
    return committer


def test_a_failure_is_told_until_nothing_is_missing() -> None:
    """A partition that went to another member takes its failed commit along."""

    async def scenario() -> None:
        committer = make_committer()
        assert await committer.commit(HANDLED)
        assert isinstance(committer.last_error, SessionSuspendedError)
        assert await committer.commit(HANDLED)
        assert committer.last_error is not None
        assert not await committer.commit({})
        assert committer.last_error is None
        assert committer.failure_count == 2

    asyncio.run(scenario())


def test_an_outage_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """However often it is tried, of however many; the next outage is news again."""
    offset = HANDLED[PARTITION]
    many = {TopicPartition("t", BrokerId(0), n): offset for n in range(1000)}

    async def scenario() -> None:
        committer = make_committer(partitions=many)
        for _ in range(2):
            for _ in range(3):
                await committer.commit(many)
            await committer.commit({})

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    line = "commit failed: group=g partitions=1000 first=t/0-0 offset=7: away"
    assert caplog.messages == [line, line]


def test_whatever_a_store_raises_is_a_commit_that_failed() -> None:
    """Users write stores: what their libraries raise may not end the consumer."""

    class Foreign(MemoryOffsets):
        async def commit(self, *args: object, **named: object) -> Mapping:
            raise KeyError("mine")

    async def scenario() -> None:
        committer = make_committer(Foreign())
        failed = await committer.commit(HANDLED)
        assert str(failed[PARTITION]) == "offset store of group g: KeyError('mine')"
        assert committer.changed(HANDLED) == HANDLED

    asyncio.run(scenario())


def test_what_failed_is_tried_again() -> None:
    """It stays changed until it is written."""

    async def scenario() -> None:
        committer = make_committer()
        await committer.commit(HANDLED)
        assert committer.changed(HANDLED) == HANDLED
        committer.dismiss([PARTITION])
        committer.begin(PARTITION, HANDLED[PARTITION])
        assert committer.changed(HANDLED) == {}

    asyncio.run(scenario())
