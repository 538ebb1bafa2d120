"""Waiting for connections, one task per broker that somebody has messages for."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from metaq.client.outlets import Pool
from metaq.clock import Clock
from metaq.errors import ClosedError, NoBrokerError
from metaq.zk.znodes import BrokerAddress

_log = logging.getLogger(__name__)

PATIENCE_S: Final = 0.5
"""How long messages that may move wait for a connection before they do."""


class Openers:
    """Asks the pool for connections. Owner: one delivery; used on its loop."""

    def __init__(
        self,
        pool: Pool,
        *,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        is_wanted: Callable[[BrokerAddress], bool],
        on_open: Callable[[], None],
        on_unreachable: Callable[[BrokerAddress, NoBrokerError], None],
    ) -> None:
        """Start with nothing asked.

        Args:
            pool: makes connections.
            clock: bounds each wait.
            loop: runs the tasks.
            is_wanted: tells whether there is anything to send to an address.
            on_open: called when there is a connection, or nothing wanted any more.
            on_unreachable: called after each PATIENCE_S without a connection.
        """
        self._pool = pool
        self._clock = clock
        self._loop = loop
        self._is_wanted = is_wanted
        self._on_open = on_open
        self._on_unreachable = on_unreachable
        self._tasks: dict[BrokerAddress, asyncio.Task[None]] = {}
        self._trouble: dict[BrokerAddress, NoBrokerError] = {}

    def trouble(self, address: BrokerAddress) -> NoBrokerError | None:
        """Return why an address was not reached lately; None when it was."""
        return self._trouble.get(address)

    def forget_trouble(self, address: BrokerAddress) -> None:
        """Take note that there is a connection, whoever made it."""
        self._trouble.pop(address, None)

    def open(self, address: BrokerAddress) -> None:
        """Wait for a connection as long as it is wanted; harmless when that is so."""
        if address not in self._tasks:
            work = self._run(address)
            task = self._loop.create_task(work, name=f"producer-open-{address}")
            self._tasks[address] = task

    async def close(self) -> None:
        """Stop waiting; nothing is called back any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, address: BrokerAddress) -> None:
        try:
            while self._is_wanted(address):
                deadline_s = self._clock.monotonic_s() + PATIENCE_S
                try:
                    await self._pool.get(address, deadline_s=deadline_s)
                except NoBrokerError as error:
                    if address not in self._trouble:
                        _log.warning(
                            "broker is unreachable: broker=%s error=%s", address, error
                        )
                    self._trouble[address] = error
                    self._on_unreachable(address, error)
                else:
                    self.forget_trouble(address)
                    break
        except ClosedError as error:
            # The client is closing. Whoever hears of it would only come back here, so
            # the next event is the one that a tick brings.
            _log.debug("connections are closed: broker=%s error=%s", address, error)
        else:
            self._loop.call_soon(self._on_open)
        finally:
            del self._tasks[address]
