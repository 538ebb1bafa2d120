"""An event loop on a thread of its own, for what must run beside a test."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self, TypeVar

TIMEOUT_S: Final = 20.0
"""How long `run`, `call` and `close` wait: no test hangs because of this thread."""

_ACCEPT_TURNS: Final = 3
"""Turns of the loop from accepting a connection to its protocol, and one more."""

T = TypeVar("T")


class LoopThread:
    """Runs work on its own loop, for callers on any other thread.

    Lifecycle: runs from the constructor on; `close` cancels what is left and ends the
    thread. Owner: whoever made it. The thread is a daemon, so that a forgotten one
    does not keep a process.
    """

    def __init__(self, name: str) -> None:
        self._is_over: asyncio.Event
        self._is_ready = threading.Event()
        self.loop: asyncio.AbstractEventLoop
        """The loop; runs until `close`."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        self._is_ready.wait(TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = TIMEOUT_S) -> T:
        """Run a coroutine on the loop; wait for its result.

        Args:
            work: not started yet.
            timeout_s: seconds; the work is cancelled then.

        Raises:
            TimeoutError: it took longer.
            Exception: whatever the work raised.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function on the loop; wait for its result, raise what it raises."""

        async def work() -> T:
            return function(*args)

        return self.run(work())

    def close(self) -> None:
        """Cancel what still runs, close the loop, end the thread. May be repeated."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._is_over.set)
            self._thread.join(TIMEOUT_S)

    def _work(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self.loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        self._is_ready.set()
        await self._is_over.wait()


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
