"""Blocking calls away from the loop: one at a time, bounded, closed when late."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from metaq.client.off_loop import OffLoop, close_off_loop, open_off_loop
from metaq.errors import RequestTimeoutError
from tests.client.stored_offsets import CLOCK, soon


def test_a_call_that_hangs_costs_its_caller_the_deadline_and_no_second_thread() -> None:
    async def scenario() -> None:
        off_loop = OffLoop("slow disk", clock=CLOCK)
        go_on = threading.Event()
        begun: list[int] = []

        def hang() -> None:
            begun.append(1)
            go_on.wait(60)

        call_count = 0
        while not begun or call_count < 3:
            call_count += 1
            late = CLOCK.monotonic_s() + 0.01
            with pytest.raises(RequestTimeoutError, match="slow disk: no answer"):
                await off_loop.run(hang, deadline_s=late)
        assert begun == [1]
        go_on.set()
        assert await off_loop.run(lambda: 7, deadline_s=soon()) == 7
        off_loop.close()

    asyncio.run(scenario())


class Resource:
    """A resource; `close` is counted."""

    def __init__(self) -> None:
        self.close_count = 0
        self.closed = threading.Event()

    def close(self) -> None:
        self.close_count += 1
        self.closed.set()


def run_with_thread(
    scenario: Callable[[ThreadPoolExecutor], Coroutine[Any, Any, None]],
) -> None:
    with ThreadPoolExecutor(1) as threads:
        asyncio.run(scenario(threads))


def test_errors_of_a_call_are_those_of_its_caller() -> None:
    """The next call has its turn."""

    async def scenario() -> None:
        off_loop = OffLoop("disk", clock=CLOCK)

        def fail() -> None:
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            await off_loop.run(fail, deadline_s=soon())
        assert await off_loop.run(lambda: 7, deadline_s=soon()) == 7
        off_loop.close()

    asyncio.run(scenario())


def test_calls_are_made_by_one_thread_until_the_close() -> None:
    """After it the next call begins another thread."""

    async def scenario() -> None:
        off_loop = OffLoop("disk", clock=CLOCK)
        seen = [
            await off_loop.run(threading.current_thread, deadline_s=soon())
            for _ in range(3)
        ]
        assert len(set(seen)) == 1
        off_loop.close()
        off_loop.close()
        again = await off_loop.run(threading.current_thread, deadline_s=soon())
        assert again not in seen
        off_loop.close()

    asyncio.run(scenario())


def test_a_close_does_not_wait_for_a_call_that_hangs() -> None:
    """Nor does the call that comes next: it has a thread of its own."""

    async def scenario() -> None:
        off_loop, go_on = OffLoop("disk", clock=CLOCK), threading.Event()
        with pytest.raises(RequestTimeoutError):
            await off_loop.run(lambda: go_on.wait(60), deadline_s=CLOCK.monotonic_s())
        off_loop.close()
        assert await off_loop.run(lambda: 7, deadline_s=soon()) == 7
        go_on.set()
        off_loop.close()

    asyncio.run(scenario())


def test_a_resource_that_is_opened_too_late_is_closed_again() -> None:
    """The caller was cancelled, and nobody else would close it."""
    one, go_on, begun = Resource(), threading.Event(), threading.Event()

    def opening() -> Resource:
        begun.set()
        go_on.wait(60)
        return one

    async def scenario(threads: ThreadPoolExecutor) -> None:
        task = asyncio.create_task(open_off_loop(threads, opening))
        while not begun.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        while not one.closed.is_set():
            await asyncio.sleep(0)

    run_with_thread(scenario)
    assert one.close_count == 1


def test_an_opening_that_fails_too_late_is_left_alone() -> None:
    """There is nothing to close."""
    go_on, begun = threading.Event(), threading.Event()

    def opening() -> Resource:
        begun.set()
        go_on.wait(60)
        raise OSError("gone")

    async def scenario(threads: ThreadPoolExecutor) -> None:
        problems: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: problems.append(context))
        task = asyncio.create_task(open_off_loop(threads, opening))
        while not begun.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await loop.run_in_executor(threads, lambda: None)
        await asyncio.sleep(0)
        assert problems == []

    run_with_thread(scenario)


def test_a_resource_is_closed_where_no_thread_begins_any_more() -> None:
    """The interpreter is ending, and the file has to be whole."""

    async def scenario() -> None:
        threads, one = ThreadPoolExecutor(1), Resource()
        await close_off_loop(threads, one)
        threads.shutdown()
        await close_off_loop(threads, one)
        assert one.close_count == 2

    asyncio.run(scenario())
