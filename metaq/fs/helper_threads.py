"""Threads for calls that wait for the disk; none keeps the process from ending.

A disk may hang for ever, and with it whatever reads from it: recovery, a cold get, a
question, a step of the scrub, a client's offsets and spools. The executors of the
standard library wait for such a call when the interpreter ends: a broker or client
that had stopped in time would stay there as a process.
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
    """An executor with daemon threads, which begin calls in the order they came.

    Asked and shut down on its owner's thread alone. The queue is bounded by its
    callers: each bounds its calls under way.
    """

    def __init__(self, count: int, name: str) -> None:
        """Prepare; a thread begins with each of the first `count` calls.

        Args:
            count: threads at most, 1 or more.
            name: of the threads, before their number.
        """
        self._count = count
        self._name = name
        self._threads: list[Thread] = []
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._queue = SimpleQueue()
        self._is_shut_down = False

    def begin(self) -> Self:
        """Begin all threads now, so that no call can fail for want of one; return it.

        Raises:
            RuntimeError: the system lets no more begin; those that have will end.
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
        """Tell whether a thread has begun, and calls are taken."""
        return bool(self._threads) and not self._is_shut_down

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Have `fn` called; never blocks.

        Raises:
            RuntimeError: it was shut down, or no thread can begin.
        """
        if self._is_shut_down:
            raise RuntimeError(f"{self._name}: a call after the shutdown")
        if len(self._threads) < self._count:
            self._begin_one()
        future: Future[T] = Future()
        self._queue.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and let the threads end behind those that are queued.

        Args:
            wait: until they have ended, without a bound.
            cancel_futures: cancel calls that no thread has begun.
        """
        self._is_shut_down = True
        if cancel_futures:
            self._cancel_queued()
        for _ in self._threads:
            self._queue.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

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
            # The work holds its arguments: let go before waiting.
            del work


def start_call(name: str, call: Callable[[], T]) -> Future[T]:
    """Have one call carried out on a thread of its own, which ends with it.

    Args:
        name: of the thread.
        call: the call that may hang.

    Raises:
        RuntimeError: no thread can begin.
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
