"""Reader of the raw bytes of one partition's log, with pipelined gets.

Theory of operation: the log is read in adjacent ranges that ignore record boundaries,
so the next get is sent before the last reply is decoded. If a reply is shorter than
requested (a segment ends there), the gets after it are useless: their replies are
dropped, and no get is sent ahead until a reply is complete. Replies arrive while the
caller processes the last range.

After a lost connection or a time-out the same offset is retried, until
`retry_timeout_s` have passed without progress.

Source: docs/metaq-1.4/client.md 2.4.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from metaq.clock import Clock, SystemClock
from metaq.errors import (
    CorruptRecordError,
    MetaqError,
    NoBrokerError,
    NoDataError,
    OffsetOutOfRangeError,
    RemoteProtocolError,
    RequestTimeoutError,
    ServerError,
    WireError,
)
from metaq.model import MAX_OFFSET, BrokerAddress, Offset, TopicPartition
from metaq.peer.connection import BrokerConnection, settling
from metaq.peer.gap_search import GapSearch, parse_probe
from metaq.peer.options import READ_BACKOFF, ConnectionOptions
from metaq.peer.pool import open_connection
from metaq.peer.replies import (
    Damaged,
    Fetched,
    FetchedRuns,
    GetOutcome,
    damage_error,
    parse_check,
    parse_get,
    parse_nearest,
    raise_passing,
)
from metaq.protocol.commands import NO_GROUP, Check, Get, OffsetQuery, Reply
from metaq.protocol.encoding import encode
from metaq.retry import retry

GET_BYTES: Final = 1024 * 1024
"""Size of one get, in bytes: the largest slice that brokers return by default."""
AHEAD_MAX: Final = 2
"""Maximum number of gets ahead of the awaited one, while replies are complete."""

T = TypeVar("T")


class LogGets:
    """Gets from one partition, some of them sent ahead of the caller.

    Owned by one task at a time, always on one loop.
    """

    def __init__(
        self,
        partition: TopicPartition,
        connect: Callable[[float], Awaitable[BrokerConnection]],
    ) -> None:
        """Send nothing yet; `connect` returns the connection, given a deadline."""
        self._partition = partition
        self._connect = connect
        self._connection: BrokerConnection | None = None
        self._asked: dict[tuple[Offset, int], asyncio.Future[Reply]] = {}
        self._where: str | None = None
        """Filter of the gets in flight."""

    @property
    def names_damage(self) -> bool:
        """Whether the broker asked last reports damage of its log."""
        return self._connection is not None and self._connection.capabilities.codes

    async def get(
        self,
        wanted: Sequence[tuple[Offset, int]],
        parse: Callable[[Reply], GetOutcome],
        *,
        deadline_s: float,
        where: str | None = None,
    ) -> GetOutcome:
        """Return the outcome of the first get; leave the others in flight.

        Args:
            wanted: (offset, size in bytes) of gets; others in flight are dropped.
            parse: parses the reply.
            deadline_s: deadline of the connection and of each get that is sent now.
            where: filter of the gets; not sent if the broker does not support it.

        Raises:
            RemoteProtocolError: the reply is invalid; the connection is closed.
            MetaqError: there is no connection or reply, the refusal is retriable (503),
                or as `parse`.
        """
        connection = await self._connect(deadline_s)
        if not connection.capabilities.filters:
            where = None
        is_same = connection is self._connection and where == self._where
        if not is_same or not self._asked.keys() <= set(wanted):
            self.drop()
            self._connection, self._where = connection, where
        topic, number = self._partition.topic, self._partition.partition
        for one in wanted:
            if one not in self._asked:
                reply: asyncio.Future[Reply] = asyncio.Future()
                self._asked[one] = reply
                on_reply = settling(reply)
                opaque = connection.next_opaque()
                connection.submit(
                    encode(Get(topic, NO_GROUP, number, *one, opaque, where=where)),
                    opaque,
                    on_reply,
                    deadline_s=deadline_s,
                    is_alone=True,
                )
        answer = await self._asked.pop(wanted[0])
        raise_passing(answer)
        try:
            return parse(answer)
        except RemoteProtocolError as error:
            connection.close_for(error)
            raise

    def drop(self) -> None:
        """Drop the gets in flight; a second call does nothing."""
        for reply in self._asked.values():
            if not reply.cancel():
                # Several gets fail with one connection; only one error was raised.
                reply.exception()
        self._asked.clear()


class LogReader:
    """Reads one partition from one broker, over its own connection.

    Owned by one task at a time, always on one loop. Lifecycle: create, use, `close`.
    """

    def __init__(
        self,
        partition: TopicPartition,
        address: BrokerAddress,
        *,
        timeout_s: float,
        retry_timeout_s: float,
        clock: Clock | None = None,
    ) -> None:
        """Create a reader, on any thread; it connects when it is first used.

        Args:
            partition: the partition to read.
            address: address of a broker that has it.
            timeout_s: longest wait for one reply, in seconds.
            retry_timeout_s: longest time for all attempts without progress, in seconds.
            clock: for deadlines; None: the system's clock.
        """
        self._partition = partition
        self._address = address
        self._timeout_s = timeout_s
        self._retry_timeout_s = retry_timeout_s
        self._clock = clock or SystemClock()
        self._give_up_s = 0.0
        self._connection: BrokerConnection | None = None
        self._opening: asyncio.Future[BrokerConnection] | None = None
        self._gets = LogGets(partition, self._connect)
        self._ahead = AHEAD_MAX

    @property
    def is_of_set(self) -> bool:
        """Whether the broker that replied last is a replica: another may lead now."""
        connection = self._connection
        return connection is not None and connection.capabilities.follow

    @property
    def can_filter(self) -> bool:
        """Whether the broker that replied last supports filters."""
        return self._connection is not None and self._connection.capabilities.filters

    async def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._gets.drop()
        if self._connection is not None:
            self._connection.close("the reader was closed")
            self._connection = None

    def move(self, address: BrokerAddress) -> None:
        """Read from another broker from now on; a running read continues there."""
        if address != self._address:
            self._address = address
            if self._opening is not None:
                self._opening.cancel()
            if self._connection is not None:
                self._connection.close("the log is read elsewhere")

    async def span(self) -> tuple[Offset, Offset] | None:
        """Return (log start, log end) now; None if the broker has no such log.

        Raises:
            NoBrokerError, RequestTimeoutError: as `read`.
            WireError: the broker refused.
        """
        return await self._retry(self._ask_span)

    async def read(self, position: Offset, end: Offset) -> bytes:
        """Return the bytes at `position`, and leave gets for the next bytes in flight.

        Args:
            position: the first byte; need not be a record boundary. Reading is fast if
                it follows the bytes of the last call.
            end: the byte after the last one wanted; the log must reach that far.

        Returns:
            1 to GET_BYTES bytes.

        Raises:
            CorruptRecordError: the broker reports damage of the next bytes; or it
                cannot report damage (MetaQ 1.4), and has readable bytes after them.
            OffsetOutOfRangeError: the log does not have the next bytes: retention has
                removed them, or the log ends before them.
            NoDataError: the log should have them, but the broker returns nothing.
            NoBrokerError: the broker cannot be reached.
            RequestTimeoutError: replies do not arrive.
            WireError: the broker refused.

        Cancellation: the gets in flight are dropped; read again.
        """
        return await self._retry(partial(self._take, position, end))

    async def matches(
        self, position: Offset, end: Offset, where: str
    ) -> FetchedRuns | None:
        """Return the records in the next bytes that match; `position` is a boundary.

        They may reach beyond `end`. None if the broker does not filter, or not there;
        `read` then shows the bytes or the error.

        Raises:
            NoBrokerError, RequestTimeoutError: as `read`.
        """
        return await self._retry(partial(self._match, position, end, where))

    async def is_good(self, position: Offset, end: Offset) -> bool:
        """Return whether the broker reports that the bytes in a range are good.

        If so, a get returns them. False if it reports damage or cannot check. A broker
        of a replica set is retried until it has repaired them or cannot.

        Raises:
            NoBrokerError, RequestTimeoutError: as `read`.
            WireError: the broker cannot check for now, until all attempts were used.
        """
        return await self._retry(partial(self._check, position, end))

    # -- inside -----------------------------------------------------------------------

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        cause: MetaqError | None = None

        async def attempt_afresh() -> T:
            nonlocal cause
            try:
                return await attempt()
            except BaseException as error:
                await self.close()
                if isinstance(error, RequestTimeoutError) and cause is not None:
                    # The final deadline cut it short; an earlier error shows why.
                    if self._clock.monotonic_s() >= self._give_up_s:
                        raise cause from error
                elif isinstance(error, MetaqError):
                    cause = error
                raise

        self._give_up_s = self._clock.monotonic_s() + self._retry_timeout_s
        return await retry(
            attempt_afresh,
            backoff=READ_BACKOFF,
            deadline_s=self._give_up_s,
            clock=self._clock,
        )

    def _deadline_s(self) -> float:
        return min(self._clock.monotonic_s() + self._timeout_s, self._give_up_s)

    async def _connect(self, deadline_s: float) -> BrokerConnection:
        if self._connection is None or not self._connection.is_open:
            address = self._address
            opening = self._opening = asyncio.ensure_future(
                open_connection(
                    address,
                    clock=self._clock,
                    deadline_s=deadline_s,
                    options=ConnectionOptions(),
                )
            )
            try:
                self._connection = await opening
            except asyncio.CancelledError:
                if address == self._address:
                    raise
                raise NoBrokerError(f"{address}: the log is read elsewhere") from None
            finally:
                self._opening = None
        return self._connection

    async def _ask_span(self) -> tuple[Offset, Offset] | None:
        start = await self._ask_offset(Offset(0))
        end = await self._ask_offset(MAX_OFFSET)
        return None if start is None or end is None else (start, end)

    async def _ask_offset(self, offset: Offset) -> Offset | None:
        """Return the start of the segment with an offset, or the log's nearest end."""
        connection = await self._connect(self._deadline_s())
        topic, number = self._partition.topic, self._partition.partition
        opaque = connection.next_opaque()
        query = OffsetQuery(topic, NO_GROUP, number, offset, opaque)
        reply = await connection.call(query, deadline_s=self._deadline_s())
        return parse_nearest(reply)

    async def _check(self, position: Offset, end: Offset) -> bool:
        connection = await self._connect(self._deadline_s())
        if not connection.capabilities.check:
            return False
        topic, number = self._partition.topic, self._partition.partition
        size_bytes, opaque = end - position, connection.next_opaque()
        check = Check(topic, number, position, size_bytes, opaque)
        reply = await connection.call(check, deadline_s=self._deadline_s())
        raise_passing(reply)
        try:
            return parse_check(reply, position) is None
        except WireError:
            return False

    async def _take(self, position: Offset, end: Offset) -> bytes:
        begins = range(position, end, GET_BYTES)[: 1 + self._ahead]
        wanted = [(Offset(at), min(GET_BYTES, end - at)) for at in begins]
        try:
            parse = partial(parse_get, asked=position)
            deadline_s = self._deadline_s()
            outcome = await self._gets.get(wanted, parse, deadline_s=deadline_s)
        except ServerError as refusal:
            raise await self._find_gap(position) or refusal from None
        if isinstance(outcome, Damaged):
            raise damage_error(self._partition, position, outcome)
        if not isinstance(outcome, Fetched):
            raise await self._explain(position, end)
        is_whole = len(outcome.data) == wanted[0][1]
        self._ahead = AHEAD_MAX if is_whole else 0
        return outcome.data

    async def _match(
        self, position: Offset, end: Offset, where: str
    ) -> FetchedRuns | None:
        connection = await self._connect(self._deadline_s())
        if not connection.capabilities.filters:
            return None
        outcome = await self._gets.get(
            [(position, min(GET_BYTES, end - position))],
            partial(parse_get, asked=position, has_filter=True),
            deadline_s=self._deadline_s(),
            where=where,
        )
        return outcome if isinstance(outcome, FetchedRuns) else None

    async def _explain(self, position: Offset, end: Offset) -> MetaqError:
        """Return the error for an offset without data."""
        start, log_end = await self._ask_span() or (Offset(0), Offset(0))
        if position < start or log_end < end:
            return OffsetOutOfRangeError(
                position, log_start=start, high_watermark=log_end
            )
        return await self._find_gap(position) or NoDataError(
            f"{self._partition}: no data at {position}, although the log of"
            f" {self._address} is [{start}, {log_end})"
        )

    async def _find_gap(self, position: Offset) -> CorruptRecordError | None:
        """Return the error of a gap that the broker cannot report; None for no gap."""
        search = GapSearch(position)
        while not search.is_over:
            if self._gets.names_damage:
                return None
            at = search.fetch_offset
            parse = partial(parse_probe, asked=at)
            outcome = await self._gets.get(
                [(at, 1)], parse, deadline_s=self._deadline_s()
            )
            search.on_reply(outcome)
        if search.found is None:
            return None
        return CorruptRecordError(
            f"{self._partition}: damaged record at offset {position}: {search.flaw};"
            " reading can go on there",
            partition=self._partition,
            offset=position,
            next_good_offset=search.found,
            detail=search.flaw,
        )
