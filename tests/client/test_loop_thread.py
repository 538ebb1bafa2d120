"""The client's own loop: whoever waits for it comes back, whatever happens to it."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from metaq.client.loop_thread import LoopThread
from metaq.errors import ClosedError, RequestTimeoutError


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    one = LoopThread("test")
    yield one
    one.stop()


async def answer() -> int:
    return 42


def test_it_runs_a_coroutine_and_returns_its_result(thread: LoopThread) -> None:
    assert thread.run(answer()) == 42


def test_at_the_end_of_its_time_a_coroutine_is_cancelled(thread: LoopThread) -> None:
    ended = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(RequestTimeoutError, match=r"not done within 0\.01 s"):
        thread.run(wait(), timeout_s=0.01)
    assert ended.wait(20)


def test_a_stop_ends_the_wait_of_every_other_thread(thread: LoopThread) -> None:
    """What they wait for is cancelled: nobody would ever finish it."""
    begun = threading.Barrier(3)
    errors: list[BaseException] = []

    def call() -> None:
        async def wait() -> None:
            await asyncio.to_thread(begun.wait, 20)
            await asyncio.Event().wait()

        try:
            thread.run(wait())
        except BaseException as error:
            errors.append(error)

    callers = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    for caller in callers:
        caller.start()
    begun.wait(20)
    thread.stop()
    for caller in callers:
        caller.join(20)
    assert [type(error) for error in errors] == [ClosedError, ClosedError]


def test_after_a_stop_nothing_runs(thread: LoopThread) -> None:
    thread.stop()
    thread.stop()
    with pytest.raises(ClosedError, match="closed"):
        thread.run(answer())
    assert thread.loop.is_closed()


def test_whatever_is_asked_while_it_stops_comes_to_an_end() -> None:
    for _ in range(50):
        thread = LoopThread("test")
        go = threading.Barrier(2)
        ends: list[object] = []

        def call(
            thread: LoopThread = thread,
            go: threading.Barrier = go,
            ends: list[object] = ends,
        ) -> None:
            go.wait(20)
            try:
                ends.append(thread.run(answer()))
            except ClosedError as error:
                ends.append(error)

        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        go.wait(20)
        thread.stop()
        caller.join(20)
        assert ends
