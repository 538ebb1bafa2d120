"""Sync producers and transactions, for any thread; the client's loop delivers.

Work per message runs on the caller's thread, which encodes the message and appends it
to a batch under one lock. Only a topic's first message, `flush` and `close` run on the
loop.
"""

import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self, Unpack

from metaq.client.consume.exactly_once import AsyncExactlyOnce
from metaq.client.errors import BufferFullError
from metaq.client.names import require_text
from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.batches import SendFuture, SendResult
from metaq.client.produce.exchange import AsyncExchange, SendKeywords, routed
from metaq.client.produce.ordered_producer import AsyncOrderedProducer
from metaq.client.produce.producer import AsyncProducer
from metaq.client.produce.routes import NotKnownYetError
from metaq.client.produce.runs import Appending, frozen, tagged, with_common, with_tag
from metaq.client.produce.scheduling import Span, due_of, with_expiry
from metaq.client.produce.transaction import AsyncTransaction, TransactionState
from metaq.client.produce.xa import AsyncXa
from metaq.client.sync.derived import (
    SyncClosable,
    SyncPart,
    blocking,
    closing,
    direct,
    like,
    like_in_place,
    making,
    same,
)
from metaq.loop_thread import LoopThread
from metaq.model import Millis, TopicPartition
from metaq.record.checksum import BytesLike
from metaq.record.flags import Headers


class Transaction(SyncPart[AsyncTransaction]):
    """One local transaction, created by `Producer.transaction`, for any thread.

    It is open from the start, and ended by `commit`, `rollback`, or its `with` block,
    which commits at its end and rolls back after an exception. Concurrent calls run one
    at a time.
    """

    id: str = same("id", "Its id, as brokers log it.")

    state: TransactionState = same("state", "Its state.")

    send = blocking(AsyncTransaction.send)
    send_many = blocking(AsyncTransaction.send_many)
    ack = blocking(AsyncTransaction.ack)
    commit = blocking(AsyncTransaction.commit)
    rollback = blocking(AsyncTransaction.rollback)

    def __enter__(self) -> Self:
        return self

    __exit__ = blocking(AsyncTransaction.__aexit__)


class ExactlyOnce(SyncPart[AsyncExactlyOnce]):
    """Sends the messages made of one batch, on any thread.

    Created by `Producer.exactly_once`, and used as one `with` block.
    """

    id: str = same(
        "id", 'Key of its transaction, as brokers list it; "" outside of the block.'
    )

    @like(AsyncExactlyOnce.send)
    def send(self, topic: str, *args: Any, **keywords: Any) -> None:
        """Add one message; see `AsyncExactlyOnce.send`."""
        message = tagged(OutgoingMessage(*args, **keywords))
        message = message._replace(data=frozen(message.data))
        if self._twin.add(topic, [message]):
            self._thread.run(self._twin.flush())

    send_many = blocking(AsyncExactlyOnce.send_many)

    def __enter__(self) -> Self:
        self._thread.run(self._twin.__aenter__())
        return self

    __exit__ = blocking(AsyncExactlyOnce.__aexit__)


