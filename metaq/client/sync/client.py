"""The sync client: the same names, options and errors as the async one, for any thread.

Each object wraps its async twin, which runs on the client's loop thread. Calls run
there as coroutines, except the work per message, which runs on the caller's thread: an
iterator takes whole batches from the consumer's fetch buffer, and a producer appends to
its accumulator.
"""

import asyncio
import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Collection, Generator, Iterator
from concurrent.futures import Future
from itertools import chain
from typing import Any, Final, Self

from metaq.client.admin.topic_admin import AsyncAdmin
from metaq.client.client_statistics import ClientStatistics
from metaq.client.consume.browse import browse_topic
from metaq.client.consume.consumer import AsyncConsumer, AsyncMessageBatch
from metaq.client.consume.current_batch import Filling
from metaq.client.consume.exactly_once import AsyncExactlyOnce
from metaq.client.consume.fetched_batch import FetchedBatch
from metaq.client.consume.find import find_messages
from metaq.client.consume.message_batch import ListedMessages, check_bounds
from metaq.client.consume.redelivery import DEFAULT_POLICY, RetryPolicy
from metaq.client.offsets.commit_orders import Committable
from metaq.client.offsets.offset_reset import Goal
from metaq.client.options import (
    HOOKS,
    ClientOptions,
    ConsumerOptions,
    check_plain_function,
    names_arguments,
)
from metaq.client.produce.transaction_branch import TransactionParts
from metaq.client.session import AsyncClient, context_of
from metaq.client.sync.derived import (
    SyncClosable,
    SyncObject,
    SyncPart,
    blocking,
    direct,
    like,
    like_in_place,
    making,
    on_loop,
    same,
    unknown_option,
)
from metaq.client.sync.handler_threads import Handler, Workers
from metaq.client.sync.producers import Exchange, OrderedProducer, Producer, Xa
from metaq.client.sync.queues import Queue, Responder
from metaq.client.sync.thread_calls import ThreadCalls
from metaq.client.validation import check_timeout, check_whole
from metaq.errors import ClosedError
from metaq.loop_thread import STOP_TIMEOUT_S, LoopThread
from metaq.model import Message, TopicPartition

_log = logging.getLogger(__name__)

OPEN_CLIENTS: Final[dict["Client", None]] = {}
"""Clients that were started and are not closed, oldest first."""


@atexit.register
def close_open_clients() -> None:
    """Close open clients, newest first; after an error the others are still closed."""
    # One function for all: `atexit.unregister` would leave a slot for each client.
    with contextlib.ExitStack() as stack:
        for client in tuple(OPEN_CLIENTS):
            stack.callback(client.close)


