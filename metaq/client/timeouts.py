"""Waits bounded by the caller's time-out."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, Self, TypeVar

from metaq.client.own_process import OfOneProcess
from metaq.clock import Clock
from metaq.errors import ClosedError, MetaqError, RequestTimeoutError

_log = logging.getLogger(__name__)

SIGNAL_S: Final = 1.0
"""Interval at which a thread that waits without a limit checks for signals, in
seconds."""

NOTICE_S: Final = 2.0
"""A call that waits for ZooKeeper or a topic for so long says so in the log."""

T = TypeVar("T")


async def within(timeout: float | None, work: Awaitable[T], what: str) -> T:
    """Return the result of `work`, if it ends in time.

    Args:
        timeout: seconds; None waits without a limit.
        work: work to wait for; cancelled at the time-out.
        what: subject of the error's sentence.

    Raises:
        RequestTimeoutError: the time is over.
        BaseException: what `work` raises.
    """
    try:
        async with asyncio.timeout(timeout) as bound:
            return await work
    except TimeoutError as error:
        if timeout is None or not bound.expired():
            raise
        raise RequestTimeoutError(f"{what}: not done within {timeout:.3g} s") from error


class WaitNotice:
    """Says why calls wait, once for all that wait in the same seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._silent_until_s = 0.0

    @contextmanager
    def of(self, say: Callable[[], None]) -> Iterator[None]:
        """Call `say` on the loop if the block takes longer than NOTICE_S."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(NOTICE_S, self._on_time, say)
        try:
            yield
        finally:
            timer.cancel()

    def _on_time(self, say: Callable[[], None]) -> None:
        now_s = self._clock.monotonic_s()
        if now_s >= self._silent_until_s:
            self._silent_until_s = now_s + NOTICE_S
            say()


def spawn(
    work: Coroutine[Any, Any, None], name: str, on_failed: Callable[[MetaqError], None]
) -> asyncio.Task[None]:
    """Start a background task; its failure is logged and passed to `on_failed`."""

    def on_done(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", name, exc_info=error)
            on_failed(MetaqError(f"{name} failed: {error!r}"))

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(on_done)
    return task


def finish(future: asyncio.Future[T], result: T) -> None:
    """Set the result of a future, unless it has one, or was cancelled."""
    if not future.done():
        future.set_result(result)


def require_loop(loop: asyncio.AbstractEventLoop, what: object) -> None:
    """Raise if an object is used on an event loop other than its own.

    There its timers would never fire, and its waits never end.

    Args:
        loop: event loop of the object.
        what: subject of the error's sentence; converted to text only for an error.

    Raises:
        ClosedError: another loop runs in this thread, or none.
    """
    try:
        if asyncio.get_running_loop() is loop:
            return
        here = "this is another one"
    except RuntimeError:
        here = "none runs in this thread"
    state = ", which is closed" if loop.is_closed() else ""
    raise ClosedError(
        f"{what} belongs to the event loop that its client was started on{state}, and"
        f" {here}: start a client on each loop"
    )


def wait_for(
    condition: threading.Condition,
    is_met: Callable[[], object],
    timeout_s: float | None,
) -> bool:
    """Wait as `condition.wait_for`, but notice every Ctrl-C.

    A signal at the moment when a thread falls asleep is noted without waking it, so a
    wait without a limit wakes at intervals.

    Args:
        condition: held by the caller.
        is_met: the awaited condition.
        timeout_s: maximum wait, in seconds; None waits without a limit.

    Returns:
        Whether the condition is met; False after a time-out.
    """
    if timeout_s is not None:
        return bool(condition.wait_for(is_met, timeout_s))
    while not condition.wait_for(is_met, SIGNAL_S):
        pass
    return True


class Closable(Protocol):
    """Object made by a client, which closes it in the end."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""

    async def close(self, timeout: float | None = None) -> None:
        """Close it within `timeout` seconds; None: the object's own limit."""


class ClosedByBlock(OfOneProcess):
    """Object of a client that is closed at the end of its `async with` block."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self: Closable, *_error: object) -> None:
        await self.close()


async def close_all(
    children: Sequence[Closable], deadline_s: float | None, clock: Clock
) -> None:
    """Close all concurrently; never raises.

    Args:
        children: the objects to close.
        deadline_s: monotonic deadline; None: the own limit of each object's `close`.
        clock: clock of the deadline.
    """
    left_s = None
    if deadline_s is not None:
        left_s = max(0.0, deadline_s - clock.monotonic_s())
    ends = await asyncio.gather(
        *(child.close(left_s) for child in children), return_exceptions=True
    )
    for child, end in zip(children, ends, strict=True):
        if end is not None:
            # A bug; the others and the connections are closed anyway.
            _log.error("closing failed: child=%r", child, exc_info=end)
