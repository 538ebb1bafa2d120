"""The raw bytes of one partition's log, on an event loop, with gets pipelined.

Theory of operation: the log is taken in pieces that follow one another byte by byte,
wherever its records begin, so the next get is on its way before the bytes of the last
one are looked at. A reply that is shorter than asked (a segment ends there) makes the
gets behind it useless; their replies are dropped, and until a whole reply comes nothing
is asked ahead. Replies come in while the caller is busy with the last piece.

A connection that breaks, or an answer that does not come, is followed by another try
at the same offset, until `retry_timeout_s` without a byte of progress.

Source: client spec 2.4.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from metaq.clock import Clock, SystemClock
from metaq.errors import (
    CorruptRecordError,
    MetaqError,
    NoDataError,
    OffsetOutOfRangeError,
    ServerError,
)
from metaq.model import MAX_OFFSET, BrokerAddress, Offset, TopicPartition
from metaq.peer.connection import BrokerConnection, settling
from metaq.peer.gap_search import GapSearch, parse_probe
from metaq.peer.options import READ_BACKOFF, ConnectionOptions
from metaq.peer.pool import open_connection
from metaq.peer.replies import (
    Damaged,
    Fetched,
    damage_error,
    parse_get,
    parse_nearest,
)
from metaq.protocol.codec import encode
from metaq.protocol.commands import NO_GROUP, Get, OffsetQuery, Reply
from metaq.retry import retry

GET_BYTES: Final = 1024 * 1024
"""Size of one get, bytes: the largest slice that brokers give by default."""
AHEAD_MAX: Final = 2
"""Gets in flight while replies are whole."""

T = TypeVar("T")


@dataclass(slots=True)
class _Asked:
    """A get in flight."""

    offset: Offset
    size_bytes: int
    reply: asyncio.Future[Reply]


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
            retry_timeout_s: how long to try again without progress.
            clock: for deadlines; None is the machine's.
        """
        self._partition = partition
        self._address = address
        self._timeout_s = timeout_s
        self._retry_timeout_s = retry_timeout_s
        self._clock = clock or SystemClock()
        self._connection: BrokerConnection | None = None
        self._asked: deque[_Asked] = deque()
        self._ahead = AHEAD_MAX

    async def close(self) -> None:
        """Close the connection; harmless twice."""
        self._drop_asked()
        if self._connection is not None:
            self._connection.close("the reader was closed")
            self._connection = None

    async def span(self) -> tuple[Offset, Offset] | None:
        """Return (log start, log end) now; None where the broker has no such log.

        Raises:
            NoBrokerError, RequestTimeoutError: as `read`.
            WireError: the broker refused.
        """
        return await self._retry(self._ask_span)

    async def read(self, position: Offset, end: Offset) -> bytes:
        """Return the bytes at `position`, and leave gets for those behind in flight.

        Args:
            position: the first byte; need not be a record boundary. Reading is quick
                where it lies right behind the bytes of the last call.
            end: the byte behind the last one that is wanted, behind `position`; the log
                must reach that far.

        Returns:
            One byte to GET_BYTES.

        Raises:
            CorruptRecordError: the broker says that the next bytes are damaged, or
                cannot say so (MetaQ 1.4), and has readable ones behind them.
            OffsetOutOfRangeError: the log does not hold the next bytes: retention has
                taken them, or the log ends before.
            NoDataError: the log should hold it, and the broker gives nothing.
            NoBrokerError: the broker cannot be reached.
            RequestTimeoutError: answers do not come.
            WireError: the broker refused.

        Cancellation: what is in flight is given up; read again.
        """
        return await self._retry(partial(self._take, position, end))

    # -- inside -----------------------------------------------------------------------

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        async def attempt_afresh() -> T:
            try:
                return await attempt()
            except BaseException:
                await self.close()
                raise

        return await retry(
            attempt_afresh,
            backoff=READ_BACKOFF,
            deadline_s=self._clock.monotonic_s() + self._retry_timeout_s,
            clock=self._clock,
        )

    def _drop_asked(self) -> None:
        for asked in self._asked:
            # One whose caller gave up is cancelled already.
            if not asked.reply.cancel() and not asked.reply.cancelled():
                # Several gets fail with one connection; one error was raised.
                asked.reply.exception()
        self._asked.clear()

    def _deadline_s(self) -> float:
        return self._clock.monotonic_s() + self._timeout_s

    async def _connected(self) -> BrokerConnection:
        if self._connection is None or not self._connection.is_open:
            self._drop_asked()
            self._connection = await open_connection(
                self._address,
                clock=self._clock,
                deadline_s=self._deadline_s(),
                options=ConnectionOptions(),
            )
        return self._connection

    async def _ask_span(self) -> tuple[Offset, Offset] | None:
        start = await self._ask_offset(Offset(0))
        end = await self._ask_offset(MAX_OFFSET)
        return None if start is None or end is None else (start, end)

    async def _ask_offset(self, offset: Offset) -> Offset | None:
        """Return the start of the segment with an offset, or the log's nearest end."""
        connection = await self._connected()
        query = OffsetQuery(
            self._partition.topic,
            NO_GROUP,
            self._partition.partition,
            offset,
            connection.next_opaque(),
        )
        reply = await connection.call(query, deadline_s=self._deadline_s())
        return parse_nearest(reply)

    async def _take(self, position: Offset, end: Offset) -> bytes:
        connection = await self._connected()
        if self._asked and self._asked[0].offset != position:
            self._drop_asked()
        self._ask_ahead(connection, position, end)
        asked = self._asked[0]
        try:
            outcome = parse_get(await asked.reply, asked.offset)
        except ServerError as refusal:
            raise await self._find_gap(position) or refusal from None
        if isinstance(outcome, Damaged):
            raise damage_error(self._partition, position, outcome)
        if not isinstance(outcome, Fetched):
            raise await self._explain(position, end)
        self._asked.popleft()
        data = outcome.data
        if len(data) < asked.size_bytes:
            self._drop_asked()
            self._ahead = 1
        else:
            self._ahead = AHEAD_MAX
        if connection.is_open:
            self._ask_ahead(connection, Offset(position + len(data)), end)
        return data

    def _ask_ahead(
        self, connection: BrokerConnection, position: Offset, end: Offset
    ) -> None:
        if self._asked:
            last = self._asked[-1]
            position = Offset(last.offset + last.size_bytes)
        while len(self._asked) < self._ahead and position < end:
            size_bytes = min(GET_BYTES, end - position)
            self._asked.append(self._ask(connection, position, size_bytes))
            position = Offset(position + size_bytes)

    def _ask(
        self, connection: BrokerConnection, position: Offset, size_bytes: int
    ) -> _Asked:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        on_reply = settling(answer)
        opaque = connection.next_opaque()
        command = Get(
            self._partition.topic,
            NO_GROUP,
            self._partition.partition,
            position,
            size_bytes,
            opaque,
        )
        deadline_s = self._deadline_s()
        connection.submit(
            encode(command),
            opaque,
            on_reply,
            deadline_s=deadline_s,
            is_alone=True,
        )
        return _Asked(position, size_bytes, answer)

    async def _explain(self, position: Offset, end: Offset) -> MetaqError:
        """Return the error for an offset at which there is no data."""
        self._drop_asked()
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
            # One that has ended is made anew: a search takes many gets.
            connection = await self._connected()
            if connection.capabilities.codes:
                return None
            at = search.fetch_offset
            asked = self._ask(connection, at, 1)
            search.on_reply(parse_probe(await asked.reply, at))
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