class Client(SyncObject[AsyncClient]):
    """Connects to a cluster: `with Client("127.0.0.1:2181") as client`.

    For any number of threads. A client and its objects belong to one process: after a
    fork the child creates its own.
    """

    @like(AsyncClient.__init__)
    def __init__(self, *args: Any, **keywords: Any) -> None:
        """Create a client; arguments and errors are those of `AsyncClient`."""
        self._twin = AsyncClient(*args, **keywords)
        self._clock = self._twin.clock
        self._thread: LoopThread | None = None
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()

    def start(self) -> None:
        """Start the client's thread and begin to connect; `with` calls it."""
        self._twin.require_new()
        thread = self._thread = LoopThread("metaq-client")
        try:
            thread.run(self._twin.start())
        except BaseException:
            thread.stop()
            raise
        OPEN_CLIENTS[self] = None

    options: ClientOptions = same("options", "Options chosen by the user.")

    def close(self, timeout: float | None = None) -> None:
        """Close producers and consumers, then the client.

        Waiting calls of other threads end with `ClosedError`.

        Raises:
            ClosedError: called on the client's own thread; nothing is closed.
        """
        check_timeout(timeout)
        thread = self._thread
        if thread is None or not thread.is_usable:
            return
        thread.require_caller()
        end_s = None if timeout is None else self._clock.monotonic_s() + timeout
        try:
            for consumer in tuple(self._consumers):
                consumer._let_go(self._left_s(end_s))  # noqa: SLF001  # same module
            thread.run_close(self._twin.close(self._left_s(end_s)))
        finally:
            left_s = self._left_s(end_s)
            thread.stop(timeout_s=STOP_TIMEOUT_S if left_s is None else left_s)
            OPEN_CLIENTS.pop(self, None)

    def _left_s(self, end_s: float | None) -> float | None:
        return None if end_s is None else max(0.0, end_s - self._clock.monotonic_s())

    def __repr__(self) -> str:
        if self._thread is None:
            return "<" + repr(self._twin).removeprefix("<Async")
        return self._thread.describe(self._twin)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _require_thread(self) -> LoopThread:
        if self._thread is None:
            raise ClosedError(
                "the client is not started: use it as 'with', or call start()"
            )
        self._thread.require_usable()
        return self._thread

    producer = making(AsyncClient.producer, Producer)
    ordered_producer = making(AsyncClient.ordered_producer, OrderedProducer)
    xa = making(AsyncClient.xa, Xa)
    exchange = making(AsyncClient.exchange, Exchange)

    @like(AsyncClient.consumer)
    def consumer(self, *args: Any, **keywords: Any) -> "Consumer":
        """Return a consumer; see `AsyncClient.consumer`."""
        thread = self._require_thread()
        for name in HOOKS:
            if keywords.get(name) is not None:
                check_plain_function(name, keywords[name])
        twin = thread.run(on_loop(self._twin.consumer, *args, **keywords))
        consumer = Consumer(twin, thread)
        self._consumers.add(consumer)
        return consumer

    queue = making(AsyncClient.queue, Queue)
    request = blocking(AsyncClient.request)
    responder = making(AsyncClient.responder, Responder)

    # -- reading without a group ------------------------------------------------------

    @like(AsyncClient.browse)
    def browse(self, topic: str, **options: Any) -> Generator[Message, None, None]:
        """Yield the messages of a topic; see `AsyncClient.browse`."""
        yield from self._iterate(browse_topic(context_of(self._twin), topic, **options))

    @like(AsyncClient.find)
    def find(self, topic: str, **options: Any) -> Generator[Message, None, None]:
        """Yield messages with a key, a header or an id; see `AsyncClient.find`."""
        found = find_messages(context_of(self._twin), topic, **options)
        yield from self._iterate(found)

    def _iterate(
        self, batches: AsyncGenerator[list[Message], None]
    ) -> Generator[Message, None, None]:
        thread = self._require_thread()
        taking: set[asyncio.Task[Any]] = set()

        async def take() -> list[Message] | None:
            task = asyncio.current_task()
            assert task is not None
            taking.add(task)
            task.add_done_callback(taking.discard)
            return await anext(batches, None)

        async def stop() -> None:
            # After an interrupt of the caller a step may still be running.
            for task in taking:
                task.cancel()
            await asyncio.gather(*taking, return_exceptions=True)
            await batches.aclose()

        is_over = False
        try:
            while batch := thread.run(take()):
                yield from batch
            is_over = True
        finally:
            # A closed client has closed the batches already.
            with contextlib.suppress(ClosedError):
                if not is_over:
                    thread.run(stop())

    get = blocking(AsyncClient.get)
    topics = blocking(AsyncClient.topics)
    partitions = blocking(AsyncClient.partitions)
    stats = blocking(AsyncClient.stats)

    def admin(self) -> "Admin":
        """Return an object that administers topics, groups, exchanges and brokers."""
        return Admin(AsyncAdmin(context_of(self._twin)), self._require_thread())

    @like(AsyncClient.statistics)
    def statistics(self) -> ClientStatistics:
        """Return a snapshot of the counters; see `AsyncClient.statistics`."""
        return self._twin.statistics()


