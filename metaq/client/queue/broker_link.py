"""One broker of a queue's topic: takes, renewals, and what this worker holds of it.

Theory of operation. One task per broker keeps a connection, over which takes are sent
one after the other, while there is room for half of the prefetch: the first by the
task, the next where the answer of the last or a settle leaves room. A broker holds a
take until it has messages. A message is held from the answer on until its settle is on
its way; as long as it is held its lease is renewed when a third of it is over.

    Invariant: over a new connection the first thing sent is an `extend` of everything
    that is held: so the broker knows that this worker is there, before the leases of
    the connection that was lost end.
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import Iterable, Sequence
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
"""Most bytes of one take; a broker gives no more."""
WAIT_S: Final = 10.0
"""Longest wait of a broker for messages, where it announces no less."""
UNANSWERED_MAX: Final = 10_000
"""Settles without an answer of a broker at which no more is taken from it."""
ANY_PARTITION: Final = -1
RENEWED_AT: Final = 2 / 3
"""Part of a lease that is left when it is renewed."""


class _Taking(enum.Enum):
    """State of the takes of a link."""

    IDLE = "idle"
    """None is on its way: there was no room, or no connection."""
    UNDER_WAY = "under way"
    """One is; or it failed, and the task has not seen that."""
    ENDED = "ended"
    """No more are sent."""


class BrokerLink:
    """The messages of one broker. Owner: the queue; on the loop.

    Lifecycle: `run` is a task of the queue. When it has ended, settles go on.
    """

    def __init__(self, broker_id: BrokerId, parts: QueueParts) -> None:
        """Begin with nothing."""
        self.broker_id = broker_id
        self._parts = parts
        self._context = parts.context
        self.held: set[HeldMessage] = set()
        self._held_bytes = 0
        self._unanswered_count = 0
        """Entries of settles without an answer of this broker."""
        self._kept_up_s = self._kept_up_before_s = 0.0
        """Monotonic times of the last two `keep_up`. What had come by the earlier one
        was read: the later one may be the first event after a stop of the process."""
        self._settlers: dict[int, PartitionSettler] = {}
        self._unsent: dict[PartitionSettler, None] = {}
        """Those that were given something since the last `flush`."""
        self._wake = asyncio.Event()
        self._connection: BrokerConnection | None = None
        self._taking = _Taking.IDLE
        self._failure: MetaqError | None = None
        """Of the last take, until the task has seen it."""
        self._failures = 0
        """Takes in a row that failed, or brought nothing too soon."""
        self._unknown = UnknownGroup(self._context.clock)
        self.last_error: MetaqError | None = None
        """Error of the last take; None after one that was answered."""
        self._renewal_error: MetaqError | None = None
        """Error of the last renewal that was refused; None after one that was not."""

    # -- taking -----------------------------------------------------------------------

    async def run(self) -> None:
        """Take messages until it is cancelled, or the broker refuses for good."""
        try:
            while True:
                self._wake.clear()
                try:
                    self._take(await self._connect())
                    # A take over a former connection may have failed in the pause.
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
                        self._wake.clear()  # a lost one is made again at once
                    await wait_set(self._wake, RECLAIM_BACKOFF.delay_s(self._failures))
        finally:
            self._taking = _Taking.ENDED

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
        """Look again: the cluster has changed, or there is room."""
        self._wake.set()

    def _is_final(self, error: MetaqError) -> bool:
        """Return whether no later try can end better."""
        if isinstance(error, NotDefinedError):
            return self._unknown.is_over(UNKNOWN_TO_TAKES_S)
        refusals = NoQueuesError | BadRequestError | ServerError
        return isinstance(error, refusals) and not error.retriable

    async def _connect(self) -> BrokerConnection:
        """Return the connection; a new one hears first what is held."""
        connection = await self._context.connect_leader(
            self.broker_id, self._context.deadline_s()
        )
        if connection is not self._connection:
            if not connection.capabilities.queues:
                raise NoQueuesError(
                    f"broker {self.broker_id} at {connection.address} has no queue"
                    f" groups: its version is {connection.capabilities.version}"
                )
            self._connection = connection
            connection.on_closed(lambda _reason: self.wake())
            self._extend(self.held)
            for settler in self._settlers.values():
                settler.flush()  # what could not be sent over the last one
        return connection

    def _open_connection(self) -> BrokerConnection | None:
        one = self._connection
        return one if one is not None and one.is_open else None

    def _has_room(self) -> bool:
        options = self._parts.options
        return (
            len(self.held) <= self._parts.held_max // 2
            and self._held_bytes <= options.prefetch_bytes // 2
            and self._unanswered_count < UNANSWERED_MAX
        )

    def _take(self, connection: BrokerConnection) -> None:
        """Take, unless a take is on its way, or there is no room."""
        if self._taking is not _Taking.IDLE or not self._has_room():
            return
        self._taking = _Taking.UNDER_WAY
        options, sent_s = self._parts.options, self._context.clock.monotonic_s()
        # After an error, ask for an answer at once: it shows that the error is over.
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
        """Hold what a take brought, and send the next."""
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
            # An empty answer that comes sooner than requested must not make this spin.
            self._failures += 1
            delay_s = RECLAIM_BACKOFF.delay_s(self._failures)
            asyncio.get_running_loop().call_later(delay_s, self.wake)

    def _on_failure(self, error: MetaqError) -> None:
        """Have the task see why a take failed."""
        self._failure = error
        self.wake()

    def _take_if_room(self) -> None:
        """Take over the connection, or have the task do so."""
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
        """Hold what a take brought that was sent then; return how much it was."""
        if not isinstance(reply, Value):
            require_ok(reply)
            raise UnexpectedReplyError("take: expected a value, got a result")
        taken = decode_taken(reply.payload)
        partition = TopicPartition(self._parts.topic, self.broker_id, taken.partition)
        rows = _rows_of(reply.payload, taken, partition)
        now_s = self._context.clock.monotonic_s()
        lease_s = taken.lease_ms / 1000
        # A process that was stopped finds here what others may have done by now.
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
        """Have the broker look whether its own bytes of a message are damaged.

        It mends them then, or stops there: such a message is not given up in silence.
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
        """Have entries sent by the next `flush`; those that end are held no more."""
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
        """Send what has gathered for each partition, and a take where there is room."""
        unsent, self._unsent = self._unsent, {}
        for settler in unsent:
            settler.flush_soon()
        if self._taking is _Taking.ENDED:
            for settler in self._settlers.values():
                settler.flush()  # a close does not wait for others
        self._take_if_room()

    def drop(self, held: HeldMessage) -> None:
        """Hold a message no more; there may be room for others."""
        if held in self.held:
            self.held.remove(held)
            self._held_bytes -= held.size_bytes
            self._take_if_room()

    def take_back(self, held: HeldMessage) -> None:
        """Hold a message again; its renewal says whether the broker still has it."""
        self.held.add(held)
        self._held_bytes += held.size_bytes
        self._extend([held])

    def give_back(self, held: HeldMessage, verb: SettleVerb) -> None:
        """Return a message by itself: nothing was, or will be said of it."""
        held.state = HeldState.SETTLED
        delay = GROUP_DELAY if verb is SettleVerb.NACK else 0
        self.settle([Settling(held, verb, delay)])

    def _on_settled(
        self, entries: Sequence[Settling], outcomes: Sequence[Word | MetaqError]
    ) -> None:
        """Note outcomes, and report each."""
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
                        future.exception()  # it need not be waited for
        for verb, errors in unheard.items():
            self._warn(verb, errors)
        self._unanswered_count -= count
        parts.unanswered_count -= count
        if not parts.unanswered_count:
            parts.all_answered.set()
        self._take_if_room()

    def _warn(self, verb: SettleVerb, errors: Sequence[MetaqError]) -> None:
        """Log what no caller hears of, and the first of renewals: they are repeated."""
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
        """Note an outcome; return what is wrong with it."""
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
            # Another delivery may have it after the first try, as was wanted.
            is_lost = False
        if isinstance(outcome, QueueGroupError):
            # There is nothing to renew or to begin; what is begun may be asked for.
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
        """End the take that waits: what is given back must not come to it."""
        self._taking = _Taking.ENDED
        connection = self._open_connection()
        if connection is not None:
            ask(
                connection,
                self._command(connection, 0, 1, 0.0),
                deadline_s=self._context.deadline_s(),
            )

    def give_up(self) -> None:
        """End every settle that is not answered."""
        for settler in self._settlers.values():
            settler.give_up()

    # -- renewing ---------------------------------------------------------------------

    def keep_up(self, now_s: float) -> None:
        """Renew leases that need it, end those that may not be renewed, and settles."""
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

    def _lets_go(self, held: HeldMessage, now_s: float) -> bool:
        """Return whether a message is not this worker's any more, or for too long."""
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
                "lease is not renewed any more: group=%s handle_s_max=%g: %s",
                parts.group,
                parts.options.handle_s_max,
                held,
            )
        return is_late

    def _extend(self, messages: Iterable[HeldMessage]) -> None:
        due = [held for held in messages if not held.is_renewing]
        if not due:
            return
        for held in due:
            held.is_renewing = True
        self.settle(
            [Settling(one, SettleVerb.EXTEND, int(one.lease_s * 1000)) for one in due]
        )
        self.flush()


