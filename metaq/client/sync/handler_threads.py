"""Threads that take messages and call the handler of a sync client.

Each thread calls the handler, message after message; only failures are passed to the
client's loop, where `Handling` decides about them.
"""

import threading
from collections.abc import Callable, Coroutine
from typing import Final, Generic, TypeAlias, TypeVar

from metaq.client.consume.consumer import AsyncConsumer
from metaq.client.consume.fetched_batch import FetchedBatch
from metaq.client.consume.handling import Handling
from metaq.client.consume.redelivery import RetryPolicy
from metaq.client.options import check_plain_function
from metaq.client.sync.thread_calls import ThreadCalls
from metaq.errors import ClosedError, ConfigError
from metaq.loop_thread import LoopThread
from metaq.model import Message

M = TypeVar("M", bound=Message)

Handler: TypeAlias = Callable[[M], object]
"""Handles a message; its result is ignored, an exception is a failure."""

TAKE_S: Final = 0.2
"""Maximum time until an idle thread notices the end of the run, in seconds."""


class HandlerThreads(Generic[M]):
    """The threads of one run, each of which repeats `turn`."""

    def __init__(
        self,
        thread: LoopThread,
        handler: Handler[M],
        calls: ThreadCalls,
        *,
        grace_s: float,
    ) -> None:
        """Prepare; no thread is started before `run_threads`.

        Args:
            thread: the client's loop thread.
            handler: called on the threads.
            calls: hooks, called on the thread that waits in `run_threads`.
            grace_s: maximum wait for running handlers at the end of the run.
        """
        check_plain_function("handler", handler)
        self._thread = thread
        self._handler = handler
        self._calls = calls
        self._grace_s = grace_s
        self.is_over = threading.Event()
        self._ended = threading.Condition()
        self._at_work = 0
        self._error: BaseException | None = None

    def turn(self) -> None:
        """Wait for messages, at most TAKE_S, and handle them.

        Raises:
            ClosedError: there will be no more messages.
        """
        raise NotImplementedError

    def run_threads(self, concurrency: int, timeout_s: float | None) -> None:
        """Run the threads until the run is over; raise the first error."""
        # Without `Thread.join`, which after an interrupt may treat a thread as ended.
        with self._calls.waking(self.wake):
            try:
                for number in range(concurrency):
                    thread = threading.Thread(
                        target=self._work, name=f"metaq-handler-{number}", daemon=True
                    )
                    self._begin(thread)
                self._wait(timeout_s)
            finally:
                self.is_over.set()
                self._wait(self._grace_s)
        if self._error is not None:
            raise self._error

    def _begin(self, thread: threading.Thread) -> None:
        # Counted before the start, because an interrupt may end `start` after the
        # thread has begun.
        with self._ended:
            self._at_work += 1
        try:
            thread.start()
        except Exception:
            with self._ended:
                self._at_work -= 1
            raise

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until no thread works, at most `timeout_s`; call hooks in the wait."""
        self._calls.wait_for(self._ended, lambda: not self._at_work, timeout_s)

    def wake(self) -> None:
        """Wake the thread in `run_threads`, to call hooks."""
        with self._ended:
            self._ended.notify_all()

    def _work(self) -> None:
        try:
            while not self.is_over.is_set() and self._thread.is_usable:
                self.turn()
        except ClosedError:
            self.is_over.set()
        except BaseException as error:  # noqa: BLE001  # raised where `run` was called
            self._error = self._error or error
            self.is_over.set()
        finally:
            with self._ended:
                self._at_work -= 1
                self._ended.notify_all()

    def failure_of(self, message: M) -> Exception | None:
        """Call the handler; return its exception, or None if it returned."""
        try:
            result = self._handler(message)
        except Exception as error:  # noqa: BLE001  # all that users raise is judged
            return error
        if isinstance(result, Coroutine):
            # From a lambda around an async handler, which has not run.
            result.close()
            raise ConfigError(
                "handler: returned a coroutine, which is not awaited here"
            )
        return None


class Workers(HandlerThreads[Message]):
    """The threads of one run of a consumer, over its fetch buffer."""

    def __init__(
        self,
        consumer: AsyncConsumer,
        thread: LoopThread,
        handler: Handler[Message],
        calls: ThreadCalls,
    ) -> None:
        """Prepare, as `HandlerThreads`."""
        grace_s = consumer.options.revoke_timeout_s
        super().__init__(thread, handler, calls, grace_s=grace_s)
        self._consumer = consumer
        self._fetch_buffer = consumer.fetch_buffer
        self._handling: Handling

    def run(
        self, concurrency: int, retry: RetryPolicy, timeout_s: float | None
    ) -> None:
        """Handle all messages; see `Consumer.run`.

        Args:
            concurrency: number of threads, 1 or more.
            retry: policy for failures.
            timeout_s: time after which the run ends; None: never.
        """
        self._handling = self._thread.run(self._start(concurrency, retry, timeout_s))
        try:
            self.run_threads(concurrency, timeout_s)
        finally:
            self._thread.run_close(self._handling.close())

    async def _start(
        self, concurrency: int, retry: RetryPolicy, timeout_s: float | None
    ) -> Handling:
        handling = self._consumer.begin_handling(concurrency, retry)
        try:
            await handling.start(timeout_s)
        except BaseException:
            await handling.close()
            raise
        return handling

    def turn(self) -> None:
        """Handle the next batch, if one arrives in time."""
        batch = self._fetch_buffer.take(TAKE_S)
        if batch is None:
            return
        if batch.on_replayed is None:
            self._handle(batch)
        else:
            batch.on_replayed(self.failure_of(batch.messages[0]))

    def _handle(self, batch: FetchedBatch) -> None:
        """Handle a batch; keep in step with `handling.py`."""
        handling = self._handling
        pause_s = None
        try:
            for message in batch.begin():
                if self.is_over.is_set():
                    break
                error = None
                is_given_up = handling.is_given_up(message)
                if not is_given_up:
                    error = self.failure_of(message)
                if error is not None or is_given_up:
                    pause_s = self._thread.run(handling.settle(batch, message, error))
                    if pause_s is not None:
                        break
                batch.confirm()
            else:
                batch.confirm()  # the loop skips expired messages at the end
        finally:
            handling.give_back(batch, pause_s)
