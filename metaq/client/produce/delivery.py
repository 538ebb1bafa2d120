"""The delivery of one producer: its senders, their connections, and one timer.

Theory of operation. Everything here runs on the event loop and nothing waits. An event
is passed on to the senders that it is for; each of them owns its partition's messages
and decides by itself (`partition_sender.py`).

Time. Every TICK_S, while anything is buffered, messages past their deadline fail: with
the error that kept them from being sent, or as unknown. No other code has to check, and
a connection that forgets a request cannot keep a partition waiting. A tick looks at
due batches (`Buffer.take_due`) and at those that wait for a connection, never at all
senders.

Ends. A producer goes on after a failure: only the messages that failed have it. With
`AttemptLimits` the first failure ends the delivery: what has not left fails with it,
what is in flight is waited for, and nothing is sent again.
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
"""Interval at which deadlines are checked, seconds: their exactness."""

PATIENCE_S: Final = 0.5
"""Time for which messages that may move wait for a connection before they do,
seconds."""


class Delivery:
    """Brings messages to brokers. Owner: one producer; used on its loop.

    Lifecycle: made, used, closed once with `close`, which leaves no batch unresolved.
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
            producer_id: 1..64 of [A-Za-z0-9._~-], no other producer's.
            request_refresh: is called when the snapshot of the cluster seems wrong.
            limits: of attempts, and the first failure ends all; None: deadlines only.
            selector: chooses partitions; None goes by the key of messages that have
                one, and round robin with the others.
            first_turn: where round robin begins, modulo the number of partitions.
            is_mandatory: all goes to exchanges, see `Mput`; None: to topics as well.
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
            # Its sequences are its own: these batches go to another log of the broker.
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
        """Send messages of senders that had none."""
        if self.outcomes.failure is not None:
            self._fail_unsent(self.outcomes.failure)
        elif not self.outcomes.is_over:
            self._keep_deadlines()
            for sender in self._buffer.take_ready():
                sender.fill()

    def on_snapshot(self, snapshot: ClusterSnapshot, topics: Iterable[str]) -> None:
        """Use new metadata of the cluster; `topics` are those that are sent to."""
        self._connections.snapshot = snapshot
        for topic in topics:
            available = snapshot.put_partitions(topic)
            for sender in self.routes.set_partitions(topic, available):
                sender.move()
        self.fill()

    def fill(self) -> None:
        """Send what may be sent, lingering batches sealed now included."""
        self._keep_deadlines()
        for sender in self.routes.senders():
            sender.fill()

    def _on_change(self, address: BrokerAddress, error: NoBrokerError | None) -> bool:
        """Go on when a broker is connected, or unreachable; return whether to retry."""
        # A broker that is elsewhere now is not waited for here.
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
        """Check what is buffered from now on, whether or not it can be sent."""
        if self._buffer.has_unanswered:
            self._connections.call_at(self._on_tick, self._clock.monotonic_s() + TICK_S)

    def _on_tick(self) -> None:
        """Fail late batches; let those send that no other event calls."""
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
            # Also after a failure: without a tick nothing is ever late.
            self._keep_deadlines()

    # -- the end ----------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Fail messages without an outcome, and stop.

        Sent messages fail with `OutcomeUnknownError`, the rest with `ClosedError`.
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
