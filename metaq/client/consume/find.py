"""Find messages by key, header or id: the newest first, over all partitions.

Brokers that announce `find` return them page by page, from an index, or by reading the
log where there is none. Partitions of other brokers are read by the client up to their
present log ends, with the same result. An id contains its time: the messages of that
millisecond are read, and those after it if the message is not among them, because
messages of a transaction are appended by its commit.
"""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from dataclasses import field as field_of
from datetime import datetime
from functools import partial
from typing import Final, TypeVar

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.consume.browse import (
    browse_topic,
    check_moment,
    require_known,
    select_partitions,
)
from metaq.client.consume.decode import decode_joined
from metaq.client.errors import CannotAnswerError
from metaq.client.fan_out import all_for, all_of
from metaq.client.names import check_topic
from metaq.client.options import check_plain_function
from metaq.client.validation import check_whole, moment_of
from metaq.errors import BadReplyError, ConfigError, UnexpectedReplyError
from metaq.model import (
    MAX_OFFSET,
    BrokerId,
    Message,
    MessageId,
    Millis,
    TopicPartition,
    id_time,
)
from metaq.peer.connection import BrokerConnection
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Find, Reply, Result, Status, Value
from metaq.protocol.decimals import I64_MAX
from metaq.protocol.find_pages import FIND_PARTITIONS_MAX, decode_pages
from metaq.record.flags import encode_payload, encode_properties, has_field
from metaq.record.runs import decode_runs

PAGE_MAX: Final = 1000
"""Maximum number of messages in one request of a search with a limit."""
PAGE: Final = 100
"""Number of messages in one request of a search without a limit."""

READ_BYTES_MAX: Final = 1 << 30
"""Default maximum of the bytes of the log that are read without an index."""

ID_WINDOWS_MS: Final = (2, 1_000, 60_000, 3_600_000)
"""Ends of the periods that are searched for an id, one after the other, in milliseconds
after the time in the id. The first has a millisecond of slack, because a float of
seconds may be a millisecond too low; the others are for commits of transactions."""

KEPT_MAX: Final = 10_000
"""Number of found messages kept of a partition whose broker has no `find`, in a search
without a limit; for older ones its log is read again."""


T = TypeVar("T")


class _NoFindError(Exception):
    """The broker does not support `find`."""


_Page = tuple[list[Message], int, int]
"""Messages, newest first; the offset below which to continue, 0 at the end; and the
number of bytes read without an index."""


