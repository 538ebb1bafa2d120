"""Find messages by key, header or id: the newest first, over all partitions.

Brokers that announce `find` look them up, page by page; what has no index they read.
Topics of other brokers are read here, up to the log ends of now, with the same result.
An id has its time, and no more than the messages of that millisecond are read.
"""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.consume.browse import (
    browse_topic,
    check_moment,
    chosen_of,
    require_known,
)
from metaq.client.consume.decode import decode_joined
from metaq.client.errors import CannotAnswerError
from metaq.client.fan_out import all_for
from metaq.client.names import check_topic
from metaq.client.options import check_plain_function
from metaq.client.validation import check_whole, moment_of
from metaq.errors import BadReplyError, ConfigError, UnexpectedReplyError
from metaq.model import MAX_OFFSET, Message, MessageId, Millis, TopicPartition, id_time
from metaq.peer.connection import BrokerConnection
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Find, Reply, Result, Status, Value
from metaq.protocol.decimals import I64_MAX
from metaq.record.flags import encode_payload, encode_properties, has_field
from metaq.record.runs import decode_runs

PAGE_MAX: Final = 1000
"""Messages that are asked for at once; without a limit fewer, see PAGE."""
PAGE: Final = 100

READ_BYTES_MAX: Final = 1 << 30
"""Most bytes of the log that are read without an index."""

KEPT_MAX: Final = 10_000
"""Newest messages of a partition that are kept where its broker looks nothing up."""


class _NoFindError(Exception):
    """The broker looks nothing up."""


_Page = tuple[list[Message], int, int]
"""Messages, where to go on, and bytes that were read for want of an index."""


@dataclass(slots=True)
class Search:
    """One search of messages; see `AsyncClient.find`."""

    context: ClientContext
    topic: str
    field: bytes
    """Key or header as a record has it."""
    since_ms: int
    until_ms: int
    """After the last time."""
    limit: int | None
    read_bytes_max: int
    on_read: Callable[[int], object] | None
    timeout: float | None
    read_bytes: int = 0

    async def newest_first(
        self, partitions: Collection[TopicPartition]
    ) -> AsyncGenerator[list[Message], None]:
        """Yield the messages, as many at a time as are known to be the next ones."""
        pages = {each: self._of_partition(each) for each in partitions}
        waiting = dict[TopicPartition, list[Message]]()
        count, asked = 0, partitions
        try:
            while True:
                more = await all_for(lambda one: anext(pages[one], None), asked)
                waiting.update((one, page[::-1]) for one, page in more.items() if page)
                found, asked = list[Message](), ()
                while waiting and not asked and count + len(found) != self.limit:
                    newest = min(waiting, key=lambda one: (_age(waiting[one][-1]), one))
                    found.append(waiting[newest].pop())
                    if not waiting[newest]:
                        # Its next one may come before those of others.
                        del waiting[newest]
                        asked = (newest,)
                count += len(found)
                if found:
                    yield found
                if not asked or count == self.limit:
                    return
        finally:
            for each in pages.values():
                await each.aclose()

    async def _of_partition(
        self, partition: TopicPartition
    ) -> AsyncGenerator[list[Message], None]:
        """Yield pages of one message or more."""
        below: int = I64_MAX
        try:
            while below > 0:
                messages, below, read_bytes = await self._ask(partition, below)
                self._count(read_bytes)
                if messages:
                    yield messages
        except _NoFindError:
            kept, count = deque[Message](maxlen=self.limit or KEPT_MAX), 0
            batches = browse_topic(
                self.context, self.topic, partitions=[partition], timeout=self.timeout
            )
            async with aclosing(batches):
                async for batch in batches:
                    self._count(batch[-1].next_offset - batch[0].offset)
                    wanted = [m for m in batch if m.offset < below and self._is_met(m)]
                    kept += wanted
                    count += len(wanted)
            if kept:
                yield list(reversed(kept))
            if self.limit is None and count > len(kept):
                raise CannotAnswerError(
                    f"find: {partition} has {count} matching messages, and its broker"
                    f" does not support find: expected a limit, or at most {KEPT_MAX}"
                    " of them"
                ) from None

    async def _ask(self, partition: TopicPartition, below: int) -> _Page:
        limit = PAGE if self.limit is None else min(self.limit, PAGE_MAX)

        def make(connection: BrokerConnection, opaque: int) -> Find:
            if not connection.capabilities.find:
                raise _NoFindError
            topic, number = self.topic, partition.partition
            times = self.since_ms, self.until_ms - 1
            return Find(topic, number, self.field, opaque, limit, below, *times)

        deadline_s = self.context.deadline_s(self.timeout)
        log = LogQueries(self.context, partition, deadline_s)
        return await log.ask(make, partial(_parse, partition, below))

    def _is_met(self, message: Message) -> bool:
        line = encode_payload(b"", None, message.key, message.header_pairs)
        time_ms = message.timestamp_ms
        is_in_time = time_ms is None or self.since_ms <= time_ms < self.until_ms
        return is_in_time and has_field(*line, self.field)

    def _count(self, size_bytes: int) -> None:
        """Take note of bytes that were read for want of an index."""
        self.read_bytes += size_bytes
        if size_bytes and self.on_read is not None:
            self.on_read(self.read_bytes)
        if self.read_bytes > self.read_bytes_max:
            raise CannotAnswerError(
                f"find: expected to read at most {self.read_bytes_max} bytes of topic"
                f" '{self.topic}' without an index, got {self.read_bytes}: give it one"
                " (index=key), a time, or a larger read_bytes_max"
            )


