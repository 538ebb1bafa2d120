"""An event loop on a thread of its own, for what must run beside a test."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self, TypeVar

from metaq.loop_thread import LoopThread

TIMEOUT_S: Final = 20.0
"""How long `run` and `call` wait: no test hangs because of this thread."""

_ACCEPT_TURNS: Final = 3
"""Turns of the loop from accepting a connection to its protocol, and one more."""

T = TypeVar("T")


class BoundedLoopThread(LoopThread):
    """A client's loop thread for `with`, where nothing waits for ever."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def run(
        self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = TIMEOUT_S
    ) -> T:
        """Run a coroutine on the loop; wait for its result.

        Raises:
            RequestTimeoutError: it took longer; it is cancelled.
            Exception: whatever the work raised.
        """
        return super().run(work, timeout_s=timeout_s)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function on the loop; wait for its result, raise what it raises."""

        async def work() -> T:
            return function(*args)

        return self.run(work())

    def close(self) -> None:
        """Cancel what still runs, close the loop, end the thread. May be repeated."""
        self.stop()


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
