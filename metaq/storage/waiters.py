"""Waiters for a log to grow: long polls.

Owner: the event loop's thread. A waiter is called back at most once: when a byte at its
offset is readable, or when nothing more is to be expected. Most wait at the high
watermark, so nothing is sorted.
"""

from collections.abc import Callable

from metaq.model import Offset


class WaitHandle:
    """One waiter, until it is woken or cancelled."""

    __slots__ = ("_callback", "_waiters", "offset")

    def __init__(
        self, waiters: "LogWaiters", offset: Offset, callback: Callable[[], None]
    ) -> None:
        self.offset = offset
        """The byte that is waited for."""
        self._waiters: LogWaiters | None = waiters
        self._callback = callback

    def cancel(self) -> None:
        """Never call back; harmless after it has."""
        waiters, self._waiters = self._waiters, None
        if waiters is not None:
            waiters.forget(self)

    def wake(self) -> None:
        """Call back, unless that has happened or was cancelled."""
        if self._waiters is not None:
            self.cancel()
            self._callback()


class LogWaiters:
    """The waiters of one log."""

    __slots__ = ("_handles",)

    def __init__(self) -> None:
        self._handles: dict[WaitHandle, None] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, offset: Offset, callback: Callable[[], None]) -> WaitHandle:
        """Add one; it is not called back by this."""
        handle = WaitHandle(self, offset, callback)
        self._handles[handle] = None
        return handle

    def forget(self, handle: WaitHandle) -> None:
        """Drop one; called by its handle."""
        self._handles.pop(handle, None)

    def wake_below(self, offset: Offset | None) -> None:
        """Wake waiters for a byte below `offset`, in the order they came.

        Args:
            offset: the high watermark; None wakes all.
        """
        if not self._handles:
            return
        for handle in [h for h in self._handles if offset is None or h.offset < offset]:
            handle.wake()