@dataclass(slots=True)
class Search:
    """One search of messages; see `AsyncClient.find`."""

    context: ClientContext
    topic: str
    field: bytes
    """Key or header, encoded as in a record."""
    since_ms: int
    until_ms: int
    """Exclusive."""
    limit: int | None
    read_bytes_max: int
    on_read: Callable[[int], object] | None
    timeout: float | None
    read_bytes: int = 0
    below: dict[TopicPartition, int] = field_of(default_factory=dict)
    """Offset below which the search of each partition continues; 0 at its end."""

    async def newest_first(
        self, partitions: Collection[TopicPartition]
    ) -> AsyncGenerator[list[Message], None]:
        """Yield the messages in lists, as soon as their order is known."""
        self.below = dict.fromkeys(partitions, I64_MAX)
        waiting, count = await self._first_pages(), 0
        while True:
            asked = [one for one, at in self.below.items() if at and one not in waiting]
            more = await all_for(self._more, asked)
            waiting |= {one: page[::-1] for one, page in more.items() if page}
            found = list[Message]()
            while waiting and count + len(found) != self.limit:
                newest = min(waiting, key=lambda one: (_age(waiting[one][-1]), one))
                found.append(waiting[newest].pop())
                if not waiting[newest]:
                    del waiting[newest]
                    if self.below[newest]:
                        break  # its next message may be newer than those of the others
            count += len(found)
            if found:
                yield found
            if count == self.limit or not (waiting or any(self.below.values())):
                return

    async def _first_pages(self) -> dict[TopicPartition, list[Message]]:
        """Return the newest messages of partitions that were asked for together.

        One request asks for the partitions of a broker. Those that it leaves out are
        left to `_more`.

        Returns:
            Lists that are not empty, the newest message last.
        """
        waiting = dict[TopicPartition, list[Message]]()
        for pages in await all_of(map(self._ask_together, together(self.below))):
            for one, page in pages.items():
                if messages := self._note(one, page):
                    waiting[one] = messages[::-1]
        return waiting

    async def _more(self, partition: TopicPartition) -> list[Message]:
        """Return the next messages of a partition, newest first; none at its end.

        Raises:
            CannotAnswerError: as `AsyncClient.find`.
        """
        try:
            while self.below[partition]:
                if messages := self._note(partition, await self._ask(partition)):
                    return messages
        except _NoFindError:
            return await self._browse(partition)
        return []

    def _note(self, partition: TopicPartition, page: _Page) -> list[Message]:
        messages, self.below[partition], read_bytes = page
        self._count(read_bytes)
        return messages

    async def _browse(self, partition: TopicPartition) -> list[Message]:
        """Return what `_more` returns, for a broker that does not support `find`."""
        kept, count = deque[Message](maxlen=self.limit or KEPT_MAX), 0
        below = self.below[partition]
        batches = browse_topic(
            self.context, self.topic, partitions=[partition], timeout=self.timeout
        )
        async with aclosing(batches):
            async for batch in batches:
                self._count(batch[-1].next_offset - batch[0].offset)
                wanted = [m for m in batch if m.offset < below and self._matches(m)]
                kept += wanted
                count += len(wanted)
                if batch[-1].next_offset >= below:
                    break
        self.below[partition] = kept[0].offset if count > len(kept) else 0
        return list(reversed(kept))

    async def _ask(self, partition: TopicPartition) -> _Page:
        below = self.below[partition]
        return await self._send(
            [partition], lambda reply: _parse(partition, below, reply)
        )

    async def _ask_together(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, _Page]:
        try:
            return await self._send(partitions, partial(_parse_pages, partitions))
        except _NoFindError:
            return {}

    async def _send(
        self, partitions: Sequence[TopicPartition], parse: Callable[[Reply], T]
    ) -> T:
        """Ask their broker for what is below the place of the first partition."""
        first, *others = partitions
        limit = PAGE if self.limit is None else min(self.limit, PAGE_MAX)

        def make(connection: BrokerConnection, opaque: int) -> Find:
            if not connection.capabilities.find:
                raise _NoFindError
            return Find(
                self.topic,
                first.partition,
                self.field,
                opaque,
                limit,
                self.below[first],
                self.since_ms,
                self.until_ms - 1,
                tuple(one.partition for one in others),
            )

        deadline_s = self.context.deadline_s(self.timeout)
        return await LogQueries(self.context, first, deadline_s).ask(make, parse)

    async def with_id(
        self, message_id: MessageId, partitions: Collection[str | TopicPartition] | None
    ) -> AsyncGenerator[list[Message], None]:
        """Yield the message with an id; raises as `find_messages`."""
        start_ms = since_ms = _time_of(message_id)
        for window_ms in ID_WINDOWS_MS:
            until_ms = Millis(start_ms + window_ms)
            batches = browse_topic(
                self.context,
                self.topic,
                partitions=partitions,
                since=moment_of(since_ms),
                until=moment_of(until_ms),
                timeout=self.timeout,
            )
            async with aclosing(batches):
                async for batch in batches:
                    if since_ms > start_ms:
                        self._count(batch[-1].next_offset - batch[0].offset)
                    found = [each for each in batch if each.id == message_id]
                    if found:
                        yield found
                        return
            since_ms = until_ms

    def _matches(self, message: Message) -> bool:
        line = encode_payload(b"", None, message.key, message.header_pairs)
        time_ms = message.timestamp_ms
        is_in_time = time_ms is None or self.since_ms <= time_ms < self.until_ms
        return is_in_time and has_field(*line, self.field)

    def _count(self, size_bytes: int) -> None:
        """Count bytes read without an index; CannotAnswerError above the limit."""
        self.read_bytes += size_bytes
        if size_bytes and self.on_read is not None:
            self.on_read(self.read_bytes)
        if self.read_bytes > self.read_bytes_max:
            more = "give it one (index=key), a time, or" if self.field else "give"
            raise CannotAnswerError(
                f"find: expected to read at most {self.read_bytes_max} bytes of topic"
                f" '{self.topic}' without an index, got {self.read_bytes}: {more} a"
                " larger read_bytes_max"
            )


