"""The producer: messages in, acknowledgements out, on one event loop.

    async with client.producer() as producer:
        result = await producer.send("test", b"hello", key="user-1")
        future = await producer.send_nowait("test", b"more")
        results = await producer.send_many("test", [b"a", b"b"])
    scheduled = await producer.send("test", b"remind", delay="30m")
    await producer.cancel(scheduled)

*Durability.* A message is acknowledged when its broker has it on disk. Until then it is
in memory only: closing waits for it, a crash loses it.

*Order.* Messages of one caller to one partition are stored in the order of the calls,
as long as nothing is refused. A MetaQ 1.4 broker may store messages that are in flight
together in any order. With `ProducerOptions.in_flight_batches_max` of 1 the order is
kept in both cases.

*Outcomes.* By its deadline every message has one outcome: its offset in the log, an
error after which it is certainly not stored, or `OutcomeUnknownError`. Batches that may
be stored are sent again under the same sequence, which brokers of this package
recognise.
"""

import asyncio
import datetime as dt
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from threading import Lock, get_ident
from typing import Literal, Protocol, TypeVar

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.scheduled import cancel_scheduled
from metaq.client.errors import BufferFullError, ExchangeError, NoTopicError
from metaq.client.names import check_topic, require_text
from metaq.client.options import ProducerOptions, names_arguments
from metaq.client.partitioner import OutgoingMessage, Selector
from metaq.client.produce.batches import SendFuture, SendResult
from metaq.client.produce.broker_starts import BrokerStarts
from metaq.client.produce.delivery import Delivery
from metaq.client.produce.first_messages import FirstMessages
from metaq.client.produce.producer_counters import (
    ClientTransactionCounters,
    ProducerStatistics,
)
from metaq.client.produce.routes import NotKnownYetError
from metaq.client.produce.runs import Appending, with_common, with_tag
from metaq.client.produce.scheduling import (
    AT_ONCE,
    Scheduled,
    Span,
    due_of,
    with_expiry,
)
from metaq.client.produce.transaction import AsyncTransaction
from metaq.client.produce.transaction_branch import TransactionParts
from metaq.client.timeouts import NOTICE_S, ClosedByBlock, WaitNotice, require_loop
from metaq.client.validation import check_timeout, wrong_type
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import (
    ClosedError,
    ConfigError,
    CoordinationError,
    MetaqError,
    NoBrokerError,
    RequestTimeoutError,
)
from metaq.model import (
    BrokerAddress,
    BrokerId,
    LocalTransactionId,
    Millis,
    TopicPartition,
)
from metaq.protocol.decimals import I32_MAX
from metaq.record.checksum import BytesLike
from metaq.record.flags import Headers
from metaq.retry import wait_set

_log = logging.getLogger(__name__)

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class ConsumedBatch(Protocol[T_co]):
    """A batch of messages that a consumer handed out."""

    def block(self, parts: TransactionParts) -> T_co:
        """Return the context manager that writes the results of the batch."""


