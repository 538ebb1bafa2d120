"""Reading a cluster without a group: nothing is committed.

Source: docs/metaq-1.4/client.md 6.
"""

import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Mapping,
)
from datetime import datetime

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
from metaq.client.consume.find import READ_BYTES_MAX, find_messages
from metaq.client.names import check_topic, fixed_partitions
from metaq.client.options import Start, names_arguments
from metaq.model import Message, Offset, TopicPartition


async def _each(
    batches: AsyncGenerator[list[Message], None],
) -> AsyncIterator[Message]:
    async with contextlib.aclosing(batches):
        async for batch in batches:
            for message in batch:
                yield message


class AsyncBrowsing:
    """The part of `AsyncClient` that reads without a group."""

    def _require_context(self) -> ClientContext:
        """Return the client's parts, on its event loop alone."""
        raise NotImplementedError

    @names_arguments
    def browse(
        self,
        topic: str,
        *,
        partitions: Collection[str | TopicPartition] | None = None,
        start: Start = "earliest",
        last: int | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        where: str | None = None,
        stop_at_end: bool = True,
        partial: bool = False,
        timeout: float | None = None,
    ) -> AsyncIterator[Message]:
        """Yield the messages of a topic, without a group; nothing is committed.

        Args:
            topic: topic name.
            partitions: partitions, or names like `0-1`; None takes all, later ones too
                when it does not stop at the end.
            start: where to begin in each partition; see `ConsumerOptions.start`.
            last: begin with the newest messages instead, so many of all partitions
                together, oldest first; 0 or more. What is before them is not read; they
                are held in memory. Messages of a MetaQ 1.4 broker carry no time: they
                are ordered among those of one broker alone.
            since: begin at the first message of that time or later; the same as a time
                as `start`. Local time without a zone.
            until: end before the first message of that time or later.
            where: only messages for which this condition is true; see
                `ConsumerOptions.where`. With `last` the newest of those, and as much
                of each partition is read as has so many, all of it if need be.
            stop_at_end: go through the partitions one after the other, each up to the
                end that its log has now; else all at once, for ever.
            partial: go on with the rest while a broker of the topic is away;
                without it, all partitions means all that there are.
            timeout: seconds that the next messages may take. None leaves each question
                `request_timeout_s`, and waits for ever for messages to come.

        Raises:
            RequestTimeoutError: the time is over, and so is the iteration.
            NoBrokerError: no broker serves the topic, or a partition that is named.
            ExchangeError: it is an exchange.
            PartitionsAwayError: all partitions are asked for, and a broker that has
                some of them is away.
            CannotAnswerError: a time, or the newest of several brokers, where a MetaQ
                1.4 broker has messages.
            ConfigError: a name of a partition that is none; several of `start`, `last`
                and `since`; `until` for a reader that does not stop at the end; or a
                FilterError, which says where `where` is wrong.
            TypeError: a value of another type.
            CorruptRecordError: a damaged record; messages before it were yielded.
            MetaqError: a broker cannot be asked within `request_timeout_s`.

        Cancellation: ends it; begin again after the last message.
        """
        batches = browse_topic(
            self._require_context(),
            topic,
            partitions=partitions,
            start=start,
            last=last,
            since=since,
            until=until,
            where=where,
            stop_at_end=stop_at_end,
            partial=partial,
            timeout=timeout,
        )
        return _each(batches)

    @names_arguments
    def find(
        self,
        topic: str,
        *,
        key: str | bytes | None = None,
        header: tuple[str, bytes] | None = None,
        id: int | None = None,  # noqa: A002  # the field of a message
        partitions: Collection[str | TopicPartition] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
        read_bytes_max: int = READ_BYTES_MAX,
        on_read: Callable[[int], object] | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Message]:
        """Yield the messages with a key, a header or an id, the newest first.

        The order is that of the times in their ids, among equal ones that of the
        partitions; within a partition that of the log, from its end. Brokers look them
        up in the index of the topic (setting `index`); where there is none they read
        the log, and what a MetaQ 1.4 broker has is read here. The result is the same.

        Args:
            topic: topic name.
            key: of the messages; text means its UTF-8 bytes.
            header: a name and the bytes that it has.
            id: of one message; the time in it says where to read.
            partitions: partitions, or names like `0-1`; None takes all.
            since: messages of that time or later. Local time without a zone. Times are
                those of the broker; messages without one count as in time.
            until: messages before that time.
            limit: most messages; None goes on to the log start.
            read_bytes_max: most bytes of the log that are read without an index.
            on_read: called with the bytes read so, as they grow.
            timeout: seconds of each question; None: `request_timeout_s`.

        Raises:
            CannotAnswerError: more than `read_bytes_max` would have to be read; an id,
                where a MetaQ 1.4 broker has messages; more than 10,000 messages of a
                partition that its broker does not look up, without a limit.
            NoBrokerError, PartitionsAwayError, ExchangeError: as `browse`.
            ConfigError: not one of `key`, `header` and `id`; an id that has no time;
                a value that means nothing.
            TypeError: a value of another type.
            CorruptRecordError: a damaged record; newer messages were yielded.
            MetaqError: a broker cannot be asked.
        """
        batches = find_messages(
            self._require_context(),
            topic,
            key=key,
            header=header,
            id=id,
            partitions=partitions,
            since=since,
            until=until,
            limit=limit,
            read_bytes_max=read_bytes_max,
            on_read=on_read,
            timeout=timeout,
        )
        return _each(batches)

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
