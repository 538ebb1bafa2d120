"""Waiting no longer than somebody was told to."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

from metaq.clock import Clock
from metaq.errors import RequestTimeoutError

log = logging.getLogger(__name__)

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


class Closable(Protocol):
    """What a client makes, and closes at the latest."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        ...

    async def close(self, timeout: float | None = None) -> None:
        """Close it within so many seconds; None: in its own time."""
        ...


async def close_all(
    children: Sequence[Closable], deadline_s: float | None, clock: Clock
) -> None:
    """Close all at once; never raises.

    Args:
        children: what is closed.
        deadline_s: absolute; None leaves each the time of its own `close`.
        clock: judges the deadline.
    """
    left_s = None
    if deadline_s is not None:
        left_s = max(0.0, deadline_s - clock.monotonic_s())
    ends = await asyncio.gather(
        *(child.close(left_s) for child in children), return_exceptions=True
    )
    for child, end in zip(children, ends, strict=True):
        if end is not None:
            # A bug; the others and the connections are closed all the same.
            log.error("closing failed: child=%r", child, exc_info=end)
