"""Connections: waiters for a time share one timer."""

import asyncio
from typing import Any

from metaq.client.produce.connections import Connections
from tests.rigs.virtual_time import VirtualClock, run_virtually


def made(loop: asyncio.AbstractEventLoop) -> Connections:
    nothing: Any = None
    return Connections(
        pool=nothing,
        clock=VirtualClock(),
        loop=loop,
        patience_s=1.0,
        request_refresh=lambda: None,
        on_change=lambda _address, _error: False,
    )


def test_waiters_are_called_in_the_order_of_their_times_each_once() -> None:
    """An earlier time sets the timer again; a later one for the same does nothing."""
    calls: list[str] = []

    def first() -> None:
        calls.append("first")

    def second() -> None:
        calls.append("second")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        connections, start_s = made(loop), loop.time()
        connections.call_at(second, start_s + 2)
        connections.call_at(first, start_s + 1)
        connections.call_at(first, start_s + 3)
        await asyncio.sleep(1.5)
        assert calls == ["first"]
        await asyncio.sleep(5)
        assert calls == ["first", "second"]

    run_virtually(main())


def test_a_waiter_that_fails_does_not_stop_the_others() -> None:
    """Both were due at one time; the error goes to the loop."""
    calls: list[str] = []
    problems: list[dict[str, object]] = []

    def fail() -> None:
        raise MemoryError

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: problems.append(context))
        connections, start_s = made(loop), loop.time()
        connections.call_at(fail, start_s + 1)
        connections.call_at(lambda: calls.append("called"), start_s + 1)
        await asyncio.sleep(2)
        assert calls == ["called"]
        assert [type(one["exception"]) for one in problems] == [MemoryError]

    run_virtually(main())


def test_after_the_close_no_waiter_is_called() -> None:
    """Neither those that wait, nor later ones."""
    calls: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        connections, start_s = made(loop), loop.time()
        connections.call_at(lambda: calls.append("before"), start_s + 1)
        connections.close()
        connections.call_at(lambda: calls.append("after"), start_s + 1)
        await asyncio.sleep(2)
        assert calls == []

    run_virtually(main())
