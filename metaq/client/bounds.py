"""Waiting no longer than somebody was told to."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from metaq.errors import RequestTimeoutError

T = TypeVar("T")


async def within(timeout: float | None, work: Awaitable[T], what: str) -> T:
    """Return what `work` returns, if it does so in time.

    Args:
        timeout: seconds; None waits as long as it takes.
        work: cancelled at the end of the time.
        what: subject of the error's sentence.

    Raises:
        RequestTimeoutError: the time is over.
        BaseException: whatever `work` raises.
    """
    try:
        async with asyncio.timeout(timeout) as bound:
            return await work
    except TimeoutError as error:
        if timeout is None or not bound.expired():
            raise
        raise RequestTimeoutError(f"{what}: not done within {timeout:.3g} s") from error


async def wait_set(event: asyncio.Event, timeout: float | None) -> None:
    """Return when the event is set, or the time is over; None waits for ever."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