class AsyncProducer(ClosedByBlock):
    """Sends messages. Owner: the client that created it; `async with` closes it.

    Lifecycle: created, any number of sends by any number of tasks, `close`.

    Concurrency: coroutines and `send_oneway` run on the loop on which it was created.
    `accumulator` and every `SendFuture` may be used from any thread.
    """

    def __init__(
        self,
        context: ClientContext,
        options: ProducerOptions,
        *,
        producer_id: str,
        selector: Selector | None = None,
        first_turn: int = 1,
        is_mandatory: bool | None = None,
    ) -> None:
        """Create a producer on the running event loop.

        Args:
            context: the client's parts.
            options: bounds and times.
            producer_id: 1..64 of [A-Za-z0-9._~-]; no other producer may ever have the
                same, because brokers recognise repeated batches by it.
            selector: chooses partitions; None for the hash of the key, or round robin
                for messages without a key.
            first_turn: where round robin begins, modulo the number of partitions.
            is_mandatory: for the producer of an exchange, see `Delivery`.
        """
        loop = asyncio.get_running_loop()
        self._context = context
        self._metadata = metadata = context.metadata
        self._clock = context.clock
        self._options = options
        self._delivery = Delivery(
            pool=context.pool,
            options=options,
            clock=context.clock,
            producer_id=producer_id,
            request_refresh=metadata.request_refresh,
            selector=selector,
            first_turn=first_turn,
            is_mandatory=is_mandatory,
        )
        self.accumulator = self._delivery.accumulator
        """Appends messages from any thread, for prepared topics."""
        self._append = self.accumulator.append
        self._is_of_exchange = is_mandatory is not None
        self._loop, self._thread_id = loop, get_ident()
        self.first_messages = FirstMessages(self.accumulator, find=self._find_first)
        self._dropped: Counter[str] = Counter()
        self._counting = Lock()
        self._stop_listening = metadata.add_listener(self._on_snapshot)
        self.transacting = TransactionParts(
            prepare=self._prepare,
            routes=self._delivery.routes,
            address_of=self._address_of,
            pool=context.pool,
            options=options,
            clock=context.clock,
            session_id=producer_id,
            starts=BrokerStarts(context.clock),
            counters=ClientTransactionCounters(),
        )
        self._transaction_numbers = count()
        self._notice = WaitNotice(self._clock)
        self.is_closed = False
        self._ended = asyncio.Event()

    # -- sending ----------------------------------------------------------------------

    async def prepare(self, topic: str, *, timeout: float | None = None) -> None:
        """Wait until the partitions of a topic are known; a first send does so itself.

        Args:
            topic: topic name.
            timeout: seconds; None is `timeout_s` of the options.

        Raises:
            ConfigError: the topic name is invalid.
            NoBrokerError: no broker serves the topic within the time.
            ClosedError: the producer is closed, or belongs to another event loop.
            TypeError: the topic is not a str.
        """
        await self._prepare(topic, self.transacting.deadline_s(timeout))

    async def _prepare(self, topic: str, deadline_s: float) -> None:
        self._require_loop()
        self._check_open()
        require_text("topic", topic)
        if self.accumulator.knows(topic):
            return
        check_topic(topic)
        snapshot = await self._find(topic, deadline_s)
        self._check_open()
        self._learn(topic, snapshot)

    async def _find_first(self, topic: str, deadline_s: float) -> None:
        """Prepare a topic; also while closing, because accepted messages are sent."""
        self._learn(topic, await self._find(topic, deadline_s))

    async def _find(self, topic: str, deadline_s: float) -> ClusterSnapshot:
        try:
            with self._notice.of(partial(self._say_wait, topic)):
                return await self._metadata.topic(
                    topic, deadline_s=deadline_s, takes_puts=True
                )
        except NoTopicError as error:
            if not self._is_of_exchange:
                raise
            raise ExchangeError(
                f"there is no exchange '{topic}' ('metaq exchanges list' lists them,"
                " 'metaq exchanges create' creates one)"
            ) from error

    def _say_wait(self, topic: str) -> None:
        try:
            self._metadata.require_reachable(NOTICE_S)
        except CoordinationError as error:
            _log.warning("sends wait: topic=%s error=%s", topic, error)
        else:
            _log.warning("sends wait, no broker serves the topic: topic=%s", topic)

    def _learn(self, topic: str, snapshot: ClusterSnapshot) -> None:
        self.first_messages.publish(topic, snapshot.put_partitions(topic))
        self._delivery.on_snapshot(snapshot, [topic])
        if not self.accumulator.knows(topic):
            raise NoBrokerError(f"topic {topic} has no partitions")

    async def send_nowait(
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
    ) -> SendFuture:
        """Begin to send one message; waits for memory only.

        For a delayed message it also waits until the topic is known.

        Arguments: see `AsyncProducer.send`.

        Returns:
            A future that has an outcome by its deadline, even if the topic is not
            known. Messages of one task are sent in the order of the calls.

        Raises:
            BufferFullError: no memory within the time, or with `when_full="raise"`.
            ConfigError, TypeError, MessageTooLargeError, ClosedError: as `send`.

        Cancellation: nothing was appended.
        """
        append: Callable[..., SendFuture] = self._append
        if get_ident() != self._thread_id:
            self._require_loop()
        if tag is not None:
            headers = with_tag(headers, tag)
        if delay is not None or deliver_at is not None or expires_in is not None:
            headers = with_expiry(headers, expires_in)
            due_ms = due_of(self._clock.wall_ms(), delay, deliver_at)
            if due_ms is not None:
                await self.prepare(topic, timeout=timeout)
                append = partial(append, deliver_ms=due_ms)
        deadline_s: float | None = None
        while True:
            try:
                return append(topic, data, attribute, key, partition, headers, timeout)
            except BufferFullError as error:
                full = error
            except NotKnownYetError:
                append = self.first_messages.append
                continue
            except TypeError:
                require_text("topic", topic)
                raise
            if deadline_s is None:
                deadline_s = self.transacting.deadline_s(timeout)
            await self._wait_room(full, deadline_s)

    @names_arguments
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
    ) -> SendResult:
        """Send one message and wait until it is on the broker's disk.

        Args:
            topic: topic name, without spaces and line ends.
            data: application bytes; mutable ones are copied.
            attribute: application attribute; "" is an attribute, None means none.
            key: stored; the same key goes to the same partition, see `KeyHash`.
            headers: names and bytes, stored in this order; a dict, or pairs.
            tag: text stored as the header `tag`, for consumers with `where`.
            partition: the only partition to send it to: `<broker>-<partition>`, or a
                partition of the topic. None: the selector chooses.
            timeout: seconds, all retries included; None is `timeout_s` of the options.
                Waiting for memory, or for a new topic, takes at most as long again.
            delay: time after which the broker delivers it: `"30m"`, seconds or a
                `timedelta`. Until then it is on the broker's disk.
            deliver_at: time at which the broker delivers it, with a time zone; a past
                time means now.
            expires_in: time after its delivery from which consumers skip it.

        Returns:
            Its partition, offset and id; for a delayed message a `Scheduled`, for
            `cancel`.

        Raises:
            OutcomeUnknownError: it was sent, and may be stored.
            NoBrokerError, NotSentError: certainly not stored; no broker took it in
                time.
            ForbiddenError, NoRoomError, UnavailableError: certainly not stored; refused
                until the deadline.
            ServerError: the broker could not store it; its text says why.
            MessageTooLargeError: larger than the broker or the buffer accepts.
            BufferFullError: no memory within the time, or with `when_full="raise"`.
            ConfigError: topic, attribute, key, headers or partition cannot be
                written; or a time is invalid, lacks its zone, or is given twice.
            NoDelayError: the broker cannot delay messages.
            ClosedError: the producer is closed, or of another event loop.
            TypeError: an argument of another type; the text names it.

        Cancellation: a message that was appended is still sent.
        """
        sent = await self.send_nowait(
            topic,
            data,
            attribute=attribute,
            key=key,
            headers=headers,
            tag=tag,
            partition=partition,
            timeout=timeout,
            delay=delay,
            deliver_at=deliver_at,
            expires_in=expires_in,
        )
        return await sent

    @names_arguments
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
    ) -> Sequence[SendResult]:
        """Send a list and wait until all of it is on the brokers' disks.

        Without keys and with the default selector, contiguous parts of up to a
        batch's size go to one partition after the other; else each message goes where
        key, partition or selector send it, in order within its partition.

        Args:
            topic: as in `send`.
            messages: bytes, or `OutgoingMessage` objects with further arguments.
            tag: tag of all messages, as in `send`.
            timeout: seconds for each message, from when there was memory for it.
            delay: delay of all messages, as in `send`.
            deliver_at: likewise.
            expires_in: likewise.

        Returns:
            One result per message, in their order, each computed on access; () for no
            messages.

        Raises:
            PartlySentError: some are stored; `outcomes` has the outcome of each.
            As `send`: none is stored, or all may be.

        Cancellation: appended messages are still sent.
        """
        due_ms = due_of(self._clock.wall_ms(), delay, deliver_at)
        messages = with_common(messages, tag, expires_in)
        appending = await self._append_all(topic, messages, timeout, due_ms)
        for batch in appending.batches:
            await batch.wait_async()
        results = appending.results()
        results.raise_errors()
        return results

    async def _append_all(
        self,
        topic: str,
        messages: Iterable[BytesLike | OutgoingMessage],
        timeout: float | None,
        due_ms: Millis | None,
    ) -> Appending:
        """Append a list, waiting for memory where needed."""
        await self.prepare(topic, timeout=timeout)
        appending = self.accumulator.append_many(
            topic, messages, timeout_s=timeout, deliver_ms=due_ms
        )
        while not appending.is_over:
            if (full := appending.step()) is not None:
                await self._wait_room(full, self.transacting.deadline_s(timeout))
            else:
                # Between the batches of a long list, the loop sends and runs others.
                await asyncio.sleep(0)
        return appending

    async def cancel(
        self, scheduled: SendResult | str, *, timeout: float | None = None
    ) -> bool:
        """Cancel a delayed message before its time, so that it is never delivered.

        Args:
            scheduled: the receipt that `send` returned, or its text.
            timeout: seconds, all retries included; None is `timeout_s` of the options.

        Returns:
            True if it is cancelled, by this call or an earlier one. False if it was
            delivered, or its topic was deleted.

        Raises:
            NoBrokerError: its broker is away.
            RequestTimeoutError: no answer in time; it may be cancelled.
            ConfigError: the text is not that of a receipt.
            ClosedError: the producer is closed, or belongs to another event loop.
            TypeError: it is not the receipt of a delayed message.
            MetaqError: the broker refused; its text says why.

        Cancellation: the message may be cancelled.
        """
        self._require_loop()
        self._check_open()
        if isinstance(scheduled, str):
            scheduled = Scheduled.parse(scheduled)
        if not isinstance(scheduled, Scheduled):
            raise wrong_type("scheduled", "a Scheduled, or its text", scheduled)
        if scheduled.tier == AT_ONCE:
            return False
        return bool(
            await cancel_scheduled(
                self._context,
                scheduled.partition,
                scheduled.receipt,
                deadline_s=self.transacting.deadline_s(timeout),
            )
        )

    def send_oneway(
        self,
        topic: str,
        data: BytesLike,
        *,
        attribute: str | None = None,
        key: str | bytes | None = None,
        headers: Headers = (),
        tag: str | None = None,
    ) -> None:
        """Send one message without an outcome for the caller.

        Arguments and retries: see `AsyncProducer.send`. A message that cannot be
        appended is dropped, and counted by its reason; later failures are counted with
        the others.

        Raises:
            ConfigError: topic, attribute, key or headers cannot be written.
            ClosedError: the producer is of another event loop.
            TypeError: an argument of another type; the text names it.
            Exception: raised by the selector, for a known topic; for another topic it
                is counted.
        """
        self._require_loop()
        if tag is not None:
            headers = with_tag(headers, tag)
        self.append_oneway(topic, data, attribute, key, headers)

    def append_oneway(
        self,
        topic: str,
        data: BytesLike,
        attribute: str | None,
        key: str | bytes | None,
        headers: Headers,
    ) -> None:
        """Send as `send_oneway`, from any thread; see `AsyncProducer.send_oneway`."""
        require_text("topic", topic)
        try:
            try:
                self._append(topic, data, attribute, key, headers=headers)
            except NotKnownYetError:
                append = self.first_messages.append
                append(topic, data, attribute, key, headers=headers)
        except ConfigError:
            raise
        except MetaqError as error:
            with self._counting:
                self._dropped[type(error).__name__] += 1

    def transaction(
        self,
        timeout: float | None = None,
        *,
        keys: Literal["cluster", "local"] = "cluster",
    ) -> AsyncTransaction:
        """Return a transaction: messages at one broker, stored all or not at all.

        Args:
            timeout: seconds from its first message, rounded up, after which the broker
                rolls it back. A MetaQ 1.4 broker limits them to 60, unless it is
                configured otherwise. None is `transaction_timeout_s` of the options.
            keys: "cluster": a key goes to the same partition as outside of the
                transaction; the message is refused if that is at another broker.
                "local": it goes to a partition of the transaction's broker, which with
                several brokers may differ from the one outside.

        Raises:
            ConfigError: `timeout` is invalid or 0, or `keys` is another value.
            ClosedError: the producer is closed, or belongs to another event loop.
        """
        self._require_loop()
        self._check_open()
        lifetime_s = self.transacting.lifetime_s(timeout)
        if keys not in {"cluster", "local"}:
            raise ConfigError(f"keys: expected 'cluster' or 'local', got {keys!r}")
        number = next(self._transaction_numbers) % I32_MAX + 1
        transaction = LocalTransactionId(self.transacting.session_id, number)
        return AsyncTransaction(
            self.transacting, transaction, lifetime_s, has_local_keys=keys == "local"
        )

    def exactly_once(self, batch: ConsumedBatch[T]) -> T:
        """Return the context manager that writes the results of a batch exactly once.

        At its end the messages sent in it and the offsets of the batch are both stored;
        or, after an exception, neither is, and the batch is delivered again.

        Args:
            batch: the current batch of `AsyncConsumer.batches`. Its consumer belongs to
                the same client, is a member of a group in ZooKeeper, and has
                `commit_interval_s=None`.

        Raises:
            ConfigError: the consumer does not meet these conditions.
            ClosedError: the producer is closed, or belongs to another event loop.
            TypeError: `batch` is not a batch of a consumer.
        """
        self._require_loop()
        self._check_open()
        if not hasattr(batch, "block"):
            raise wrong_type("batch", "one of consumer.batches() of this client", batch)
        return batch.block(self.transacting)

    # -- the end ----------------------------------------------------------------------

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until every message appended before has an outcome, success or failure.

        Args:
            timeout: seconds; None waits until the messages' own deadlines.

        Raises:
            RequestTimeoutError: some have no outcome yet; they are still being sent.
            ClosedError: the producer belongs to another event loop.
        """
        self._require_loop()
        check_timeout(timeout)
        batches = self.accumulator.unanswered()
        self._delivery.fill()
        try:
            async with asyncio.timeout(timeout):
                for batch in batches:
                    await batch.wait_async()
        except TimeoutError as error:
            left = sum(len(b.payloads) for b in batches if not b.is_done)
            raise RequestTimeoutError(
                f"{left} messages have no outcome after {timeout:g} s"
            ) from error

    @property
    def has_ended(self) -> bool:
        """Whether it is closed and every message has its outcome."""
        return self._ended.is_set()

    async def close(self, timeout: float | None = None) -> None:
        """Refuse new messages, wait for appended ones, then fail the rest.

        Also waits for messages whose topics are not known yet. A second call waits for
        the first.

        Args:
            timeout: seconds for everything; None is the client's `close_timeout_s`.

        Errors of messages are raised by their futures only. At the end, messages that
        may be stored fail with `OutcomeUnknownError`, the others with `ClosedError`.

        Raises:
            ClosedError: the producer belongs to another event loop; it is not closed.

        Cancellation: everything without an outcome fails at once.
        """
        self._require_loop()
        limit_s = self._context.options.close_timeout_s if timeout is None else timeout
        check_timeout(limit_s)
        if self.is_closed:
            await wait_set(self._ended, timeout)
            return
        self.is_closed = True
        try:
            self.accumulator.close()
            await self.flush(limit_s)
        except RequestTimeoutError as error:
            _log.warning("producer closed early: error=%s", error)
        finally:
            self._stop_listening()
            self.first_messages.close()
            self._delivery.close("the producer was closed")
            self._ended.set()

    def statistics(self) -> ProducerStatistics:
        """Return a snapshot of the counters."""
        sent = self._delivery.statistics()
        return replace(
            sent,
            **asdict(self.accumulator.buffer.statistics()),
            failed=dict(Counter(sent.failed) + self.first_messages.failed),
            dropped=dict(self._dropped),
            transactions=self.transacting.counters.snapshot(),
        )

    def __repr__(self) -> str:
        state = "ended" if self.has_ended else "closing" if self.is_closed else "open"
        count = self.accumulator.buffer.statistics().buffered_count
        return (
            f"<{type(self).__name__} to {self._context.place}: {state}, {count}"
            " messages without an outcome>"
        )

    # -- inside -----------------------------------------------------------------------

    def _require_loop(self) -> None:
        require_loop(self._loop, self)

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("the producer is closed")

    def _address_of(self, broker_id: BrokerId) -> BrokerAddress | None:
        leader = self._metadata.snapshot.leader(broker_id)
        if leader is None:
            self._metadata.request_refresh()
        return leader

    async def _wait_room(self, full: BufferFullError, deadline_s: float) -> None:
        """Wait for memory; raise `full` with `when_full="raise"` or on a time-out."""
        if self._options.when_full == "raise":
            raise full
        left_s = max(0.0, deadline_s - self._clock.monotonic_s())
        if not await wait_set(self.accumulator.buffer.room, left_s):
            raise full

    def _on_snapshot(self, snapshot: ClusterSnapshot) -> None:
        self._delivery.on_snapshot(snapshot, [*self._delivery.routes.by_topic])
