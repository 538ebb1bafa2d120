"""Read topics, partitions and messages without a group: nothing is committed.

    partitions --> for each: [begin, log end at the beginning) --> gets --> messages

Reading up to the end goes partition by partition, in numeric order, with one get ahead
of the caller, and stops at the log ends of the moment when it began. The newest N
messages of a topic are the newest of the last N of each partition, which are found
without reading earlier ones. Following never ends: it is a consumer that keeps its
offsets in memory. When retention deletes messages before they are read, all of these
continue at the log start.

Source: docs/metaq-1.4/client.md 6.1, 15.1, 15.2 and 21 (row 13).
"""

import asyncio
import contextlib
import heapq
import logging
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Final, TypeAlias

from metaq.client.cluster.boundaries import offset_back
from metaq.client.cluster.catalog import read_cluster, read_whole
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import LogQueries, connect, insist
from metaq.client.cluster.presence import refuse_exchanges
from metaq.client.consume.consumer import AsyncConsumer
from metaq.client.consume.cursor import FETCH_BYTES_MAX, PartitionCursor
from metaq.client.consume.decode import matching
from metaq.client.errors import CannotAnswerError
from metaq.client.fan_out import all_for
from metaq.client.group.assignments import FixedSource, listed_source, topic_source
from metaq.client.group.subscribed_topics import SubscribedTopics
from metaq.client.names import check_topic, fixed_partitions, name_some, require_text
from metaq.client.offsets.offset_reset import first_offset
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.client.options import ConsumerOptions, Start, check_start, load_filter
from metaq.client.timeouts import within
from metaq.client.validation import (
    WIRE_BYTES_MAX,
    check_offset,
    check_whole,
    wrong_type,
)
from metaq.errors import (
    ConfigError,
    CorruptRecordError,
    MetaqError,
    NoBrokerError,
    ServerError,
    WireError,
)
from metaq.filter.language import Filter
from metaq.model import (
    MAX_OFFSET,
    SCHEME,
    BrokerAddress,
    BrokerId,
    Message,
    Offset,
    TopicPartition,
)
from metaq.peer.connection import BrokerConnection
from metaq.peer.log_reader import LogGets
from metaq.peer.replies import (
    GetOutcome,
    MovedTo,
    NothingThere,
    parse_stats,
    require_ok,
)
from metaq.protocol.commands import NO_GROUP, Check, Stats

_log = logging.getLogger(__name__)

FOLLOW_COUNT_MAX: Final = 10_000
"""Maximum number of messages that a follower yields at a time."""
BACK_GROWTH: Final = 4
"""The newest matching messages are searched for backwards in ranges of messages; each
range is this many times as long as the one after it."""


@dataclass(frozen=True, slots=True)
class GetResult:
    """Result of one `get`."""

    messages: list[Message]
    """Messages in order; [] at the end of the log, or if `is_moved`."""
    next_offset: Offset
    """Offset of the next get."""
    is_moved: bool
    """Whether the offset was outside the log; if so `next_offset` is one of its
    ends."""


async def known_topics(context: ClientContext, *, deadline_s: float) -> tuple[str, ...]:
    """Return the names of all topics, sorted; wait for a connection to ZooKeeper.

    Raises:
        NoBrokerError: there is no snapshot of the cluster by the deadline.
        MetaqError: ZooKeeper cannot be asked.
    """
    await context.metadata.reach(deadline_s=deadline_s)
    return tuple(sorted(await insist(context, context.metadata.topics, deadline_s)))


async def known_partitions(
    context: ClientContext, topic: str, *, deadline_s: float
) -> tuple[TopicPartition, ...]:
    """Return a topic's partitions in numeric order, including those that are away.

    () if no broker serves or has recorded the topic.

    Raises:
        NoBrokerError: there is no snapshot of the cluster by the deadline.
        ConfigError: the topic name is invalid.
        TypeError: the topic is not a str.
    """
    check_topic(topic)
    snapshot = await read_cluster(context, [topic], deadline_s=deadline_s)
    readable = snapshot.get_partitions(topic)
    taking = snapshot.put_partitions(topic)
    return tuple(sorted({*readable, *taking, *snapshot.away(topic)}))


