"""The delivery of one producer: its senders, their connections, and one timer.

Theory of operation. Everything here runs on the event loop, and nothing blocks. Events
are passed to the senders concerned; each owns its partition's messages and decides what
to send (`partition_sender.py`).

Time. Every TICK_S, while anything is buffered, messages past their deadline fail: with
the error that prevented sending, or as unknown. No other code checks deadlines, and a
request that its connection lost cannot block a partition. A tick visits the senders of
due batches (`Buffer.take_due`) and those waiting for room in a connection, never all.

Ends. A producer continues after a failure, which affects only the messages that failed.
With `AttemptLimits` the first failure ends the delivery: unsent messages fail with it,
replies to requests in flight are awaited, and nothing is sent again.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from metaq.client.errors import GivenUpError
from metaq.client.options import ProducerOptions
from metaq.client.partitioner import Selector
from metaq.client.produce.accumulator import Accumulator
from metaq.client.produce.attempts import AttemptLimits
from metaq.client.produce.buffer import Buffer
from metaq.client.produce.connections import Connections
from metaq.client.produce.outcomes import SendOutcomes
from metaq.client.produce.partition_sender import PartitionSender
from metaq.client.produce.producer_counters import ProducerStatistics
from metaq.client.produce.routes import Routes
from metaq.clock import Clock
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import ClosedError, MetaqError, NoBrokerError
from metaq.model import BrokerAddress, TopicPartition
from metaq.peer.pool import ConnectionPool

TICK_S: Final = 0.05
"""Seconds between checks of deadlines, and so their precision."""

PATIENCE_S: Final = 0.5
"""Seconds that movable messages wait for a connection before they are moved."""


class Delivery:
    """Sends messages to brokers. Owner: one producer; used on its loop.

    Lifecycle: created, used, closed once with `close`, which resolves every batch.
    """

    def __init__(
        self,
        *,
        pool: ConnectionPool,
        options: ProducerOptions,
        clock: Clock,
        producer_id: str,
        request_refresh: Callable[[], None],
        limits: AttemptLimits | None = None,
        selector: Selector | None = None,
        first_turn: int = 1,
        is_mandatory: bool | None = None,
    ) -> None:
        """Prepare, on the loop's thread; nothing is connected.

        Args:
            pool: connections to brokers.
            options: bounds and times.
            clock: for deadlines.
            producer_id: 1..64 of [A-Za-z0-9._~-]; unique among producers.
            request_refresh: called when the cluster snapshot seems outdated.
            limits: of attempts; the first failure ends the delivery. None for
                deadlines only.
            selector: chooses partitions; None for the hash of the key, or round robin
                for messages without a key.
            first_turn: where round robin begins, modulo the number of partitions.
            is_mandatory: for messages to exchanges, see `Mput`; None for messages to
                topics, too.
        """
        loop = asyncio.get_running_loop()
        self._is_mandatory = is_mandatory
        self._clock = clock
        self._producer_id = producer_id
        self._buffer = Buffer[PartitionSender](options, clock, loop, self._on_ready)
        self._connections = Connections(
            pool=pool,
            clock=clock,
            loop=loop,
            patience_s=PATIENCE_S if limits is None else limits.answer_timeout_s,
            request_refresh=request_refresh,
            on_change=self._on_change,
        )
        self.outcomes = SendOutcomes(self._buffer, limits, self._fail_unsent)
        self.routes = Routes(self._make_sender, selector, first_turn)
        self.accumulator = Accumulator(self._buffer, self.routes)

    def _make_sender(
        self, partition: TopicPartition, row: int | None
    ) -> PartitionSender:
        producer_id, sender_of = self._producer_id, self.routes.sender
        if row is not None:
            # A sequence of its own: these batches go to another log of the broker.
            producer_id = f"{producer_id}~t{row}"
            sender_of = partial(self.routes.timed, row=row)
        return PartitionSender(
            partition,
            buffer=self._buffer,
            connections=self._connections,
            outcomes=self.outcomes,
            producer_id=producer_id,
            sender_of=sender_of,
            is_mandatory=self._is_mandatory,
        )

    # -- events -----------------------------------------------------------------------

    def _on_ready(self) -> None:
        """Let senders that have become non-empty send."""
        if self.outcomes.failure is not None:
            self._fail_unsent(self.outcomes.failure)
        elif not self.outcomes.is_over:
            self._keep_deadlines()
            for sender in self._buffer.take_ready():
                sender.fill()

    def on_snapshot(self, snapshot: ClusterSnapshot, topics: Iterable[str]) -> None:
        """Apply a new cluster snapshot; `topics`: the topics of this producer."""
        self._connections.snapshot = snapshot
        for topic in topics:
            available = snapshot.put_partitions(topic)
            for sender in self.routes.set_partitions(topic, available):
                sender.move()
        self.fill()

    def fill(self) -> None:
        """Let all senders send; sealed batches do not linger."""
        self._keep_deadlines()
        for sender in self.routes.senders():
            sender.fill()

    def _on_change(self, address: BrokerAddress, error: NoBrokerError | None) -> bool:
        """React to a broker connected or unreachable; return whether to keep trying."""
        # Empty if the broker has another address by now: no more attempts here.
        senders = self._senders_to(address)
        if error is not None and senders:
            causes = [sender.on_unreachable(error) for sender in senders]
            cause = next(filter(None, causes), None)
            self.outcomes.end(
                error if cause is None else GivenUpError(f"{cause}; then {error}")
            )
            if any(sender.has_work for sender in senders):
                return True
        self.fill()
        return False

    def _senders_to(self, address: BrokerAddress) -> list[PartitionSender]:
        return [
            sender
            for sender in self.routes.senders()
            if self._connections.address(sender.partition.broker_id) == address
        ]

    def statistics(self) -> ProducerStatistics:
        """Return a snapshot of the counters."""
        senders = self.routes.senders()
        return self.outcomes.snapshot(sum(one.in_flight_count for one in senders))

    # -- time -------------------------------------------------------------------------

    def _keep_deadlines(self) -> None:
        """Schedule the next tick, if anything is buffered."""
        if self._buffer.has_unanswered:
            self._connections.call_at(self._on_tick, self._clock.monotonic_s() + TICK_S)

    def _on_tick(self) -> None:
        """Fail late batches; let senders send that no other event calls."""
        try:
            now_s = self._clock.monotonic_s()
            senders = self._buffer.take_due(now_s, TICK_S)
            for sender in senders:
                sender.fail_late(now_s)
            fills: dict[Callable[[], None], None] = {one.fill: None for one in senders}
            fills.update(self._connections.take_waiting())
            for fill in fills:
                fill()
        finally:
            # Also after an exception: without ticks no message would ever time out.
            self._keep_deadlines()

    # -- the end ----------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Stop, and fail all messages without an outcome.

        Messages that may be stored fail with `OutcomeUnknownError`, the others with
        `ClosedError`.
        """
        self.outcomes.is_over = True
        self._connections.close()
        error = ClosedError(reason)
        for sender in self.routes.senders():
            sender.give_up(error)
        self._fail_unsent(error)

    def _fail_unsent(self, error: MetaqError) -> None:
        """Fail everything that is not in flight."""
        self._buffer.take_ready()
        for sender in self.routes.senders():
            sender.fail_unsent(error)
