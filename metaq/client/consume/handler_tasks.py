"""Handlers of the async world: tasks that call one, until one fails or all have ended.

The threads of the sync world are in `sync/handler_threads.py`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final, TypeAlias, TypeVar

from metaq.client.consume.current_batch import current_task
from metaq.errors import ConfigError
from metaq.model import Message

_log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

AsyncHandler: TypeAlias = Callable[[M], Awaitable[object]]
"""Handles a message; its result is ignored, an exception is a failure."""

CONCURRENCY_MAX: Final = 10_000

END_S: Final = 1.0
"""Longest wait for handlers that are cancelled at the end of a run."""


class HandlerTasks:
    """The tasks of one run. Used on the loop."""

    def __init__(self, group: str) -> None:
        """Prepare those of a group's run; nothing runs before `run`."""
        self._group = group
        self._idle: set[asyncio.Task[Any]] = set()
        self._late: set[asyncio.Task[None]] = set()
        """Tasks whose handlers go on after the run; referred to, so that they can."""
        self.is_ending = False
        """No further message is begun: a handler may swallow its cancellation."""

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Mark the running task, for the time of the block, as without a message."""
        me = current_task()
        self._idle.add(me)
        try:
            yield
        finally:
            self._idle.discard(me)

    async def run(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        concurrency: int,
        *,
        timeout_s: float | None,
        grace_s: float,
    ) -> None:
        """Run `work` in so many tasks, until one fails or all have ended.

        After `timeout_s` (None: never) handlers that run have `grace_s` to end. Then
        they are cancelled, and one that has not ended END_S later is not waited for.

        Raises:
            BaseException: the first error of a task.
        """
        tasks = [
            asyncio.create_task(work(), name=f"handler {number}")
            for number in range(concurrency)
        ]
        try:
            ended, late = await asyncio.wait(
                tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
            if not any(task.cancelled() or task.exception() for task in ended):
                self.is_ending = True
                for task in late & self._idle:
                    task.cancel()
                if late:
                    await asyncio.wait(late, timeout=grace_s)
        finally:
            self.is_ending = True
            for task in tasks:
                task.cancel()
            ended, self._late = await asyncio.wait(tasks, timeout=END_S)
            if self._late:
                _log.warning(
                    "handlers do not end, and go on after their run: group=%s count=%d",
                    self._group,
                    len(self._late),
                )
        for task in tasks:
            if task in ended and not task.cancelled() and (error := task.exception()):
                raise error


async def failure_of(handler: AsyncHandler[M], message: M) -> BaseException | None:
    """Return the exception of a handler; None when it returned.

    Raises:
        ConfigError: it is a plain function, which has done its work in the loop.
    """
    try:
        result = handler(message)
        if hasattr(result, "__await__"):
            await result
            return None
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # The handler awaited something that was cancelled; it was not cancelled itself.
        return error
    except Exception as error:  # noqa: BLE001  # any error of the user's code
        return error
    got = type(result).__name__
    raise ConfigError(
        f"handler: expected an async function, got one that returns {got}"
    )
