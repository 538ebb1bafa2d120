"""Tasks that call an async handler, until one fails or all have ended.

`sync/handler_threads.py` has the threads of the sync client.
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
"""Maximum wait for cancelled handlers at the end of a run, in seconds."""


class HandlerTasks:
    """The tasks of one run. Used on the loop."""

    def __init__(self, group: str) -> None:
        """Create it for a run of a group; nothing runs before `run`."""
        self._group = group
        self._idle: set[asyncio.Task[Any]] = set()
        self._late: set[asyncio.Task[None]] = set()
        """Tasks that continue after the run; kept, or they could be collected."""
        self.is_ending = False
        """Whether no further message may begin, even if a handler ignores its
        cancellation."""

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Mark the running task as without a message inside the block."""
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
        """Run `work` in `concurrency` tasks, until one fails or all have ended.

        After `timeout_s` (None: never), running handlers have `grace_s` to end. Then
        they are cancelled, and waited for up to END_S.

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
                    "handlers did not end in time, and continue after their run:"
                    " group=%s count=%d",
                    self._group,
                    len(self._late),
                )
        for task in tasks:
            if task in ended and not task.cancelled() and (error := task.exception()):
                raise error


async def failure_of(handler: AsyncHandler[M], message: M) -> BaseException | None:
    """Call a handler; return its exception, or None if it returned.

    Raises:
        ConfigError: it is a plain function, which has run on the loop.
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