async def get_at(
    context: ClientContext,
    partition: TopicPartition,
    offset: Offset,
    max_bytes: int,
    *,
    deadline_s: float,
) -> GetResult:
    """Return the messages at an offset; only a large message needs several gets.

    Args:
        context: the client's parts.
        partition: the partition to read.
        offset: a record boundary, or any offset outside the log.
        max_bytes: minimum size of a get, 1 or more.
        deadline_s: monotonic time.

    Raises:
        CorruptRecordError: the record at `offset` is damaged.
        NoBrokerError: no broker serves the partition.
        MetaqError: the broker cannot be asked, or refuses.
    """
    check_whole("max_bytes", max_bytes, 1, WIRE_BYTES_MAX)
    check_offset("offset", offset)
    cursor = PartitionCursor(
        partition,
        offset,
        fetch_bytes=max_bytes,
        fetch_bytes_max=max(max_bytes, FETCH_BYTES_MAX),
    )
    gets = LogGets(partition, partial(connect, context, partition))
    is_searched = False
    while True:
        is_incomplete = cursor.is_incomplete
        outcome, messages = await _step(context, gets, cursor, deadline_s)
        is_end = isinstance(outcome, NothingThere) and not is_incomplete
        if is_end and not gets.names_damage and not is_searched:
            # Search for a gap: MetaQ 1.4 answers there as at the log end.
            is_searched = True
            cursor.search_gap()
            continue
        if is_end and not messages:
            break
        is_moved = isinstance(outcome, MovedTo) and not is_incomplete
        if messages or is_moved:
            return GetResult(messages, cursor.offset, is_moved)
    end = await LogQueries(context, partition, deadline_s).nearest(MAX_OFFSET)
    if end is None:
        await require_known(context, [partition], deadline_s)
        end = Offset(0)
    is_moved = cursor.offset > end
    return GetResult([], end if is_moved else cursor.offset, is_moved)


async def require_known(
    context: ClientContext, partitions: Collection[TopicPartition], deadline_s: float
) -> None:
    """Raise NoBrokerError if one of a topic's partitions is not served.

    Call it for partitions without a log: one without puts has none but is served.
    """
    (topic,) = {one.topic for one in partitions}
    known = await known_partitions(context, topic, deadline_s=deadline_s)
    refuse_exchanges(context.metadata.snapshot, [topic])
    for one in partitions:
        if one not in known:
            raise NoBrokerError(
                f"{one}: no broker serves it; partitions of topic '{topic}':"
                f" {name_some(known) or 'none'}"
            )


_Step: TypeAlias = tuple[GetOutcome, list[Message]]
"""Outcome of a get, and its messages."""


async def _step(
    context: ClientContext, gets: LogGets, cursor: PartitionCursor, deadline_s: float
) -> _Step:
    """Get once; after a refusal that may be caused by damage, search for the damage.

    Raises:
        CorruptRecordError, NoProgressError: as `PartitionCursor.on_reply`.
        MetaqError: the broker cannot be asked, or refuses.
    """
    refusal: ServerError | None = None
    while True:
        wanted = [(cursor.fetch_offset, cursor.size_bytes)]
        get = partial(gets.get, wanted, cursor.outcome_of, where=cursor.where)
        try:
            outcome = await insist(context, get, deadline_s)
        except ServerError as error:
            if gets.names_damage:
                raise
            refusal = error
            cursor.search_gap()
            continue
        try:
            messages = list(cursor.on_reply(outcome))
        except CorruptRecordError as error:
            await _require_good(context, cursor, error, deadline_s)
            continue
        if refusal is None or messages:
            return outcome, messages
        if not cursor.is_searching:
            raise refusal


