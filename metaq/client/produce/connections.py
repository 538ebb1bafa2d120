"""The connections of one producer, and waiters for one of them, or for a time.

A waiter is a callback that is called once. One timer serves all of them.
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
"""Interval at which those without a connection look for one, or for another partition,
seconds: no event says that a partition which refused may be asked again."""

Waiter: TypeAlias = Callable[[], None]


class Connections:
    """Brokers, the connections to them, and one timer. Owner: a delivery, on its loop.

    Lifecycle: made, used, closed once; no waiter is called afterwards.
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
            patience_s: time in which a broker has to be connected, or is unreachable.
            request_refresh: is called when the snapshot of the cluster seems wrong.
            on_change: is called when there is a connection, or none in that time;
                returns whether to go on trying.
        """
        self.snapshot = ClusterSnapshot()
        """Of the cluster; written by the owner."""
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
        """Return where a broker takes puts; None when it is away."""
        return self.snapshot.leader(broker_id)

    def find(
        self, partition: TopicPartition
    ) -> BrokerConnection | NoBrokerError | None:
        """Return the connection to a partition's broker; begin to connect if needed.

        Returns:
            The error of a broker that is away or unreachable; None: not known yet.
        """
        address = self.address(partition.broker_id)
        if address is None:
            self.request_refresh()
            return NoBrokerError(
                f"{partition}: broker {partition.broker_id} is not there"
            )
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
            # The client is closing, and would call back at once again. What waits is
            # looked at in time.
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
        """Yield the partitions of connected brokers, once each, from the next on.

        Brokers are few, and partitions may be thousands, each with messages to move.
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

    # -- those who wait ---------------------------------------------------------------

    def wait_for_connection(self, waiter: Waiter) -> None:
        """Call back after RETRY_S, though nothing may have changed."""
        self.call_at(waiter, self._clock.monotonic_s() + RETRY_S)

    def wait_for_room(self, connection: BrokerConnection, waiter: Waiter) -> None:
        """Call back when a connection takes requests again."""
        self._crowded.setdefault(connection, {})[waiter] = None

    def on_room(self, connection: BrokerConnection) -> None:
        """Call those who wait for a connection that got a reply."""
        crowded = self._crowded.get(connection)
        while crowded and connection.has_room:
            waiter = next(iter(crowded))
            del crowded[waiter]
            waiter()
        if not crowded:
            self._crowded.pop(connection, None)

    def take_waiting(self) -> dict[Waiter, None]:
        """Return who waits for room and may go on although nothing called them.

        Other users of a connection may have left it free.
        """
        found: dict[Waiter, None] = {}
        for crowded in self._crowded.values():
            found.update(crowded)
        self._crowded.clear()
        return found

    def call_at(self, waiter: Waiter, at_s: float) -> None:
        """Call back at a time, unless it is called earlier already."""
        known_s = self._times.get(waiter)
        if known_s is None or at_s < known_s:
            self._times.set(waiter, at_s)
            if not self._is_closed:
                self._timer.start()

    def _call_back(self, due: list[Waiter]) -> None:
        for waiter in due:
            # By itself: one that fails does not keep the others from going on.
            self._loop.call_soon(waiter)
