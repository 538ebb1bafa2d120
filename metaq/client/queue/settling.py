"""Settles of one partition: one request is in flight, and the others gather.

What gathers is the next request: the broker writes one record for it, and syncs once.
Acks that no one waits for gather for some milliseconds in any case.
A request without a known outcome is sent again, over the next connection if need be,
until the deadline of each of its entries. A broker says `done` of what it did before,
so an entry that is sent twice counts once.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from metaq.client.errors import OutcomeUnknownError, group_gone
from metaq.client.queue.prefetch import HeldMessage, QueueParts
from metaq.client.timeouts import finish
from metaq.clock import Clock
from metaq.errors import (
    ClosedError,
    MetaqError,
    NotDefinedError,
    NotSentError,
    RemoteProtocolError,
    RequestTimeoutError,
    UnknownPutError,
)
from metaq.model import TopicPartition
from metaq.peer.connection import BrokerConnection, ignore
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Check, Reply, Settle, Take
from metaq.protocol.encoding import encode
from metaq.protocol.queue_frames import (
    SettleVerb,
    Word,
    decode_words,
    encode_settlements,
)
from metaq.retry import Backoff

ENTRIES_MAX: Final = 1_000
"""Most entries of one request: a broker looks at them in one turn."""
GATHERS_BYTES: Final = 2048
"""Bytes of requests that leave together, of some ten workers: the broker begins with
them while the others have theirs made."""
LATER_S: Final = 0.02
"""Acks that no one waits for leave at multiples of this: those of all workers of a loop
together. A put that comes while the broker syncs an ack waits for that sync."""
RECLAIM_BACKOFF: Final = Backoff(first_s=0.1, max_s=0.5)
"""Pauses after errors: a worker is back before the broker's queueReclaimMs (2 s) are
over, after which its messages are given to others."""
UNKNOWN_TO_TAKES_S: Final = 10.0
UNKNOWN_TO_SETTLES_S: Final = 2.0
"""A broker may not have heard of a group for so long. One that hears late of a new
group must not end its workers. One that gave a message knew the group, but for a new
leader; and the end of a block, which waits for its settles, must not wait long for a
group that was deleted."""
GRACE_S: Final = 5.0
"""A settle is tried until its lease is over, and so long after it: a late ack is taken
while no other worker has the message."""


class SettledTogether:
    """Messages that one call waits for. On the loop."""

    def __init__(self, count: int) -> None:
        """Wait for so many, 1 or more."""
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when all of them have an outcome."""
        self.errors: list[BaseException] = []
        """Of those that were not settled."""
        self._left = count

    def done(self) -> bool:
        """Return whether it is waited for no more."""
        return self.future.done()

    def set_result(self, _result: None) -> None:
        """Count one that is settled."""
        self._left -= 1
        if not self._left:
            finish(self.future, None)

    def set_exception(self, error: BaseException) -> None:
        """Count one that is not."""
        self.errors.append(error)
        self.set_result(None)


@dataclass(slots=True, eq=False)
class Settling:
    """One message, and what is said about it."""

    held: HeldMessage
    verb: SettleVerb
    argument: int = 0
    text: str = ""
    future: asyncio.Future[None] | Future[None] | SettledTogether | None = None
    """Of who waits for it, in either world; None: no one."""
    is_awaited: bool = True
    """With a future: its error reaches the caller, and is not logged."""
    since_s: float = 0.0
    """Monotonic; when it came to the link of its broker."""
    is_in_doubt: bool = False
    """It was sent, and no answer came."""

    @property
    def may_wait(self) -> bool:
        """Return whether it is an ack that its caller does not wait for."""
        is_awaited = self.future is not None and self.is_awaited
        return self.verb is SettleVerb.ACK and not is_awaited

    @property
    def deadline_s(self) -> float:
        """Monotonic; from then on it is not tried any more."""
        return max(self.held.lease_end_s, self.since_s) + GRACE_S


class UnknownGroup:
    """For how long one broker has not known the group. Owner: the link to it."""

    def __init__(self, clock: Clock) -> None:
        """Begin with a broker that does."""
        self._clock = clock
        self._since_s: float | None = None

    def is_over(self, bound_s: float) -> bool:
        """Note that the broker does not know it; return whether that is so for long."""
        now_s = self._clock.monotonic_s()
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= bound_s

    def clear(self) -> None:
        """Note that it does."""
        self._since_s = None


OnSettled = Callable[[Sequence[Settling], Sequence[Word | MetaqError]], None]


def ask(
    connection: BrokerConnection,
    command: Take | Settle | Check,
    *,
    deadline_s: float,
    on_reply: Callable[[Reply], None] = ignore,
    on_error: Callable[[MetaqError], None] = ignore,
) -> None:
    """Send a command; its reply is handled, or an error, that of `on_reply` as well.

    Also when its sender was cancelled: what a broker gives has to be given back.
    """

    def receive(reply: Reply | MetaqError) -> None:
        try:
            if isinstance(reply, MetaqError):
                raise reply
            on_reply(reply)
        except MetaqError as error:
            if isinstance(error, RemoteProtocolError):
                connection.close_for(error)
            on_error(error)

    frame = encode(command)
    try:
        # It may leave with those of other workers, and a settle with the next take.
        connection.submit(
            frame,
            command.opaque,
            receive,
            deadline_s=deadline_s,
            gathers_bytes=GATHERS_BYTES,
        )
    except MetaqError as error:
        on_error(error)


