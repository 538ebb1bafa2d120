"""Calls of a client that read without a group; they commit nothing.

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
from metaq.client.options import Start
from metaq.client.own_process import OfOneProcess
from metaq.model import Message, Offset, TopicPartition


async def _each(
    batches: AsyncGenerator[list[Message], None],
) -> AsyncIterator[Message]:
    async with contextlib.aclosing(batches):
        async for batch in batches:
            for message in batch:
                yield message


class AsyncBrowsing(OfOneProcess):
    """The part of `AsyncClient` that reads without a group."""

    def _require_context(self) -> ClientContext:
        """Return the client's parts; raise ClosedError on another event loop."""
        raise NotImplementedError

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
            partitions: partitions, or names like `0-1`; None: all, including later ones
                if it does not stop at the end.
            start: where to begin in each partition; see `ConsumerOptions.start`.
            last: begin with this number of newest messages of all partitions together,
                oldest first; 0 or more. They are held in memory; earlier ones are not
                read. Messages of a MetaQ 1.4 broker have no time: they are only
                ordered among those of one broker.
            since: begin at the first message of that time or later, like a time as
                `start`. Local time without a zone.
            until: end before the first message of that time or later.
            where: yield only messages for which this condition is true; see
                `ConsumerOptions.where`. With `last` the newest of these: each partition
                is read back until that many match, to its start if necessary.
            stop_at_end: read one partition after the other, each up to the log end at
                the beginning; if False, all at once, without an end.
            partial: while a broker of the topic is away, read the other partitions. If
                False, that is an error.
            timeout: maximum seconds until the next messages. None: each request has
                `request_timeout_s`, and waiting for new messages has no limit.

        Raises:
            RequestTimeoutError: the time is over, which ends the iteration.
            NoBrokerError: no broker serves the topic, or a given partition.
            ExchangeError: it is an exchange.
            PartitionsAwayError: all partitions are to be read, and a broker that has
                some of them is away.
            CannotAnswerError: a time, or the newest messages of several brokers, when a
                MetaQ 1.4 broker has messages.
            ConfigError: an invalid name of a partition; several of `start`, `last` and
                `since`; `until` without `stop_at_end`; or a FilterError for `where`.
            TypeError: a value is of another type.
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

        They are in descending order of the times in their ids, equal times in the order
        of the partitions; within a partition from the end of the log. Brokers use the
        topic's index (setting `index`), or read the log if it has none. Partitions of
        MetaQ 1.4 brokers are read by the client, with the same result.

        Args:
            topic: topic name.
            key: key of the messages; text means its UTF-8 bytes.
            header: name and bytes of a header.
            id: id of one message. It contains the time from which the log is read, so
                no index is needed.
            partitions: partitions, or names like `0-1`; None: all.
            since: only messages of that time or later. Local time without a zone. Times
                are those of the broker; messages without a time are included.
            until: only messages before that time.
            limit: maximum number of messages; None continues to the log start.
            read_bytes_max: maximum bytes of the log to read without an index.
            on_read: called with the number of bytes read without an index so far.
            timeout: seconds of each request; None: `request_timeout_s`.

        Raises:
            CannotAnswerError: more than `read_bytes_max` would have to be read; or an
                id, when a MetaQ 1.4 broker has messages.
            NoBrokerError, PartitionsAwayError, ExchangeError: as `browse`.
            ConfigError: not exactly one of `key`, `header` and `id`; an id without a
                time; or an invalid value.
            TypeError: a value is of another type.
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
        offset: int,
        max_bytes: int = FETCH_BYTES,
        timeout: float | None = None,
    ) -> GetResult:
        """Return the messages at an offset, and the next offset, without waiting.

        Args:
            topic: topic name.
            partition: partition, or a name like `0-1`.
            offset: offset of a message, or any offset outside the log; then the result
                has the nearest end of the log.
            max_bytes: requested size, 1 or more; a larger message is returned whole.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: the name of the partition, or `max_bytes`, is invalid.
            CorruptRecordError: the record at `offset` is damaged.
            NoBrokerError: no broker serves the partition.
            ExchangeError: the topic is an exchange.
            MetaqError: the broker cannot be asked, or refuses.
        """
        check_topic(topic)
        (one,) = fixed_partitions([topic], [partition])
        context = self._require_context()
        deadline_s = context.deadline_s(timeout)
        return await get_at(
            context, one, Offset(offset), max_bytes, deadline_s=deadline_s
        )

    async def topics(self, timeout: float | None = None) -> tuple[str, ...]:
        """Return the names of all topics, sorted.

        Args:
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            CoordinationError: ZooKeeper cannot be reached.
            NoBrokerError: without ZooKeeper: no given broker answers.
        """
        context = self._require_context()
        return await known_topics(context, deadline_s=context.deadline_s(timeout))

    async def partitions(
        self, topic: str, timeout: float | None = None
    ) -> tuple[TopicPartition, ...]:
        """Return a topic's partitions in numeric order, including those that are away.

        () if no broker serves or has recorded the topic.

        Args:
            topic: topic name.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            CoordinationError: ZooKeeper cannot be reached.
            NoBrokerError: without ZooKeeper: no given broker answers.
            ConfigError: the topic name is invalid.
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
            The statistics of every registered leader and follower, except those that
            refuse the request.

        Raises:
            MetaqError: a registered broker cannot be asked.
        """
        context = self._require_context()
        return await stats_of(context, item, deadline_s=context.deadline_s(timeout))