class Admin(SyncPart[AsyncAdmin]):
    """Administration of a cluster, for any thread.

    Created by `Client.admin`; holds no resources. Calls about topics and groups need
    ZooKeeper. Topics also need brokers of this package, because MetaQ 1.4 brokers only
    take topics from their `server.ini`. A call with `plan=True` only returns what it
    would change.
    """

    create_topic = blocking(AsyncAdmin.create_topic)
    alter_topic = blocking(AsyncAdmin.alter_topic)
    delete_topic = blocking(AsyncAdmin.delete_topic)
    describe_topic = blocking(AsyncAdmin.describe_topic)
    topics = blocking(AsyncAdmin.topics)
    brokers = blocking(AsyncAdmin.brokers)
    forget_broker = blocking(AsyncAdmin.forget_broker)
    broker_stats = blocking(AsyncAdmin.broker_stats)
    describe_partitions = blocking(AsyncAdmin.describe_partitions)
    wait_until_there = blocking(AsyncAdmin.wait_until_there)
    groups = blocking(AsyncAdmin.groups)
    describe_group = blocking(AsyncAdmin.describe_group)
    committed_offsets = blocking(AsyncAdmin.committed_offsets)
    reset_offsets = blocking(AsyncAdmin.reset_offsets)
    copy_offsets = blocking(AsyncAdmin.copy_offsets)
    delete_offsets = blocking(AsyncAdmin.delete_offsets)
    delete_group = blocking(AsyncAdmin.delete_group)
    settle_group = blocking(AsyncAdmin.settle_group)
    queue_groups = blocking(AsyncAdmin.queue_groups)
    describe_queue_group = blocking(AsyncAdmin.describe_queue_group)
    create_queue_group = blocking(AsyncAdmin.create_queue_group)
    alter_queue_group = blocking(AsyncAdmin.alter_queue_group)
    delete_queue_group = blocking(AsyncAdmin.delete_queue_group)
    exchanges = blocking(AsyncAdmin.exchanges)
    unread_definitions = blocking(AsyncAdmin.unread_definitions)
    create_exchange = blocking(AsyncAdmin.create_exchange)
    delete_exchange = blocking(AsyncAdmin.delete_exchange)
    bind = blocking(AsyncAdmin.bind)
    unbind = blocking(AsyncAdmin.unbind)
    route = blocking(AsyncAdmin.route)
    scheduled = blocking(AsyncAdmin.scheduled)
    cancel_scheduled = blocking(AsyncAdmin.cancel_scheduled)


