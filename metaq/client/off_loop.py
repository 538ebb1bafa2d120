"""Runs blocking calls outside the event loop: on one thread, one call at a time.

A call that hangs (on a dead disk, or on a database behind a broken network) keeps the
thread, and no second thread is started: later calls wait for their turn, and give up at
their deadlines without having started. So hung calls do not accumulate.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar, TypeVarTuple

from metaq.clock import Clock
from metaq.errors import RequestTimeoutError
from metaq.fs.helper_threads import HelperThreads

A = TypeVarTuple("A")
T = TypeVar("T")


class _Open(Protocol):
    def close(self) -> None: ...


R = TypeVar("R", bound=_Open)


class OffLoop:
    """Runs blocking calls of one owner; used on one event loop at a time.

    Lifecycle: the first call starts the thread; `close` ends it, and the next call
    starts another one.
    """

    def __init__(self, name: str, *, clock: Clock) -> None:
        """Prepare; there is no thread yet.

        Args:
            name: name of the thread, and of the other side in time-out errors.
            clock: clock of the deadlines.
        """
        self._name = name
        self._clock = clock
        self._executor: HelperThreads | None = None
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T], *, deadline_s: float) -> T:
        """Run `work` and return its result, or raise its error.

        While the interpreter is shutting down, no thread can be started, and `work`
        runs on the loop's own thread without a bound.

        Raises:
            RequestTimeoutError: it did not end before the deadline, and may still take
                effect; or its turn did not come, and it is not started.

        Cancellation: as at the deadline.
        """
        left_s = max(0.0, deadline_s - self._clock.monotonic_s())
        turn = self._turn
        try:
            async with asyncio.timeout(left_s):
                await turn.acquire()
                if self._executor is None:
                    self._executor = HelperThreads(1, self._name)
                try:
                    future = call_off_loop(self._executor, work)
                except RuntimeError:
                    # The interpreter is shutting down: let a client that was not closed
                    # still commit.
                    turn.release()
                    return work()

                def end_turn(ended: asyncio.Future[Any]) -> None:
                    turn.release()
                    if not ended.cancelled():
                        # A caller that gave up will not retrieve the exception.
                        ended.exception()

                future.add_done_callback(end_turn)
                return await asyncio.shield(future)
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"{self._name}: no answer within {left_s:.3g} s"
            ) from error

    def close(self) -> None:
        """Let the thread end after its present call; does not wait."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None
            self._turn = asyncio.Lock()


def call_off_loop(
    threads: Executor, work: Callable[[*A], T], *args: *A
) -> asyncio.Future[T]:
    """Submit a call to the threads; return the future of its outcome.

    Raises:
        RuntimeError: the threads were shut down, or no thread can be started.
    """
    return asyncio.get_running_loop().run_in_executor(threads, work, *args)


async def open_off_loop(threads: Executor, opening: Callable[[], R]) -> R:
    """Open a resource on one of the threads; return it, or raise the error.

    Cancellation: a resource that is opened anyway is closed again, so that others can
    use it.
    """
    future = call_off_loop(threads, opening)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(_close_late)
        raise


async def close_off_loop(threads: Executor, one: _Open) -> None:
    """Close a resource on one of the threads; here if the interpreter shuts down.

    Args:
        threads: threads that are not shut down.
        one: resource whose `close` never raises and may be called twice.
    """
    try:
        closing = call_off_loop(threads, one.close)
    except RuntimeError:
        # No thread can be started: let a client that was not closed still end.
        one.close()
        return
    await closing


def _close_late(opening: asyncio.Future[R]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
