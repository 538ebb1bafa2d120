"""A loop on its own thread: results, errors, deadlines, and its end."""

import asyncio
import inspect
import threading

import pytest

from metaq.errors import RequestTimeoutError
from metaq.testing.servers import BoundedLoopThread
from tests.rigs.waiting import wait_until


def test_work_runs_elsewhere_and_its_outcome_comes_back() -> None:
    """Results and exceptions of coroutines and functions."""
    with BoundedLoopThread("elsewhere") as thread:

        async def who() -> int:
            await asyncio.sleep(0)
            return threading.get_ident()

        there = thread.run(who())
        assert there == thread.call(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            thread.call(lambda: 1 // 0)


@pytest.mark.slow
def test_work_that_takes_too_long_is_cancelled() -> None:
    """The caller goes on at its deadline, and the work ends."""
    with BoundedLoopThread("elsewhere") as thread:
        work = asyncio.Event().wait()
        with pytest.raises(RequestTimeoutError):
            thread.run(work, timeout_s=0.2)
        # It may not have begun by then.
        wait_until(lambda: inspect.getcoroutinestate(work) == inspect.CORO_CLOSED)


def test_close_cancels_what_is_left_and_may_be_repeated() -> None:
    """The thread is gone afterwards, and its loop closed."""
    thread = BoundedLoopThread("elsewhere")
    cancelled = threading.Event()
    started = threading.Event()

    async def wait_for_ever() -> None:
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cancelled.set()

    future = asyncio.run_coroutine_threadsafe(wait_for_ever(), thread.loop)
    assert started.wait(30)
    thread.close()
    thread.close()
    assert cancelled.is_set()
    assert future.cancelled()
    assert thread.loop.is_closed()
