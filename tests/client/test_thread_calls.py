"""Functions that the loop runs on user threads: once, one at a time, in time."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from metaq.client.sync.thread_calls import ThreadCalls
from metaq.clock import SystemClock
from metaq.errors import ClosedError
from metaq.loop_thread import LoopThread
from tests.rigs.waiting import wait_until

PATIENCE_S = 60.0


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    loop_thread = LoopThread("calls")
    yield loop_thread
    loop_thread.stop()


def make_calls() -> ThreadCalls:
    return ThreadCalls(SystemClock())


def test_a_waiting_thread_is_woken_and_goes_on_waiting(thread: LoopThread) -> None:
    """Its event may come later, and its time-out is the whole time."""
    calls, condition = make_calls(), threading.Condition()
    callers: list[threading.Thread] = []

    def wake() -> None:
        with condition:
            condition.notify_all()

    def note() -> None:
        callers.append(threading.current_thread())

    async def call_twice() -> None:
        await calls.call(note)
        await calls.call(note)

    future = asyncio.run_coroutine_threadsafe(call_twice(), thread.loop)
    with calls.waking(wake):
        calls.wait_for(condition, lambda: len(callers) == 2, PATIENCE_S)
    future.result(PATIENCE_S)
    assert callers == [threading.current_thread()] * 2
    calls.wait_for(condition, lambda: False, 0.01)


def test_what_is_given_up_before_it_began_is_not_called(thread: LoopThread) -> None:
    """A partition may be another's by then."""
    calls = make_calls()
    called: list[int] = []
    work = calls.call(lambda: called.append(1))
    future = asyncio.run_coroutine_threadsafe(work, thread.loop)
    wait_until(lambda: calls.is_due)
    future.cancel()
    wait_until(lambda: not calls.is_due)
    calls.run_due()
    assert called == []


def test_an_error_goes_to_the_loop_and_not_to_the_thread(thread: LoopThread) -> None:
    """The loop judges it for both worlds."""
    calls = make_calls()

    def fail() -> None:
        raise LookupError("no")

    future = asyncio.run_coroutine_threadsafe(calls.call(fail), thread.loop)
    wait_until(lambda: calls.is_due)
    calls.run_due()
    with pytest.raises(LookupError):
        future.result(PATIENCE_S)


def test_an_interrupt_goes_to_both_and_keeps_nothing_locked(
    thread: LoopThread,
) -> None:
    """The thread ends, the loop goes on, and another thread has the next call."""
    calls, wakes = make_calls(), threading.Event()

    def interrupt() -> None:
        raise KeyboardInterrupt

    first = asyncio.run_coroutine_threadsafe(calls.call(interrupt), thread.loop)
    second = asyncio.run_coroutine_threadsafe(calls.call(int), thread.loop)
    wait_until(lambda: calls.is_due)
    with calls.waking(wakes.set), pytest.raises(KeyboardInterrupt):
        calls.run_due()
    assert wakes.is_set()
    with pytest.raises(InterruptedError):
        first.result(PATIENCE_S)
    calls.run_due()
    second.result(PATIENCE_S)


def test_one_function_is_called_at_a_time(thread: LoopThread) -> None:
    """A second thread passes by, and the first one calls the rest."""
    calls = make_calls()
    began, is_free = threading.Event(), threading.Event()
    ended: list[int] = []

    def hold() -> None:
        began.set()
        assert is_free.wait(PATIENCE_S)
        ended.append(1)

    asyncio.run_coroutine_threadsafe(calls.call(hold), thread.loop)
    wait_until(lambda: calls.is_due)
    running = threading.Thread(target=calls.run_due, daemon=True)
    running.start()
    assert began.wait(PATIENCE_S)
    is_posted = threading.Event()
    with calls.waking(is_posted.set):
        work = calls.call(lambda: ended.append(2))
        later = asyncio.run_coroutine_threadsafe(work, thread.loop)
        assert is_posted.wait(PATIENCE_S)
    calls.run_due()
    assert not calls.is_due
    assert ended == []
    is_free.set()
    later.result(PATIENCE_S)
    running.join(PATIENCE_S)
    assert ended == [1, 2]


def test_a_close_runs_what_is_due_in_the_thread_that_closes(
    thread: LoopThread,
) -> None:
    """As often as it is due; the errors of the close are raised."""
    calls = make_calls()
    callers: list[threading.Thread] = []

    async def close() -> None:
        for _ in range(3):
            await calls.call(lambda: callers.append(threading.current_thread()))
        raise LookupError("closed with an error")

    with pytest.raises(LookupError):
        thread.run_close(close(), calls.serve)
    assert callers == [threading.current_thread()] * 3


def test_a_close_that_is_interrupted_is_cancelled(thread: LoopThread) -> None:
    """As `LoopThread.run` does it."""
    calls, is_cancelled = make_calls(), threading.Event()

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def close() -> None:
        try:
            await asyncio.gather(calls.call(interrupt), return_exceptions=True)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        thread.run_close(close(), calls.serve)
    assert is_cancelled.wait(PATIENCE_S)


def test_a_close_after_the_end_of_the_loop_does_nothing() -> None:
    """On its own thread it is refused: it would wait for itself."""
    calls, thread = make_calls(), LoopThread("calls")

    async def close() -> None: ...

    async def close_here() -> None:
        thread.run_close(close(), calls.serve)

    with pytest.raises(ClosedError, match="own thread"):
        thread.run(close_here())
    thread.stop()
    thread.run_close(close(), calls.serve)
