"""Parts of a server inside a test: a loop on a thread of its own, and a reserved port.

A port that was free a moment ago goes to the next program that asks the system for one:
tests that run side by side take it from a broker that restarts. On Linux a socket that
is bound and does not listen keeps it. Connecting is refused, no other program is given
the port; a server that names it and reuses addresses, as all of ours do, may listen
there.
"""

import asyncio
import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Self, TypeVar

from metaq.loop_thread import LoopThread

HOST: Final = "127.0.0.1"
TIMEOUT_S: Final = 60.0
"""Bound on every start, stop and wait: no test hangs because of a server."""

_ACCEPT_TURNS: Final = 3
"""Turns of the loop from accepting a connection to its protocol, and one more."""

T = TypeVar("T")


class BoundedLoopThread(LoopThread):
    """A client's loop thread for `with`, where nothing waits for ever."""

    timeout_s = TIMEOUT_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function on the loop; wait for its result, raise what it raises."""

        async def work() -> T:
            return function(*args)

        return self.run(work())

    def close(self) -> None:
        """Cancel what still runs, close the loop, end the thread. May be repeated."""
        self.stop()


class ThreadOwner(ABC):
    """Base of what runs on a loop thread of its own from `start` to `stop`.

    Lifecycle: `start`, `stop`, again and again; or `with`, which does both ends.
    """

    def __init__(self, name: str) -> None:
        """Prepare; there is no thread before `start`.

        Args:
            name: of the thread.
        """
        self._thread_name = name
        self._thread: BoundedLoopThread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start; returns when it is done. After an error there is no thread."""
        thread = BoundedLoopThread(self._thread_name)
        try:
            thread.run(self._start())
        except BaseException:
            thread.close()
            raise
        self._thread = thread

    def stop(self) -> None:
        """Stop, and end the thread, even after an error. May be repeated."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        try:
            thread.run(self._stop())
        finally:
            thread.close()

    @property
    def _running(self) -> BoundedLoopThread:
        assert self._thread is not None, "not started"
        return self._thread

    @abstractmethod
    async def _start(self) -> None: ...

    @abstractmethod
    async def _stop(self) -> None: ...


async def stop_listening(server: asyncio.Server) -> None:
    """Close a listener without losing connections that it has just accepted.

    A server that is closed in the turn in which it accepted a connection never gives
    the connection to its protocol, nor closes it: the peer would wait for ever.
    """
    loop = asyncio.get_running_loop()
    for sock in server.sockets:
        loop.remove_reader(sock.fileno())
    for _ in range(_ACCEPT_TURNS):
        await asyncio.sleep(0)
    server.close()


def reserve_port(owner: object) -> int:
    """Return a free port that is the owner's as long as the owner lives."""
    sock = bind_port(0)
    weakref.finalize(owner, sock.close)
    port: int = sock.getsockname()[1]
    return port


def bind_port(port: int) -> socket.socket:
    """Return a socket that keeps a port, 0 for a free one, and does not listen.

    Raises:
        OSError: it is taken.
    """
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((HOST, port))
    except BaseException:
        sock.close()
        raise
    return sock