@dataclass(slots=True, eq=False)
class PartitionSettler:
    """The settles of one partition. Owner: the link to its broker; on the loop."""

    _parts: QueueParts
    partition: TopicPartition
    """Of all messages."""
    _connection: Callable[[], BrokerConnection | None]
    """Returns the open connection to the broker, if there is one."""
    _on_settled: OnSettled
    """Called with entries, and the broker's word or an error for each."""
    _unknown: UnknownGroup
    """Of the link to the broker."""
    _pending: list[Settling] = field(default_factory=list)
    _sent: list[Settling] = field(default_factory=list)
    _failures: int = 0
    _is_urgent: bool = False
    """Entries that wait here leave with the next `flush_soon`."""
    _is_due_later: bool = False
    """A `flush` comes within LATER_S."""

    def add(self, entry: Settling) -> None:
        """Have an entry sent by the next `flush`, after all others."""
        self._pending.append(entry)
        # In order, the next message of a key waits for the settle of the last.
        if not entry.may_wait or self._parts.is_ordered:
            self._is_urgent = True

    def flush_soon(self) -> None:
        """Send what has gathered: now, or within LATER_S if no one waits for it."""
        if self._is_urgent:
            self.flush()
        elif self._pending and not self._is_due_later:
            self._is_due_later, loop = True, asyncio.get_running_loop()
            loop.call_at((loop.time() // LATER_S + 1) * LATER_S, self._flush_later)

    def _flush_later(self) -> None:
        self._is_due_later = False
        self.flush()

    def flush(self) -> None:
        """Send what has gathered, unless a request is in flight, or there is no way."""
        connection = self._connection()
        if self._sent or not self._pending or connection is None:
            return
        sent = self._sent = self._pending[:ENTRIES_MAX]
        self._pending = self._pending[ENTRIES_MAX:]
        self._is_urgent = bool(self._pending)
        entries = [
            (one.held.offset, one.held.delivery, one.verb, one.argument, one.text)
            for one in sent
        ]
        command = Settle(
            self.partition.topic,
            self._parts.group,
            self.partition.partition,
            len(entries),
            encode_settlements(entries),
            connection.next_opaque(),
            self._parts.worker,
            generation=self._parts.generation,
        )
        ask(
            connection,
            command,
            on_reply=lambda reply: self._on_reply(reply, sent),
            on_error=lambda error: self._on_error(error, sent),
            deadline_s=self._parts.context.deadline_s(),
        )

    def expire(self, now_s: float) -> None:
        """End the entries that wait, and whose time is over."""
        late = [one for one in self._pending if one.deadline_s <= now_s]
        self._pending = [one for one in self._pending if one.deadline_s > now_s]
        errors = list[MetaqError]()
        for one in late:
            what = f"{one.held}: its {one.verb.name.lower()}"
            error: MetaqError = NotSentError(
                f"{what} could not be sent in time to broker {self.partition.broker_id}"
            )
            if one.is_in_doubt:
                error = OutcomeUnknownError(f"{what} was not answered in time")
            errors.append(error)
        self._on_settled(late, errors)

    def give_up(self) -> None:
        """End all entries, also those in flight; later ones may be added."""
        for one in self._sent:
            one.is_in_doubt = True
        self._pending, self._sent = [*self._sent, *self._pending], []
        self.expire(math.inf)

    def _on_reply(self, reply: Reply, sent: list[Settling]) -> None:
        if sent is not self._sent:
            return  # given up
        words = decode_words(require_ok(reply).text, len(sent))
        self._failures, self._sent = 0, []
        self._unknown.clear()
        self._on_settled(sent, words)
        self.flush_soon()

    def _on_error(self, error: MetaqError, sent: list[Settling]) -> None:
        """Send them again, unless the broker refuses for good."""
        if sent is not self._sent:
            return  # given up
        self._sent = []
        if isinstance(error, NotDefinedError) and self._unknown.is_over(
            UNKNOWN_TO_SETTLES_S
        ):
            error = group_gone(self._parts.group, self.partition.broker_id)
        in_doubt = RequestTimeoutError | RemoteProtocolError | UnknownPutError
        if error.retriable or isinstance(error, ClosedError | in_doubt):
            self._failures += 1
            if isinstance(error, in_doubt):
                for one in sent:
                    one.is_in_doubt = True
            self._pending, self._is_urgent = [*sent, *self._pending], True
            delay_s = RECLAIM_BACKOFF.delay_s(self._failures)
            asyncio.get_running_loop().call_later(delay_s, self.flush)
            return
        self._on_settled(sent, [error] * len(sent))
        self.flush()
