"""Threads for calls that block on the disk; none keeps the process from ending.

A disk may hang for ever, and with it every call that reads from it: recovery, a cold
get, a step of the scrub, a client's offsets and spools. The executors of the standard
library wait for such calls when the interpreter ends, so that a broker or client that
has stopped in time would not exit.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class HelperThreads(Executor):
    """An executor with daemon threads, which begin calls in the order of submission.

    Only the owner's thread submits and shuts down. The queue is unbounded; each caller
    bounds its own outstanding calls.
    """

    def __init__(self, count: int, name: str) -> None:
        """Create the executor; each of the first `count` calls starts a thread."""
        self._count = count
        self._name = name
        self._threads: list[Thread] = []
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._queue = SimpleQueue()
        self._is_shut_down = False

    def begin(self) -> Self:
        """Start all threads now, so that later calls can not fail for lack of one.

        Raises `RuntimeError` if a thread can not start; those that run will end.
        """
        try:
            while len(self._threads) < self._count:
                self._begin_one()
        except RuntimeError:
            self.shutdown(wait=False)
            raise
        return self

    @property
    def is_running(self) -> bool:
        """Whether a thread has started and calls are accepted."""
        return bool(self._threads) and not self._is_shut_down

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Queue a call; never blocks.

        Raises `RuntimeError` after `shutdown`, or if no thread can start.
        """
        if self._is_shut_down:
            raise RuntimeError(f"{self._name}: a call after the shutdown")
        if len(self._threads) < self._count:
            self._begin_one()
        future: Future[T] = Future()
        self._queue.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls, and end the threads after the queued ones.

        With `wait` it returns when they have ended, without a time limit.
        """
        self._is_shut_down = True
        if cancel_futures:
            self._cancel_queued()
        for _ in self._threads:
            self._queue.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    async def end(self, *, cancel_futures: bool = False) -> None:
        """Shut down without waiting, as a step of an owner's stop."""
        self.shutdown(wait=False, cancel_futures=cancel_futures)

    def _begin_one(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _cancel_queued(self) -> None:
        while True:
            try:
                work = self._queue.get_nowait()
            except Empty:
                return
            if work is not None:
                work[0].cancel()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            _carry_out(*work)
            # Free the arguments of the call before waiting.
            del work


def start_call(name: str, call: Callable[[], T]) -> Future[T]:
    """Run one call, which may hang, on its own thread.

    Raises `RuntimeError` if no thread can start.
    """
    threads = HelperThreads(1, name)
    future = threads.submit(call)
    threads.shutdown(wait=False)
    return future


def _carry_out(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  # goes to the future
        future.set_exception(error)
    else:
        future.set_result(result)