def _age(message: Message) -> int:
    return -(message.timestamp_ms or 0)


def _parse(partition: TopicPartition, below: int, reply: Reply) -> _Page:
    if isinstance(reply, Result) and reply.status == Status.NOT_FOUND:
        # No put has made the log.
        return [], 0, 0
    if not isinstance(reply, Value):
        require_ok(reply)
        raise UnexpectedReplyError("expected a value, got a result")
    if reply.next_offset >= below:
        raise BadReplyError(f"find below {below} goes on below {reply.next_offset}")
    messages = list(decode_joined(decode_runs(reply.payload), partition))
    return messages, reply.next_offset, reply.read_bytes


async def find_messages(
    context: ClientContext,
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
) -> AsyncGenerator[list[Message], None]:
    """Yield the messages found, many at a time; see `AsyncClient.find`."""
    check_topic(topic)
    if limit is not None:
        check_whole("limit", limit, 1)
    check_whole("read_bytes_max", read_bytes_max, 0)
    if on_read is not None:
        check_plain_function("on_read", on_read)
    # A broker is asked for what is not later than the millisecond before `until`.
    times = _time("since", since, 0), max(1, _time("until", until, MAX_OFFSET))
    if sum(each is not None for each in (key, header, id)) != 1:
        raise ConfigError("find: expected one of key, header and id")
    if id is not None:
        since, until = _times_of(id)
        batches = browse_topic(
            context,
            topic,
            partitions=partitions,
            since=since,
            until=until,
            timeout=timeout,
        )
    else:
        field = encode_properties(key, () if header is None else [header]).encode()
        deadline_s = context.deadline_s(timeout)
        chosen = await chosen_of(context, topic, partitions, deadline_s)
        if partitions is not None:
            await require_known(context, chosen, deadline_s)
        search = Search(
            context, topic, field, *times, limit, read_bytes_max, on_read, timeout
        )
        batches = search.newest_first(chosen)
    async with aclosing(batches):
        async for batch in batches:
            found = batch if id is None else [one for one in batch if one.id == id]
            if found:
                yield found
            if found and id is not None:
                return


def _time(name: str, moment: datetime | None, otherwise: int) -> int:
    check_moment(name, moment)
    return otherwise if moment is None else max(0, int(moment.timestamp() * 1000))


def _times_of(message_id: int) -> tuple[datetime, datetime]:
    """Return between which times a message with an id is."""
    check_whole("id", message_id, -(1 << 63), MAX_OFFSET)
    time_ms = id_time(MessageId(message_id))
    if time_ms is None:
        raise ConfigError(
            f"id: {message_id} was given by a Java broker, and has no time: browse"
            " the topic for it"
        )
    # A float of seconds may be a millisecond short.
    return moment_of(time_ms), moment_of(Millis(time_ms + 2))
