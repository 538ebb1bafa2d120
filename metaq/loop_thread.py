"""An event loop on its own thread, for the synchronous API.

One thread per client, reading task or sender of named batches. Callers in any other
thread hand it coroutines and wait. The thread is a daemon, so a program that forgets to
close its client still ends; an exit hook closes clients that are still open, which
commits handled messages.

A fork copies neither the thread nor the owners of its locks. In the child, every call
raises at once instead of waiting for a thread that does not exist.
"""

import asyncio
import concurrent.futures
import logging
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

from metaq.errors import ClosedError, NoResourcesError, RequestTimeoutError

_log = logging.getLogger(__name__)

T = TypeVar("T")

Outcome: TypeAlias = Callable[[], T]
"""Returns the result of a call, or raises its error."""

Ended: TypeAlias = SimpleQueue[Outcome[T] | None]
"""Gets the outcome of a call. None only wakes the thread that waits."""

STOP_TIMEOUT_S: Final = 10.0

_all: "weakref.WeakSet[LoopThread]" = weakref.WeakSet()


class LoopThread:
    """Runs coroutines for other threads. Lifecycle: runs when created, until `stop`."""

    timeout_s: ClassVar[float | None] = None
    """Longest wait of `run`, in seconds; None: without a limit."""

    def __init__(self, name: str) -> None:
        """Start the thread.

        Args:
            name: for logs and debuggers.

        Raises:
            NoResourcesError: no descriptors or no thread is available; everything is
                closed again, and a later try may succeed.
        """
        self.loop = _new_loop(name)
        """The loop, for `call_soon_threadsafe`."""
        self.is_usable = True
        """False after `stop`, and in the child of a fork."""
        self._is_forked = False
        # Held while a coroutine is handed to the loop, so that `stop` comes after it.
        self._entry = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.loop.close()
            raise NoResourcesError(f"{name}: no thread can begin: {error}") from error
        _all.add(self)

    def _run(self) -> None:
        # The runner cancels unfinished tasks at its end, so their waiters are woken.
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            loop = runner.get_loop()
            is_over = False
            while not is_over:
                try:
                    loop.run_forever()
                    is_over = True
                except SystemExit:
                    # Raised by a user's callback. Keep running: without the loop, no
                    # message would ever have an outcome.
                    _log.exception("a callback asked for the end of the program")
                    is_over = not self.is_usable

    def run(
        self,
        work: Coroutine[Any, Any, T],
        *,
        timeout_s: float | None = None,
        serve: Callable[[Ended[T]], Outcome[T]] | None = None,
    ) -> T:
        """Run a coroutine on the loop and wait for its end.

        Waits on a queue instead of the future of `begin`: its lock is in C, which saves
        a fifth of the two thread switches. A result is reported by the coroutine, one
        turn of the loop before the callback of its task.

        Args:
            work: closed without running when this raises ClosedError.
            timeout_s: longest wait, in seconds, instead of that of the class; the
                coroutine is then cancelled.
            serve: waits for the outcome on this thread and does work until then.

        Raises:
            ClosedError: the loop is closed, is closed during the call, or belongs to
                another process; or this is its own thread, which would wait for itself.
            RequestTimeoutError: the time-out has passed.
        """
        ended: Ended[T] = SimpleQueue()
        started: list[asyncio.Task[T]] = []

        async def call() -> T:
            result = await work
            ended.put(lambda: result)
            return result

        def on_done(task: asyncio.Task[T]) -> None:
            work.close()  # not begun if the task was cancelled at once
            ended.put(task.result)

        def start() -> None:
            started.append(self.loop.create_task(call()))
            started[0].add_done_callback(on_done)

        def cancel() -> None:
            started[0].cancel()

        try:
            self.require_caller()
            with self._entry:
                self.require_usable()
                self.loop.call_soon_threadsafe(start)
        except ClosedError:
            work.close()
            raise
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            outcome = ended.get(timeout=timeout_s) if serve is None else serve(ended)
        except Empty:
            with suppress(Empty):
                return self._result(ended.get_nowait())  # it ended just now
            self._end_early(cancel)
            raise RequestTimeoutError(f"not done within {timeout_s:g} s") from None
        except BaseException:
            self._end_early(cancel)
            raise
        return self._result(outcome)

    def _end_early(self, cancel: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and its tasks cancelled
            self.loop.call_soon_threadsafe(cancel)

    def _result(self, outcome: Outcome[T] | None) -> T:
        assert outcome is not None  # only `serve` is woken without one
        try:
            return outcome()
        except asyncio.CancelledError:
            self.require_usable()
            raise concurrent.futures.CancelledError from None

    def begin(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Start a coroutine on the loop; return its future, which `stop` cancels.

        Raises:
            ClosedError: as `require_usable`; the coroutine is closed without running.
        """
        try:
            with self._entry:
                self.require_usable()
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        except ClosedError:
            work.close()
            raise

    def run_close(
        self,
        work: Coroutine[Any, Any, None],
        serve: Callable[[Ended[None]], Outcome[None]] | None = None,
    ) -> None:
        """Run a close as `run` does; do nothing if `stop` closes, or has closed, it.

        Raises:
            ClosedError: this is the loop's own thread; nothing is closed.
        """
        try:
            self.run(work, serve=serve)
        except ClosedError:
            if self.is_usable:
                raise

    def require_caller(self) -> None:
        """Raise when the calling thread cannot wait for the loop.

        Raises:
            ClosedError: as `require_usable`, or this is the loop's own thread.
        """
        self.require_usable()
        if threading.current_thread() is self._thread:
            raise ClosedError(
                "a blocking call on the client's own thread would wait for itself:"
                " call it from another thread"
            )

    def require_usable(self) -> None:
        """Raise if the loop cannot take work.

        Raises:
            ClosedError: stopped, or copied by a fork.
        """
        self.require_own()
        if not self.is_usable:
            raise ClosedError("the client is closed")

    def require_own(self) -> None:
        """Raise in the child of a fork.

        Raises:
            ClosedError: the loop belongs to another process.
        """
        if self._is_forked:
            raise ClosedError(
                f"this client was created before a fork: process {os.getpid()} needs"
                " its own client"
            )

    def describe(self, twin: object) -> str:
        """Return the repr of a synchronous object: that of its async twin."""
        if self._is_forked:
            # The twin's locks may be held for ever.
            name = type(twin).__name__.removeprefix("Async")
            return f"<{name} of another process, before a fork>"
        return "<" + repr(twin).removeprefix("<Async")

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Cancel running work and end the thread; not from the thread itself.

        Does nothing if it was stopped before, or belongs to another process.

        Args:
            timeout_s: longest wait for the thread's end, in seconds; it may end later.
        """
        if self._is_forked:
            return  # the lock may be held for ever
        with self._entry:
            is_first, self.is_usable = self.is_usable, False
        if not is_first:
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)

    def forget(self) -> None:
        """Mark the loop as another process's; called in the child of a fork."""
        self._is_forked = True
        self.is_usable = False


def _new_loop(name: str) -> asyncio.AbstractEventLoop:
    try:
        # Try the descriptors first: a loop that fails half-way logs errors for ever.
        with selectors.DefaultSelector():
            ends = socket.socketpair()
        for end in ends:
            end.close()
        return asyncio.new_event_loop()
    except OSError as error:
        raise NoResourcesError(
            f"{name}: no event loop can begin: {error.strerror or error}"
        ) from error


def _forget_all() -> None:
    for thread in tuple(_all):
        thread.forget()


os.register_at_fork(after_in_child=_forget_all)
