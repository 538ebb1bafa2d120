"""Parts of servers in tests: an event loop on its own thread, and a reserved port.

A free port may be given to the next program that asks the system for one, so parallel
tests could take the port of a broker that restarts. On Linux, a socket that is bound
but does not listen reserves the port: connections are refused, and the system gives the
port to no other program, but a server that names it and sets SO_REUSEADDR, as all of
ours do, may listen on it.
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
"""Timeout of every start, stop and wait, so that no test hangs because of a server."""

_ACCEPT_TURNS: Final = 3
"""Turns of the loop from the accept of a connection to its protocol, and one more."""

T = TypeVar("T")


class BoundedLoopThread(LoopThread):
    """A client's loop thread as a context manager, with a timeout for every call."""

    timeout_s = TIMEOUT_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function on the loop; wait for its result or exception."""

        async def work() -> T:
            return function(*args)

        return self.run(work())

    def close(self) -> None:
        """Cancel all tasks, close the loop, end the thread. Idempotent."""
        self.stop()


class ThreadOwner(ABC):
    """Base of servers that run on their own loop thread from `start` to `stop`.

    Lifecycle: `start` and `stop`, repeatedly; or `with`, which calls both.
    """

    def __init__(self, name: str) -> None:
        """Create the object; there is no thread before `start`.

        Args:
            name: name of the thread.
        """
        self._thread_name = name
        self._thread: BoundedLoopThread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start; returns when the server runs. After an error there is no thread."""
        thread = BoundedLoopThread(self._thread_name)
        try:
            thread.run(self._start())
        except BaseException:
            thread.close()
            raise
        self._thread = thread

    def stop(self) -> None:
        """Stop, and end the thread even after an error. Idempotent."""
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

    If an asyncio server is closed in the turn in which it accepted a connection, the
    connection gets no protocol and is not closed: the peer would wait without end.
    """
    loop = asyncio.get_running_loop()
    for sock in server.sockets:
        loop.remove_reader(sock.fileno())
    for _ in range(_ACCEPT_TURNS):
        await asyncio.sleep(0)
    server.close()


def reserve_port(owner: object) -> int:
    """Return a free port, reserved until `owner` is garbage-collected."""
    sock = bind_port(0)
    weakref.finalize(owner, sock.close)
    port: int = sock.getsockname()[1]
    return port


def bind_port(port: int) -> socket.socket:
    """Return a socket bound to a port, 0 for a free one, that does not listen.

    Raises:
        OSError: the port is in use.
    """
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((HOST, port))
    except BaseException:
        sock.close()
        raise
    return sock
