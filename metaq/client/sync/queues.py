"""Sync workers of queue groups, in which any number of threads take and settle.

The calling thread takes messages from the worker's prefetch buffer; settles are passed
to the client's loop, many at once. A responder is a worker whose handlers return
replies.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Self

from metaq.client.consume.decode import MAKE
from metaq.client.options import QueueOptions, check_plain_function, names_arguments
from metaq.client.queue.prefetch import HeldMessage
from metaq.client.queue.queue_life import handled
from metaq.client.queue.queue_messages import DeliveredMessage
from metaq.client.queue.work_queue import AsyncQueue
from metaq.client.request.responder import AsyncResponder
from metaq.client.sync.derived import (
    SyncClosable,
    blocking,
    closing,
    direct,
    like,
    on_loop,
    same,
)
from metaq.client.sync.handler_threads import TAKE_S, Handler, HandlerThreads
from metaq.client.sync.thread_calls import ThreadCalls
from metaq.client.validation import check_timeout, check_whole
from metaq.errors import ClosedError, RequestTimeoutError
from metaq.loop_thread import LoopThread
from metaq.protocol.queue_frames import SettleVerb


class QueueMessage(DeliveredMessage[None, Future[None]]):
    """A message of a queue group, for any thread; its settles wait for the broker."""

    thread: LoopThread

    def _make_future(self) -> Future[None]:
        self.thread.require_own()
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # so that it cannot be cancelled
        return future

    def _settle(
        self, verb: SettleVerb, timeout: float | None, argument: int = 0, text: str = ""
    ) -> None:
        check_timeout(timeout)
        self.thread.require_caller()
        future = self._say(verb, argument, text)
        try:
            future.result(timeout)
        except TimeoutError as error:
            if future.done():
                raise
            raise RequestTimeoutError(
                f"{self.held}: {verb.name.lower()}: no answer within {timeout:g} s"
            ) from error


class Queue(SyncClosable[AsyncQueue]):
    """A worker of a queue group; any number of workers share the messages of a topic.

    Created by `Client.queue`; used as `with`. Any number of threads may read and settle
    at once.

    Delivery: at least once. A worker has a message until it is settled or its lease
    ends; leases of held messages are renewed for up to `handle_s_max`. A message that
    contradicts its checksum is not handed out: it is returned with the delay of the
    group, and logged.

    The end of the block releases messages that were not handed out, returns unsettled
    ones with the delay of the group, and waits for settles in progress.
    """

    def __init__(self, twin: AsyncQueue, thread: LoopThread) -> None:
        """Wrap the async twin; use `Client.queue` to create one."""
        super().__init__(twin, thread)
        twin.schedule = twin.loop.call_soon_threadsafe

    topic: str = same("topic", "Name of the topic.")
    group: str = same("group", "Name of the queue group.")
    worker: str = same("worker", "Name of this worker.")
    options: QueueOptions = same("options", "Options chosen by the user.")

    start = blocking(AsyncQueue.start)

    close = closing(AsyncQueue.close)
    ack_many = blocking(AsyncQueue.ack_many)
    statistics = direct(AsyncQueue.statistics)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __iter__(self) -> Iterator[QueueMessage]:
        self._require_started()
        while True:
            self._thread.require_own()
            try:
                held = self._twin.prefetch.take(None)
            except ClosedError:
                return
            assert held is not None, "it waits until there is one"
            yield self._message(held)

    def _message(self, held: HeldMessage) -> QueueMessage:
        message = MAKE(QueueMessage, held.row)
        message.held, message.queue = held, self._twin
        message.thread = self._thread
        return message

    def _require_started(self) -> None:
        self._thread.require_own()
        self._twin.require_started()

    @like(AsyncQueue.receive)
    def receive(self, timeout: float | None = None) -> QueueMessage | None:
        """Return the next message; see `AsyncQueue.receive`."""
        many = self.receive_many(1, timeout)
        return many[0] if many else None

    @like(AsyncQueue.receive_many)
    def receive_many(
        self, count_max: int, timeout: float | None = None
    ) -> list[QueueMessage]:
        """Return available messages; see `AsyncQueue.receive_many`."""
        self._require_started()
        check_whole("count_max", count_max, 1)
        check_timeout(timeout)
        first = self._twin.prefetch.take(timeout)
        if first is None:
            return []
        return [
            self._message(one)
            for one in self._twin.prefetch.with_others(first, count_max)
        ]

    @names_arguments
    def run(
        self,
        handler: Handler[QueueMessage],
        *,
        concurrency: int = 1,
        timeout: float | None = None,
    ) -> None:
        """Call the handler for every message, until `close` or the time-out.

        When it returns, the message is acked, unless the handler has settled it. If it
        raises, the message is returned with the delay of the group; `Reject` rejects it
        with the exception's text as the reason.

        Args:
            handler: handles one message, on one of the threads.
            concurrency: number of threads, 1 or more; raises `prefetch` if that is
                less.
            timeout: seconds until no more handlers are started. Running ones then have
                `close_timeout_s` to end. None runs until another thread calls `close`.

        Raises:
            ConfigError: the handler is a coroutine function.
            MetaqError: a broker refuses for good, or the queue is not started.

        Interrupt: raised after running handlers have ended, or after
        `close_timeout_s`.
        """
        check_timeout(timeout)
        threads = _QueueThreads(
            self._thread,
            handler,
            ThreadCalls(self._twin.clock),
            grace_s=self._twin.close_timeout_s,
        )
        threads.twin, threads.make = self._twin, self._message
        at_work = self._thread.run(on_loop(self._twin.begin_run, concurrency))
        threads.at_work = at_work
        try:
            threads.run_threads(concurrency, timeout)
        finally:
            self._twin.end_run(at_work)


class _QueueThreads(HandlerThreads[QueueMessage]):
    """The threads of one run of a worker."""

    twin: AsyncQueue
    make: Callable[[HeldMessage], QueueMessage]
    at_work: set[HeldMessage]

    def turn(self) -> None:
        """Handle the next message, if one arrives in time."""
        held = self.twin.prefetch.take(TAKE_S, self.at_work)
        if held is None:
            return
        handled.set(held)
        try:
            error = self.failure_of(self.make(held))
        except BaseException:
            self.twin.say(held, SettleVerb.NACK)
            raise
        else:
            self.twin.conclude(held, error)
        finally:
            self.twin.end_work(self.at_work, held)


class Responder(SyncClosable[AsyncResponder]):
    """Answers requests of a topic, sharing them with the responders of its group.

    Created by `Client.responder`, for any thread. Requests are delivered at least once;
    a reply arrives at most once.
    """

    def __init__(self, twin: AsyncResponder, thread: LoopThread) -> None:
        """Wrap the async twin; use `Client.responder` to create one."""
        super().__init__(twin, thread)
        self._queue = Queue(twin.queue, thread)

    close = closing(AsyncResponder.close)

    @names_arguments
    def run(
        self,
        handler: Callable[[QueueMessage], bytes],
        *,
        concurrency: int = 1,
        timeout: float | None = None,
    ) -> None:
        """Call the handler for every request, until `close` or the time-out.

        The bytes that it returns are the reply; an exception becomes an `ErrorReply`
        with its text at the requester. Messages that ask for no reply are handled, too.

        Args:
            handler: handles one request, on one of the threads.
            concurrency: number of threads, 1 or more.
            timeout: seconds until no more handlers are started; None runs until another
                thread calls `close`.

        Raises:
            ConfigError: the handler is a coroutine function.
            MetaqError: as the start of a queue, and its `run`.

        Interrupt: raised after running handlers have ended, or after the client's
        `close_timeout_s`.
        """
        check_plain_function("handler", handler)

        def handle(message: QueueMessage) -> None:
            data, error = None, None
            try:
                data = handler(message)
            except Exception as failure:  # noqa: BLE001  # the requester gets it
                error = failure
            self._thread.run(self._twin.conclude(message, data, error))

        with self._queue:
            self._queue.run(handle, concurrency=concurrency, timeout=timeout)
