"""Partition sender: owns the messages of one partition until they are answered.

Theory of operation. Messages wait in an open batch and sealed ones. Nothing blocks the
loop: each event (messages, a reply, a connection, a time) calls `fill`, which sends
while fewer than `in_flight_batches_max` requests are in flight. So batches grow while
others are in flight.

Order. Requests are sent in the order of their messages. After a failed one, nothing is
sent until everything in flight is answered; then the returned requests are sent first,
in their old order, and those with a sequence one at a time. A broker that recognises
batches refuses those in flight after a refused one, as long as their sequences are
contiguous. So a refused request keeps its sequence; if it fails for good, moves or gets
a new sequence, the sender leaves a gap. At other brokers, and among delayed messages or
those to an exchange, requests in flight may overtake a refused one. After a lost
connection nothing is overtaken, because everything in flight comes back.

    Invariant: a request without an outcome is in exactly one of `_waiting`, `_returned`
    and `_in_flight`, of one sender.
    Invariant: a batch is resolved when its last request has its outcome.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from metaq.client.errors import (
    ExchangeError,
    MessageTooLargeError,
    OutcomeUnknownError,
)
from metaq.client.produce.attempts import (
    PUTS_MAX,
    REFUSALS,
    BatchSpan,
    Reaction,
    cut_by_time,
    for_one_time,
    no_delay,
    no_exchanges,
    on_failure,
    plan_spans,
)
from metaq.client.produce.batches import Batch
from metaq.client.produce.buffer import Buffer, age_s
from metaq.client.produce.connections import Connections
from metaq.client.produce.outcomes import SendOutcomes
from metaq.client.produce.requests import Request
from metaq.errors import (
    ClientError,
    ClosedError,
    LocalProtocolError,
    MetaqError,
    NoBrokerError,
    NotAnExchangeError,
    NotSentError,
    RemoteProtocolError,
    SequenceUsedError,
    ServerError,
    UnroutableError,
)
from metaq.model import BrokerAddress, TopicPartition
from metaq.peer.connection import BrokerConnection
from metaq.protocol.commands import Reply
from metaq.protocol.version import Capabilities
from metaq.record.layout import HEADER_BYTES, PAYLOAD_BYTES_MAX
from metaq.retry import Backoff

ANSWER_GRACE_S: Final = 0.2
"""Seconds after its deadline at which a request, or a put of a transaction, is given up
if its connection has reported nothing. The connection's own timer fires earlier, but a
reply whose handling failed for lack of memory is not reported again."""

TIME_LEFT_MIN_S: Final = 0.001
"""Minimum time before the deadline, in seconds, at which a batch is still sent: later
that would only turn a certain failure into an unknown outcome."""

PUTS_IN_FLIGHT_MAX: Final = 4000
"""Maximum number of single puts of one partition in flight, to a broker without
`mput`."""


class PartitionSender:
    """Owns and sends one partition's messages.

    Concurrency: `open`, `is_awake`, the sealed batches and the limits change under the
    buffer's lock; the rest is used on the loop. Only methods here write fields.
    """

    __slots__ = (
        "_alone", "_buffer", "_connection", "_connections", "_failures", "_in_flight",
        "_is_gap_due", "_is_mandatory", "_last_error", "_order", "_outcomes",
        "_payload_bytes_max", "_producer_id", "_refused_at", "_resume_s", "_returned",
        "_sealed", "_sender_of", "_sequence", "_waiting", "_was_offered", "bytes_max",
        "count_max", "in_flight_count", "is_awake", "open", "partition",
        "refused_until_s",
    )  # fmt: skip

    def __init__(
        self,
        partition: TopicPartition,
        *,
        buffer: "Buffer[PartitionSender]",
        connections: Connections,
        outcomes: "SendOutcomes[PartitionSender]",
        producer_id: str,
        sender_of: Callable[[TopicPartition], "PartitionSender"],
        is_mandatory: bool | None = None,
    ) -> None:
        self.partition = partition
        self.open: Batch | None = None
        self.is_awake = False
        """Whether the loop has been notified of the messages here."""
        self.bytes_max = buffer.options.batch_bytes_max
        """Maximum record bytes of a batch: the option, or less if its broker announced
        less."""
        self.count_max = buffer.options.batch_count_max
        """Maximum number of messages of a batch, likewise."""
        self.in_flight_count = 0
        """Number of commands in flight."""
        self.refused_until_s = 0.0
        """Monotonic time before which no messages of other partitions move here."""
        self._buffer = buffer
        self._connections = connections
        self._outcomes = outcomes
        self._producer_id = producer_id
        self._sender_of = sender_of
        self._is_mandatory = is_mandatory  # None: not only to exchanges
        self._sealed: deque[Batch] = deque()
        self._payload_bytes_max: int = PAYLOAD_BYTES_MAX
        self._connection: BrokerConnection | None = None
        self._waiting: deque[Request] = deque()
        self._returned: list[Request] = []
        self._in_flight: dict[Request, None] = {}
        self._alone: Request | None = None  # nothing is sent while this is in flight
        self._sequence = 0
        self._is_gap_due = False  # a sequence was given up
        self._order = 0
        self._failures = 0  # refusals in a row
        self._resume_s = 0.0  # no sends before this monotonic time,
        self._refused_at: BrokerAddress | None = None  # unless the leader moved away
        self._last_error: MetaqError | None = None  # reason why nothing is sent
        self._was_offered = False  # was registered for puts at the last connect

    # -- messages, under the buffer's lock --------------------------------------------

    def begin(self, batch: Batch) -> None:
        """Seal the open batch, and make another one the open batch."""
        self.seal()
        self.open = batch

    def seal(self) -> None:
        """Seal the open batch, if there is one."""
        if self.open is not None:
            self._buffer.give_back(self.open)
            self._sealed.append(self.open)
            self.open = None

    def note_ready(self) -> None:
        """Add this sender to `Buffer.ready`; call `Buffer.announce` next."""
        self.is_awake = True
        self._buffer.ready.append(self)

    def check(self, size_bytes: int, *, is_lasting: bool = False) -> None:
        """Refuse a message that is too large for the broker.

        Limits announced on a lost connection are ignored, because the broker may
        announce higher ones when it is back. `fill` checks again.

        Args:
            size_bytes: of the record, header included.
            is_lasting: apply the last known limits even without a connection, because
                the message is to be spooled.

        Raises:
            MessageTooLargeError: its payload is over the limit.
        """
        payload_bytes = size_bytes - HEADER_BYTES
        if payload_bytes <= self._payload_bytes_max:
            return
        if is_lasting or (self._connection is not None and self._connection.is_open):
            raise self._too_large(self._payload_bytes_max, payload_bytes)

    # -- messages, on the loop; these take the lock -----------------------------------

    def take(self, now_s: float) -> Batch | float | None:
        """Take the next sealed batch, or seal and take the open one.

        Returns:
            The batch; or the monotonic time until which the open one lingers, unless it
            is full before; or None if there are no messages: the next one notifies the
            loop.
        """
        buffer = self._buffer
        with buffer.lock:
            buffer.look_at_turn(now_s)
            if not self._sealed:
                batch = self.open
                if batch is None:
                    self.is_awake = False
                    return None
                linger_s = batch.created_s + buffer.options.linger_s
                if linger_s > now_s:
                    return linger_s
                self.seal()
            return self._sealed.popleft()

    def take_late(self, now_s: float) -> list[Batch]:
        """Seal the open batch if it is old; take batches past their deadline."""
        with self._buffer.lock:
            batch = self.open
            if batch and now_s - batch.created_s >= age_s(batch.timeout_s):
                self.seal()
            return self._take_sealed(lambda batch: batch.deadline_s <= now_s)

    def set_connection(self, connection: BrokerConnection) -> None:
        """Apply the limits that a broker announced, within the options."""
        options, capabilities = self._buffer.options, connection.capabilities
        with self._buffer.lock:
            self._connection = connection
            payload_bytes_max = capabilities.payload_bytes_max or PAYLOAD_BYTES_MAX
            self._payload_bytes_max = payload_bytes_max
            # The batch limit includes the payload limit, so that a too large message
            # never fits an open batch, and `check` sees it.
            self.bytes_max = min(
                options.batch_bytes_max,
                capabilities.batch_bytes_max or options.batch_bytes_max,
                payload_bytes_max + HEADER_BYTES,
            )
            self.count_max = min(
                options.batch_count_max,
                capabilities.batch_records_max or options.batch_count_max,
            )
            if self.open is not None:  # its reservation may exceed the new limits
                self._buffer.give_back(self.open)

    def _has_messages(self) -> bool:
        with self._buffer.lock:
            self.is_awake = bool(self._sealed) or self.open is not None
            return self.is_awake

    def _take_sealed(self, is_wanted: Callable[[Batch], bool]) -> list[Batch]:
        found = [batch for batch in self._sealed if is_wanted(batch)]
        if found:
            self._sealed = deque(b for b in self._sealed if not is_wanted(b))
        return found

    # -- sending ----------------------------------------------------------------------

    def fill(self) -> None:
        """Send waiting messages, up to the limits of what may be in flight."""
        now_s = self._buffer.clock.monotonic_s()
        if self._outcomes.is_over:
            return
        if now_s < self._resume_s and not self._is_elsewhere():
            self._connections.call_at(self.fill, self._resume_s)
            return
        if self._returned or self._is_gap_due:
            if self._in_flight:
                return
            self._take_back()
        # A sender without messages does not ask for a connection.
        if not self._waiting and not self._has_messages():
            return
        connection = self._find_connection()
        if connection is None:
            self._connections.wait_for_connection(self.fill)
            return
        while not (self._returned or self._is_gap_due) and self._may_send(connection):
            if not self._waiting:
                batch = self.take(now_s)
                if isinstance(batch, float):
                    self._connections.call_at(self.fill, batch)
                if not isinstance(batch, Batch):
                    return
                self._waiting.append(self._request(batch))
            if not connection.has_room:
                self._connections.wait_for_room(connection, self.fill)
                return
            request = self._waiting[0]
            if request.batch.deadline_s <= now_s + TIME_LEFT_MIN_S:
                self._fail_first(self._lateness(request))
                continue
            error = self._fit_first(connection.capabilities)
            request = self._waiting[0]
            if error is not None:
                self._fail_first(error)
                continue
            if request.sequence is not None:
                # A repetition is sent alone: if it were refused and the next request
                # stored, its sequence would be too low for good.
                if self._in_flight:
                    return
                self._alone = request
            self._send(self._waiting.popleft(), connection)
        if self._is_gap_due and not self._in_flight:
            self._connections.call_at(self.fill, now_s)

    def _fail_first(self, error: MetaqError) -> None:
        request = self._waiting.popleft()
        self._is_gap_due |= request.sequence is not None
        self._outcomes.fail(request, error)

    def _is_elsewhere(self) -> bool:
        """Return whether the leader is not the replica that refused."""
        address = self._connections.address(self.partition.broker_id)
        return address not in {None, self._refused_at}

    def _find_connection(self) -> BrokerConnection | None:
        """Return the connection to send on; None if there is none to use now."""
        found = self._connections.find(self.partition)
        if found is None or isinstance(found, NoBrokerError):
            self._last_error = found
            if found is not None:
                self.move()
            return None
        if found is not self._connection:
            # To keep the order, requests in flight on the old connection come first.
            if self._in_flight or self._is_early():
                return None
            self.set_connection(found)
        return found

    def _is_early(self) -> bool:
        """Return whether a broker has restarted and not yet registered the topic.

        A put at that time may keep a MetaQ 1.4 broker from registering the topic, which
        makes its start fail.
        """
        partition = self.partition
        puts = self._connections.snapshot.puts.get(partition.topic, {})
        is_offered = partition.partition < puts.get(partition.broker_id, 0)
        if is_offered or not self._was_offered:
            self._was_offered = is_offered
            return False
        self._last_error = NoBrokerError(
            f"{partition}: broker {partition.broker_id} does not take puts at the"
            " moment"
        )
        return True

    def _may_send(self, connection: BrokerConnection) -> bool:
        if self._alone in self._in_flight:
            return False
        limit = self._buffer.options.in_flight_batches_max
        if limit > 1 and not connection.capabilities.has_mput:
            limit = PUTS_IN_FLIGHT_MAX
        return self.in_flight_count < limit

    def _request(self, batch: Batch) -> Request:
        self._order += 1
        whole = BatchSpan(0, len(batch.payloads), is_mput=True)
        return Request(batch, whole, self.partition, self._order)

    def _broker_name(self) -> str:
        broker_id = self.partition.broker_id
        return f"broker {broker_id} at {self._connections.address(broker_id)}"

    def _fit_first(self, capabilities: Capabilities) -> ClientError | None:
        """Cut the first request to the broker's limits; return its error, if any."""
        request = self._waiting[0]
        batch, span = request.batch, request.span
        if self._is_mandatory is not None and not capabilities.exchanges:
            return no_exchanges(self._broker_name(), capabilities)
        if batch.times:
            if not capabilities.delay_ms_max:
                return no_delay(self._broker_name(), capabilities)
            capabilities = for_one_time(capabilities, self.partition.topic)
        if request.is_in_doubt and span.is_mput and capabilities.has_mput:
            return None  # the broker recognises it only at its old size
        is_single = self._buffer.options.in_flight_batches_max == 1
        puts_max = 1 if is_single else PUTS_MAX
        spans = plan_spans(batch.ends, span.first, span.end, capabilities, puts_max)
        if batch.times and not capabilities.delay_each:
            spans = cut_by_time(spans, batch.times)
        if spans != [span]:
            self._waiting.popleft()
            batch.requests_left += len(spans) - 1
            self._waiting.extendleft(request.like(each) for each in reversed(spans))
            if request.sequence is not None:
                self._renumber()
        span, limit = spans[0], capabilities.payload_bytes_max
        size_bytes = len(batch.payloads[span.first])
        if span.is_mput:
            return None
        is_plain = not batch.times and self._is_mandatory is None
        if is_plain and (limit is None or size_bytes <= limit):
            return None
        return self._too_large(limit or PAYLOAD_BYTES_MAX, size_bytes)

    def _send(self, request: Request, connection: BrokerConnection) -> None:
        request.attempt += 1
        if request.attempt > 1:
            self._outcomes.retried_count += request.command_count
        send = self._send_batch if request.span.is_mput else self._send_puts
        try:
            send(request, connection)
        except LocalProtocolError as error:
            self._outcomes.fail(request, error)
        except MemoryError:
            lack = ClientError(
                f"{self.partition}: no memory to send {request.message_count} messages"
            )
            if request.left:
                self._give_up(request, lack)
            else:
                self._outcomes.fail(request, lack)

    def _send_batch(self, request: Request, connection: BrokerConnection) -> None:
        opaque = connection.next_opaque()
        if request.name is None and request.sequence is None:
            request.sequence = self._sequence
            self._sequence += request.message_count
        frame = request.encode_mput(
            opaque, self._producer_id, is_mandatory=self._is_mandatory
        )
        on_reply = partial(self._on_reply, request, request.attempt, connection)
        deadline_s = self._answer_deadline_s(request)
        self._begin(request)
        try:
            # A batch is not grouped with other frames.
            connection.submit(
                frame, opaque, on_reply, deadline_s=deadline_s, is_alone=True
            )
        except ClosedError as error:
            on_reply(error)
            return
        self._outcomes.on_sent(request.message_count, 1)

    def _send_puts(self, request: Request, connection: BrokerConnection) -> None:
        """Send a run of single puts; runs of one loop iteration are sent together."""
        opaques = connection.next_opaques(request.message_count)
        frames = request.encode_puts(opaques)
        request.expect_receipts(
            opaques,
            partial(self._on_stored, connection),
            partial(self._on_puts_failed, connection),
        )
        self._begin(request)
        deadline_s = self._answer_deadline_s(request)
        try:
            connection.submit_puts(frames, opaques, request, deadline_s=deadline_s)
        except ClosedError as error:
            request.on_outcome(opaques, error)
            return
        self._outcomes.on_sent(1, request.message_count)

    def _answer_deadline_s(self, request: Request) -> float:
        deadline_s, limits = request.batch.deadline_s, self._outcomes.limits
        if limits is None:
            return deadline_s
        now_s = self._buffer.clock.monotonic_s()
        return min(deadline_s, now_s + limits.answer_timeout_s)

    def _begin(self, request: Request) -> None:
        self._in_flight[request] = None
        request.left = request.command_count
        self.in_flight_count += request.left

    def _end(self, request: Request, command_count: int) -> None:
        """Record that commands of a request are answered or given up."""
        self.in_flight_count -= command_count
        request.left -= command_count
        if not request.left:
            del self._in_flight[request]

    # -- answers ----------------------------------------------------------------------

    def _on_reply(
        self,
        request: Request,
        attempt: int,
        connection: BrokerConnection,
        reply: Reply | MetaqError,
    ) -> None:
        if not request.left or request.attempt != attempt:
            return  # it was given up
        try:
            if isinstance(reply, MetaqError):
                raise reply
            outcome = request.outcome_of(reply)
        except MetaqError as error:
            self._end(request, 1)
            self._on_failure(request, connection, error)
            if isinstance(error, RemoteProtocolError):
                connection.close_for(error)
            self._go_on(connection)
            return
        if _recognises(connection, request):
            request.is_in_doubt = False
        # After the steps above: if memory runs out in them, the request stays in
        # flight and is given up at its deadline.
        self._end(request, 1)
        self._forget_failures()
        try:
            self._go_on(connection)
        finally:
            # Last, because this wakes callers in other threads, which compete for the
            # interpreter.
            self._outcomes.succeed(request, [outcome])

    def _on_stored(
        self, connection: BrokerConnection, request: Request, count: int
    ) -> None:
        outcomes = request.outcomes() if request.left == count else []
        # After the outcomes, as in `_on_reply`.
        self._end(request, count)
        self._forget_failures()
        try:
            self._go_on(connection)
        finally:
            if outcomes:
                self._outcomes.succeed(request, outcomes)

    def _on_puts_failed(
        self,
        connection: BrokerConnection,
        request: Request,
        opaques: Sequence[int],
        error: MetaqError,
    ) -> None:
        for failed in self._cut(request, opaques, len(opaques)):
            self._on_failure(failed, connection, error)
        if isinstance(error, RemoteProtocolError):
            connection.close_for(error)
        self._go_on(connection)

    def _cut(
        self, request: Request, opaques: Sequence[int], count: int
    ) -> list[Request]:
        """Return failed puts as requests of their own.

        Args:
            request: the run of puts.
            opaques: of the failed puts, ascending.
            count: number of its puts that end now, including failed ones.
        """
        outcomes = request.outcomes() if request.left == count else []
        failed = request.cut(opaques)
        self._end(request, count)
        if not request.left:
            self._outcomes.succeed(request, outcomes)
        return failed

    def _give_up(self, request: Request, error: MetaqError) -> None:
        """Fail the messages of a request in flight: their outcome is unknown."""
        failed = [request]
        if request.span.is_mput:
            self._end(request, 1)
        else:
            # Puts whose receipts failed for lack of memory are still in flight, though
            # their receipts may have been recorded.
            failed = self._cut(request, request.unanswered(), request.left)
        for each in failed:
            each.is_in_doubt = True
            self._outcomes.fail(each, error)

    def _go_on(self, connection: BrokerConnection) -> None:
        """Send more, here and for waiters of the same connection."""
        self.fill()
        self._connections.on_room(connection)

    def _forget_failures(self) -> None:
        self._failures, self._last_error, self.refused_until_s = 0, None, 0.0

    def _on_failure(
        self, request: Request, connection: BrokerConnection, error: MetaqError
    ) -> None:
        outcomes, options = self._outcomes, self._buffer.options
        is_used = isinstance(error, SequenceUsedError)
        if is_used and not outcomes.is_over and request.use_spare_name():
            outcomes.renamed_count += request.message_count
            self._returned.append(request)
            return
        is_shared = request.message_count > 1 and not request.is_in_doubt
        is_for_one = isinstance(error, UnroutableError) or (
            type(error) is ServerError and bool(request.own_times)
        )
        if is_for_one and is_shared and not outcomes.is_over:
            # An unroutable message, or a delay too long, must not fail the others.
            assert isinstance(error, ServerError)
            failed, others = request.split(error.messages)
            self._returned += others
            for each in failed:
                outcomes.fail(each, error)
            return
        request.error = error
        decision, request.is_in_doubt = on_failure(
            error,
            may_move=request.batch.may_move,
            is_in_doubt=request.is_in_doubt,
            has_dedup=_recognises(connection, request),
            retry_unknown=options.retry_unknown,
            attempt=request.attempt,
            limits=outcomes.limits,
        )
        if error.refresh_metadata:
            self._connections.request_refresh()
        now_s = self._buffer.clock.monotonic_s()
        is_late = now_s >= request.batch.deadline_s
        if decision is Reaction.FAIL or is_late or outcomes.is_over:
            if isinstance(error, NotAnExchangeError):
                error = ExchangeError(str(error))  # a topic, or one that was deleted
            self._is_gap_due |= isinstance(error, REFUSALS)
            outcomes.fail(request, error)
            return
        if not (request.is_in_doubt or self._is_in_order(connection, request)):
            # The broker has not stored it, but may have stored later batches.
            request.sequence, self._is_gap_due = None, True
        self._last_error = error
        if isinstance(error, REFUSALS):
            # Otherwise two refusing partitions would pass a message back and forth
            # without a pause.
            self.refused_until_s = now_s + options.retry_max_s
        if decision is Reaction.MOVE:
            target = self._target()
            if target is not None:
                self._is_gap_due = True
                target.accept(request)
                return
        self._returned.append(request)
        if now_s >= self._resume_s or self._is_elsewhere():
            self._failures += 1
            self._refused_at = self._connections.address(self.partition.broker_id)
            backoff = Backoff(first_s=options.retry_first_s, max_s=options.retry_max_s)
            self._resume_s = now_s + backoff.delay_s(self._failures)
            self._connections.call_at(self.fill, self._resume_s)

    def _take_back(self) -> None:
        """Put returned requests before waiting ones, in the old order.

        Those with a sequence come first: the others get new sequences, and a broker
        accepts no sequence below one that it has seen.
        """
        self._sequence += self._is_gap_due
        self._is_gap_due = False
        self._returned.sort(key=_order_of)
        self._waiting.extendleft(reversed(self._returned))
        self._returned.clear()

    def _renumber(self) -> None:
        """Give up the sequences of refused requests, because one of them was cut."""
        self._sequence += 1
        for each in self._waiting:
            if not each.is_in_doubt:
                each.sequence = None
        self._waiting = deque(sorted(self._waiting, key=_order_of))

    def _is_in_order(self, connection: BrokerConnection, request: Request) -> bool:
        """Return whether the broker refuses those in flight after a refused request."""
        is_plain = not request.batch.times and self._is_mandatory is None
        return is_plain and _recognises(connection, request)

    # -- other partitions -------------------------------------------------------------

    def move(self) -> None:
        """Move movable messages to other partitions, if any of them can send now."""
        if self._target() is None:
            return
        with self._buffer.lock:
            self.seal()
            movable = self._take_sealed(lambda batch: batch.may_move)
        self._waiting.extend(map(self._request, movable))
        if not self._in_flight:
            self._take_back()
        staying: deque[Request] = deque()
        for request in self._waiting:
            may_move = request.batch.may_move and not request.is_in_doubt
            target = self._target() if may_move else None
            if target is None:
                staying.append(request)
            else:
                target.accept(request)
        self._waiting = staying

    def accept(self, request: Request) -> None:
        """Accept a request from another partition of the topic."""
        self._outcomes.moved_count += 1
        self._order += 1
        request.partition, request.order = self.partition, self._order
        request.sequence = None
        self._waiting.append(request)
        self._buffer.note_moved(request.batch, self)
        self._buffer.home.loop.call_soon(self.fill)

    def _target(self) -> "PartitionSender | None":
        """Return the sender of another partition that can send now, in turn."""
        now_s = self._buffer.clock.monotonic_s()
        for partition in self._connections.others(self.partition.topic):
            target = self._sender_of(partition)
            if target is not self and target.refused_until_s <= now_s:
                return target
        return None

    def on_unreachable(self, error: NoBrokerError) -> MetaqError | None:
        """Move messages; return the last error of a request in doubt, if any."""
        self._last_error = error
        requests = (*self._returned, *self._waiting)
        cause = next((one.error for one in requests if one.is_in_doubt), None)
        self.move()
        return cause

    # -- the end ----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._waiting or self._returned) or self._has_messages()

    def fail_late(self, now_s: float) -> None:
        """Fail messages past their deadline."""
        late = list(map(self._request, self.take_late(now_s)))
        for each in (self._waiting, self._returned):
            late += (one for one in each if one.batch.deadline_s <= now_s)
        if late:
            gone = set(late)
            self._waiting = deque(one for one in self._waiting if one not in gone)
            self._returned = [one for one in self._returned if one not in gone]
        for one in late:
            self._is_gap_due |= one.sequence is not None
            self._outcomes.fail(one, self._lateness(one))
        for one in list(self._in_flight):
            if one.batch.deadline_s <= now_s - ANSWER_GRACE_S and one.left:
                silence = OutcomeUnknownError(
                    f"{self.partition}: no answer within {one.batch.timeout_s:g} s;"
                    " outcome unknown"
                )
                self._give_up(one, silence)

    def give_up(self, error: MetaqError) -> None:
        """Fail the requests in flight: their outcome is unknown."""
        for request in list(self._in_flight):
            self._give_up(request, error)

    def fail_unsent(self, error: MetaqError) -> None:
        """Fail everything that is not in flight."""
        with self._buffer.lock:
            self.seal()
            self.is_awake = False
            batches = self._take_sealed(lambda _: True)
        self._waiting.extend(map(self._request, batches))
        requests = [*self._returned, *self._waiting]
        self._returned.clear()
        self._waiting.clear()
        for request in requests:
            self._outcomes.fail(request, error)

    def _lateness(self, request: Request) -> MetaqError:
        timeout_s = request.batch.timeout_s
        return self._last_error or NotSentError(
            f"{self.partition}: not sent within {timeout_s:g} s"
        )

    def _too_large(self, limit: int, size_bytes: int) -> MessageTooLargeError:
        return MessageTooLargeError(
            f"message: {self.partition} takes at most {limit} bytes, got {size_bytes}"
        )


def _recognises(connection: BrokerConnection, request: Request) -> bool:
    """Return whether the broker stores a repeated request only once."""
    return connection.capabilities.dedup and request.span.is_mput


def _order_of(request: Request) -> tuple[bool, int, int]:
    if request.name is not None:  # sequences of two names cannot be compared
        return False, request.order, request.span.first
    order = request.order if request.sequence is None else request.sequence
    return request.sequence is None, order, request.span.first
