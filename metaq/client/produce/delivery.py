"""The way of batches to their brokers: in flight, again, elsewhere, or failed in time.

Theory of operation. Everything here runs on the event loop and nothing waits: each
event (messages, a reply, a connection, a snapshot, a tick) changes the state of some
partition queues, which are then filled again (`_fill`): a queue's next batch leaves
when a place in flight is free, so batches grow while others are under way.

Order. Parts leave in the order of their messages. When one comes back, nothing more of
its queue leaves until everything in flight has an answer; then the returned parts leave
first, in their old order. A refused part can only be overtaken by those that were in
flight with it; behind a lost connection nothing is overtaken, for everything in flight
comes back, and is repeated one part at a time.

Time. Every TICK_S, while anything is buffered, parts past their deadline fail: with the
error that kept them from being sent, or as unknown. No other code needs to care, and a
connection that forgets a request cannot keep a queue waiting. A tick looks at due
batches (`Accumulator.take_due`) and at those that wait for a connection, never at all
queues.

Ends. A producer goes on after a failure: only the messages that failed have it. With
`AttemptLimits` the first failure ends the delivery: what has not left fails with it,
what is in flight is waited for, and nothing is sent again.

    Invariant: a part is in `waiting`, `returned` or `in_flight` of one queue, or has
    its outcome.
    Invariant: a batch is resolved when its last part has its outcome.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from metaq.client.errors import GivenUpError
from metaq.client.options import ProducerOptions
from metaq.client.produce.accumulator import Accumulator
from metaq.client.produce.attempts import (
    PUTS_MAX,
    REFUSALS,
    AttemptLimits,
    Verdict,
    final_error,
    on_failure,
)
from metaq.client.produce.batches import Batch, BatchOutcome, SendResult
from metaq.client.produce.partition_queue import (
    BatchPart,
    PartitionQueue,
    Pool,
    PutConnection,
    PutRun,
)
from metaq.client.produce.producer_counters import DeliveryCounters, ProducerStatistics
from metaq.clock import Clock
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import (
    ClientError,
    ClosedError,
    LocalProtocolError,
    MetaqError,
    NoBrokerError,
    RemoteProtocolError,
    SequenceUsedError,
)
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.peer.replies import parse_receipt
from metaq.protocol.commands import Reply
from metaq.record.layout import HEADER_BYTES
from metaq.retry import Backoff

_log = logging.getLogger(__name__)

TICK_S: Final = 0.05
"""Interval at which deadlines are checked, seconds: their exactness."""

ANSWER_GRACE_S: Final = 0.2
"""Seconds after its deadline at which a part in flight, or a put of a transaction, is
given up although its connection has said nothing; the connection's own timer comes
first. A reply that found no memory here is not told again."""

TIME_LEFT_MIN_S: Final = 0.001
"""Batches with less time left are not sent: that would only turn a certain failure into
an unknown outcome."""

PATIENCE_S: Final = 0.5
"""Time for which messages that may move wait for a connection before they do,
seconds."""

RETRY_S: Final = 0.5
"""Interval at which a queue without a connection looks for one by itself, seconds, or
for another queue: no event tells that one which refused may be asked again."""

PUTS_IN_FLIGHT_MAX: Final = 4000
"""Single puts of one partition sent and not answered, to a broker without `mput`."""


class Delivery:
    """Brings batches to brokers. Owner: one producer; used on its loop.

    Lifecycle: made, used, closed once with `close`, which leaves no batch unresolved.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        options: ProducerOptions,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        producer_id: str,
        request_refresh: Callable[[], None],
        limits: AttemptLimits | None = None,
    ) -> None:
        """Prepare; `start` says where the batches come from.

        Args:
            pool: connections to brokers.
            options: bounds and times.
            clock: judges deadlines.
            loop: the loop everything here runs on.
            producer_id: 1..64 of [A-Za-z0-9._~-], no other producer's.
            request_refresh: told when what is known of the cluster seems wrong.
            limits: of attempts, and the first failure ends all; None: deadlines only.
        """
        self._pool = pool
        self._options = options
        self._clock = clock
        self._loop = loop
        self._producer_id = producer_id
        self._request_refresh = request_refresh
        self._limits = limits
        self.failure: MetaqError | None = None
        """With limits: what ended it."""
        self.renamed_count = 0
        """Messages that were sent again under the spare name of their batch."""
        self._backoff = Backoff(
            first_s=options.retry_first_s, max_s=options.retry_max_s
        )
        self._accumulator: Accumulator
        self._snapshot = ClusterSnapshot()
        self._crowded: dict[PutConnection, dict[PartitionQueue, None]] = {}
        self._unconnected: dict[PartitionQueue, None] = {}
        self._retry_s = 0.0  # when those look again
        self._moved: dict[Batch, dict[PartitionQueue, None]] = {}  # where parts went
        self._patience_s = PATIENCE_S if limits is None else limits.answer_timeout_s
        self._opening: dict[BrokerAddress, Callable[[], None]] = {}  # end the waits
        self._unreachable: dict[BrokerAddress, NoBrokerError] = {}
        self._tick: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._moves = 0
        self._counters = DeliveryCounters()

    def start(self, accumulator: Accumulator) -> None:
        """Say where batches come from, once."""
        self._accumulator = accumulator

    # -- events -----------------------------------------------------------------------

    def on_ready(self) -> None:
        """Take note of queues that have messages."""
        if self._is_closed:
            return
        if self.failure is not None:
            self._fail_unsent(self.failure)
            return
        self._keep_deadlines()
        for queue in self._accumulator.take_ready():
            self._fill(queue)

    def on_snapshot(
        self, snapshot: ClusterSnapshot, topics: Mapping[str, None]
    ) -> None:
        """Use new metadata of the cluster.

        Args:
            snapshot: the news.
            topics: those that messages are sent to.
        """
        self._snapshot = snapshot
        for topic in topics:
            available = snapshot.put_partitions(topic)
            for queue in self._accumulator.routes.set_partitions(topic, available):
                self._move(queue)
        self.fill()

    def fill(self) -> None:
        """Send what may be sent, lingering batches sealed now included."""
        self._keep_deadlines()
        for queue in self._queues():
            self._fill(queue)

    def statistics(self) -> ProducerStatistics:
        """Return a snapshot of the counters."""
        in_flight_count = sum(queue.commands for queue in self._queues())
        return self._counters.snapshot(in_flight_count)

    def close(self, reason: str) -> None:
        """Fail messages without an outcome, and stop.

        Sent messages fail with `OutcomeUnknownError`, the rest with `ClosedError`.
        """
        self._is_closed = True
        if self._tick is not None:
            self._tick.cancel()
        error = ClosedError(reason)
        for cancel in self._opening.values():
            cancel()
        for queue in self._queues():
            for part in list(queue.in_flight):
                self._give_up(queue, part, error)
        self._fail_unsent(error)

    def _fail_unsent(self, error: MetaqError) -> None:
        """Fail everything that is not in flight."""
        self._accumulator.unanswered()  # seals what is open
        self._accumulator.take_ready()
        for queue in self._queues():
            while isinstance(batch := self._take(queue), Batch):
                queue.waiting.append(queue.part_of(batch))
            parts = [*queue.returned, *queue.waiting]
            queue.returned.clear()
            queue.waiting.clear()
            for part in parts:
                self._fail(queue, part, error)

    def _queues(self) -> list[PartitionQueue]:
        return self._accumulator.routes.everything()

    def _keep_deadlines(self) -> None:
        """Look after what is buffered from now on, whatever becomes of its sending."""
        if self._tick is None and self._accumulator.has_unanswered:
            self._tick = self._loop.call_later(TICK_S, self._on_tick)

    # -- sending ----------------------------------------------------------------------

    def _fill(self, queue: PartitionQueue) -> None:
        """Send the batches of a partition, as far as its bounds allow."""
        now_s = self._clock.monotonic_s()
        if self._is_closed or self.failure is not None:
            return
        if now_s < queue.resume_s:
            if queue.alarm is None:
                self._fill_later(queue, queue.resume_s - now_s)
            return
        if queue.returned:
            if queue.in_flight:
                return
            queue.take_back()
        # A queue without messages does not ask for a connection.
        if not queue.waiting and not self._accumulator.has_messages(queue):
            return
        connection = self._connection(queue)
        if connection is None:
            self._unconnected[queue] = None
            return
        while not queue.returned and self._has_place(queue):
            if not queue.waiting:
                batch = self._take(queue)
                if batch is None:
                    return
                queue.waiting.append(queue.part_of(batch))
            if not connection.has_room:
                self._crowded.setdefault(connection, {})[queue] = None
                return
            part = queue.waiting[0]
            if part.batch.deadline_s <= now_s + TIME_LEFT_MIN_S:
                queue.waiting.popleft()
                self._fail(queue, part, queue.lateness(part.batch))
                continue
            puts_max = 1 if self._options.in_flight_batches_max == 1 else PUTS_MAX
            part, error = queue.fit_next(connection.capabilities, puts_max)
            if error is not None:
                queue.waiting.popleft()
                self._fail(queue, part, error)
                continue
            if part.sequence is not None:
                # A repetition travels alone: were it refused and the next one
                # stored, its sequence would be too low for ever.
                if queue.in_flight:
                    return
                queue.alone = part
            self._send(queue, queue.waiting.popleft(), connection)

    def _fill_later(self, queue: PartitionQueue, delay_s: float) -> None:
        if queue.alarm is not None:
            queue.alarm.cancel()
        queue.alarm = self._loop.call_later(delay_s, self._on_alarm, queue)

    def _on_alarm(self, queue: PartitionQueue) -> None:
        queue.alarm = None
        self._fill(queue)

    def _connection(self, queue: PartitionQueue) -> PutConnection | None:
        """Return the connection to send on; None when the queue has to wait for it."""
        address = self._address(queue.partition.broker_id)
        if address is None:
            queue.trouble = NoBrokerError(
                f"{queue.partition}: broker {queue.partition.broker_id} is not there"
            )
            self._request_refresh()
            self._move(queue)
            return None
        connection = self._pool.ready(address)
        if connection is None:
            queue.trouble = self._unreachable.get(address)
            if queue.trouble is not None:
                self._move(queue)
            self._open(address)
            return None
        if connection is not queue.connection:
            # The order: nothing overtakes batches in flight on the old one.
            if queue.in_flight or queue.is_early(self._snapshot.puts):
                return None
            self._unreachable.pop(address, None)
            self._accumulator.set_connection(queue, connection)
        return connection

    def _address(self, broker_id: BrokerId) -> BrokerAddress | None:
        copies = self._snapshot.brokers.get(broker_id)
        return None if copies is None else copies.leader

    def _has_place(self, queue: PartitionQueue) -> bool:
        if queue.alone in queue.in_flight:
            return False
        limit = self._options.in_flight_batches_max
        connection = queue.connection
        if (
            limit > 1
            and connection is not None
            and not connection.capabilities.has_mput
        ):
            limit = PUTS_IN_FLIGHT_MAX
        return queue.commands < limit

    def _take(self, queue: PartitionQueue) -> Batch | None:
        now_s = self._clock.monotonic_s()
        batch = self._accumulator.take(queue, now_s)
        if isinstance(batch, float):
            self._fill_later(queue, batch - now_s)
            return None
        return batch

    def _send(
        self, queue: PartitionQueue, part: BatchPart, connection: PutConnection
    ) -> None:
        part.attempt += 1
        if part.attempt > 1:
            self._counters.retried_count += part.command_count
        send = self._send_batch if part.span.is_mput else self._send_puts
        try:
            send(queue, part, connection)
        except LocalProtocolError as error:
            self._fail(queue, part, error)
        except MemoryError:
            lack = ClientError(
                f"{queue.partition}: no memory to send {part.message_count} messages"
            )
            if part in queue.in_flight:
                self._give_up(queue, part, lack)
            else:
                self._fail(queue, part, lack)

    def _send_batch(
        self, queue: PartitionQueue, part: BatchPart, connection: PutConnection
    ) -> None:
        opaque = connection.next_opaque()
        frame = queue.frame(part, opaque, self._producer_id)
        on_reply = partial(self._on_reply, queue, part, part.attempt, connection)
        deadline_s = self._answer_deadline_s(part)
        queue.begin(part, None)
        try:
            # Batches are their own groups.
            connection.submit(
                frame,
                opaque,
                on_reply,
                deadline_s=deadline_s,
                is_alone=True,
            )
        except ClosedError as error:
            on_reply(error)
            return
        self._counters.on_sent(part.message_count, 1)

    def _send_puts(
        self, queue: PartitionQueue, part: BatchPart, connection: PutConnection
    ) -> None:
        """Send a run of single puts; runs of one turn of the loop leave together."""
        opaques = connection.next_opaques(part.message_count)
        frames = queue.put_frames(part, opaques)
        run = PutRun(
            part,
            queue.partition,
            opaques,
            sizes=partial(queue.put_sizes, part, opaques),
            on_stored=partial(self._on_stored, queue, connection),
            on_failed=partial(self._on_puts_failed, queue, connection),
        )
        queue.begin(part, run)
        deadline_s = self._answer_deadline_s(part)
        try:
            connection.submit_puts(frames, opaques, run, deadline_s=deadline_s)
        except ClosedError as error:
            run.on_outcome(opaques, error)
            return
        self._counters.on_sent(1, part.message_count)

    def _answer_deadline_s(self, part: BatchPart) -> float:
        deadline_s = part.batch.deadline_s
        if self._limits is None:
            return deadline_s
        answer_s = self._clock.monotonic_s() + self._limits.answer_timeout_s
        return min(deadline_s, answer_s)

    # -- answers ----------------------------------------------------------------------

    def _on_reply(
        self,
        queue: PartitionQueue,
        part: BatchPart,
        attempt: int,
        connection: PutConnection,
        reply: Reply | MetaqError,
    ) -> None:
        if part not in queue.in_flight or part.attempt != attempt:
            return  # given up meanwhile
        try:
            if isinstance(reply, MetaqError):
                raise reply
            receipt = parse_receipt(reply, queue.partition.partition)
        except MetaqError as error:
            queue.end(part, 1)
            self._on_failure(queue, part, connection, error)
            if isinstance(error, RemoteProtocolError):
                connection.close_for(error)
        else:
            result = SendResult(receipt.id, queue.partition, receipt.offset)
            is_in_doubt = part.is_in_doubt and not _recognises(connection, part)
            outcome = BatchOutcome(part.span.first, result, None)
            # Only now: without memory for all this it is given up at its deadline.
            queue.end(part, 1)
            queue.note_success()
            try:
                self._fill_behind(queue, connection)
            finally:
                # Last: a sender in another thread wakes up and wants the interpreter.
                self._succeed(part, [outcome], is_in_doubt=is_in_doubt)
            return
        self._fill_behind(queue, connection)

    def _on_stored(
        self,
        queue: PartitionQueue,
        connection: PutConnection,
        run: PutRun,
        count: int,
    ) -> None:
        outcomes = run.outcomes() if run.left == count else []
        # Only now, as in `_on_reply`.
        queue.end(run.part, count)
        queue.note_success()
        try:
            self._fill_behind(queue, connection)
        finally:
            if outcomes:
                self._succeed(run.part, outcomes, is_in_doubt=run.part.is_in_doubt)

    def _on_puts_failed(
        self,
        queue: PartitionQueue,
        connection: PutConnection,
        run: PutRun,
        opaques: Sequence[int],
        error: MetaqError,
    ) -> None:
        for part in self._cut(queue, run, opaques, len(opaques)):
            self._on_failure(queue, part, connection, error)
        if isinstance(error, RemoteProtocolError):
            connection.close_for(error)
        self._fill_behind(queue, connection)

    def _cut(
        self, queue: PartitionQueue, run: PutRun, opaques: Sequence[int], count: int
    ) -> list[BatchPart]:
        """Return puts that failed as parts of their own; so many are at their end."""
        outcomes = run.outcomes() if run.left == count else []
        parts = run.cut(opaques)
        queue.end(run.part, count)
        if not run.left:
            self._succeed(run.part, outcomes, is_in_doubt=run.part.is_in_doubt)
        return parts

    def _give_up(
        self, queue: PartitionQueue, part: BatchPart, error: MetaqError
    ) -> None:
        """Fail the messages of a part in flight: they are in doubt."""
        run, parts = queue.in_flight[part], [part]
        if run is None:
            queue.end(part, 1)
        else:
            # Receipts that found no memory are in flight still, though noted perhaps.
            parts = self._cut(queue, run, run.unanswered(), run.left)
        for each in parts:
            each.is_in_doubt = True
            self._fail(queue, each, error)

    def _fill_behind(self, queue: PartitionQueue, connection: PutConnection) -> None:
        """Send what waited for an answer: the queue's own, and what found no room."""
        self._fill(queue)
        crowded = self._crowded.get(connection)
        while crowded and connection.has_room:
            queue = next(iter(crowded))
            del crowded[queue]
            self._fill(queue)
        if not crowded:
            self._crowded.pop(connection, None)

    def _on_failure(
        self,
        queue: PartitionQueue,
        part: BatchPart,
        connection: PutConnection,
        error: MetaqError,
    ) -> None:
        is_used = isinstance(error, SequenceUsedError)
        if is_used and self.failure is None and part.take_spare():
            self.renamed_count += part.message_count
            queue.returned.append(part)
            return
        part.error = error
        verdict, part.is_in_doubt = on_failure(
            error,
            may_move=part.batch.may_move,
            is_in_doubt=part.is_in_doubt,
            has_dedup=_recognises(connection, part),
            retry_unknown=self._options.retry_unknown,
            attempt=part.attempt,
            limits=self._limits,
        )
        if error.refresh_metadata:
            self._request_refresh()
        now_s = self._clock.monotonic_s()
        is_late = now_s >= part.batch.deadline_s
        if verdict is Verdict.FAIL or is_late or self.failure is not None:
            self._fail(queue, part, error)
            return
        if not part.is_in_doubt:
            # The broker does not know it, and may have stored batches behind it.
            part.sequence = None
        queue.trouble = error
        if isinstance(error, REFUSALS):
            # Two that refuse would else send a message to and fro without a pause.
            queue.refused_until_s = now_s + self._options.retry_max_s
        if verdict is Verdict.MOVE:
            target = self._target(queue)
            if target is not None:
                self._hand_over(part, target)
                return
        queue.returned.append(part)
        if now_s >= queue.resume_s:
            queue.failures += 1
            pause_s = self._backoff.delay_s(queue.failures)
            queue.resume_s = now_s + pause_s
            self._fill_later(queue, pause_s)

    def _succeed(
        self, part: BatchPart, outcomes: Sequence[BatchOutcome], *, is_in_doubt: bool
    ) -> None:
        """Settle a part with where its messages lie; with none, all were cut out."""
        batch = part.batch
        latency_s = self._clock.monotonic_s() - batch.created_s
        for first, receipt, _, puts in outcomes:
            assert receipt is not None
            count = part.message_count if puts is None else len(puts.ids)
            size_bytes = batch.size_of(first, first + count)
            self._counters.on_acknowledged(
                receipt.partition,
                count,
                size_bytes - HEADER_BYTES * count,
                latency_s,
            )
            self._counters.doubtful_count += count * is_in_doubt
        self._settle(part, outcomes)

    def _fail(self, queue: PartitionQueue, part: BatchPart, error: MetaqError) -> None:
        final = final_error(error, queue.partition, is_in_doubt=part.is_in_doubt)
        self._counters.on_failed(part.message_count, final)
        self._end(error)  # before anyone hears of the outcome
        self._settle(part, [BatchOutcome(part.span.first, None, final)])

    def _end(self, error: MetaqError) -> None:
        """Send nothing more after the first failure, where attempts are limited."""
        if self._limits is not None and self.failure is None:
            self.failure = error
            self._fail_unsent(error)

    def _settle(self, part: BatchPart, outcomes: Sequence[BatchOutcome]) -> None:
        batch = part.batch
        batch.found += outcomes
        batch.parts_left -= 1
        if not batch.parts_left:
            batch.found.sort(key=lambda outcome: outcome.first)
            self._moved.pop(batch, None)
            self._accumulator.resolve(batch, batch.found)

    # -- connections and other partitions ---------------------------------------------

    def _open(self, address: BrokerAddress) -> None:
        """Have the pool make a connection, unless it does."""
        if address not in self._opening:
            self._opening[address] = self._pool.when_open(
                address,
                partial(self._on_opened, address),
                deadline_s=self._clock.monotonic_s() + self._patience_s,
            )

    def _on_opened(self, address: BrokerAddress, error: MetaqError | None) -> None:
        """Go on when there is a connection, or none within PATIENCE_S."""
        del self._opening[address]
        if isinstance(error, ClosedError):
            # The client is closing. Its listeners would only come back here, so the
            # next event is the one that a tick brings.
            _log.debug("connections are closed: broker=%s error=%s", address, error)
            return
        if not isinstance(error, NoBrokerError):
            self._unreachable.pop(address, None)
        else:
            if address not in self._unreachable:
                _log.warning(
                    "broker is unreachable: broker=%s error=%s", address, error
                )
            self._unreachable[address] = error
            self._on_unreachable(address, error)
            if self._is_wanted(address):
                self._open(address)
                return
        self.fill()

    def _is_wanted(self, address: BrokerAddress) -> bool:
        """Tell whether there is anything to send to an address."""
        return any(
            (queue.waiting or queue.returned or self._accumulator.has_messages(queue))
            and self._address(queue.partition.broker_id) == address
            for queue in self._queues()
        )

    def _on_unreachable(self, address: BrokerAddress, error: NoBrokerError) -> None:
        self._request_refresh()
        cause: MetaqError | None = None
        for queue in self._queues():
            if self._address(queue.partition.broker_id) == address:
                queue.trouble = error
                cause = cause or queue.doubt()
                self._move(queue)
        self._end(error if cause is None else GivenUpError(f"{cause}; then {error}"))

    def _move(self, queue: PartitionQueue) -> None:
        """Give movable batches to other partitions, if there is one that takes them."""
        if self._target(queue) is None:
            return
        for batch in self._accumulator.take_movable(queue):
            queue.waiting.append(queue.part_of(batch))
        if not queue.in_flight:
            queue.take_back()
        staying: deque[BatchPart] = deque()
        for part in queue.waiting:
            target = self._target(queue)
            if part.is_in_doubt or not part.batch.may_move or target is None:
                staying.append(part)
            else:
                self._hand_over(part, target)
        queue.waiting = staying

    def _target(self, queue: PartitionQueue) -> PartitionQueue | None:
        """Return another partition's queue that can send now, each in turn.

        Brokers are few, and partitions may be thousands, each with parts to move.
        """
        now_s, topic = self._clock.monotonic_s(), queue.partition.topic
        counts = [
            (broker_id, count)
            for broker_id, count in self._snapshot.puts.get(topic, {}).items()
            if self._is_connected(broker_id)
        ]
        total = sum(count for _, count in counts)
        for _ in range(total):
            self._moves += 1
            partition = _nth_partition(topic, counts, self._moves % total)
            target = self._accumulator.routes.queue(partition)
            if target is not queue and target.refused_until_s <= now_s:
                return target
        return None

    def _is_connected(self, broker_id: BrokerId) -> bool:
        address = self._address(broker_id)
        return address is not None and self._pool.ready(address) is not None

    def _hand_over(self, part: BatchPart, target: PartitionQueue) -> None:
        self._counters.moved_count += 1
        part.sequence = None
        part.place = target.next_place()
        target.waiting.append(part)
        self._moved.setdefault(part.batch, {})[target] = None
        self._loop.call_soon(self._fill, target)

    # -- time -------------------------------------------------------------------------

    def _on_tick(self) -> None:
        """Fail late batches; let those send that have no other trigger."""
        self._tick = None
        try:
            self._look_at_all()
        finally:
            # Also behind a failure: without a tick nothing is ever late.
            self._keep_deadlines()

    def _look_at_all(self) -> None:
        now_s = self._clock.monotonic_s()
        queues: dict[PartitionQueue, None] = {}
        for batch, queue in self._accumulator.take_due(now_s, TICK_S):
            queues[queue] = None
            queues.update(self._moved.get(batch, {}))
        for queue in queues:
            self._fail_late(queue, now_s)
        # Others may have made room on a connection that is not ours alone.
        for crowded in self._crowded.values():
            queues.update(crowded)
        self._crowded.clear()
        if now_s >= self._retry_s:
            self._retry_s = now_s + RETRY_S
            queues.update(self._unconnected)
            self._unconnected.clear()
        for queue in queues:
            self._fill(queue)

    def _fail_late(self, queue: PartitionQueue, now_s: float) -> None:
        for batch in self._accumulator.take_late(queue, now_s):
            part = queue.part_of(batch)
            self._fail(queue, part, queue.lateness(batch))
        for part in queue.take_late(now_s):
            self._fail(queue, part, queue.lateness(part.batch))
        for part in queue.unanswered(now_s - ANSWER_GRACE_S):
            self._give_up(queue, part, queue.silence(part.batch))


def _recognises(connection: PutConnection, part: BatchPart) -> bool:
    """Tell whether the broker stores a part once, however often it is sent."""
    return connection.capabilities.dedup and part.span.is_mput


def _nth_partition(
    topic: str, counts: Sequence[tuple[BrokerId, int]], number: int
) -> TopicPartition:
    """Return one of the partitions of some brokers, of which there are more."""
    for broker_id, count in counts:
        if number < count:
            return TopicPartition(topic, broker_id, number)
        number -= count
    raise AssertionError(f"{topic}: no partition of number {number}")