def together(partitions: Iterable[TopicPartition]) -> list[list[TopicPartition]]:
    """Return the partitions that one request each asks for: two or more of a broker."""
    of_broker = dict[BrokerId, list[TopicPartition]]()
    for one in partitions:
        of_broker.setdefault(one.broker_id, []).append(one)
    groups = [
        each[at : at + FIND_PARTITIONS_MAX]
        for each in of_broker.values()
        for at in range(0, len(each), FIND_PARTITIONS_MAX)
    ]
    return [each for each in groups if len(each) > 1]


def _age(message: Message) -> int:
    return -(message.timestamp_ms or 0)


def _parse(partition: TopicPartition, below: int, reply: Reply) -> _Page:
    if isinstance(reply, Result) and reply.status == Status.NOT_FOUND:
        # There is no log before the first put.
        return [], 0, 0
    if not isinstance(reply, Value):
        require_ok(reply)
        raise UnexpectedReplyError("expected a value, got a result")
    after, read_bytes = reply.next_offset, reply.read_bytes
    return _page(partition, below, after, read_bytes, reply.payload)


def _parse_pages(
    partitions: Sequence[TopicPartition], reply: Reply
) -> dict[TopicPartition, _Page]:
    """Return a page for each partition in a reply; none if the broker refuses."""
    if not isinstance(reply, Value):
        return {}
    by_number = {one.partition: one for one in partitions}
    pages = dict[TopicPartition, _Page]()
    for number, after, read_bytes, runs in decode_pages(reply.payload):
        one = by_number.get(number)
        if one is None:
            raise BadReplyError(
                f"find: expected partitions {[*by_number]}, got {number}"
            )
        pages[one] = _page(one, I64_MAX, after, read_bytes, runs)
    return pages


def _page(
    partition: TopicPartition, below: int, after: int, read_bytes: int, runs: bytes
) -> _Page:
    if after >= below:
        raise BadReplyError(f"find below {below} goes on below {after}")
    # Most partitions have no message with a key.
    messages = list(decode_joined(decode_runs(runs), partition)) if runs else []
    return messages, after, read_bytes


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
    """Yield the found messages in lists; see `AsyncClient.find`."""
    check_topic(topic)
    if limit is not None:
        check_whole("limit", limit, 1)
    check_whole("read_bytes_max", read_bytes_max, 0)
    if on_read is not None:
        check_plain_function("on_read", on_read)
    # `until` is 1 or more, because requests have the last millisecond, `until - 1`.
    times = _time("since", since, 0), max(1, _time("until", until, MAX_OFFSET))
    if sum(each is not None for each in (key, header, id)) != 1:
        raise ConfigError("find: expected one of key, header and id")
    field = b""
    if id is None:
        field = encode_properties(key, () if header is None else [header]).encode()
    search = Search(
        context, topic, field, *times, limit, read_bytes_max, on_read, timeout
    )
    if id is not None:
        batches = search.with_id(MessageId(id), partitions)
    else:
        deadline_s = context.deadline_s(timeout)
        chosen = await select_partitions(context, topic, partitions, deadline_s)
        if partitions is not None:
            await require_known(context, chosen, deadline_s)
        batches = search.newest_first(chosen)
    async with aclosing(batches):
        async for batch in batches:
            yield batch


def _time(name: str, moment: datetime | None, otherwise: int) -> int:
    check_moment(name, moment)
    return otherwise if moment is None else max(0, int(moment.timestamp() * 1000))


def _time_of(message_id: int) -> Millis:
    """Return the time in an id."""
    check_whole("id", message_id, -(1 << 63), MAX_OFFSET)
    time_ms = id_time(MessageId(message_id))
    if time_ms is None:
        raise ConfigError(
            f"id: {message_id} was given by a Java broker, and has no time: browse"
            " the topic for it"
        )
    return time_ms
