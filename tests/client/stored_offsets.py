"""Partitions, offsets, and stores that are opened for one call."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from metaq.client.offsets.offset_store import OffsetStore
from metaq.clock import SystemClock
from metaq.model import BrokerId, GroupOffset, MessageId, Offset, TopicPartition

CLOCK = SystemClock()
ZERO = TopicPartition("t", BrokerId(0), 0)
ONE = TopicPartition("t", BrokerId(0), 1)
FAR = TopicPartition("a topic-2", BrokerId(1023), 17)

PLACE = '"topic": "t", "partition": {"brokerId": 0, "partition": 0}'


def soon() -> float:
    return CLOCK.monotonic_s() + 60


def at(offset: int, message_id: int = -1) -> GroupOffset:
    return GroupOffset(Offset(offset), MessageId(message_id))


def run(store: OffsetStore, scenario: Callable[[OffsetStore], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        try:
            return await scenario(store)
        finally:
            await store.close()

    return asyncio.run(main())


def load(store: OffsetStore, group: str, partition: TopicPartition) -> Any:
    return run(store, lambda s: s.load(group, partition, deadline_s=soon()))


def commit(
    store: OffsetStore, group: str, offsets: dict[TopicPartition, GroupOffset]
) -> Any:
    return run(store, lambda s: s.commit(group, offsets, fence=None, deadline_s=soon()))


@contextmanager
def listening(target: Any, event: str, listener: Callable[..., Any]) -> Iterator[None]:
    """Have SQLAlchemy call `listener` at an event, inside the block."""
    sa.event.listen(target, event, listener)
    try:
        yield
    finally:
        sa.event.remove(target, event, listener)