async def _require_good(
    context: ClientContext,
    cursor: PartitionCursor,
    damage: CorruptRecordError,
    deadline_s: float,
) -> None:
    """Ask the broker whether its bytes are good, so that the cursor gets them again.

    Raises:
        CorruptRecordError: they are damaged, or the broker cannot check them.
        MetaqError: the broker cannot be asked, or refuses.
    """
    if not cursor.may_be_good():
        raise damage

    def make(connection: BrokerConnection, opaque: int) -> Check:
        if not connection.capabilities.check:
            raise damage
        return cursor.next_check(opaque)

    log = LogQueries(context, cursor.partition, deadline_s)
    await log.ask(make, cursor.on_check)


def check_item(item: str) -> None:
    """Raise TypeError or ConfigError for an invalid name of an item of statistics."""
    require_text("item", item)
    if item.split() not in ([], [item]):
        raise ConfigError(f"item: expected a name without blanks, got {item!r}")


async def stats_of(
    context: ClientContext, item: str, *, deadline_s: float
) -> Mapping[str, Mapping[str, str]]:
    """Return `host:port` → name → value, for every broker that answers with 200.

    Raises:
        NoBrokerError: there is no snapshot of the cluster by the deadline.
        MetaqError: a registered broker cannot be asked.
    """
    check_item(item)
    snapshot = await context.metadata.wait_newer(0, deadline_s=deadline_s)
    addresses = [
        address
        for copies in snapshot.brokers.values()
        for address in (copies.leader, *copies.followers.values())
        if address is not None
    ]

    async def ask(address: BrokerAddress) -> Mapping[str, str] | None:
        try:
            text = await stats_text(context, address, item, deadline_s=deadline_s)
        except WireError:
            return None
        return parse_stats(text)

    return {
        str(address).removeprefix(SCHEME): statistics
        for address, statistics in (await all_for(ask, addresses)).items()
        if statistics is not None
    }


async def stats_text(
    context: ClientContext, address: BrokerAddress, item: str, *, deadline_s: float
) -> str:
    """Return the statistics of one broker as it sends them.

    Raises:
        WireError: the broker refuses the request.
        MetaqError: the broker cannot be asked.
    """
    connection = await context.pool.get(address, deadline_s=deadline_s)
    command = Stats(item, connection.next_opaque())
    reply = await connection.call(command, deadline_s=deadline_s)
    return require_ok(reply).text


async def browse_topic(
    context: ClientContext,
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
) -> AsyncGenerator[list[Message], None]:
    """Yield the messages of a topic in lists; see `AsyncClient.browse`."""
    start = _check_range(start, last, since, until, stop_at_end=stop_at_end)
    matcher = await load_filter(where)
    check_topic(topic)
    deadline_s = context.deadline_s(timeout)
    source = None
    chosen = await select_partitions(
        context, topic, partitions, deadline_s, partial=partial
    )
    if not stop_at_end and partitions is None:
        source = topic_source(context.metadata, [topic], clock=context.clock)
    elif not stop_at_end:
        await require_known(context, chosen, deadline_s)
        source = listed_source(chosen, clock=context.clock)
    if source is not None and last is None:
        batches = _follow(context, source, start, where)
    else:
        is_named = partitions is not None
        reading = _Reading(context, chosen, until, timeout, is_named, matcher)
        batches = reading.last(last, source) if last is not None else reading.all(start)
    left_s = timeout
    if timeout is not None:
        # The time for the first messages includes finding the topic.
        left_s = max(0.0, deadline_s - context.clock.monotonic_s())
    async with contextlib.aclosing(batches):
        what = f"browsing topic {topic}"
        while batch := await within(left_s, anext(batches, None), what):
            yield batch
            left_s = timeout