def _count(counts: QueueStatistics, entry: Settling) -> None:
    match entry.verb:
        case SettleVerb.NACK | SettleVerb.RELEASE:
            counts.returned_count += 1
        case SettleVerb.REJECT:
            counts.rejected_count += 1
        case SettleVerb.EXTEND:
            entry.held.lease_end_s = entry.since_s + entry.argument / 1000


def lease_lost(held: HeldMessage) -> LeaseLostError:
    """Return the error of a message that is not its worker's any more."""
    return LeaseLostError(
        f"{held}: its lease is over, and another delivery has it: it may be handled"
        " twice"
    )


def _rows_of(
    payload: bytes, taken: TakenReply, partition: TopicPartition
) -> dict[Offset, Sequence[Any]]:
    """Return the fields of each message in the runs that is whole, by offset."""

    def decode(run: RecordRun) -> list[Sequence[Any]]:
        messages, _end = decode_messages(run.data, partition, run.offset)
        return list(zip(*messages.columns, strict=True))

    found = list[Sequence[Any]]()
    with contextlib.suppress(CorruptRecordError):  # what was read so far is good
        for run in decode_runs(payload, taken.records_at):
            rows = decode(run)
            if not rows or rows[-1][6] < run.offset + len(run.data):
                # What follows the damage may be good.
                for one in records_of(run):
                    rows += decode(one)
            found += rows
    return {row[5]: row for row in found}
