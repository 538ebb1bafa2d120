"""Readiness of many sockets, looked at together.

Theory of operation. A connection with one small command under way costs the event loop
about as much for the news that its socket is readable as the command itself does. So
the sockets are registered with an epoll of our own, whose descriptor is the only one
that the loop watches; when that is readable, all sockets that are get their callback in
one flat loop. What one socket alone would cost is not changed by that.

What is due within microseconds (a sync of a fast disk, for a client that waits for it)
is not slept for: to be woken takes a third as long as such a sync. The pass is made
again and again then, POLL_S at most, and other processes run between two looks. Where
that was in vain it is not done for the next time, then the next two, four, ... times:
a slow disk costs no more than before.

A pass over the readable sockets has an end that their owners can be told of: what came
on many connections at once can be carried out together (`call_at_end`).

Level-triggered, as the loop's own readers are: what a callback leaves in its socket is
there in the next pass.
"""

import asyncio
import os
import select
from collections.abc import Callable
from typing import Final, Protocol

POLL_S: Final = 0.000_3
"""Longest time that a pass waits for what is due without sleep, in seconds; everything
else that the loop has to do waits as long."""
YIELD_S_MAX: Final = 0.000_1
"""A look that comes so much later than the last one: others need the processor."""
SKIPS_MAX: Final = 64
"""Passes that sleep, at most, behind a wait that was in vain."""


class Readers(Protocol):
    """Calls back where descriptors are readable; an event loop is one too."""

    def add_reader(self, fd: int, callback: Callable[[], None], /) -> object:
        """Call back in each turn in which `fd` is readable; it is not watched yet."""
        ...

    def remove_reader(self, fd: int, /) -> object:
        """Call back no more; `fd` is open still."""
        ...


class Poller:
    """Readers of one event loop. Used on its thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        is_due: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin to watch; nothing is registered yet.

        Args:
            loop: calls back on its thread.
            is_due: whether a descriptor is about to be readable, and not to be slept
                for; asked behind each pass.
        """
        self._loop = loop
        self._is_due = is_due
        self._skips = 0
        """Passes that are still to sleep."""
        self._skips_next = 1
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._at_end: list[Callable[[], None]] = []
        self._is_in_pass = False
        self._epoll = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._run)

    def close(self) -> None:
        """Watch nothing any more; a second call does nothing."""
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._callbacks.clear()

    def add_reader(self, fd: int, callback: Callable[[], None], /) -> None:
        """Call back in each turn in which `fd` is readable; see `Readers`."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def remove_reader(self, fd: int, /) -> None:
        """Call back no more; also not in the pass that is under way."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call back once: at the end of this pass, or else in the next turn."""
        if self._is_in_pass:
            self._at_end.append(callback)
        else:
            self._loop.call_soon(callback)

    def _run(self) -> None:
        """Make a pass, and more while something is due."""
        self._make_pass()
        if not self._is_due():
            return
        if self._skips:
            self._skips -= 1
            return
        now_s, is_in_vain = self._loop.time(), True
        until_s = now_s + POLL_S
        while now_s < until_s:
            before_s = now_s
            os.sched_yield()
            now_s = self._loop.time()
            if now_s - before_s > YIELD_S_MAX:
                is_in_vain = True
                break
            if self._make_pass():
                is_in_vain = False
                if not self._is_due():
                    break
                now_s = self._loop.time()
        if is_in_vain:
            self._skips = self._skips_next
            self._skips_next = min(2 * self._skips_next, SKIPS_MAX)
        else:
            self._skips_next = 1

    def _make_pass(self) -> bool:
        """Call back for all sockets that are readable now, then at the end.

        Returns:
            Whether any was.
        """
        callbacks = self._callbacks
        readable = self._epoll.poll(0, len(callbacks) or 1)
        if not readable:
            return False
        self._is_in_pass = True
        for fd, _ in readable:
            callback = callbacks.get(fd)
            if callback is not None:
                try:
                    callback()
                except Exception as error:  # noqa: BLE001  # a bug of one costs no other
                    self._tell(callback, error)
        self._is_in_pass = False
        at_end, self._at_end = self._at_end, []
        for callback in at_end:
            try:
                callback()
            except Exception as error:  # noqa: BLE001  # as above
                self._tell(callback, error)
        return True

    def _tell(self, callback: Callable[[], None], error: Exception) -> None:
        """Report an error as the loop does for its own readers."""
        context = {"message": f"reader failed: {callback!r}", "exception": error}
        self._loop.call_exception_handler(context)
