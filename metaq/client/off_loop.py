"""Calls that block, for an event loop that may not: one thread, one call at a time.

A call that hangs (a dead disk, a database beyond a broken network) keeps its thread,
and no second one starts beside it: later calls wait for their turn, and give up at
their deadlines without having been begun. Nothing piles up.
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
    """Runs blocking calls of one owner; on one event loop at a time.

    Lifecycle: the thread begins with the first call; `close` ends it, and the next
    call begins another one.
    """

    def __init__(self, name: str, *, clock: Clock) -> None:
        """Prepare; there is no thread yet.

        Args:
            name: of the thread, and of the other side in errors about time.
            clock: gives meaning to deadlines.
        """
        self._name = name
        self._clock = clock
        self._executor: HelperThreads | None = None
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T], *, deadline_s: float) -> T:
        """Run `work` and return its result, or raise its error.

        Where no thread can begin, while the interpreter is ending, it runs on the
        loop's own thread, unbounded.

        Raises:
            RequestTimeoutError: it did not end before the deadline, and may still do
                what it does; or its turn did not come, and it does nothing.

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
                    # The interpreter is ending, and lets no thread begin: a client
                    # that was not closed still commits.
                    turn.release()
                    return work()

                def end_turn(ended: asyncio.Future[Any]) -> None:
                    turn.release()
                    if not ended.cancelled():
                        # A caller that gave up does not ask for it any more.
                        ended.exception()

                future.add_done_callback(end_turn)
                return await asyncio.shield(future)
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"{self._name}: no answer within {left_s:.3g} s"
            ) from error

    def close(self) -> None:
        """Let the thread end when its call does; does not wait."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None
            self._turn = asyncio.Lock()


def call_off_loop(
    threads: Executor, work: Callable[[*A], T], *args: *A
) -> asyncio.Future[T]:
    """Have a call made on one of the threads; return the future of its outcome.

    Raises:
        RuntimeError: they were shut down, or no thread can begin.
    """
    return asyncio.get_running_loop().run_in_executor(threads, work, *args)


async def open_off_loop(threads: Executor, opening: Callable[[], R]) -> R:
    """Open a resource on one of the threads; return it, or raise the error.

    Cancellation: a resource opened all the same is closed again, so that others can
    have it.
    """
    future = call_off_loop(threads, opening)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(_close_late)
        raise


async def close_off_loop(threads: Executor, one: _Open) -> None:
    """Close a resource on one of the threads; here while the interpreter is ending.

    Args:
        threads: not shut down.
        one: its `close` never raises, and is harmless twice.
    """
    try:
        closing = call_off_loop(threads, one.close)
    except RuntimeError:
        # No thread begins any more: a client that was not closed still ends.
        one.close()
        return
    await closing


def _close_late(opening: asyncio.Future[R]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
