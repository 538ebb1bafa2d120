"""One transaction at one broker: its commands, and its puts in flight together.

    BEGIN ── first put ── puts, many in flight ── prepare, commit or rollback

Messages for one partition are one `mput` if the broker announced support for it in
transactions, and single puts otherwise. A MetaQ 1.4 broker writes the transaction to
its journal with the first put, and handles concurrent commands in several threads. So
other puts wait for the reply to the first one, and the end waits for all replies.

Source: docs/metaq-1.4/client.md 9.1; docs/metaq-1.4/broker.md 5.1 to 5.4;
docs/protocol.md "mput".
"""

import asyncio
import contextlib
import datetime as dt
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from metaq.client.errors import MessageTooLargeError, TransactionRolledBackError
from metaq.client.options import ProducerOptions
from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.attempts import (
    NEVER_LEFT,
    REFUSALS,
    BatchSpan,
    for_one_time,
    no_delay,
    plan_spans,
)
from metaq.client.produce.awaited_calls import AwaitedCalls, to_be_awaited
from metaq.client.produce.batches import encode_records, ends_of
from metaq.client.produce.broker_starts import BrokerStarts
from metaq.client.produce.partition_sender import ANSWER_GRACE_S
from metaq.client.produce.producer_counters import ClientTransactionCounters
from metaq.client.produce.routes import Routes
from metaq.client.produce.runs import (
    encode_outgoing,
    frozen,
    list_outgoing,
    tagged,
    with_common,
)
from metaq.client.produce.scheduling import Span, due_of, with_expiry
from metaq.client.produce.transaction_replies import (
    parse_pending,
    parse_vote,
    require_done,
)
from metaq.client.validation import check_seconds, check_timeout
from metaq.clock import Clock
from metaq.errors import (
    ClosedError,
    MetaqError,
    NoBrokerError,
    RemoteProtocolError,
    RequestTimeoutError,
    TransactionError,
)
from metaq.model import (
    BrokerAddress,
    BrokerId,
    MessageId,
    Millis,
    Offset,
    TopicPartition,
    TransactionId,
    XaTransactionId,
)
from metaq.peer.connection import BrokerConnection
from metaq.peer.pool import ConnectionPool
from metaq.peer.replies import ReceiptColumns
from metaq.protocol.commands import (
    Mput,
    Reply,
    Settle,
    TransactionCommand,
    TransactionType,
)
from metaq.protocol.encoding import encode, encode_puts
from metaq.protocol.queue_frames import (
    Settlement,
    SettleVerb,
    Word,
    decode_words,
    encode_settlements,
)
from metaq.protocol.version import Capabilities
from metaq.record.checksum import BytesLike, checksum, checksums
from metaq.record.flags import Headers
from metaq.record.ids import id_after
from metaq.record.layout import PAYLOAD_BYTES_MAX

CERTAIN: Final = (*NEVER_LEFT, *REFUSALS, TransactionRolledBackError)
"""Errors of a commit that certainly was not and will not be carried out."""

LOOK_S: Final = 0.1
"""Seconds between looks for the broker of a first message while it is away."""


class PendingResult(NamedTuple):
    """A message in a transaction, stored only with all its other messages."""

    message_id: MessageId
    """Id that the broker stamped."""
    partition: TopicPartition
    """Partition of the message. It has no offset before the commit."""


class HeldDelivery(Protocol):
    """A message that a queue has handed out, as a transaction sees it."""

    partition: TopicPartition
    offset: Offset
    delivery: int


class QueueWorker(Protocol):
    """A worker of a queue group, as a transaction sees it."""

    group: str
    worker: str
    generation: int | None


class PlacedMessage(NamedTuple):
    """A message whose partition is chosen."""

    partition: TopicPartition
    payload: bytes
    """Attribute block, if the flag says so, and application bytes."""
    flag: int
    deliver_ms: Millis | None = None
    """Delivery time, ms since 1970; None for the commit."""


