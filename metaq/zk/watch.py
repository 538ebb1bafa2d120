"""A watched node: snapshots on change, built on watches that fire once.

Theory of operation: ZooKeeper's watches fire once, and only report that something
changed. `Watch` reads with a watch set, delivers the snapshot if it differs from the
last one, and reads again when the watch fires and on every reconnect. Intermediate
states may be skipped, and firing twice costs one read.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from metaq.errors import CoordinationError, SessionLostError, SessionSuspendedError
from metaq.retry import Backoff

_log = logging.getLogger(__name__)

BACKOFF: Final = Backoff(first_s=0.5, max_s=5.0)
"""Pauses between failed reads."""

T = TypeVar("T")


class Watch(Generic[T]):
    """One watched node. Owned by a coordinator, used on its loop only."""

    def __init__(
        self,
        path: str,
        read: Callable[[], Awaitable[T | None]],
        callback: Callable[[T | None], None],
    ) -> None:
        """Create a watch; nothing is read until `refresh`.

        `read` returns a snapshot, or None for a missing node, and sets the watch;
        `callback` gets each snapshot that differs from the last one, on the loop.
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
        """Read again, now or after the running read."""
        if self._is_cancelled:
            return
        self._is_stale = True
        if self._task is None or self._task.done():
            name = f"zk-watch {self._path}"
            self._task = self._loop.create_task(self._run(), name=name)

    def cancel(self) -> None:
        """End the watch; the callback is not called any more."""
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
