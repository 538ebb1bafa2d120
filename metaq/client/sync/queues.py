"""Workers of queue groups in the sync world: any number of threads take and settle.

Messages are taken from the worker's prefetch by the calling thread; what is said about
them crosses to the client's loop, many at once.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Self

from metaq.client.consume.decode import MAKE
from metaq.client.names import require_text
from metaq.client.options import QueueOptions, check_lease
from metaq.client.queue.prefetch import HeldMessage
from metaq.client.queue.queue_messages import (
    AsyncQueueMessage,
    DeliveredMessage,
    delay_of,
    held_of,
)
from metaq.client.queue.settling import Settling
from metaq.client.queue.work_queue import AsyncQueue
from metaq.client.sync.derived import (
    SyncClosable,
    blocking,
    direct,
    like,
    on_loop,
    same,
)
from metaq.client.sync.handler_threads import TAKE_S, Handler, HandlerThreads
from metaq.client.sync.thread_calls import ThreadCalls
from metaq.client.validation import check_timeout, check_whole
from metaq.clock import Clock
from metaq.errors import ClosedError, RequestTimeoutError
from metaq.loop_thread import LoopThread
from metaq.protocol.queue_frames import SettleVerb


class QueueMessage(DeliveredMessage):
    """A message of a queue group, for any thread; see `AsyncQueueMessage`."""

    thread: LoopThread

    @like(AsyncQueueMessage.ack)
    def ack(self, timeout: float | None = None) -> None:
        """Say that it is done; see `AsyncQueueMessage.ack`."""
        self._settle(SettleVerb.ACK, timeout)

    def ack_nowait(self) -> Future[None]:
        """Begin an `ack`; the future has its outcome, and need not be waited for."""
        return self._say(SettleVerb.ACK)

    @like(AsyncQueueMessage.nack)
    def nack(self, delay: float | None = None, timeout: float | None = None) -> None:
        """Have it delivered again; see `AsyncQueueMessage.nack`."""
        self._settle(SettleVerb.NACK, timeout, delay_of(delay))

    @like(AsyncQueueMessage.release)
    def release(self, timeout: float | None = None) -> None:
        """Have it delivered again, uncounted; see `AsyncQueueMessage.release`."""
        self._settle(SettleVerb.RELEASE, timeout)

    @like(AsyncQueueMessage.extend)
    def extend(self, seconds: float, timeout: float | None = None) -> None:
        """Let its lease go on; see `AsyncQueueMessage.extend`."""
        check_lease("seconds", seconds)
        self._settle(SettleVerb.EXTEND, timeout, int(seconds * 1000))

    @like(AsyncQueueMessage.reject)
    def reject(self, reason: str, timeout: float | None = None) -> None:
        """Give it up; see `AsyncQueueMessage.reject`."""
        require_text("reason", reason)
        self._settle(SettleVerb.REJECT, timeout, text=reason)

    def _say(self, verb: SettleVerb, argument: int = 0, text: str = "") -> Future[None]:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled from now on
        queue = self.queue
        queue.settle([Settling(self.held, verb, argument, text, future)])
        return future

    def _settle(
        self, verb: SettleVerb, timeout: float | None, argument: int = 0, text: str = ""
    ) -> None:
        check_timeout(timeout)
        self.thread.require_caller()
        future = self._say(verb, argument, text)
        wait_answered(future, timeout, f"{self.held}: {verb.name.lower()}")


def wait_answered(future: Future[None], timeout: float | None, what: str) -> None:
    """Wait for the outcome of a settle, and raise its error.

    Raises:
        RequestTimeoutError: there is none yet; it goes on.
    """
    try:
        future.result(timeout)
    except TimeoutError as error:
        if future.done():
            raise
        raise RequestTimeoutError(f"{what}: no answer within {timeout:g} s") from error


class Queue(SyncClosable[AsyncQueue]):
    """A worker of a queue group, for any threads; see `AsyncQueue`."""

    def __init__(self, twin: AsyncQueue, thread: LoopThread, *, clock: Clock) -> None:
        """Wrap the async twin; `Client.queue` is the way in."""
        super().__init__(twin, thread)
        self._clock = clock
        twin.schedule = twin.loop.call_soon_threadsafe

    topic: str = same("topic", "Name of the topic.")
    group: str = same("group", "Name of the queue group.")
    worker: str = same("worker", "Name of this worker.")
    options: QueueOptions = same("options", "Options chosen by the user.")

    start = blocking(AsyncQueue.start)

    def close(self, timeout: float | None = None) -> None:
        """Release what was not begun, and leave; see `AsyncQueue.close`."""
        check_timeout(timeout)
        self._thread.run_close(self._twin.close(timeout))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

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
        """Return messages that are here; see `AsyncQueue.receive_many`."""
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

    def run(
        self,
        handler: Handler[QueueMessage],
        *,
        concurrency: int = 1,
        timeout: float | None = None,
    ) -> None:
        """Call the handler for every message, in threads; see `AsyncQueue.run`.

        The handler is a plain function: an async one is refused with `ConfigError`. An
        interrupt (Ctrl-C) waits for the handlers that are at work, at most the client's
        `close_timeout_s`, and is raised then.
        """
        check_timeout(timeout)
        calls = ThreadCalls(self._clock)
        threads = _QueueThreads(self._twin, self._thread, handler, calls, self._message)
        self._thread.run(on_loop(self._twin.begin_run, concurrency))
        threads.run_threads(concurrency, timeout)

    @like(AsyncQueue.ack_many)
    def ack_many(
        self, messages: Iterable[QueueMessage], timeout: float | None = None
    ) -> None:
        """Ack messages together; see `AsyncQueue.ack_many`."""
        check_timeout(timeout)
        helds = held_of(messages, self._twin)
        self._thread.run(self._twin.ack_held(helds, timeout))

    statistics = direct(AsyncQueue.statistics)


class _QueueThreads(HandlerThreads[QueueMessage]):
    """The threads of one run of a worker."""

    def __init__(
        self,
        twin: AsyncQueue,
        thread: LoopThread,
        handler: Handler[QueueMessage],
        calls: ThreadCalls,
        make: Any,
    ) -> None:
        """Prepare; as `HandlerThreads`."""
        super().__init__(thread, handler, calls, grace_s=twin.close_timeout_s)
        self._twin = twin
        self._make = make

    def turn(self) -> None:
        """Have the next message handled, if one comes."""
        held = self._twin.prefetch.take(TAKE_S)
        if held is None:
            return
        try:
            error = self.failure_of(self._make(held))
        except BaseException:
            self._twin.say(held, SettleVerb.NACK)
            raise
        self._twin.conclude(held, error)