@dataclass(frozen=True, slots=True)
class BranchParts:
    """Parts that branches share to reach their brokers."""

    address_of: Callable[[BrokerId], BrokerAddress | None]
    """Returns the address at which a broker takes puts; None while it is away."""
    pool: ConnectionPool
    clock: Clock
    session_id: str
    """Identifies the client to brokers in every command; without ':' and space."""
    starts: BrokerStarts

    async def connect(
        self, broker_id: BrokerId, *, deadline_s: float
    ) -> BrokerConnection:
        """Return a connection to a broker, after waiting for its recovery.

        Raises:
            NoBrokerError: the broker is away, cannot be reached, or may not recover
                before the deadline.
            ClosedError: the client is closed.
            MetaqError: its start time cannot be read.
        """
        where = f"broker {broker_id}"
        while True:
            address = self.address_of(broker_id)
            if address is None:
                raise NoBrokerError(f"{where} is not registered")
            connection = await self.pool.get(address, deadline_s=deadline_s)
            wait_s = await self.starts.ask(connection, where, deadline_s=deadline_s)
            if not wait_s:
                return connection
            left_s = max(0.0, deadline_s - self.clock.monotonic_s())
            await asyncio.sleep(min(wait_s, left_s))
            if left_s < wait_s:
                raise NoBrokerError(
                    f"{where} has just started, and may not have recovered yet: a"
                    " MetaQ 1.4 broker rolls back transactions begun before that;"
                    f" expected at least {wait_s:.3g} s to wait for it, got"
                    f" {left_s:.3g} s"
                )

    async def wait_connect(
        self, broker_id: BrokerId, *, deadline_s: float
    ) -> BrokerConnection:
        """As `connect`, but also wait for a broker that is away, as a send does."""
        while (now_s := self.clock.monotonic_s()) < deadline_s:
            until_s = min(deadline_s, now_s + LOOK_S)
            # In each round, because the broker may return at another address.
            address = self.address_of(broker_id)
            if address is None:
                self.pool.require_open()
                await asyncio.sleep(until_s - now_s)
                continue
            with contextlib.suppress(NoBrokerError):
                await self.pool.get(address, deadline_s=until_s)
                break
        return await self.connect(broker_id, deadline_s=deadline_s)

    async def call(
        self,
        connection: BrokerConnection,
        transaction: TransactionId,
        kind: TransactionType,
        *,
        deadline_s: float,
        lifetime_s: int = 0,
        qualifier: str | None = None,
    ) -> Reply:
        """Send a transaction command; return its reply.

        Raises:
            MetaqError: as `BrokerConnection.call`.
        """
        opaque = connection.next_opaque()
        command = TransactionCommand(
            transaction, self.session_id, kind, opaque, lifetime_s, qualifier
        )
        return await connection.call(command, deadline_s=deadline_s)

    async def send(
        self,
        broker_id: BrokerId,
        transaction: TransactionId,
        kind: TransactionType,
        deadline_s: float,
        qualifier: str | None = None,
    ) -> tuple[BrokerConnection, Reply]:
        """Send a command over any connection to a broker; return that and the reply.

        Raises:
            MetaqError: as `connect` and `call`.
        """
        connection = await self.connect(broker_id, deadline_s=deadline_s)
        reply = await self.call(
            connection, transaction, kind, deadline_s=deadline_s, qualifier=qualifier
        )
        return connection, reply

    async def vote(
        self, broker_id: BrokerId, xid: XaTransactionId, *, deadline_s: float
    ) -> bool:
        """Prepare a branch at a broker; return whether it has work to commit.

        Raises:
            MetaqError: as `parse_vote`, and as `send`.
        """
        _, reply = await self.send(broker_id, xid, TransactionType.PREPARE, deadline_s)
        return parse_vote(reply, f"broker {broker_id}")

    async def roll_back(
        self, broker_id: BrokerId, xid: XaTransactionId, *, deadline_s: float
    ) -> None:
        """Roll a branch back; raises as `require_done`, and as `send`."""
        _, reply = await self.send(broker_id, xid, TransactionType.ROLLBACK, deadline_s)
        require_done(reply, f"broker {broker_id}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionParts(BranchParts):
    """Parts that the transactions of one producer share."""

    prepare: Callable[[str, float], Awaitable[None]]
    """Waits until a topic's partitions are known, or raises at the deadline given."""
    routes: Routes
    options: ProducerOptions
    """`timeout_s` and `transaction_timeout_s`."""
    counters: ClientTransactionCounters

    def deadline_s(self, timeout: float | None) -> float:
        """Return the monotonic time `timeout` seconds from now; None is `timeout_s`.

        Raises:
            ConfigError, TypeError: `timeout` is invalid.
        """
        check_timeout(timeout)
        timeout_s = self.options.timeout_s if timeout is None else timeout
        return self.clock.monotonic_s() + timeout_s

    def lifetime_s(self, timeout: float | None) -> int:
        """Return the lifetime sent to a broker, in whole seconds; None is the option.

        Raises:
            ConfigError, TypeError: `timeout` is invalid, or 0, with which a MetaQ 1.4
                broker would keep abandoned transactions without a limit.
        """
        if timeout is None:
            timeout = self.options.transaction_timeout_s
        check_seconds("timeout", timeout, may_be_zero=False)
        return math.ceil(timeout)

    async def place(
        self,
        topic: str,
        messages: Sequence[OutgoingMessage],
        broker_id: BrokerId | None,
        *,
        deadline_s: float,
        is_bound: bool,
        has_local_keys: bool = False,
        deliver_ms: Millis | None = None,
    ) -> list[PlacedMessage]:
        """Choose the partition of each message.

        Args:
            topic: of all messages.
            messages: at least one.
            broker_id: broker to which the transaction is bound; None if not bound.
            deadline_s: deadline for finding a new topic.
            is_bound: whether all messages must go to the broker of the first one.
            has_local_keys: whether keys choose among the partitions of that broker.
            deliver_ms: delivery time of all messages; None for the commit.

        Raises:
            TransactionError: the broker has no partition of the topic, or not that of
                a key.
            As `AsyncProducer.send`, as far as detected before sending.
        """
        await self.prepare(topic, deadline_s)
        placed = []
        for message in messages:
            payload, flag = encode_outgoing(message)
            partition = self.routes.choose(
                topic, message, broker_id, has_local_keys=has_local_keys
            )
            if partition is None or broker_id not in {None, partition.broker_id}:
                raise _misplaced(topic, message, broker_id, partition)
            if is_bound:
                broker_id = partition.broker_id
            placed.append(PlacedMessage(partition, payload, flag, deliver_ms))
        return placed


class TransactionSends(AwaitedCalls):
    """Methods that add messages; base class of both kinds of transaction."""

    _parts: TransactionParts

    @to_be_awaited
    async def send(
        self,
        topic: str,
        data: BytesLike,
        *,
        attribute: str | None = None,
        key: str | bytes | None = None,
        headers: Headers = (),
        tag: str | None = None,
        partition: str | TopicPartition | None = None,
        timeout: float | None = None,
        delay: Span | None = None,
        deliver_at: dt.datetime | None = None,
        expires_in: Span | None = None,
    ) -> PendingResult:
        """Add one message and wait until its broker holds it.

        Args:
            topic: any topic of the cluster; in a local transaction, of its broker.
            data: application bytes.
            attribute: application attribute; "" is an attribute, None means none.
            key: stored; goes to the same partition as outside of the transaction. For
                local transactions see `AsyncProducer.transaction`.
            headers: names and bytes, stored in this order; a dict, or pairs.
            tag: text stored as the header `tag`, for consumers with `where`.
            partition: the only destination: `<broker>-<partition>`, or a partition of
                the topic.
            timeout: seconds; None is `timeout_s` of the producer's options.
            delay: as in `AsyncProducer.send`, counted from now; delivery waits for the
                commit too. The message cannot be cancelled.
            deliver_at: likewise.
            expires_in: as in `AsyncProducer.send`.

        Returns:
            Its id and partition; it has no offset before the commit.

        Raises:
            TransactionRolledBackError: the broker has rolled the transaction back,
                because its time was over; UnknownXidError in an XA transaction.
            TransactionError: the transaction has failed, is prepared or has ended; or
                the broker of a local one has no partition of the topic, or not that of
                the key. Nothing was sent.
            NoBrokerError, NoDelayError, MessageTooLargeError, ConfigError, TypeError:
                as `AsyncProducer.send`; in a local transaction nothing was sent. Only
                the first message at a broker waits for a broker that is away.
            MetaqError: the message may be missing; the transaction has failed.

        Cancellation: the transaction has failed.
        """
        headers = with_expiry(headers, expires_in)
        message = tagged(
            OutgoingMessage(frozen(data), attribute, key, partition, headers, tag)
        )
        due_ms = due_of(self._parts.clock.wall_ms(), delay, deliver_at)
        return (await self._send(topic, [message], timeout, due_ms))[0]

    @to_be_awaited
    async def send_many(
        self,
        topic: str,
        messages: Iterable[BytesLike | OutgoingMessage],
        *,
        tag: str | None = None,
        timeout: float | None = None,
        delay: Span | None = None,
        deliver_at: dt.datetime | None = None,
        expires_in: Span | None = None,
    ) -> Sequence[PendingResult]:
        """Add a list: one batch per partition, or hundreds of single puts at a time.

        Single puts are used if the broker accepts no batch in a transaction. A MetaQ
        1.4 broker keeps no order among them; see `AsyncProducer`.

        Args:
            topic: as in `send`.
            messages: bytes, or `OutgoingMessage` for messages with keys and the like.
            tag: of all messages, as in `send`.
            timeout: seconds for the whole list; None is `timeout_s` of the options.
            delay: of all messages, as in `send`.
            deliver_at: likewise.
            expires_in: likewise.

        Returns:
            One result per message, in their order; () for no messages.

        Raises:
            As `send`.

        Cancellation: the transaction has failed.
        """
        listed = list_outgoing(with_common(messages, tag, expires_in))
        due_ms = due_of(self._parts.clock.wall_ms(), delay, deliver_at)
        return await self._send(topic, listed, timeout, due_ms) if listed else ()

    async def _send(
        self,
        topic: str,
        messages: list[OutgoingMessage],
        timeout: float | None,
        due_ms: Millis | None,
    ) -> list[PendingResult]:
        """Add messages, at least one."""
        raise NotImplementedError


def _misplaced(
    topic: str,
    message: OutgoingMessage,
    broker_id: BrokerId | None,
    partition: TopicPartition | None,
) -> TransactionError:
    bound = (
        f"broker {broker_id}, which the transaction is bound to by its first message"
    )
    if partition is None or message.key is None or message.partition:
        wanted = f" {partition.name}" if partition else ""
        return TransactionError(
            f"topic {topic}: {bound}, has no partition{wanted} of it"
        )
    return TransactionError(
        f"topic {topic}: key {message.key!r:.80} belongs to partition {partition.name},"
        f" not to {bound}: send it in an XA transaction (client.xa), which spans"
        ' brokers, or begin this one with keys="local", where a key goes to another'
        " partition than outside of the transaction"
    )


class Branch:
    """A transaction at one broker, over one connection. Owner: the transaction."""

    def __init__(
        self,
        parts: BranchParts,
        connection: BrokerConnection,
        broker_id: BrokerId,
        transaction: TransactionId,
    ) -> None:
        """Prepare; `begin` creates the branch at the broker."""
        self.broker_id = broker_id
        self.where = f"broker {broker_id}"
        self._parts = parts
        self._connection = connection
        self._transaction = transaction
        self._has_put = False

    def check(
        self, payloads: Iterable[bytes], first: PlacedMessage | None = None
    ) -> None:
        """Refuse messages that the broker would refuse.

        Args:
            payloads: of all messages; at least one.
            first: one of the messages; None if they are not delayed.

        Raises:
            MessageTooLargeError: a payload exceeds the announced limit.
            NoDelayError: the messages are delayed, and the broker has no delays.
        """
        announced = self._announced(first)
        limit = announced.payload_bytes_max or PAYLOAD_BYTES_MAX
        largest = max(map(len, payloads))
        if largest > limit:
            raise MessageTooLargeError(
                f"{self.where} takes messages of at most {limit} bytes, got {largest}"
            )

    def _announced(self, first: PlacedMessage | None) -> Capabilities:
        """Return the broker's limits for messages like `first`, delayed or not.

        Raises:
            NoDelayError: as `check`.
        """
        announced = self._connection.capabilities
        if first is None or first.deliver_ms is None:
            return announced
        if not announced.delay_ms_max:
            raise no_delay(self.where, announced)
        return for_one_time(announced, first.partition.topic)

    async def begin(
        self, lifetime_s: int, *, deadline_s: float, qualifier: str | None = None
    ) -> None:
        """Begin the branch; the broker rolls it back after `lifetime_s`.

        Args:
            lifetime_s: seconds; no limit applies once it is prepared.
            deadline_s: deadline of the reply.
            qualifier: of an XA transaction.

        Raises:
            MetaqError: it did not begin, or the broker will roll it back in time.
        """
        reply = await self._parts.call(
            self._connection,
            self._transaction,
            TransactionType.BEGIN,
            deadline_s=deadline_s,
            lifetime_s=lifetime_s,
            qualifier=qualifier,
        )
        require_done(reply, self.where)

    async def end(self, kind: TransactionType, *, deadline_s: float) -> None:
        """Commit or roll back, over the same connection.

        Raises:
            MetaqError: as `require_done`, and as `BrokerConnection.call`.
        """
        reply = await self._parts.call(
            self._connection, self._transaction, kind, deadline_s=deadline_s
        )
        require_done(reply, self.where)

    async def ack(
        self, held: HeldDelivery, queue: QueueWorker, *, deadline_s: float
    ) -> Word:
        """Ack a message of a queue within the transaction; raises as `require_done`."""
        log = held.partition
        command = Settle(
            log.topic,
            queue.group,
            log.partition,
            1,
            encode_settlements(
                [Settlement(held.offset, held.delivery, SettleVerb.ACK)]
            ),
            self._connection.next_opaque(),
            queue.worker,
            self._transaction,
            queue.generation,
        )
        reply = await self._connection.call(command, deadline_s=deadline_s)
        return decode_words(require_done(reply, self.where), 1)[0]

    async def put(
        self, messages: Sequence[PlacedMessage], *, deadline_s: float
    ) -> list[PendingResult]:
        """Add messages, many in flight at once; our brokers keep their order.

        Raises:
            MetaqError: a message failed; others may or may not be in the transaction.
                The first error, raised once all sent puts are answered.
        """
        found: dict[int, PendingResult] = {}
        deliver_ms, payloads = messages[0].deliver_ms, [one.payload for one in messages]
        for span in self._plan(payloads, self._announced(messages[0])):
            by_partition: dict[TopicPartition, list[int]] = {}
            for at in range(span.first, span.end):
                by_partition.setdefault(messages[at].partition, []).append(at)
            runs = [
                self._submit(
                    partition,
                    [messages[at].payload for at in numbers],
                    [messages[at].flag for at in numbers],
                    deadline_s,
                    is_mput=span.is_mput
                    and (deliver_ms is not None or len(numbers) > 1),
                    deliver_ms=deliver_ms,
                )
                for partition, numbers in by_partition.items()
            ]
            first_ids = await self._first_ids(runs, deadline_s)
            for numbers, ids in zip(by_partition.values(), first_ids, strict=True):
                # The reply to an `mput` has the id of its first message only.
                count = len(numbers) // len(ids)
                for number, at in enumerate(numbers):
                    message_id = id_after(ids[number // count], number % count)
                    found[at] = PendingResult(message_id, messages[at].partition)
        return [found[at] for at in range(len(messages))]

    async def put_run(
        self,
        partition: TopicPartition,
        payloads: Sequence[bytes],
        flags: Sequence[int],
        *,
        deadline_s: float,
    ) -> None:
        """Add messages for one partition; as `put`, but without results.

        Raises:
            MetaqError: as `put`.
        """
        runs: list[_Run] = []
        for span in self._plan(payloads, self._connection.capabilities):
            some = slice(span.first, span.end)
            runs.append(
                self._submit(
                    partition,
                    payloads[some],
                    flags[some],
                    deadline_s,
                    is_mput=span.is_mput,
                )
            )
            if not span.is_mput:
                await self._first_ids(runs, deadline_s)
                runs = []
        await self._first_ids(runs, deadline_s)

    def _plan(
        self, payloads: Sequence[bytes], announced: Capabilities
    ) -> list[BatchSpan]:
        """Cut messages into spans that are in flight together."""
        has_mput = announced.has_mput and announced.mput_tx
        announced = replace(announced, has_mput=has_mput)
        ends = ends_of(payloads)
        spans, first = list[BatchSpan](), 0
        if not self._has_put and not has_mput:
            spans, first = [BatchSpan(0, 1, is_mput=False)], 1
        return spans + plan_spans(ends, first, len(payloads), announced)

    def _submit(
        self,
        partition: TopicPartition,
        payloads: Sequence[bytes],
        flags: Sequence[int],
        deadline_s: float,
        *,
        is_mput: bool,
        deliver_ms: Millis | None = None,
    ) -> "_Run":
        """Send one `mput`, or single puts."""
        if deliver_ms is not None and not is_mput:
            raise MessageTooLargeError(
                f"{self.where} does not take a scheduled message of {len(payloads[0])}"
                " bytes"
            )
        self._has_put = True
        opaques = self._connection.next_opaques(1 if is_mput else len(payloads))
        run = _Run(
            partition, payloads, flags, opaques, is_mput, self._transaction, deliver_ms
        )
        frames = run.frames()
        run.size_bytes = len(frames)
        try:
            self._connection.submit_puts(frames, opaques, run, deadline_s=deadline_s)
        except ClosedError as error:
            run.on_outcome(opaques, error)
        return run

    async def _first_ids(
        self, runs: Sequence["_Run"], deadline_s: float
    ) -> list[list[MessageId]]:
        """Wait for runs; return the ids in their replies, or raise the first error.

        An `mput` has one id, that of its first message.
        """
        left_s = deadline_s + ANSWER_GRACE_S - self._parts.clock.monotonic_s()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                for run in runs:
                    await run.done.wait()
        unknown = RequestTimeoutError(
            f"{self.where}: no answer before the deadline; outcome unknown"
        )
        first_ids: list[list[MessageId]] = []
        failed: MetaqError | None = None
        for run in runs:
            first_ids.append([])
            for opaque in run.opaques:
                outcome = run.outcomes.get(opaque, unknown)
                try:
                    first_ids[-1].append(self._read(outcome, run.partition))
                except MetaqError as error:
                    failed = failed or error
        if failed is not None:
            raise failed
        return first_ids

    def _read(
        self, outcome: Reply | MetaqError, partition: TopicPartition
    ) -> MessageId:
        if isinstance(outcome, MetaqError):
            raise outcome
        try:
            return parse_pending(outcome, partition.partition, self.where)
        except RemoteProtocolError as error:
            self._connection.close_for(error)
            raise


@dataclass(slots=True, eq=False)
class _Run:
    """Puts, or one `mput`, in flight for a partition; a `PutListener`."""

    partition: TopicPartition
    payloads: Sequence[bytes]
    flags: Sequence[int]
    opaques: range
    is_mput: bool
    transaction: TransactionId
    deliver_ms: Millis | None = None
    size_bytes: int = 0
    outcomes: dict[int, Reply | MetaqError] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def frames(self) -> bytes:
        """Return the encoded commands."""
        if not self.is_mput:
            return self._puts(slice(None))
        flags = self.flags if any(self.flags) else None
        records = encode_records(self.payloads, flags)
        return encode(
            Mput(
                topic=self.partition.topic,
                partition=self.partition.partition,
                count=len(self.payloads),
                checksum=checksum(records),
                opaque=self.opaques[0],
                payload=records,
                transaction=self.transaction,
                deliver_ms=self.deliver_ms,
            )
        )

    def sizes(self) -> list[int]:
        """Return the size of each command in bytes."""
        if self.is_mput:
            return [self.size_bytes]
        return [len(self._puts(slice(k, k + 1))) for k in range(len(self.opaques))]

    def _puts(self, some: slice) -> bytes:
        payloads = self.payloads[some]
        return encode_puts(
            self.partition.topic,
            self.partition.partition,
            payloads,
            flags=self.flags[some],
            checksums=checksums(payloads),
            opaques=self.opaques[some],
            transaction=self.transaction,
        )

    def on_receipts(self, receipts: ReceiptColumns) -> None:
        """Record plain receipts, which no put of a transaction should get."""
        for reply in receipts.replies():
            self.on_outcome((reply.opaque,), reply)

    def on_outcome(self, opaques: Sequence[int], outcome: Reply | MetaqError) -> None:
        """Record the reply to one command, or the error of several."""
        self.outcomes.update(dict.fromkeys(opaques, outcome))
        if len(self.outcomes) == len(self.opaques):
            self.done.set()
