"""Settles of one partition: one request in flight, while later entries are queued.

Queued entries become the next request, for which the broker writes one record and syncs
once. Acks that no caller awaits are queued for some milliseconds in any case. A request
with an unknown outcome is sent again, over a new connection if needed, until the
deadline of each entry. A broker replies `done` for a message that was done before, so
an ack sent twice counts once.
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
"""Maximum number of entries of one request: a broker handles them without a break."""
GATHERS_BYTES: Final = 2048
"""Bytes of requests, about ten workers' worth, that are sent before the end of a loop
iteration: the broker handles them while the others are being made."""
LATER_S: Final = 0.02
"""Acks that no caller awaits are sent at multiples of this time, together for all
workers of a loop. Otherwise puts would wait for more syncs of acks at the broker."""
RECLAIM_BACKOFF: Final = Backoff(first_s=0.1, max_s=0.5)
"""Pauses after errors. They are short, so that a worker returns within the broker's
queueReclaimMs (2 s), after which its messages go to others."""
UNKNOWN_TO_TAKES_S: Final = 10.0
UNKNOWN_TO_SETTLES_S: Final = 2.0
"""Seconds for which a broker may report the group as unknown before that is believed.
For takes they are long, because a broker may learn late of a new group. For settles
they are short: a broker that delivered a message knew the group, unless the leader
changed; and `close`, which waits for settles, must not wait long for a deleted group.
"""
GRACE_S: Final = 5.0
"""Seconds after the end of its lease for which a settle is retried: a broker accepts a
late ack while no other worker has the message."""


class SettledTogether:
    """Settles for which one call waits; replaces their futures. On the loop."""

    def __init__(self, count: int) -> None:
        """Wait for `count` settles, 1 or more."""
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when every settle has an outcome."""
        self.errors: list[BaseException] = []
        """Errors of failed settles."""
        self._left = count

    def done(self) -> bool:
        """Return whether all have an outcome, or the caller no longer waits."""
        return self.future.done()

    def set_result(self, _result: None) -> None:
        """Count one success."""
        self._left -= 1
        if not self._left:
            finish(self.future, None)

    def set_exception(self, error: BaseException) -> None:
        """Count one failure."""
        self.errors.append(error)
        self.set_result(None)


@dataclass(slots=True, eq=False)
class Settling:
    """One settle or extend of a message."""

    held: HeldMessage
    verb: SettleVerb
    argument: int = 0
    text: str = ""
    future: asyncio.Future[None] | Future[None] | SettledTogether | None = None
    """Future of its caller, of either kind; None if there is no caller."""
    is_awaited: bool = True
    """Whether the caller awaits the future, so that errors are not logged."""
    since_s: float = 0.0
    """Monotonic time at which the link of its broker got it."""
    is_in_doubt: bool = False
    """Whether it was sent, and the outcome is unknown."""

    @property
    def may_wait(self) -> bool:
        """Whether it is an ack that no caller awaits."""
        is_awaited = self.future is not None and self.is_awaited
        return self.verb is SettleVerb.ACK and not is_awaited

    @property
    def deadline_s(self) -> float:
        """Monotonic time after which it is not sent again."""
        return max(self.held.lease_end_s, self.since_s) + GRACE_S


class UnknownGroup:
    """Time for which a broker has not known the group. Owner: the link to it."""

    def __init__(self, clock: Clock) -> None:
        """Start with a known group."""
        self._clock = clock
        self._since_s: float | None = None

    def is_over(self, bound_s: float) -> bool:
        """Record that the group is unknown; return whether so for `bound_s` or more."""
        now_s = self._clock.monotonic_s()
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= bound_s

    def clear(self) -> None:
        """Record that the group is known."""
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
    """Send a command, and have its reply or error handled by callbacks.

    `on_error` also gets a MetaqError that `on_reply` raises. The reply is handled even
    if the caller is cancelled, because delivered messages must be returned.
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
        # Sent together with commands of other workers, and a settle with the next take.
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
    """Partition of all entries."""
    _connection: Callable[[], BrokerConnection | None]
    """Returns the open connection to the broker, if there is one."""
    _on_settled: OnSettled
    """Called with entries, and the broker's word or an error for each."""
    _unknown: UnknownGroup
    """Shared by all settlers of the link to the broker."""
    _pending: list[Settling] = field(default_factory=list)
    _sent: list[Settling] = field(default_factory=list)
    _failures: int = 0
    _is_urgent: bool = False
    """Whether the next `flush_soon` sends the pending entries at once."""
    _is_due_later: bool = False
    """Whether a `flush` is scheduled within LATER_S."""

    def add(self, entry: Settling) -> None:
        """Append an entry for the next `flush`."""
        self._pending.append(entry)
        # In an ordered group, the next message of a key waits for this settle.
        if not entry.may_wait or self._parts.is_ordered:
            self._is_urgent = True

    def flush_soon(self) -> None:
        """Send pending entries: now, or within LATER_S if no caller awaits one."""
        if self._is_urgent:
            self.flush()
        elif self._pending and not self._is_due_later:
            self._is_due_later, loop = True, asyncio.get_running_loop()
            loop.call_at((loop.time() // LATER_S + 1) * LATER_S, self._flush_later)

    def _flush_later(self) -> None:
        self._is_due_later = False
        self.flush()

    def flush(self) -> None:
        """Send pending entries, unless a request is in flight or no connection open."""
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
        """Fail pending entries past their deadline."""
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
        """Fail all entries, including those in flight; more may be added later."""
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
        """Queue the entries of a failed request again, or fail them for good."""
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