async def select_partitions(
    context: ClientContext,
    topic: str,
    partitions: Collection[str | TopicPartition] | None,
    deadline_s: float,
    *,
    partial: bool = False,
) -> tuple[TopicPartition, ...]:
    """Return the given partitions, served or not, or all of the topic, sorted.

    Raises:
        PartitionsAwayError: none are given, some are away, and `partial` is False.
        NoBrokerError, ExchangeError, ConfigError: as `AsyncClient.browse`.
    """
    if partitions is not None:
        chosen = fixed_partitions([topic], partitions)
        await read_cluster(context, (), deadline_s=deadline_s)
        return chosen
    snapshot = await context.metadata.topic(topic, deadline_s=deadline_s)
    refuse_exchanges(snapshot, [topic])
    if not partial:
        snapshot = await read_whole(context, [topic], deadline_s=deadline_s)
    return tuple(sorted(snapshot.get_partitions(topic)))


def _check_range(
    start: Start,
    last: int | None,
    since: datetime | None,
    until: datetime | None,
    *,
    stop_at_end: bool,
) -> Start:
    """Return where to begin; refuse invalid or contradictory arguments."""
    check_start(start)
    if last is not None:
        check_whole("last", last, 0)
    check_moment("since", since)
    check_moment("until", until)
    if (start != "earliest") + (last is not None) + (since is not None) > 1:
        raise ConfigError("browse: expected one of start, last and since")
    if until is not None and not stop_at_end:
        raise ConfigError("until: expected a reader that stops at the end")
    return since or start


