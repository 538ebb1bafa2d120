"""Readiness of many sockets, checked in one call.

Theory of operation. For a connection with one small command in flight, the event loop's
own handling of a readable socket costs about as much as the command itself. So the
sockets are registered with our own epoll, whose descriptor is the only one that the
loop watches. When it is readable, one flat loop runs the callbacks of all readable
sockets. The cost for a single socket stays the same.

Callbacks can register for the end of a pass over the readable sockets (`call_at_end`),
so that commands received on many connections at once can be executed together.

Level-triggered, like the loop's own readers: data that a callback leaves in its socket
is reported again in the next pass.
"""

import asyncio
import select
from collections.abc import Callable
from typing import Protocol


class Readers(Protocol):
    """Runs callbacks when descriptors are readable; an event loop is one too."""

    def add_reader(self, fd: int, callback: Callable[[], None], /) -> object:
        """Call back in each turn in which `fd` is readable; it is not watched yet."""

    def remove_reader(self, fd: int, /) -> object:
        """Stop watching `fd`, which must still be open."""


class Poller:
    """Readers of one event loop; used on its thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start watching on the loop's thread; no descriptor is registered yet."""
        self._loop = loop
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._at_end: list[Callable[[], None]] = []
        self._is_in_pass = False
        self._epoll = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._make_pass)

    def close(self) -> None:
        """Stop watching all descriptors; a second call does nothing."""
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._callbacks.clear()

    def add_reader(self, fd: int, callback: Callable[[], None], /) -> None:
        """Run a callback in each turn in which `fd` is readable; see `Readers`."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def remove_reader(self, fd: int, /) -> None:
        """Stop watching `fd`; not called back again, even in the current pass."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call back once: at the end of the current pass, or else in the next turn."""
        if self._is_in_pass:
            self._at_end.append(callback)
        else:
            self._loop.call_soon(callback)

    def _make_pass(self) -> None:
        """Run the callbacks of all readable sockets, then those for the end."""
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
