"""Readiness of many sockets, checked together.

Theory of operation. For a connection with one small command in flight, the event loop's
call for a readable socket costs about as much as the command itself. So the sockets are
registered with an epoll of our own, whose descriptor is the only one that the loop
watches; when that is readable, all readable sockets get their callback in one flat
loop. The cost of one socket alone stays the same.

Owners can be called at the end of a pass over the readable sockets: what came on many
connections at once can be carried out together (`call_at_end`).

Level-triggered, as the loop's own readers: data that a callback leaves in its socket is
reported in the next pass.
"""

import asyncio
import select
from collections.abc import Callable
from typing import Protocol


class Readers(Protocol):
    """Calls back where descriptors are readable; an event loop is one too."""

    def add_reader(self, fd: int, callback: Callable[[], None], /) -> object:
        """Call back in each turn in which `fd` is readable; it is not watched yet."""

    def remove_reader(self, fd: int, /) -> object:
        """Call back no more; `fd` is still open."""


class Poller:
    """Readers of one event loop. Used on its thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch for a loop, on its thread; nothing is registered yet."""
        self._loop = loop
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._at_end: list[Callable[[], None]] = []
        self._is_in_pass = False
        self._epoll = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._make_pass)

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

    def _make_pass(self) -> None:
        """Call back for all sockets that are readable now, then at the end."""
        callbacks = self._callbacks
        readable = self._epoll.poll(0, len(callbacks) or 1)
        self._is_in_pass = True
        for fd, _ in readable:
            callback = callbacks.get(fd)
            if callback is not None:
                try:
                    callback()
                except Exception as error:  # noqa: BLE001  # a bug in one must not stop the others
                    self._report(callback, error)
        self._is_in_pass = False
        at_end, self._at_end = self._at_end, []
        for callback in at_end:
            try:
                callback()
            except Exception as error:  # noqa: BLE001  # as above
                self._report(callback, error)

    def _report(self, callback: Callable[[], None], error: Exception) -> None:
        """Report an error as the loop does for its own readers."""
        context = {"message": f"reader failed: {callback!r}", "exception": error}
        self._loop.call_exception_handler(context)
