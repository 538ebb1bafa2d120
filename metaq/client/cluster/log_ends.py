"""Log starts and ends of many partitions, refreshed at little cost.

Theory of operation: polling the end of a log that does not grow would cost many
requests a second. If the broker supports waiting, a get that waits is sent for the end
of each watched log, even one without a put yet: until it is answered, the end is known
without requests. The span (start and end) of a growing log is queried only when a
caller needs it, so a busy log costs three requests per read.

A log that cannot be queried for a while keeps its last span, so that a broker that
restarts does not delay readers of the others.

Logs of brokers that do not support waiting are polled: one request every POLL_S for all
of them together, and each at least every POLL_MAX_S. The start of such a log is only
queried when its end has moved.

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
"""Wait of a get at the end of a log, in milliseconds."""
POLL_S: Final = 0.75
"""Interval between polls of all logs together on brokers that do not wait, in
seconds."""
ASK_S: Final = 2.0
"""Time-out of a span query if an older span is known, in seconds."""
POLL_MAX_S: Final = 10.0
"""Maximum interval between polls of one log, in seconds."""
EARLY_PART: Final = 0.9
"""Share of the wait before which an answer without data means that the broker refused
to wait."""

Span: TypeAlias = tuple[Offset, Offset]


@dataclass(slots=True, eq=False)
class _Tail:
    """State of one watched log."""

    partition: TopicPartition
    span: Span | None = None
    poll: "asyncio.Task[None] | None" = None
    is_known: bool = False
    due_s: float = 0.0
    failing_since_s: float | None = None


class LogEnds:
    """The spans of the watched logs. Used on the client's loop.

    Lifecycle: created, used, `close` once.
    """

    def __init__(
        self, context: ClientContext, *, patience_s: float, poll_s: float = POLL_S
    ) -> None:
        """Watch nothing yet.

        Args:
            context: the client's parts.
            patience_s: time for which queries of a known log may fail before that is an
                error, in seconds.
            poll_s: see POLL_S.
        """
        self._context = context
        self._poll_s = poll_s
        self._patience_s = patience_s
        self._tails: dict[TopicPartition, _Tail] = {}
        self._news = asyncio.Event()

    async def read(
        self, partitions: Collection[TopicPartition], *, deadline_s: float
    ) -> Mapping[TopicPartition, Span | None]:
        """Return the spans of some logs; stop watching all others.

        Args:
            partitions: the logs.
            deadline_s: monotonic deadline of queries.

        Returns:
            (log start, log end) for each; None if the broker has no log of it. The log
            start may be of an earlier moment than the log end.

        Raises:
            NoBrokerError, RequestTimeoutError, WireError: a log cannot be queried.
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
        """Wait until a watched log has grown, at most `wait_s` seconds."""
        await wait_set(self._news, wait_s)

    def close(self) -> None:
        """Stop watching all logs."""
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
        """Query the span of a log; after a failure keep the known one for a while."""
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
        """Return the present span; the known one if the end is the same."""
        log = LogQueries(self._context, tail.partition, deadline_s)
        if tail.span is not None and await log.nearest(MAX_OFFSET) == tail.span[1]:
            return tail.span
        return await log.ends()

    async def _long_poll(self, tail: _Tail, wait_ms: int, pause_s: float) -> None:
        """Long-poll the end of a log."""
        # If there is no log yet, the first message will be at offset 0.
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
            # The next `read` raises the error if it lasts.
            pass
        finally:
            tail.poll = None
        tail.is_known = is_same and not is_early
        if is_early:
            tail.due_s = context.clock.monotonic_s() + pause_s
        if not is_same:
            self._news.set()
