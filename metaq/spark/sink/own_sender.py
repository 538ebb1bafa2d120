"""Base of senders that have a loop thread and connections of their own."""

import asyncio
from collections.abc import Mapping
from typing import Final, Self

from metaq.client.names import parse_address
from metaq.client.options import ClientOptions
from metaq.clock import SystemClock
from metaq.loop_thread import LoopThread
from metaq.model import BrokerAddress, BrokerId
from metaq.peer.pool import ConnectionPool

CLOSE_TIMEOUT_S: Final = 1.0
"""Bound on giving up attempts to connect."""


class OwnSender:
    """Connections to brokers of known addresses. Blocking; one thread owns it."""

    def __init__(
        self,
        thread_name: str,
        addresses: Mapping[BrokerId, str],
        timeout_s: float,
    ) -> None:
        """Begin the thread, and `_start` there; nothing is connected."""
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._clock = SystemClock()
        self._thread = LoopThread(thread_name)
        self._thread.run(self._start())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; requests in flight stay without an answer.

        Harmless twice.
        """
        if not self._thread.is_usable:
            return
        try:
            self._thread.run(self._close())
        finally:
            self._thread.stop()

    async def _start(self) -> None:
        self._pool = ConnectionPool(
            clock=self._clock,
            options=ClientOptions(connect_timeout_s=self._timeout_s),
            loop=asyncio.get_running_loop(),
        )

    async def _close(self) -> None:
        deadline_s = self._clock.monotonic_s() + CLOSE_TIMEOUT_S
        await self._pool.close(deadline_s=deadline_s)

    def _deadline_s(self) -> float:
        return self._clock.monotonic_s() + self._timeout_s

    def _address_of(self, broker_id: BrokerId) -> BrokerAddress | None:
        text = self._addresses.get(broker_id)
        return None if text is None else parse_address(text)
