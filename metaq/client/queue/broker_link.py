"""One broker of a queue's topic: takes, lease renewals, and the messages held from it.

Theory of operation. One task per broker keeps a connection, over which takes are sent
one at a time, while at least half of the prefetch is free, or any of it and no message
waits to be handed out. The first take is sent by the task, the next when a reply, a
settle or the handing out of the last message leaves room. A broker delays the reply to
a take until it has messages. A message is held from that reply until its settle is
submitted; while it is held, its lease is renewed once a third of it has passed.

    Invariant: the first command over a new connection is an `extend` of all held
    messages, so that the broker sees this worker before it reclaims the leases of the
    lost connection.
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from metaq.client.consume.decode import decode_messages
from metaq.client.consume.fetcher import GET_SLACK_S
from metaq.client.errors import (
    LeaseLostError,
    NoQueuesError,
    QueueGroupError,
    group_gone,
)
from metaq.client.queue.prefetch import (
    HeldMessage,
    HeldState,
    QueueParts,
    QueueStatistics,
)
from metaq.client.queue.settling import (
    RECLAIM_BACKOFF,
    UNKNOWN_TO_TAKES_S,
    PartitionSettler,
    Settling,
    UnknownGroup,
    ask,
)
from metaq.errors import (
    BadRequestError,
    CorruptRecordError,
    MetaqError,
    NotDefinedError,
    ServerError,
    UnexpectedReplyError,
)
from metaq.model import BrokerId, Offset, TopicPartition
from metaq.peer.connection import BrokerConnection
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Check, Reply, Take, Value
from metaq.protocol.queue_frames import (
    GROUP_DELAY,
    SettleVerb,
    TakenReply,
    Word,
    decode_taken,
)
from metaq.record.runs import RecordRun, decode_runs, records_of
from metaq.retry import wait_set

_log = logging.getLogger(__name__)

TAKE_BYTES_MAX: Final = 1024 * 1024
"""Maximum bytes of one take; brokers deliver no more."""
WAIT_S: Final = 10.0
"""Maximum seconds that a broker waits for messages, unless it announces less."""
UNANSWERED_MAX: Final = 10_000
"""Number of unanswered settles of a broker at which takes from it stop."""
ANY_PARTITION: Final = -1
RENEWED_AT: Final = 2 / 3
"""A lease is renewed when this share of it is left."""


class _Taking(enum.Enum):
    """State of the takes of a link."""

    IDLE = "idle"
    """No take in flight: there was no room, or no connection."""
    UNDER_WAY = "under way"
    """A take is in flight, or it failed and the task has not handled that yet."""
    ENDED = "ended"
    """No more takes are sent."""


class BrokerLink:
    """Messages held from one broker. Owner: the queue; on the loop.

    Lifecycle: `run` is a task of the queue. Settles are still sent after it has ended.
    """

    def __init__(self, broker_id: BrokerId, parts: QueueParts) -> None:
        """Start without messages or a connection."""
        self.broker_id = broker_id
        self._parts = parts
        self._context = parts.context
        self.held: set[HeldMessage] = set()
        self._held_bytes = 0
        self._unanswered_count = 0
        """Number of settle entries without a reply from this broker."""
        self._kept_up_s = self._kept_up_before_s = 0.0
        """Monotonic times of the last two `keep_up`. Bytes received before the earlier
        one have been read; the later one may be the first event after the process was
        suspended, with bytes still unread."""
        self._settlers: dict[int, PartitionSettler] = {}
        self._unsent: dict[PartitionSettler, None] = {}
        """Settlers with entries added since the last `flush`."""
        self._wake = asyncio.Event()
        self._connection: BrokerConnection | None = None
        self._ignore_end: Callable[[], None] = lambda: None
        """Removes the callback for the end of the connection, which outlives the
        queue."""
        self._taking = _Taking.IDLE
        self._failure: MetaqError | None = None
        """Error of the last take, until the task has handled it."""
        self._failures = 0
        """Number of takes in a row that failed, or were empty sooner than requested."""
        self._unknown = UnknownGroup(self._context.clock)
        self.last_error: MetaqError | None = None
        """Error of the last take; None after a successful one."""
        self._renewal_error: MetaqError | None = None
        """Error of the last failed renewal; None after a successful one."""

    # -- taking -----------------------------------------------------------------------

    async def run(self) -> None:
        """Take messages until cancelled, or until the broker refuses for good."""
        try:
            while True:
                self._wake.clear()
                try:
                    self._take(await self._connect())
                    # A take over the former connection may have failed in the meantime.
                    if self._failure is None:
                        await self._wake.wait()
                    if self._failure is not None:
                        raise self._failure
                except MetaqError as error:
                    if self._failure is not None:
                        self._failure = None
                        if self._taking is _Taking.UNDER_WAY:
                            self._taking = _Taking.IDLE
                    if self._is_final(error):
                        if isinstance(error, NotDefinedError):
                            error = group_gone(self._parts.group, self.broker_id)
                        self._parts.fail(error)
                        return
                    self._note_failure(error)
                    if self._open_connection() is not None:
                        self._wake.clear()  # only a lost connection skips the pause
                    await wait_set(self._wake, RECLAIM_BACKOFF.delay_s(self._failures))
        finally:
            self._taking = _Taking.ENDED
            self._ignore_end()

    def _note_failure(self, error: MetaqError) -> None:
        if not isinstance(error, NotDefinedError | type(self.last_error)):
            _log.warning(
                "no messages from broker, trying again: broker=%d topic=%s"
                " group=%s error=%s",
                self.broker_id,
                self._parts.topic,
                self._parts.group,
                error,
            )
        self.last_error = error
        self._failures += 1
        self._context.metadata.request_refresh()

    def wake(self) -> None:
        """Have the task check again, as the cluster has changed or there is room."""
        self._wake.set()

    def _is_final(self, error: MetaqError) -> bool:
        """Return whether no later attempt can succeed."""
        if isinstance(error, NotDefinedError):
            return self._unknown.is_over(UNKNOWN_TO_TAKES_S)
        refusals = NoQueuesError | BadRequestError | ServerError
        return isinstance(error, refusals) and not error.retriable

    async def _connect(self) -> BrokerConnection:
        """Return the connection; over a new one, first extend all held messages."""
        connection = await self._context.connect_leader(
            self.broker_id, self._context.deadline_s()
        )
        if connection is not self._connection:
            if not connection.capabilities.queues:
                raise NoQueuesError(
                    f"broker {self.broker_id} at {connection.address} does not support"
                    f" queue groups: its version is {connection.capabilities.version}"
                )
            self._connection = connection
            self._ignore_end = connection.on_closed(lambda _reason: self.wake())
            self._extend(self.held)
            for settler in self._settlers.values():
                settler.flush()  # entries not sent over the former connection
        return connection

    def _open_connection(self) -> BrokerConnection | None:
        one = self._connection
        return one if one is not None and one.is_open else None

    def _has_room(self) -> bool:
        """Return whether to take more now; if only later, be called then."""
        parts, count, size_bytes = self._parts, len(self.held), self._held_bytes
        count_max, bytes_max = parts.held_max, parts.options.prefetch_bytes
        if self._unanswered_count >= UNANSWERED_MAX:
            return False
        if count <= count_max // 2 and size_bytes <= bytes_max // 2:
            return True
        # Few at a time only for those that would wait: each take costs a request.
        if count >= count_max or size_bytes >= bytes_max:
            return False
        return not parts.prefetch.call_when_empty(self._take_if_room)

    def _take(self, connection: BrokerConnection) -> None:
        """Send a take, unless one is in flight or there is no room."""
        if self._taking is not _Taking.IDLE or not self._has_room():
            return
        self._taking = _Taking.UNDER_WAY
        options, sent_s = self._parts.options, self._context.clock.monotonic_s()
        # After an error request an immediate reply: it shows that the error is over.
        announced_s = connection.capabilities.wait_ms_max / 1000
        wait_s = min(WAIT_S, announced_s) if self.last_error is None else 0.0
        ask(
            connection,
            self._command(
                connection,
                self._parts.held_max - len(self.held),
                min(max(1, options.prefetch_bytes - self._held_bytes), TAKE_BYTES_MAX),
                wait_s,
            ),
            on_reply=lambda reply: self._on_taken(reply, sent_s, wait_s),
            on_error=self._on_failure,
            deadline_s=self._context.deadline_s() + wait_s + GET_SLACK_S,
        )

    def _on_taken(self, reply: Reply, sent_s: float, wait_s: float) -> None:
        """Hold the messages of a reply, and send the next take."""
        count = self._on_reply(reply, sent_s)
        had_failed, self.last_error = self.last_error is not None, None
        self._unknown.clear()
        if self._taking is _Taking.ENDED:
            return
        self._taking = _Taking.IDLE
        passed_s = self._context.clock.monotonic_s() - sent_s
        if count or had_failed or passed_s >= wait_s / 2 > 0:
            self._failures = 0
            self._take_if_room()
        else:
            # Pause, because a broker that replies too early would cause a busy loop.
            self._failures += 1
            delay_s = RECLAIM_BACKOFF.delay_s(self._failures)
            asyncio.get_running_loop().call_later(delay_s, self.wake)

    def _on_failure(self, error: MetaqError) -> None:
        """Pass the error of a take to the task."""
        self._failure = error
        self.wake()

    def _take_if_room(self) -> None:
        """Send a take if there is room; the task does so if the link is not healthy."""
        if self._taking is not _Taking.IDLE or not self._has_room():
            return
        connection = self._open_connection()
        if connection is None or self.last_error is not None:
            self.wake()
        else:
            self._take(connection)

    def _command(
        self, connection: BrokerConnection, count: int, size_max: int, wait_s: float
    ) -> Take:
        parts, opaque = self._parts, connection.next_opaque()
        return Take(
            parts.topic,
            parts.group,
            ANY_PARTITION,
            count,
            size_max,
            opaque,
            parts.worker,
            wait_ms=int(wait_s * 1000),
            generation=parts.generation,
        )

    def _on_reply(self, reply: Reply, sent_s: float) -> int:
        """Hold the messages in the reply to a take; return their number.

        Args:
            reply: of the broker.
            sent_s: monotonic time at which the take was sent.
        """
        if not isinstance(reply, Value):
            require_ok(reply)
            raise UnexpectedReplyError("take: expected a value, got a result")
        taken = decode_taken(reply.payload)
        partition = TopicPartition(self._parts.topic, self.broker_id, taken.partition)
        rows = _rows_of(reply.payload, taken, partition)
        now_s = self._context.clock.monotonic_s()
        lease_s = taken.lease_ms / 1000
        # The reply arrived after both times, so leases count from the later one. If the
        # process was suspended since, they may be over by now.
        given_s = max(sent_s, self._kept_up_before_s)
        good = list[HeldMessage]()
        for offset, delivery, deliveries in taken.deliveries:
            row = rows.get(offset, ())
            held = HeldMessage(
                row,
                partition,
                offset,
                delivery,
                deliveries,
                lease_s,
                given_s + lease_s,
                now_s,
                row[6] - offset if row else 0,
            )
            if row:
                good.append(held)
                continue
            _log.error(
                "damaged message given back: topic=%s partition=%s group=%s offset=%d",
                partition.topic,
                partition.name,
                self._parts.group,
                offset,
            )
            self._check(held)
            self.give_back(held, SettleVerb.NACK)
        if self._parts.prefetch.put(good):
            self._parts.counts.taken_count += len(good)
            self.held.update(good)
            self._held_bytes += sum([one.size_bytes for one in good])
        else:
            for held in good:
                self.give_back(held, SettleVerb.RELEASE)
        self.flush()
        return len(taken.deliveries)

    def _check(self, held: HeldMessage) -> None:
        """Ask the broker to check whether its own copy of a message is damaged.

        If so, it repairs the copy or stops, so that the message is not lost silently.
        """
        connection, partition = self._open_connection(), held.partition
        if connection is not None and connection.capabilities.check:
            opaque = connection.next_opaque()
            ask(
                connection,
                Check(partition.topic, partition.partition, held.offset, 1, opaque),
                deadline_s=self._context.deadline_s(),
            )

    # -- settling ---------------------------------------------------------------------

    def settle(self, entries: Sequence[Settling]) -> None:
        """Queue entries for the next `flush`; stop holding those that are settled."""
        now_s, held = self._context.clock.monotonic_s(), self.held
        for entry in entries:
            one = entry.held
            entry.since_s = now_s
            settler = self._settlers.get(one.partition.partition)
            if settler is None:
                settler = self._begin_settler(one.partition)
            settler.add(entry)
            self._unsent[settler] = None
            if entry.verb is not SettleVerb.EXTEND and one in held:
                held.remove(one)
                self._held_bytes -= one.size_bytes
        self._unanswered_count += len(entries)
        self._parts.unanswered_count += len(entries)

    def _begin_settler(self, partition: TopicPartition) -> PartitionSettler:
        settler = self._settlers[partition.partition] = PartitionSettler(
            self._parts,
            partition,
            self._open_connection,
            self._on_settled,
            self._unknown,
        )
        return settler

    def flush(self) -> None:
        """Send the queued entries of each partition, and a take if there is room."""
        unsent, self._unsent = self._unsent, {}
        for settler in unsent:
            settler.flush_soon()
        if self._taking is _Taking.ENDED:
            for settler in self._settlers.values():
                settler.flush()  # while closing, without LATER_S
        self._take_if_room()

    def drop(self, held: HeldMessage) -> None:
        """Stop holding a message, and take others if there is room."""
        if held in self.held:
            self.held.remove(held)
            self._held_bytes -= held.size_bytes
            self._take_if_room()

    def take_back(self, held: HeldMessage) -> None:
        """Hold a message again; its next renewal fails if its lease was lost."""
        self.held.add(held)
        self._held_bytes += held.size_bytes

    def give_back(self, held: HeldMessage, verb: SettleVerb) -> None:
        """Return an unsettled message to the broker, by `verb`; no caller waits."""
        held.state = HeldState.SETTLED
        delay = GROUP_DELAY if verb is SettleVerb.NACK else 0
        self.settle([Settling(held, verb, delay)])

    def _on_settled(
        self, entries: Sequence[Settling], outcomes: Sequence[Word | MetaqError]
    ) -> None:
        """Record outcomes, and report each to its caller or the log."""
        parts, count = self._parts, len(entries)
        unheard: dict[SettleVerb, list[MetaqError]] = {}
        for entry, outcome in zip(entries, outcomes, strict=True):
            future, error = entry.future, self._note(entry, outcome)
            if error is not None and (future is None or not entry.is_awaited):
                is_renewal = entry.verb is SettleVerb.EXTEND
                if not (is_renewal and isinstance(error, QueueGroupError)):
                    unheard.setdefault(entry.verb, []).append(error)
            if future is not None and not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
                    if isinstance(future, asyncio.Future):
                        future.exception()  # mark as retrieved: it may not be awaited
        for verb, errors in unheard.items():
            self._warn(verb, errors)
        self._unanswered_count -= count
        parts.unanswered_count -= count
        if not parts.unanswered_count:
            parts.all_answered.set()
        self._take_if_room()

    def _warn(self, verb: SettleVerb, errors: Sequence[MetaqError]) -> None:
        """Log errors without a caller; of repeated renewal errors only the first."""
        error = errors[0]
        if verb is SettleVerb.EXTEND and not isinstance(error, LeaseLostError):
            if isinstance(self._renewal_error, type(error)):
                return
            self._renewal_error = error
        _log.warning(
            "not settled: group=%s verb=%s messages=%d: %s",
            self._parts.group,
            verb.name.lower(),
            len(errors),
            error,
        )

    def _note(self, entry: Settling, outcome: Word | MetaqError) -> MetaqError | None:
        """Record an outcome; return its error, if any."""
        held, verb, parts = entry.held, entry.verb, self._parts
        if verb is SettleVerb.ACK and (outcome is Word.OK or outcome is Word.DONE):
            parts.counts.acked_count += 1
            return None
        is_lost = outcome is Word.LOST
        if verb is SettleVerb.EXTEND:
            held.is_renewing, is_lost = False, outcome is not Word.OK
            if outcome is Word.OK:
                self._renewal_error = None
        elif verb in (SettleVerb.NACK, SettleVerb.RELEASE) and entry.is_in_doubt:
            # The first attempt may have succeeded, and another delivery has it.
            is_lost = False
        if isinstance(outcome, QueueGroupError):
            # The group is gone: messages are not renewed or handed out any more; those
            # in handlers keep their state, for a later settle to report the error.
            with parts.prefetch.lock:
                if held.state is HeldState.WAITING:
                    held.state = HeldState.LOST
            self.drop(held)
        if isinstance(outcome, MetaqError):
            return outcome
        if not is_lost:
            _count(parts.counts, entry)
            return None
        if verb is not SettleVerb.EXTEND or held.state is not HeldState.SETTLED:
            parts.counts.lost_count += 1
        with parts.prefetch.lock:
            held.state = HeldState.LOST
        self.drop(held)
        return lease_lost(held)

    def stop_taking(self) -> None:
        """End the take in flight, so that it does not get returned messages."""
        self._taking = _Taking.ENDED
        connection = self._open_connection()
        if connection is not None:
            ask(
                connection,
                self._command(connection, 0, 1, 0.0),
                deadline_s=self._context.deadline_s(),
            )

    def give_up(self) -> None:
        """End every unanswered settle."""
        for settler in self._settlers.values():
            settler.give_up()

    # -- renewing ---------------------------------------------------------------------

    def keep_up(self, now_s: float) -> None:
        """Renew leases that are due; let go of messages and settles past their time."""
        self._kept_up_before_s, self._kept_up_s = self._kept_up_s, now_s
        for settler in self._settlers.values():
            settler.expire(now_s)
        due = list[HeldMessage]()
        for held in tuple(self.held):
            if held.lease_end_s - now_s > held.lease_s * RENEWED_AT:
                continue
            if self._lets_go(held, now_s):
                self.drop(held)
            else:
                due.append(held)
        self._extend(due)
        if self._unsent:
            self.flush()

    def _lets_go(self, held: HeldMessage, now_s: float) -> bool:
        """Return whether to stop renewing: the lease is lost, or held too long."""
        parts = self._parts
        is_late = now_s - held.since_s >= parts.options.handle_s_max
        with parts.prefetch.lock:
            is_waiting = held.state is HeldState.WAITING
            if is_waiting and held.lease_end_s <= now_s:
                held.state = HeldState.LOST
            if held.state is HeldState.LOST:
                parts.counts.lost_count += 1
                return True
            if is_late and is_waiting:
                self.give_back(held, SettleVerb.RELEASE)
        if is_late and not is_waiting:
            _log.warning(
                "lease no longer extended: group=%s handle_s_max=%g: %s",
                parts.group,
                parts.options.handle_s_max,
                held,
            )
        return is_late

    def _extend(self, messages: Iterable[HeldMessage]) -> None:
        """Queue a renewal of each message, unless it has one; `flush` sends them."""
        due = [held for held in messages if not held.is_renewing]
        for held in due:
            held.is_renewing = True
        self.settle(
            [Settling(one, SettleVerb.EXTEND, int(one.lease_s * 1000)) for one in due]
        )


def _count(counts: QueueStatistics, entry: Settling) -> None:
    match entry.verb:
        case SettleVerb.NACK | SettleVerb.RELEASE:
            counts.returned_count += 1
        case SettleVerb.REJECT:
            counts.rejected_count += 1
        case SettleVerb.EXTEND:
            entry.held.lease_end_s = entry.since_s + entry.argument / 1000


def lease_lost(held: HeldMessage) -> LeaseLostError:
    """Return the error of a message whose lease is lost."""
    return LeaseLostError(
        f"{held}: its lease has expired, and it was delivered again: it may be handled"
        " twice"
    )


def _rows_of(
    payload: bytes, taken: TakenReply, partition: TopicPartition
) -> dict[Offset, Sequence[Any]]:
    """Return offset → fields, of each undamaged message in the runs."""

    def decode(run: RecordRun) -> list[Sequence[Any]]:
        messages, _end = decode_messages(run.data, partition, run.offset)
        return list(zip(*messages.columns, strict=True))

    found = list[Sequence[Any]]()
    with contextlib.suppress(CorruptRecordError):  # messages found before it are good
        for run in decode_runs(payload, taken.records_at):
            rows = decode(run)
            if not rows or rows[-1][6] < run.offset + len(run.data):
                # Messages after the damage may be good.
                for one in records_of(run):
                    rows += decode(one)
            found += rows
    return {row[5]: row for row in found}
