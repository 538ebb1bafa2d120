"""A watched node: snapshots on change, out of watches that fire once.

Theory of operation: ZooKeeper's watches fire once and say nothing but "look again".
`Watch` reads with a watch set, delivers the snapshot if it differs from the last one,
and reads again when the watch fires and on every reconnect. Events in between do not
matter, and firing twice costs one read.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from metaq.errors import CoordinationError, SessionLostError, SessionSuspendedError
from metaq.retry import Backoff

_log = logging.getLogger(__name__)

BACKOFF: Final = Backoff(first_s=0.5, max_s=5.0)
"""Between reads that fail."""

T = TypeVar("T")


class Watch(Generic[T]):
    """One watched node; owned by a coordinator, used on its loop alone."""

    def __init__(
        self,
        path: str,
        read: Callable[[], Awaitable[T | None]],
        callback: Callable[[T | None], None],
    ) -> None:
        """Prepare a watch; nothing is read before `refresh`.

        `read` returns a snapshot, None for a missing node, and arms the watch;
        `callback` gets each snapshot that differs, on the loop.
        """
        self._path = path
        self._read = read
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._is_stale = False
        self._is_cancelled = False
        self._last: T | None = None
        self._has_delivered = False

    def refresh(self) -> None:
        """Read again, now or after the read that is under way."""
        if self._is_cancelled:
            return
        self._is_stale = True
        if self._task is None or self._task.done():
            name = f"zk-watch {self._path}"
            self._task = self._loop.create_task(self._run(), name=name)

    def cancel(self) -> None:
        """End it; nothing is delivered any more."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _deliver(self, snapshot: T | None) -> None:
        if not self._is_cancelled:
            self._callback(snapshot)

    async def _run(self) -> None:
        failures = 0
        while self._is_stale:
            self._is_stale = False
            try:
                snapshot = await self._read()
            except (SessionSuspendedError, SessionLostError):
                # The next CONNECTED refreshes every watch; it may have come already.
                continue
            except Exception as error:  # noqa: BLE001  # top of a task
                is_ours = isinstance(error, CoordinationError)
                _log.warning(
                    "watch failed: path=%s error=%s",
                    self._path,
                    error if is_ours else repr(error),
                    exc_info=not is_ours,
                )
                failures += 1
                await asyncio.sleep(BACKOFF.delay_s(failures))
                self._is_stale = True
                continue
            failures = 0
            if not self._has_delivered or snapshot != self._last:
                self._last, self._has_delivered = snapshot, True
                self._loop.call_soon(self._deliver, snapshot)
