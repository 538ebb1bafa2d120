"""Log starts and ends of many partitions, refreshed at little cost.

Theory of operation: a reader of a log that does not grow would ask for its end many
times a second. Where brokers offer to wait, a get with a wait is sent for the end of
each watched log, also of one without a put yet: as long as it is not answered the end
is known, and asking costs nothing. A log that grows is asked for its span only when a
caller wants it, so a busy log costs three requests for each look at it.

A log that cannot be asked for a while keeps the span it had: a broker that restarts
does not hold up readers of the others.

The logs of brokers that do not wait are asked for their ends every POLL_S, or less
often when there are several: all of them together cost one request in that time, as
long as POLL_MAX_S allows it. The start of such a log is asked for when its end has
moved.

Source: docs/metaq-1.4/client.md 2.4.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.errors import MetaqError
from metaq.model import MAX_OFFSET, Offset, SizeBytes, TopicPartition
from metaq.peer.connection import BrokerConnection
from metaq.peer.replies import NothingThere, parse_get
from metaq.protocol.commands import NO_GROUP, Get
from metaq.record.layout import HEADER_BYTES
from metaq.retry import wait_set

WAIT_MS: Final = 30_000
"""Wait of a get at the end of a log, milliseconds."""
POLL_S: Final = 0.75
"""Seconds between two questions to brokers that do not wait, all logs together."""
ASK_S: Final = 2.0
"""Time-out of a span query when an older span is known, seconds."""
POLL_MAX_S: Final = 10.0
"""The same for one log, however many there are."""
EARLY_PART: Final = 0.9
"""A get that ends without data before so much of its wait was refused to wait."""

Span: TypeAlias = tuple[Offset, Offset]


@dataclass(slots=True, eq=False)
class _Tail:
    """Knowledge of one log."""

    partition: TopicPartition
    span: Span | None = None
    poll: "asyncio.Task[None] | None" = None
    is_known: bool = False
    due_s: float = 0.0
    failing_since_s: float | None = None


class LogEnds:
    """The spans of the watched logs. Used on the client's loop.

    Lifecycle: made, used, `close` once.
    """

    def __init__(
        self, context: ClientContext, *, patience_s: float, poll_s: float = POLL_S
    ) -> None:
        """Watch nothing yet.

        Args:
            context: the client's parts.
            patience_s: how long a log that was known may not be asked before that is
                an error.
            poll_s: seconds between two questions to brokers that do not wait.
        """
        self._context = context
        self._poll_s = poll_s
        self._patience_s = patience_s
        self._tails: dict[TopicPartition, _Tail] = {}
        self._news = asyncio.Event()

    async def read(
        self, partitions: Collection[TopicPartition], *, deadline_s: float
    ) -> Mapping[TopicPartition, Span | None]:
        """Return the spans of some logs; the others are watched no more.

        Args:
            partitions: the logs.
            deadline_s: absolute; for those that have to be asked.

        Returns:
            (log start, log end) for each; None where the broker has no log of it. The
            log start may be older than the log end.

        Raises:
            NoBrokerError, RequestTimeoutError, WireError: a log cannot be asked.
        """
        for partition in self._tails.keys() - set(partitions):
            self._drop(self._tails.pop(partition))
        tails = {p: self._tails.setdefault(p, _Tail(p)) for p in partitions}
        self._news.clear()
        now_s = self._context.clock.monotonic_s()
        pause_s = min(self._poll_s * max(1, len(tails)), max(self._poll_s, POLL_MAX_S))
        outcomes = await asyncio.gather(
            *(
                self._refresh(tail, pause_s, deadline_s)
                for tail in tails.values()
                if tail.poll is None and tail.due_s <= now_s
            ),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        return MappingProxyType({p: tail.span for p, tail in tails.items()})

    async def wait(self, *, wait_s: float) -> None:
        """Return when a log that was read has grown, or after so many seconds."""
        await wait_set(self._news, wait_s)

    def close(self) -> None:
        """Watch nothing any more."""
        for tail in self._tails.values():
            self._drop(tail)
        self._tails.clear()

    # -- inside -----------------------------------------------------------------------

    def _drop(self, tail: _Tail) -> None:
        if tail.poll is not None:
            tail.poll.cancel()

    async def _refresh(self, tail: _Tail, pause_s: float, deadline_s: float) -> None:
        if not tail.is_known:
            await self._ask(tail, deadline_s)
        address = self._context.address_of(tail.partition.broker_id)
        connection = address and self._context.pool.ready(address)
        wait_ms = 0
        if connection:
            wait_ms = min(WAIT_MS, connection.capabilities.wait_ms_max)
        if not tail.is_known or not wait_ms:
            tail.is_known = False
            tail.due_s = self._context.clock.monotonic_s() + pause_s
            return
        tail.poll = asyncio.create_task(self._long_poll(tail, wait_ms, pause_s))

    async def _ask(self, tail: _Tail, deadline_s: float) -> None:
        """Ask for a span; a failure leaves the one that is known, for a while."""
        now_s = self._context.clock.monotonic_s()
        if tail.span is not None:
            deadline_s = min(deadline_s, now_s + ASK_S)
        try:
            tail.span = await self._span(tail, deadline_s)
        except MetaqError as error:
            since_s = tail.failing_since_s or now_s
            is_patient = error.retriable and now_s - since_s < self._patience_s
            if tail.span is None or not is_patient:
                raise
            tail.failing_since_s = since_s
        else:
            tail.is_known, tail.failing_since_s = True, None

    async def _span(self, tail: _Tail, deadline_s: float) -> Span | None:
        """Return the span of now; the known one where the end is the same."""
        log = LogQueries(self._context, tail.partition, deadline_s)
        if tail.span is not None and await log.nearest(MAX_OFFSET) == tail.span[1]:
            return tail.span
        return await log.ends()

    async def _long_poll(self, tail: _Tail, wait_ms: int, pause_s: float) -> None:
        """Long-poll the end of a log."""
        # Without a log yet the next message will be at offset 0.
        partition, end = tail.partition, tail.span[1] if tail.span else Offset(0)

        def make(_connection: BrokerConnection, opaque: int) -> Get:
            topic, number = partition.topic, partition.partition
            size = SizeBytes(HEADER_BYTES)
            return Get(topic, NO_GROUP, number, end, size, opaque, wait_ms)

        context = self._context
        since_s = context.clock.monotonic_s()
        deadline_s = since_s + wait_ms / 1000 + context.options.request_timeout_s
        is_same, is_early = False, True
        try:
            log = LogQueries(context, partition, deadline_s)
            outcome = await log.ask(make, partial(parse_get, asked=end))
            is_same = isinstance(outcome, NothingThere)
            waited_s = context.clock.monotonic_s() - since_s
            is_early = is_same and waited_s < EARLY_PART * wait_ms / 1000
        except MetaqError:
            # The next caller hears of it, if it lasts.
            pass
        finally:
            tail.poll = None
        tail.is_known = is_same and not is_early
        if is_early:
            tail.due_s = context.clock.monotonic_s() + pause_s
        if not is_same:
            self._news.set()