def check_moment(name: str, moment: datetime | None) -> None:
    """Raise TypeError or ConfigError for an invalid time; None is accepted."""
    if moment is not None:
        if not isinstance(moment, datetime):
            raise wrong_type(name, "datetime", moment)
        check_start(moment)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A reading of partitions up to their log ends."""

    context: ClientContext
    partitions: Collection[TopicPartition]
    until: datetime | None
    timeout: float | None
    is_named: bool
    where: Filter | None

    async def all(self, start: Start) -> AsyncGenerator[list[Message], None]:
        """Yield the messages from `start` on, partition by partition."""
        ends = await self._ends()
        # All begins first: later deletions by retention are then reported as loss.
        begins = await all_for(lambda one: self._offset_of(one, start), ends)
        for partition, end in ends.items():
            reading = self._read(partition, begins[partition], end)
            async with contextlib.aclosing(reading) as read:
                async for messages in read:
                    yield messages

    async def last(
        self, count: int, source: FixedSource | None
    ) -> AsyncGenerator[list[Message], None]:
        """Yield the newest messages of all partitions as one list; then follow.

        They are in the order of their ids, which is that of their times. Messages
        without a time have an order only at a single broker.

        Raises:
            CannotAnswerError: messages are of several brokers, and some have no time.
        """
        found: list[Message] = []
        brokers: set[BrokerId] = set()
        ends, is_timeless = await self._ends(), False
        for partition, end in ends.items() if count else ():
            tail = await self._tail(partition, end, count)
            brokers |= {one.partition.broker_id for one in tail[:1]}
            is_timeless = is_timeless or any(one.timestamp_ms is None for one in tail)
            if is_timeless and len(brokers) > 1:
                raise CannotAnswerError(
                    f"last={count}: messages of {partition.topic} carry no time where a"
                    " MetaQ 1.4 broker stored them, so those of several brokers have no"
                    " common order; read the partitions of one broker"
                )
            found = list(heapq.merge(found, tail, key=attrgetter("id")))[-count:]
        if found:
            yield found
        if source is not None:
            where = None if self.where is None else self.where.text
            following = _follow(self.context, source, ends, where)
            async with contextlib.aclosing(following) as more:
                async for messages in more:
                    yield messages

    async def _tail(
        self, partition: TopicPartition, end: Offset, count: int
    ) -> list[Message]:
        """Return the newest messages of a partition, up to `count` or more, that match.

        Without `where` all messages match.
        """
        found: list[Message] = []
        wanted = count
        while True:
            deadline_s = self.context.deadline_s(self.timeout)
            begin = await offset_back(
                self.context, partition, end, wanted, deadline_s=deadline_s
            )
            before: list[Message] = []
            async with contextlib.aclosing(self._read(partition, begin, end)) as read:
                async for messages in read:
                    before += messages
                    del before[:-count]
            found = [*before, *found]
            if self.where is None or len(found) >= count or begin >= end:
                return found
            end, wanted = begin, wanted * BACK_GROWTH

    async def _ends(self) -> dict[TopicPartition, Offset]:
        """Return the offset at which to stop, for each partition that has a log."""
        deadline_s = self.context.deadline_s(self.timeout)
        # All ends first: later puts are left out in every partition.
        found = await all_for(
            lambda one: LogQueries(self.context, one, deadline_s).ends(),
            self.partitions,
        )
        ends = {}
        for partition, log in found.items():
            if log is not None:
                ends[partition] = log[1]
            elif self.is_named:
                # Partitions found through the topic are known to be served.
                deadline_s = self.context.deadline_s(self.timeout)
                await require_known(self.context, [partition], deadline_s)
        if self.until is not None:
            for partition, end in ends.items():
                ends[partition] = min(end, await self._offset_of(partition, self.until))
        return ends

    async def _offset_of(self, partition: TopicPartition, start: Start) -> Offset:
        deadline_s = self.context.deadline_s(self.timeout)
        begin, _ = await first_offset(
            self.context, partition, None, start, deadline_s=deadline_s
        )
        return begin.offset

    async def _read(
        self, partition: TopicPartition, begin: Offset, end: Offset
    ) -> AsyncGenerator[list[Message], None]:
        """Yield the messages from `begin` to `end`, with one get ahead of the caller.

        This get is a task, so that its reply is decoded while the caller blocks. Its
        error is raised when the caller asks for its messages, but a retriable error
        first causes another get, because the outage may be over by then.
        """
        context, where = self.context, self.where
        text = None if where is None else where.text
        cursor = PartitionCursor(partition, begin, end=end, where=text)
        gets = LogGets(partition, partial(connect, context, partition))

        def ask() -> asyncio.Task[_Step]:
            step = _step(context, gets, cursor, context.deadline_s(self.timeout))
            return asyncio.create_task(step, name="metaq-browse")

        ahead: asyncio.Task[_Step] | None = None
        reached = begin
        try:
            while ahead is not None or not cursor.is_done:
                was_ahead, step = ahead is not None, ahead or ask()
                ahead = step
                try:
                    outcome, messages = await step
                except MetaqError as error:
                    ahead = None
                    if was_ahead and error.retriable:
                        continue
                    raise
                if isinstance(outcome, MovedTo):
                    _report_loss(partition, reached, cursor.offset)
                reached = cursor.offset
                ahead = None if cursor.is_done else ask()
                if wanted := list(matching(messages, where)):
                    yield wanted
        finally:
            # Do not wait here: the end of an event loop closes all generators at once.
            if ahead is not None and not ahead.cancel() and not ahead.cancelled():
                ahead.exception()


def _report_loss(partition: TopicPartition, old: Offset, new: Offset) -> None:
    _log.error(
        "browsing continues at another offset: partition=%s old=%d new=%d: %d bytes"
        " were deleted before they were read",
        partition,
        old,
        new,
        new - old,
    )


async def _follow(
    context: ClientContext, source: FixedSource, start: Start, where: str | None
) -> AsyncGenerator[list[Message], None]:
    consumer = AsyncConsumer(
        context,
        group=NO_GROUP,
        topics=SubscribedTopics(context.metadata),
        source=source,
        store=MemoryOffsets(),
        options=ConsumerOptions(start=start, commit_interval_s=None, where=where),
        marks={},
    )
    context.followers.add(consumer)
    try:
        async with consumer:
            while True:
                yield await consumer.receive_many(FOLLOW_COUNT_MAX)
    finally:
        context.followers.discard(consumer)
