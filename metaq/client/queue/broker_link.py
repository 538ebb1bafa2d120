"""One broker of a queue's topic: takes, renewals, and what this worker holds of it.

Theory of operation. One task per broker keeps a connection and sends takes, one after
the other, while there is room for half of the prefetch. A broker holds a take until it
has messages. A message is held from the answer on until its settle is on its way; as
long as it is held its lease is renewed when a third of it is over.

    Invariant: over a new connection the first thing sent is an `extend` of everything
    that is held: so the broker knows that this worker is there, before the leases of
    the connection that was lost end.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from metaq.client.cluster.context import ClientContext
from metaq.client.consume.decode import FetchedMessages, decode_messages
from metaq.client.consume.fetcher import GET_SLACK_S
from metaq.client.errors import NoQueuesError
from metaq.client.options import QueueOptions
from metaq.client.queue.prefetch import HeldMessage, HeldState
from metaq.client.queue.settling import (
    RECLAIM_BACKOFF,
    OnSettled,
    PartitionSettler,
    Settling,
)
from metaq.errors import (
    BadRequestError,
    ClosedError,
    CorruptRecordError,
    MetaqError,
    NoBrokerError,
    NotDefinedError,
    RemoteProtocolError,
    ServerError,
    UnexpectedReplyError,
)
from metaq.model import BrokerId, Offset, TopicPartition
from metaq.peer.connection import BrokerConnection
from metaq.peer.replies import require_ok
from metaq.protocol.codec import encode
from metaq.protocol.commands import Reply, Take, Value
from metaq.protocol.queue_frames import (
    GROUP_DELAY,
    SettleVerb,
    TakenReply,
    decode_taken,
)
from metaq.record.runs import decode_runs, records_of
from metaq.retry import wait_set

_log = logging.getLogger(__name__)

TAKE_COUNT_MAX: Final = 1_000
"""Most messages of one take."""
TAKE_BYTES_MAX: Final = 1024 * 1024
UNANSWERED_MAX: Final = 10_000
"""Settles without an answer at which no more is taken."""
NOT_DEFINED_S: Final = 10.0
"""A broker may not have heard of a new group for so long."""
ANY_PARTITION: Final = -1
RENEWED_AT: Final = 2 / 3
"""Part of a lease that is left when it is renewed."""


@dataclass(frozen=True, slots=True)
class QueueParts:
    """Parts that the links of one queue share."""

    context: ClientContext
    topic: str
    group: str
    worker: str
    options: QueueOptions
    on_taken: Callable[[Sequence[HeldMessage]], bool]
    """Takes messages in order; False: the queue is closed, and has none of them."""
    on_damage: Callable[[HeldMessage], None]
    """Called with a message that cannot be read; it is returned already."""
    gives_up: Callable[[HeldMessage, bool], bool]
    """Called with a message whose lease needs renewal, and whether it is here for
    `handle_s_max`; returns whether it is given up."""
    on_settled: OnSettled
    on_fatal: Callable[[MetaqError], None]
    """Called once, with the reason why no message will ever come from a broker."""


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
        self.prefetch = parts.options.prefetch
        self.unanswered_count = 0
        """Entries of settles without an answer."""
        self._held_bytes = 0
        self._kept_up_s = self._kept_up_before_s = 0.0
        """Monotonic times of the last two `keep_up`. What had come by the earlier one
        was read: the later one may be the first event after a stop of the process."""
        self._settlers: dict[int, PartitionSettler] = {}
        self._wake = asyncio.Event()
        self._connection: BrokerConnection | None = None
        self._undefined_since_s: float | None = None
        self.last_error: MetaqError | None = None
        """Error of the last take; None after one that was answered."""

    # -- taking -----------------------------------------------------------------------

    async def run(self) -> None:
        """Take messages until it is cancelled, or the broker refuses for good."""
        failures = 0
        while True:
            self._wake.clear()
            try:
                connection = await self._connect()
                if not self._has_room():
                    await self._wake.wait()
                    continue
                pause_s = await self._take(connection)
                self.last_error = self._undefined_since_s = None
                failures = failures + 1 if pause_s else 0
            except MetaqError as error:
                if self._is_final(error):
                    self._parts.on_fatal(error)
                    return
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
                self._context.metadata.request_refresh()
                failures += 1
            if failures:
                await wait_set(self._wake, RECLAIM_BACKOFF.delay_s(failures))

    def wake(self) -> None:
        """Look again: the cluster has changed, or there is room."""
        self._wake.set()

    def _is_final(self, error: MetaqError) -> bool:
        """Return whether no later try can end better."""
        if isinstance(error, NotDefinedError):
            now_s = self._context.clock.monotonic_s()
            since_s = self._undefined_since_s = self._undefined_since_s or now_s
            return now_s - since_s >= NOT_DEFINED_S
        if isinstance(error, NoQueuesError):
            return True
        refuses = isinstance(error, BadRequestError | ServerError)
        return refuses and not error.retriable

    async def _connect(self) -> BrokerConnection:
        """Return the connection; a new one hears first what is held."""
        copies = self._context.metadata.snapshot.brokers.get(self.broker_id)
        if copies is None or copies.leader is None:
            raise NoBrokerError(f"broker {self.broker_id} is not there")
        connection = await self._context.pool.get(
            copies.leader, deadline_s=self._context.deadline_s()
        )
        if connection is not self._connection:
            if not connection.capabilities.queues:
                raise NoQueuesError(
                    f"broker {self.broker_id} at {copies.leader} has no queue groups:"
                    f" its version is {connection.capabilities.version}"
                )
            self._connection = connection
            connection.on_closed(lambda _reason: self.wake())
            self._extend(self.held, self._context.clock.monotonic_s())
        return connection

    def _open_connection(self) -> BrokerConnection | None:
        one = self._connection
        return one if one is not None and one.is_open else None

    def _has_room(self) -> bool:
        options = self._parts.options
        return (
            len(self.held) <= self.prefetch // 2
            and self._held_bytes <= options.prefetch_bytes // 2
            and self.unanswered_count < UNANSWERED_MAX
        )

    async def _take(self, connection: BrokerConnection) -> float:
        """Take once; return the pause after it, 0 for none."""
        options, parts = self._parts.options, self._parts
        clock = self._context.clock
        announced_s = connection.capabilities.wait_ms_max / 1000
        # After an error, ask for an answer at once: it shows that the error is over.
        wait_s = min(options.wait_s, announced_s) if self.last_error is None else 0.0
        command = Take(
            parts.topic,
            parts.group,
            ANY_PARTITION,
            min(self.prefetch - len(self.held), TAKE_COUNT_MAX),
            min(max(1, options.prefetch_bytes - self._held_bytes), TAKE_BYTES_MAX),
            connection.next_opaque(),
            parts.worker,
            wait_ms=int(wait_s * 1000),
        )
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def receive(reply: Reply | MetaqError) -> None:
            # Also when `run` was cancelled: what the broker gave is given back.
            try:
                if isinstance(reply, MetaqError):
                    raise reply
                count = self._on_reply(reply, sent_s)
            except MetaqError as error:
                if isinstance(error, RemoteProtocolError):
                    connection.close_for(error)
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(count)

        sent_s = clock.monotonic_s()
        connection.submit(
            encode(command),
            command.opaque,
            receive,
            deadline_s=self._context.deadline_s() + wait_s + GET_SLACK_S,
            is_alone=True,
        )
        count = await answer
        is_early = clock.monotonic_s() - sent_s < wait_s / 2 or not wait_s
        # An empty answer that comes sooner than requested must not make this spin.
        return float(not count and is_early and self.last_error is None)

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
            row = rows.get(offset)
            held = HeldMessage(
                row or (),
                partition,
                offset,
                delivery,
                deliveries,
                lease_s,
                given_s + lease_s,
                now_s,
            )
            if row is None:
                self._settle_unheld(held, SettleVerb.NACK, GROUP_DELAY)
                self._parts.on_damage(held)
                continue
            held.size_bytes = row[6] - offset
            good.append(held)
        if self._parts.on_taken(good):
            self.held.update(good)
            self._held_bytes += sum(one.size_bytes for one in good)
        else:
            for held in good:
                self._settle_unheld(held, SettleVerb.RELEASE)
        self.flush()
        return len(taken.deliveries)

    # -- settling ---------------------------------------------------------------------

    def settle(self, entry: Settling) -> None:
        """Have an entry sent by the next `flush`; one that ends is held no more."""
        number = entry.held.partition.partition
        settler = self._settlers.get(number)
        if settler is None:
            settler = self._settlers[number] = PartitionSettler(
                self._context,
                entry.held.partition,
                group=self._parts.group,
                worker=self._parts.worker,
                connection=self._open_connection,
                on_settled=self._on_settled,
            )
        if entry.verb is not SettleVerb.EXTEND:
            self.drop(entry.held)
        self.unanswered_count += 1
        settler.add(entry)

    def flush(self) -> None:
        """Send what has gathered for each partition."""
        for settler in self._settlers.values():
            settler.flush()

    def drop(self, held: HeldMessage) -> None:
        """Hold a message no more; there may be room for others."""
        if held in self.held:
            self.held.remove(held)
            self._held_bytes -= held.size_bytes
            if self._has_room():
                self.wake()

    def take_back(self, held: HeldMessage) -> None:
        """Hold a message again; its renewal says whether the broker still has it."""
        self.held.add(held)
        self._held_bytes += held.size_bytes
        self._extend([held], self._context.clock.monotonic_s())

    def _settle_unheld(
        self, held: HeldMessage, verb: SettleVerb, argument: int = 0
    ) -> None:
        held.state = HeldState.SETTLED
        self.settle(Settling(held, verb, held.since_s, argument))

    def _on_settled(self, entry: Settling, outcome: Any) -> None:
        self.unanswered_count -= 1
        self._parts.on_settled(entry, outcome)
        if self._has_room():
            self.wake()

    def stop_taking(self) -> None:
        """End the take that waits: what is given back must not come to it."""
        connection = self._open_connection()
        if connection is None:
            return
        opaque = connection.next_opaque()
        parts = self._parts
        command = Take(
            parts.topic, parts.group, ANY_PARTITION, 0, 1, opaque, parts.worker
        )
        with contextlib.suppress(ClosedError):
            connection.submit(
                encode(command),
                opaque,
                lambda _reply: None,
                deadline_s=self._context.deadline_s(),
                is_alone=True,
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
            is_late = now_s - held.since_s >= self._parts.options.handle_s_max
            if self._parts.gives_up(held, is_late):
                self.drop(held)
            else:
                due.append(held)
        self._extend(due, now_s)

    def _extend(self, messages: Iterable[HeldMessage], now_s: float) -> None:
        for held in messages:
            if not held.is_renewing:
                held.is_renewing = True
                argument = int(held.lease_s * 1000)
                self.settle(Settling(held, SettleVerb.EXTEND, now_s, argument))
        self.flush()


def _rows_of(
    payload: bytes, taken: TakenReply, partition: TopicPartition
) -> dict[Offset, Sequence[Any]]:
    """Return the fields of each message in the runs that is whole, by offset."""
    rows = dict[Offset, Sequence[Any]]()
    try:
        for run in decode_runs(payload, taken.records_at):
            messages, _end = decode_messages(run.data, partition, run.offset)
            if not len(messages) or messages[-1].next_offset < run.offset + len(
                run.data
            ):
                # What follows the damage may be good.
                for one in records_of(run):
                    messages, _end = decode_messages(one.data, partition, one.offset)
                    rows |= _by_offset(messages)
            else:
                rows |= _by_offset(messages)
    except CorruptRecordError:
        pass  # what was read so far is good
    return rows


def _by_offset(messages: FetchedMessages) -> dict[Offset, Sequence[Any]]:
    return {row[5]: row for row in zip(*messages.columns, strict=True)}