class Consumer(SyncClosable[AsyncConsumer]):
    """A member of a group, or a reader of fixed partitions; one thread at a time.

    Created by `Client.consumer`; used as `with`. Reading begins when the block is
    entered.

    Delivery: at least once. A message counts as handled when the next one is requested,
    or by `commit`. Handled offsets are committed every `commit_interval_s`, when
    partitions are revoked, and on `close`; with None only `commit` commits. Messages
    handled after the last commit are delivered again, for example after a crash.
    """

    def __init__(self, twin: AsyncConsumer, thread: LoopThread) -> None:
        """Wrap the async twin; use `Client.consumer` to create one."""
        super().__init__(twin, thread)
        self._clock = twin.clock
        self._calls = ThreadCalls(
            twin.clock, twin.fetch_buffer.wake, twin.current_batch.interrupt
        )
        twin.fetch_buffer.is_call_due = lambda: self._calls.is_due
        twin.hooks.call_in_threads(self, self._calls.call)

    group: str = same("group", "Name of the consumer group.")

    topics: Collection[str] = same("topics", "Names of the topics that it reads.")

    options: ConsumerOptions = same("options", "Options chosen by the user.")

    start = blocking(AsyncConsumer.start)

    @like(AsyncConsumer.close)
    def close(self, timeout: float | None = None) -> None:
        """Revoke the partitions and leave the group; see `AsyncConsumer.close`."""
        check_timeout(timeout)
        is_free = self._is_free

        async def close() -> None:
            if is_free:
                self._twin.current_batch.drop()
            await self._twin.close(timeout)

        if self._thread.is_usable:
            self._thread.run_close(close(), self._calls.serve)

    def _let_go(self, timeout: float | None = None) -> None:
        """Give the current batch back, unless a loop of another thread has it.

        A consumer with hooks is closed instead, because its hooks run on this thread.
        """
        if self._twin.hooks.are_set:
            try:
                self.close(timeout)
            except Exception:  # noqa: BLE001  # the others are closed all the same
                _log.exception("closing failed: child=%r", self)
        elif self._is_free:
            self._twin.current_batch.drop()

    @property
    def _is_free(self) -> bool:
        return self._twin.current_batch.is_free_for(threading.current_thread())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object = None, *_error: object) -> None:
        if kind is None and self._thread.is_usable and self._is_free:
            self._twin.current_batch.count()
        self.close()

    def __iter__(self) -> Iterator[Message]:
        # No Python frame is entered per message.
        return chain.from_iterable(self._pieces())

    def _pieces(self) -> Iterator[Iterator[Message]]:
        current = self._twin.current_batch
        self._require_started()
        with current.loop_of(threading.current_thread()):
            try:
                while True:
                    for piece in current.pieces():
                        # A hook that is queued later interrupts this piece.
                        self._calls.run_due()
                        yield piece
                    self._thread.require_own()
                    try:
                        with current.taking():
                            batch = self._take(None)
                            assert batch is not None
                            current.hold(batch)
                    except ClosedError:
                        return
            except KeyboardInterrupt:
                current.recover()
                raise

    def _require_started(self) -> None:
        self._thread.require_own()
        self._twin.require_started()

    def _take(self, end_s: float | None) -> FetchedBatch | None:
        """Wait for a batch as `FetchBuffer.take`, and call queued hooks."""
        while True:
            self._calls.run_due()
            left_s = None
            if end_s is not None:
                left_s = max(0.0, end_s - self._clock.monotonic_s())
            batch = self._twin.fetch_buffer.take(left_s)
            if batch is not None or left_s == 0:
                return batch

    @like_in_place(AsyncConsumer.receive)
    def receive(
        self, timeout: float | None = None, **unknown: object
    ) -> Message | None:
        """Return the next message; see `AsyncConsumer.receive`."""
        if unknown:
            raise unknown_option(Consumer.receive, unknown)
        # If an interrupt prevents the return, the message is handed out again.
        try:
            many = self._receive(1, timeout)
            return many[0] if many else None
        except KeyboardInterrupt:
            self._twin.current_batch.recover()
            raise

    @like_in_place(AsyncConsumer.receive_many)
    def receive_many(
        self,
        count_max: int,
        timeout: float | None = None,
        *,
        fill: bool = False,
        **unknown: object,
    ) -> list[Message]:
        """Return available messages; see `AsyncConsumer.receive_many`."""
        if unknown:
            raise unknown_option(Consumer.receive_many, unknown)
        try:
            if not fill:
                return self._receive(count_max, timeout)
            self._check_reader(count_max, timeout)
            return self._fill(count_max, timeout=timeout).messages
        except KeyboardInterrupt:
            self._twin.current_batch.recover()
            raise

    def _receive(self, count_max: int, timeout: float | None) -> list[Message]:
        current = self._twin.current_batch
        self._check_reader(count_max, timeout)
        self._calls.run_due()
        many = current.some(count_max)
        if many:
            return many
        end_s = None if timeout is None else self._clock.monotonic_s() + timeout
        with current.taking():
            while batch := self._take(end_s):
                current.hold(batch)
                # Empty if its partition is being revoked.
                many = current.some(count_max)
                if many:
                    return many
        return []

    def _check_reader(self, count_max: int, timeout: float | None) -> None:
        self._require_started()
        check_whole("count_max", count_max, 1)
        check_timeout(timeout)
        self._twin.current_batch.require_free_for(threading.current_thread())

    @like(AsyncConsumer.batches)
    def batches(
        self,
        *,
        max_count: int = 500,
        max_bytes: int | None = None,
        max_wait_s: float = 1.0,
    ) -> Iterator["MessageBatch"]:
        """Iterate over batches of messages; see `AsyncConsumer.batches`."""
        check_bounds(max_count, max_bytes, max_wait_s)
        return self._batches(max_count, max_bytes, max_wait_s)

    def _batches(
        self, max_count: int, max_bytes: int | None, max_wait_s: float
    ) -> Iterator["MessageBatch"]:
        self._require_started()
        current = self._twin.current_batch
        with current.loop_of(threading.current_thread()):
            try:
                while True:
                    self._thread.require_own()
                    try:
                        filling = self._fill(max_count, max_bytes, wait_s=max_wait_s)
                    except ClosedError:
                        return
                    if filling.offsets:
                        yield MessageBatch(self, filling)
            except KeyboardInterrupt:
                current.recover()
                raise

    def _fill(
        self,
        count_max: int,
        bytes_max: int | None = None,
        *,
        timeout: float | None = None,
        wait_s: float | None = None,
    ) -> Filling:
        """Return a list when it is full, or its time is over; as `AsyncConsumer`."""
        current, now_s = self._twin.current_batch, self._clock.monotonic_s
        end_s = None if timeout is None else now_s() + timeout
        with current.taking():
            filling = Filling(current, count_max=count_max, bytes_max=bytes_max)
            self._calls.run_due()
            while not filling.add_nowait():
                if wait_s is not None and filling.offsets and end_s is None:
                    end_s = now_s() + wait_s
                left_s = None if end_s is None else max(0.0, end_s - now_s())
                if not self._twin.fetch_buffer.wait(left_s, current.held):
                    break
                self._calls.run_due()
        return filling

    pause = direct(AsyncConsumer.pause)
    resume = direct(AsyncConsumer.resume)
    paused = direct(AsyncConsumer.paused)

    @names_arguments
    def run(
        self,
        handler: Handler[Message],
        *,
        concurrency: int = 1,
        retry: RetryPolicy = DEFAULT_POLICY,
        timeout: float | None = None,
    ) -> None:
        """Call the handler for every message, until `close` or the time-out.

        A message counts as handled when its handler has returned. Messages of one
        partition are handled one at a time, in order. A message whose handler fails is
        handled again as `retry` says, while its partition waits. With
        `commit_interval_s=None` nothing is committed until `commit` is called, in a
        handler or elsewhere.

        Args:
            handler: handles one message, on one of the threads; an exception is a
                failure.
            concurrency: number of threads, 1 or more; each has one partition at a time.
            retry: policy for failures.
            timeout: seconds until no more handlers are started. Running ones then have
                `revoke_timeout_s` to end; one that still runs keeps its thread and its
                partition until it returns. The consumer stays open, and may be run
                again. None runs until another thread calls `close`.

        Raises:
            NoTopicError: `retry` sends dead letters to a topic that does not exist. If
                the consumer's topic matched a pattern later, `health` reports it.
            HandlerFailedError: a message was given up, and `retry` says to stop.
            ConfigError: the handler is a coroutine function.
            RequestTimeoutError: the local retry store could not be opened in time.
            MetaqError: the consumer has failed, is running already, or is not started.

        Interrupt: raised after running handlers have ended, or after
        `revoke_timeout_s`; messages that they finished are handled.
        """
        workers = Workers(self._twin, self._thread, handler, self._calls)
        workers.run(concurrency, retry, timeout)

    commit = blocking(AsyncConsumer.commit)
    committed = blocking(AsyncConsumer.committed)

    @like(AsyncConsumer.commit_nowait)
    def commit_nowait(self, what: Committable | None = None) -> Future[None]:
        """Begin a commit; see `AsyncConsumer.commit_nowait`.

        The messages to commit are those handed out now, not when the loop commits.
        """
        self._thread.require_usable()
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # so that it cannot be cancelled
        order = self._twin.commit_order(what)
        self._twin.commit_orders.add(order, future, self._thread.begin)
        return future

    @like(AsyncConsumer.seek)
    def seek(
        self, partition: TopicPartition | str, to: Goal, timeout: float | None = None
    ) -> None:
        """Continue at another offset; see `AsyncConsumer.seek`."""
        limit_s = self._twin.limit_s(timeout)
        seeking = self._twin.seek(partition, to, timeout)
        self._thread.run(seeking, timeout_s=limit_s)

    rollback = blocking(AsyncConsumer.rollback)
    assignment = direct(AsyncConsumer.assignment)
    lag = blocking(AsyncConsumer.lag)
    health = direct(AsyncConsumer.health)
    statistics = direct(AsyncConsumer.statistics)


class MessageBatch(ListedMessages[Consumer]):
    """Messages that are handled together; created by `Consumer.batches`."""

    def block(self, parts: TransactionParts) -> AsyncExactlyOnce:
        """Return the block that writes its results, for `Producer.exactly_once`.

        Raises:
            ConfigError: the consumer commits automatically, or not in ZooKeeper; or it
                and the producer are of different clients.
        """
        consumer = self.consumer._twin  # noqa: SLF001  # same module
        return AsyncMessageBatch(consumer, self._filling).block(parts)

    @like(AsyncMessageBatch.commit)
    def commit(self, timeout: float | None = None) -> None:
        """Commit all messages of the batch; see `AsyncMessageBatch.commit`."""
        self.consumer.commit(None if self.is_last else self, timeout)