class Producer(SyncClosable[AsyncProducer]):
    """Sends messages, for any number of threads.

    Created by `Client.producer`; used as `with`, or closed by `close`. Every
    `SendFuture` may be used from any thread.
    """

    prepare = blocking(AsyncProducer.prepare)

    @like(AsyncProducer.send)
    def send(self, *args: Any, **keywords: Any) -> SendResult:
        """Send one message and wait until it is on the broker's disk.

        Arguments, result and errors are those of `AsyncProducer.send`.
        """
        # The future is always done by the deadline; see `Delivery`.
        return self.send_nowait(*args, **keywords).result()

    @like_in_place(AsyncProducer.send_nowait)
    def send_nowait(
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
        """Begin to send one message; see `AsyncProducer.send_nowait`."""
        # No helpers, for speed: for most messages only the append runs.
        if not self._thread.is_usable:
            self._thread.require_usable()
        if tag is not None:
            headers = with_tag(headers, tag)
        append: Callable[..., SendFuture] = self._twin.accumulator.append
        if delay is not None or deliver_at is not None or expires_in is not None:
            headers = with_expiry(headers, expires_in)
            due_ms = self._due_ms(delay, deliver_at)
            if due_ms is not None:
                self._prepare(topic, timeout)
                append = partial(append, deliver_ms=due_ms)
        deadline_s: float | None = None
        while True:
            try:
                return append(topic, data, attribute, key, partition, headers, timeout)
            except BufferFullError as error:
                full = error
            except NotKnownYetError:
                append = self._twin.first_messages.append
                continue
            except TypeError:
                require_text("topic", topic)
                raise
            if deadline_s is None:
                deadline_s = self._twin.transacting.deadline_s(timeout)
            self._wait_room(full, deadline_s)

    @like(AsyncProducer.send_many)
    def send_many(
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

        Arguments, results and errors are those of `AsyncProducer.send_many`.
        """
        due_ms = self._due_ms(delay, deliver_at)
        messages = with_common(messages, tag, expires_in)
        appending = self._append_all(topic, messages, timeout, due_ms)
        for batch in appending.batches:
            batch.wait(None)
        results = appending.results()
        results.raise_errors()
        return results

    def _prepare(self, topic: str, timeout: float | None) -> None:
        """Wait for a topic that is not known yet."""
        require_text("topic", topic)
        if not self._twin.accumulator.knows(topic):
            self._thread.run(self._twin.prepare(topic, timeout=timeout))

    def _due_ms(self, delay: object, deliver_at: object) -> Millis | None:
        clock = self._twin.accumulator.buffer.clock
        return due_of(clock.wall_ms(), delay, deliver_at)

    def _append_all(
        self,
        topic: str,
        messages: Iterable[BytesLike | OutgoingMessage],
        timeout: float | None,
        due_ms: Millis | None,
    ) -> Appending:
        """Append a list; while the buffer memory is full, wait before the rest."""
        self._thread.require_usable()
        self._prepare(topic, timeout)
        accumulator = self._twin.accumulator
        appending = accumulator.append_many(
            topic, messages, timeout_s=timeout, deliver_ms=due_ms
        )
        while not appending.is_over:
            if (full := appending.step()) is not None:
                self._wait_room(full, self._twin.transacting.deadline_s(timeout))
        return appending

    cancel = blocking(AsyncProducer.cancel)

    @like_in_place(AsyncProducer.send_oneway)
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
        """Send one message without a result; see `AsyncProducer.send_oneway`."""
        # No helpers, as in `send_nowait`; it never waits.
        self._thread.require_usable()
        if tag is not None:
            headers = with_tag(headers, tag)
        self._twin.append_oneway(topic, data, attribute, key, headers)

    transaction = making(AsyncProducer.transaction, Transaction)

    exactly_once = making(AsyncProducer.exactly_once, ExactlyOnce)

    flush = blocking(AsyncProducer.flush)
    close = closing(AsyncProducer.close)
    statistics = direct(AsyncProducer.statistics)

    def _wait_room(self, full: BufferFullError, deadline_s: float) -> None:
        """Wait for buffer memory; raise `full` at the deadline, or per `when_full`."""
        buffer = self._twin.accumulator.buffer
        if buffer.options.when_full == "raise":
            raise full
        has_room = buffer.wait(
            max(0.0, deadline_s - buffer.clock.monotonic_s()),
            size_bytes=full.size_bytes,
            message_count=full.message_count,
        )
        if not has_room:
            raise full


class OrderedProducer(SyncClosable[AsyncOrderedProducer]):
    """Sends messages of one topic and keeps their order even while brokers are away.

    Created by `Client.ordered_producer`; used as `with`, by any number of threads. One
    process at a time uses a directory. Sends to one partition run one at a time;
    partitions are independent of each other.
    """

    topic: str = same("topic", "Topic of all messages.")

    partitions: Sequence[TopicPartition] = same("partitions", "The layout.")

    start = blocking(AsyncOrderedProducer.start)
    send = blocking(AsyncOrderedProducer.send)
    close = closing(AsyncOrderedProducer.close)
    statistics = direct(AsyncOrderedProducer.statistics)

    def __enter__(self) -> Self:
        self.start()
        return self


class Exchange(SyncClosable[AsyncExchange]):
    """Sends messages to one exchange, for any number of threads.

    Created by `Client.exchange`; used as `with`, or closed by `close`.
    """

    name: str = same("name", "Its name.")

    def __init__(self, twin: AsyncExchange, thread: LoopThread) -> None:
        """Wrap the async twin; use `Client.exchange` to create one."""
        super().__init__(twin, thread)
        self._producer = Producer(twin.producer, thread)

    @like(AsyncExchange.send)
    def send(self, *args: Any, **keywords: Any) -> SendResult:
        """Send one message; see `AsyncExchange.send`."""
        return self.send_nowait(*args, **keywords).result()

    @like_in_place(AsyncExchange.send_nowait)
    def send_nowait(
        self,
        routing_key: str,
        data: BytesLike,
        *,
        headers: Headers = (),
        timeout: float | None = None,
        **options: Unpack[SendKeywords],
    ) -> SendFuture:
        """Begin to send one message; see `AsyncExchange.send_nowait`."""
        headers = routed(routing_key, headers)
        return self._producer.send_nowait(
            self._twin.name, data, headers=headers, timeout=timeout, **options
        )

    flush = blocking(AsyncExchange.flush)
    close = closing(AsyncExchange.close)
    statistics = direct(AsyncExchange.statistics)


class Xa(SyncClosable[AsyncXa]):
    """XA transactions, one at a time, for any thread.

    Lifecycle: `begin`, sends, `prepare`, `commit` or `rollback`, any number of times;
    in between `recover`, and `commit` or `rollback` of the xids it returns; `close`.
    Concurrent calls run one at a time.
    """

    qualifier: str = same(
        "qualifier",
        "The name that marks its transactions among those of other programs.",
    )

    xid = direct(AsyncXa.xid)
    begin = blocking(AsyncXa.begin)
    send = blocking(AsyncXa.send)
    send_many = blocking(AsyncXa.send_many)
    prepare = blocking(AsyncXa.prepare)
    commit = blocking(AsyncXa.commit)
    rollback = blocking(AsyncXa.rollback)
    recover = blocking(AsyncXa.recover)
    forget = blocking(AsyncXa.forget)
    close = closing(AsyncXa.close)
