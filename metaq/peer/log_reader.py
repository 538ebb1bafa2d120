"""The raw bytes of one partition's log, on an event loop, with gets pipelined.

Theory of operation: the log is read in adjacent pieces that ignore record boundaries,
so the next get leaves before the last reply is decoded. A reply that is shorter than
asked (a segment ends there) makes the gets after it useless; their replies are dropped,
and nothing is asked ahead until a whole reply comes. Replies arrive while the caller
works on the last piece.

After a broken connection or a missing answer the same offset is tried again, until
`retry_timeout_s` without a byte of progress.

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
"""Size of one get, bytes: the largest slice that brokers give by default."""
AHEAD_MAX: Final = 2
"""Gets in flight after the one that is waited for, while replies are whole."""

T = TypeVar("T")


class LogGets:
    """Gets of one partition, some of them ahead of their caller.

    Owner: one task at a time, always on one loop.
    """

    def __init__(
        self,
        partition: TopicPartition,
        connect: Callable[[float], Awaitable[BrokerConnection]],
    ) -> None:
        """Ask nothing yet; `connect` returns the connection before a deadline."""
        self._partition = partition
        self._connect = connect
        self._connection: BrokerConnection | None = None
        self._asked: dict[tuple[Offset, int], asyncio.Future[Reply]] = {}
        self._where: str | None = None
        """Filter of those in flight."""

    @property
    def names_damage(self) -> bool:
        """The broker that was asked last names damage of its log."""
        return self._connection is not None and self._connection.capabilities.codes

    async def get(
        self,
        wanted: Sequence[tuple[Offset, int]],
        parse: Callable[[Reply], GetOutcome],
        *,
        deadline_s: float,
        where: str | None = None,
    ) -> GetOutcome:
        """Return the meaning of the reply to the first get; leave the others in flight.

        Args:
            wanted: (offset, size in bytes) of gets; no other stays in flight.
            parse: reads the reply.
            deadline_s: bound on the connection, and on each get that leaves now.
            where: filter of the gets, where the broker takes one.

        Raises:
            RemoteProtocolError: the reply is invalid; the connection is closed.
            MetaqError: there is no connection or reply, a refusal passes (503, 504),
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
        """Give up what is in flight; harmless twice."""
        for reply in self._asked.values():
            if not reply.cancel():
                # Several gets fail with one connection, and one error was raised.
                reply.exception()
        self._asked.clear()


class LogReader:
    """Reads one partition from one broker, over a connection of its own.

    Owner: one task at a time, always on one loop. Lifecycle: made, used, `close`.
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
        """Prepare to read, on any thread; the connection is made when it is needed.

        Args:
            partition: the partition to read.
            address: of a broker that has it.
            timeout_s: how long one answer may take.
            retry_timeout_s: how long all tries may take without progress.
            clock: for deadlines; None is the machine's.
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
        """The broker that has answered last is a replica: another one may lead now."""
        connection = self._connection
        return connection is not None and connection.capabilities.follow

    @property
    def can_filter(self) -> bool:
        """The broker that has answered last takes filters."""
        return self._connection is not None and self._connection.capabilities.filters

    async def close(self) -> None:
        """Close the connection; harmless twice."""
        self._gets.drop()
        if self._connection is not None:
            self._connection.close("the reader was closed")
            self._connection = None

    def move(self, address: BrokerAddress) -> None:
        """Read from another broker from now on; a read under way goes on there."""
        if address != self._address:
            self._address = address
            if self._opening is not None:
                self._opening.cancel()
            if self._connection is not None:
                self._connection.close("the log is read elsewhere")

    async def span(self) -> tuple[Offset, Offset] | None:
        """Return (log start, log end) now; None where the broker has no such log.

        Raises:
            NoBrokerError, RequestTimeoutError: as `read`.
            WireError: the broker refused.
        """
        return await self._retry(self._ask_span)

    async def read(self, position: Offset, end: Offset) -> bytes:
        """Return the bytes at `position`, and leave gets for those after it in flight.

        Args:
            position: the first byte; need not be a record boundary. Reading is fast
                where it follows the bytes of the last call.
            end: the byte after the last one wanted; the log must reach that far.

        Returns:
            One byte to GET_BYTES.

        Raises:
            CorruptRecordError: the broker says that the next bytes are damaged, or
                cannot say so (MetaQ 1.4), and has readable ones after them.
            OffsetOutOfRangeError: the log does not have the next bytes: retention has
                removed them, or the log ends before.
            NoDataError: the log should have them, and the broker returns nothing.
            NoBrokerError: the broker cannot be reached.
            RequestTimeoutError: answers do not come.
            WireError: the broker refused.

        Cancellation: what is in flight is given up; read again.
        """
        return await self._retry(partial(self._take, position, end))

    async def matches(
        self, position: Offset, end: Offset, where: str
    ) -> FetchedRuns | None:
        """Return what matches a filter in the next bytes, from a record boundary on.

        It may go on after `end`. None where the broker does not filter, at all or
        there: `read` says what is there.

        Raises:
            NoBrokerError, RequestTimeoutError: as `read`.
        """
        return await self._retry(partial(self._match, position, end, where))

    async def is_good(self, position: Offset, end: Offset) -> bool:
        """Return whether the broker says that the bytes in a range are good.

        A get shows them so then. False where it names damage, or cannot say anything.
        A broker of a replica set is asked again until it has mended them, or cannot.

        Raises:
            NoBrokerError, RequestTimeoutError: as `read`.
            WireError: the broker cannot say for now, until all tries were used.
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
                    # The end of all tries cut this one short; one before knows why.
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
        """Return the error for an offset at which there is no data."""
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
        """Return the error of a gap that the broker cannot name; None for no gap."""
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
