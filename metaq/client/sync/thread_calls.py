"""Functions that the client's event loop runs on the user's threads.

A coroutine on the loop queues a function here and waits for its result. A thread that
is in a blocking call of the consumer, or enters one, calls it; `wakers` end the waits
of such threads when a function is queued. One function is called at a time.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty
from typing import Any, TypeVar

from metaq.client.timeouts import SIGNAL_S, wait_for
from metaq.clock import Clock
from metaq.loop_thread import Ended, Outcome

T = TypeVar("T")


class ThreadCalls:
    """Queue of functions for the threads that use one consumer."""

    def __init__(self, clock: Clock, *wakers: Callable[[], None]) -> None:
        """Create it empty; each of `wakers` is called when a function is queued."""
        self._clock = clock
        self._due: deque[tuple[Future[Any], Callable[[], object]]] = deque()
        self._running = threading.Lock()
        self._wakers = list(wakers)

    @contextlib.contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Add a waker inside the block; it is called on any thread."""
        self._wakers.append(wake)
        try:
            yield
        finally:
            self._wakers.remove(wake)

    @property
    def is_due(self) -> bool:
        """Whether a function is queued and none is being called."""
        return bool(self._due) and not self._running.locked()

    async def call(self, function: Callable[[], object]) -> object:
        """Run a function on a user's thread and return its result; called on the loop.

        Raises:
            Exception: raised by the function.

        Cancellation: the function is not called, unless it has begun.
        """
        entry = Future[Any](), function
        self._due.append(entry)
        self._wake()
        try:
            return await asyncio.wrap_future(entry[0])
        finally:
            with contextlib.suppress(ValueError):
                self._due.remove(entry)

    def run_due(self) -> None:
        """Call the queued functions on this thread; errors go to the loop."""
        while self._due and self._running.acquire(blocking=False):
            try:
                with contextlib.suppress(IndexError):  # another thread was faster
                    self._run(*self._due.popleft())
            except BaseException:
                self._running.release()
                self._wake()
                raise
            self._running.release()

    def wait_for(
        self,
        condition: threading.Condition,
        is_met: Callable[[], bool],
        timeout_s: float | None,
    ) -> None:
        """Wait as `timeouts.wait_for`, calling queued functions on this thread.

        Args:
            condition: not held by the caller; notified by a waker.
            is_met: the awaited condition.
            timeout_s: maximum wait, in seconds; None waits without a limit.
        """
        end_s = None if timeout_s is None else self._clock.monotonic_s() + timeout_s
        while True:
            self.run_due()
            with condition:
                wait_for(condition, lambda: is_met() or self.is_due, timeout_s)
                if end_s is not None:
                    timeout_s = max(0.0, end_s - self._clock.monotonic_s())
                if is_met() or timeout_s == 0:
                    return

    def serve(self, ended: Ended[T]) -> Outcome[T]:
        """Call queued functions on this thread until a call has its outcome."""
        with self.waking(lambda: ended.put(None)):
            while True:
                self.run_due()
                with contextlib.suppress(Empty):
                    if (outcome := ended.get(timeout=SIGNAL_S)) is not None:
                        return outcome

    def _run(self, future: Future[Any], function: Callable[[], object]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  # judged on the loop
            future.set_exception(error)
        except BaseException as error:
            # For example Ctrl-C: it must end this thread's call and not the loop.
            future.set_exception(InterruptedError(repr(error)))
            raise

    def _wake(self) -> None:
        for wake in tuple(self._wakers):
            wake()
