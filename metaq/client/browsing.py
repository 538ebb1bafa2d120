"""Reading a cluster without a group: nothing is committed.

Source: docs/metaq-1.4/client.md 6.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Concatenate, ParamSpec, TypeAlias

from metaq.client.cluster.context import ClientContext
from metaq.client.consume.browse import (
    GetResult,
    browse_topic,
    get_at,
    known_partitions,
    known_topics,
    stats_of,
)
from metaq.client.consume.cursor import FETCH_BYTES
from metaq.client.consume.find import find_messages
from metaq.client.names import check_topic, fixed_partitions
from metaq.client.options import same_arguments
from metaq.model import Message, Offset, TopicPartition

P = ParamSpec("P")
Batches: TypeAlias = AsyncGenerator[list[Message], None]


def _one_by_one(
    name: str, make: Callable[Concatenate[ClientContext, P], Batches]
) -> Callable[Concatenate["AsyncBrowsing", P], AsyncIterator[Message]]:
    """Return the method of a client that yields what `make` yields many at a time."""

    def call(
        self: "AsyncBrowsing", /, *args: P.args, **keywords: P.kwargs
    ) -> AsyncIterator[Message]:
        return _each(make(self._require_context(), *args, **keywords))

    call.__name__, call.__qualname__ = name, f"AsyncClient.{name}"
    return same_arguments(make, make.__doc__)(call)


async def _each(batches: Batches) -> AsyncIterator[Message]:
    async with contextlib.aclosing(batches):
        async for batch in batches:
            for message in batch:
                yield message


class AsyncBrowsing:
    """The part of `AsyncClient` that reads without a group."""

    def _require_context(self) -> ClientContext:
        """Return the client's parts, on its event loop alone."""
        raise NotImplementedError

    browse = _one_by_one("browse", browse_topic)
    find = _one_by_one("find", find_messages)

    async def get(
        self,
        topic: str,
        partition: str | TopicPartition,
        offset: Offset,
        max_bytes: int = FETCH_BYTES,
        timeout: float | None = None,
    ) -> GetResult:
        """Return the messages at an offset, and where to go on; never waits for any.

        Args:
            topic: topic name.
            partition: the partition, or its name, like `0-1`.
            offset: a record boundary, or any offset outside the log: the result says
                where the log is.
            max_bytes: how much is asked for; a larger message comes as a whole.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: no name of a partition, or `max_bytes` below 1.
            CorruptRecordError: the record at `offset` is damaged.
            NoBrokerError: no broker serves the partition.
            ExchangeError: it is an exchange.
            MetaqError: the broker cannot be asked, or refuses.
        """
        check_topic(topic)
        (one,) = fixed_partitions([topic], [partition])
        context = self._require_context()
        deadline_s = context.deadline_s(timeout)
        return await get_at(context, one, offset, max_bytes, deadline_s=deadline_s)

    async def topics(self, timeout: float | None = None) -> tuple[str, ...]:
        """Return the names of all topics, sorted.

        Args:
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            CoordinationError: ZooKeeper cannot be reached.
            NoBrokerError: no named broker answers.
        """
        context = self._require_context()
        return await known_topics(context, deadline_s=context.deadline_s(timeout))

    async def partitions(
        self, topic: str, timeout: float | None = None
    ) -> tuple[TopicPartition, ...]:
        """Return a topic's partitions in numeric order, also those that are away.

        () when no broker serves or has recorded it.

        Args:
            topic: topic name.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            CoordinationError: ZooKeeper cannot be reached.
            NoBrokerError: no named broker answers.
            ConfigError: no topic can have this name.
        """
        context = self._require_context()
        deadline_s = context.deadline_s(timeout)
        return await known_partitions(context, topic, deadline_s=deadline_s)

    async def stats(
        self, item: str = "", timeout: float | None = None
    ) -> Mapping[str, Mapping[str, str]]:
        """Return the statistics of brokers: `host:port` → name → value.

        Args:
            item: "" for the broker itself, or one of MetaQ's items, like `topics`.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            Of every broker that is there, leaders and followers; those that refuse
            the question are left out.

        Raises:
            MetaqError: a broker that should be there cannot be asked.
        """
        context = self._require_context()
        return await stats_of(context, item, deadline_s=context.deadline_s(timeout))
