"""The connections of one producer, and callbacks that wait for one or for a time.

A waiter is a callback that is called once. One timer serves all waiters.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeAlias

from metaq.clock import Clock
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.deadlines import Deadlines, DeadlineTimer
from metaq.errors import ClosedError, MetaqError, NoBrokerError
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.peer.connection import BrokerConnection
from metaq.peer.pool import ConnectionPool

_log = logging.getLogger(__name__)

RETRY_S: Final = 0.5
"""Seconds between attempts of a sender without a connection to find one, or to find
another partition: no event reports that a partition which refused takes puts again."""

Waiter: TypeAlias = Callable[[], None]


class Connections:
    """Brokers, the connections to them, and one timer. Owner: a delivery, on its loop.

    Lifecycle: created, used, closed once; then no waiter is called.
    """

    def __init__(
        self,
        *,
        pool: ConnectionPool,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        patience_s: float,
        request_refresh: Callable[[], None],
        on_change: Callable[[BrokerAddress, NoBrokerError | None], bool],
    ) -> None:
        """Prepare; nothing is connected.

        Args:
            pool: makes the connections.
            clock: for times.
            loop: calls back.
            patience_s: time to connect, after which a broker counts as unreachable.
            request_refresh: called when the cluster snapshot seems outdated.
            on_change: called when a broker is connected, or was not within
                `patience_s`; returns whether to keep trying.
        """
        self.snapshot = ClusterSnapshot()
        """The cluster as last known; set by the owner."""
        self.request_refresh = request_refresh
        self._pool = pool
        self._clock = clock
        self._loop = loop
        self._patience_s = patience_s
        self._on_change = on_change
        self._opening: dict[BrokerAddress, Callable[[], None]] = {}  # end the waits
        self._unreachable: dict[BrokerAddress, NoBrokerError] = {}
        self._crowded: dict[BrokerConnection, dict[Waiter, None]] = {}
        self._times = Deadlines[Waiter]()
        self._timer = DeadlineTimer(self._times, clock.monotonic_s, self._call_back)
        self._is_closed = False
        self._turn = 0

    def close(self) -> None:
        """End all waits."""
        self._is_closed = True
        self._timer.close()
        for cancel in self._opening.values():
            cancel()

    # -- brokers ----------------------------------------------------------------------

    def address(self, broker_id: BrokerId) -> BrokerAddress | None:
        """Return the address at which a broker takes puts; None if it is away."""
        return self.snapshot.leader(broker_id)

    def find(
        self, partition: TopicPartition
    ) -> BrokerConnection | NoBrokerError | None:
        """Return the connection to a partition's broker; start to connect if needed.

        Returns:
            The connection; the error, if the broker is away or unreachable; or None
            while connecting.
        """
        address = self.address(partition.broker_id)
        if address is None:
            self.request_refresh()
            return NoBrokerError(f"{partition}: broker {partition.broker_id} is away")
        connection = self._pool.ready(address)
        if connection is None:
            self._open(address)
            return self._unreachable.get(address)
        self._unreachable.pop(address, None)
        return connection

    def _open(self, address: BrokerAddress) -> None:
        if address not in self._opening:
            self._opening[address] = self._pool.when_open(
                address,
                partial(self._on_opened, address),
                deadline_s=self._clock.monotonic_s() + self._patience_s,
            )

    def _on_opened(self, address: BrokerAddress, error: MetaqError | None) -> None:
        del self._opening[address]
        if isinstance(error, ClosedError):
            # The client is closing: another attempt would call back at once, endlessly.
            # The timer still serves waiters.
            _log.debug("connections are closed: broker=%s error=%s", address, error)
            return
        if not isinstance(error, NoBrokerError):
            error = None
            self._unreachable.pop(address, None)
        else:
            if address not in self._unreachable:
                _log.warning(
                    "broker is unreachable: broker=%s error=%s", address, error
                )
            self._unreachable[address] = error
            self.request_refresh()
        if self._on_change(address, error):
            self._open(address)

    def others(self, topic: str) -> Iterator[TopicPartition]:
        """Yield each partition of connected brokers once, beginning with the next turn.

        Cost per partition depends on the number of brokers only: there may be thousands
        of partitions, each with messages to move.
        """
        connected = [
            (broker_id, count)
            for broker_id, count in self.snapshot.puts.get(topic, {}).items()
            if self._is_connected(broker_id)
        ]
        total = sum(count for _, count in connected)
        for _ in range(total):
            self._turn += 1
            number = self._turn % total
            for broker_id, count in connected:
                if number < count:
                    yield TopicPartition(topic, broker_id, number)
                    break
                number -= count

    def _is_connected(self, broker_id: BrokerId) -> bool:
        address = self.address(broker_id)
        return address is not None and self._pool.ready(address) is not None

    # -- waiters ----------------------------------------------------------------------

    def wait_for_connection(self, waiter: Waiter) -> None:
        """Call back after RETRY_S, whether or not there is a connection."""
        self.call_at(waiter, self._clock.monotonic_s() + RETRY_S)

    def wait_for_room(self, connection: BrokerConnection, waiter: Waiter) -> None:
        """Call back when a connection may take more requests."""
        self._crowded.setdefault(connection, {})[waiter] = None

    def on_room(self, connection: BrokerConnection) -> None:
        """Call waiters of a connection that got a reply, while it has room."""
        crowded = self._crowded.get(connection)
        while crowded and connection.has_room:
            waiter = next(iter(crowded))
            del crowded[waiter]
            waiter()
        if not crowded:
            self._crowded.pop(connection, None)

    def take_waiting(self) -> dict[Waiter, None]:
        """Remove and return all waiters for room.

        A connection may have room without an event here, because it has other users.
        """
        found: dict[Waiter, None] = {}
        for crowded in self._crowded.values():
            found.update(crowded)
        self._crowded.clear()
        return found

    def call_at(self, waiter: Waiter, at_s: float) -> None:
        """Call back at a monotonic time; an earlier time set before stays."""
        known_s = self._times.get(waiter)
        if known_s is None or at_s < known_s:
            self._times.set(waiter, at_s)
            if not self._is_closed:
                self._timer.start()

    def _call_back(self, due: list[Waiter]) -> None:
        for waiter in due:
            # In a call of its own, so that an exception does not affect the others.
            self._loop.call_soon(waiter)
