"""One connection per broker address, made again for ever after a pause.

Theory of operation. Nothing is kept connected for its own sake: callers ask (`get`),
and all callers for one address at a time wait for the same attempt. Attempts to one
address follow each other after a pause that doubles up to `reconnect_max_s`, however
often and by however many callers it is asked for, so a broker that is away costs a
bounded number of attempts and is found soon after it comes back. There is no last
attempt: callers have deadlines.

A connection that ends within `reconnect_max_s` of its beginning counts as a failed
attempt. A peer that takes every connection and drops it would otherwise be called
without a pause.

    Invariant: an address has at most one attempt under way and one open connection.

Source: client spec 16.1, 16.2 and 21 (defects 7 to 9).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from metaq.clock import Clock
from metaq.errors import ClosedError, NoBrokerError
from metaq.model import BrokerAddress
from metaq.peer.connect import open_connection
from metaq.peer.connection import BrokerConnection, ConnectionStatistics
from metaq.peer.options import ConnectionOptions
from metaq.retry import Backoff
from metaq.stats import counter, part

_log = logging.getLogger(__name__)

PATIENCE_S: Final = 0.5
"""Time for which messages that may move wait for a connection before they do,
seconds."""

IDLE_ROUTE_COUNT_MAX: Final = 64
"""Addresses remembered without a caller; cleared when there are more."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A snapshot of a pool's counters."""

    connections: tuple[ConnectionStatistics, ...] = part(
        default=(),
        labels=("address",),
        label=lambda one: (str(one.address).removeprefix("meta://"),),
    )
    """Of the connections that are open."""
    attempt_count: int = counter(
        "metaq_client_connect_attempts_total", "Attempts to connect to brokers."
    )
    failure_count: int = counter(
        "metaq_client_connect_failures_total", "Attempts to connect that failed."
    )
    lost_count: int = counter(
        "metaq_client_connections_lost_total",
        "Connections that ended without being closed here.",
    )


class _Route:
    """State of one address."""

    __slots__ = (
        "address",
        "attempts",
        "connection",
        "due_s",
        "failures",
        "opened_s",
        "reason",
        "waiters",
    )

    def __init__(self, address: BrokerAddress) -> None:
        self.address = address
        self.connection: BrokerConnection | None = None
        self.opened_s = 0.0
        self.attempts: asyncio.Task[None] | None = None
        self.waiters: dict[asyncio.Future[None], None] = {}
        self.failures = 0  # in a row
        self.due_s = 0.0  # no attempt before
        self.reason = f"no connection to {address} yet"

    @property
    def usable(self) -> BrokerConnection | None:
        # Requests in flight on a lost connection hear of it before the pool does.
        connection = self.connection
        return connection if connection is not None and connection.is_open else None

    @property
    def is_idle(self) -> bool:
        return self.connection is None and self.attempts is None and not self.waiters


class ConnectionPool:
    """The connections of one client. Owner: the client; used on the loop.

    Lifecycle: made, used, closed once with `close`.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        options: ConnectionOptions,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Prepare a pool without connections.

        Args:
            clock: judges every deadline.
            options: times and bounds, also of the connections.
            loop: the loop everything here runs on.
        """
        self._clock = clock
        self._options = options
        self._loop = loop
        self._backoff = Backoff(
            first_s=options.reconnect_first_s, max_s=options.reconnect_max_s
        )
        self._routes: dict[BrokerAddress, _Route] = {}
        self._is_closed = False
        self._attempt_count = 0
        self._failure_count = 0
        self._lost_count = 0

    def ready(self, address: BrokerAddress) -> BrokerConnection | None:
        """Return the open connection to an address; None when there is none now."""
        route = self._routes.get(address)
        return None if route is None else route.usable

    async def get(
        self, address: BrokerAddress, *, deadline_s: float
    ) -> BrokerConnection:
        """Return a connection to an address, made if there is none.

        Joins the attempt under way, or the pause before the next one.

        Args:
            address: the broker.
            deadline_s: absolute; how long to go on trying.

        Raises:
            NoBrokerError: there was none before the deadline; names the address, the
                last attempt's reason and how long this call tried.
            ClosedError: the pool is closed, or was meanwhile.

        Cancellation: the attempt goes on for the others.
        """
        since_s = self._clock.monotonic_s()
        route = self._route(address)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - since_s)):
                while (connection := route.usable) is None:
                    await self._wait(route)
                    route = self._route(address)
        except TimeoutError as error:
            tried_s = self._clock.monotonic_s() - since_s
            raise NoBrokerError(
                f"{route.reason} (tried for {tried_s:.3g} s)"
            ) from error
        return connection

    @property
    def is_closed(self) -> bool:
        """Tell whether `close` was called."""
        return self._is_closed

    async def close(self, *, deadline_s: float) -> None:
        """Close every connection; requests in flight on them fail.

        Args:
            deadline_s: absolute; how long attempts under way may take to end.
        """
        self._is_closed = True
        attempts = []
        for route in list(self._routes.values()):
            for waiter in list(route.waiters):
                if not waiter.done():
                    waiter.set_exception(ClosedError("the connection pool is closed"))
            if route.attempts is not None:
                route.attempts.cancel()
                attempts.append(route.attempts)
            if route.connection is not None:
                route.connection.close("the client was closed")
        self._routes.clear()
        if attempts:
            left_s = max(0.0, deadline_s - self._clock.monotonic_s())
            await asyncio.wait(attempts, timeout=left_s)

    def statistics(self) -> PoolStatistics:
        """Return a snapshot of the counters; from any thread."""
        connections = [route.connection for route in tuple(self._routes.values())]
        return PoolStatistics(
            connections=tuple(
                one.statistics() for one in connections if one is not None
            ),
            attempt_count=self._attempt_count,
            failure_count=self._failure_count,
            lost_count=self._lost_count,
        )

    # -- inside -----------------------------------------------------------------------

    def _route(self, address: BrokerAddress) -> _Route:
        if self._is_closed:
            raise ClosedError("the connection pool is closed")
        route = self._routes.get(address)
        if route is not None:
            return route
        idle = [known for known, route in self._routes.items() if route.is_idle]
        if len(idle) >= IDLE_ROUTE_COUNT_MAX:
            for known in idle:
                del self._routes[known]
        route = self._routes[address] = _Route(address)
        return route

    async def _wait(self, route: _Route) -> None:
        """Wait for the end of the next successful attempt."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        route.waiters[waiter] = None
        if route.attempts is None:
            route.attempts = self._loop.create_task(
                self._run_attempts(route), name=f"connect {route.address}"
            )
        try:
            await waiter
        finally:
            route.waiters.pop(waiter, None)

    async def _run_attempts(self, route: _Route) -> None:
        """Try until there is a connection, or no caller waits for one any more."""
        try:
            while route.waiters:
                pause_s = route.due_s - self._clock.monotonic_s()
                if pause_s > 0:
                    await asyncio.sleep(pause_s)
                    continue
                await self._attempt(route)
        finally:
            route.attempts = None

    async def _attempt(self, route: _Route) -> None:
        self._attempt_count += 1
        deadline_s = self._clock.monotonic_s() + self._options.connect_timeout_s
        try:
            connection = await open_connection(
                route.address,
                clock=self._clock,
                deadline_s=deadline_s,
                options=self._options,
            )
        except NoBrokerError as error:
            self._failure_count += 1
            self._note_failure(route, str(error))
            return
        route.connection = connection
        route.opened_s = self._clock.monotonic_s()
        connection.on_closed(lambda reason: self._on_lost(route, reason))
        for waiter in list(route.waiters):
            if not waiter.done():
                waiter.set_result(None)
        route.waiters.clear()

    def _note_failure(self, route: _Route, reason: str) -> None:
        route.failures += 1
        route.reason = reason
        pause_s = self._backoff.delay_s(route.failures)
        route.due_s = self._clock.monotonic_s() + pause_s

    def _on_lost(self, route: _Route, reason: str) -> None:
        route.connection = None
        if self._is_closed:
            return
        self._lost_count += 1
        reason = f"connection to {route.address} is lost: {reason}"
        lived_s = self._clock.monotonic_s() - route.opened_s
        if lived_s < self._options.reconnect_max_s:
            self._note_failure(route, reason)
        else:
            route.failures, route.due_s, route.reason = 0, 0.0, reason


class Connector(Protocol):
    """The pool, as far as waiting for its connections goes."""

    async def get(self, address: BrokerAddress, *, deadline_s: float) -> object:
        """Return a connection; NoBrokerError at the deadline."""
        ...


class ConnectionWaiters:
    """Wait for connections, one task per broker that a producer has messages for.

    Owner: one delivery; used on its loop.
    """

    def __init__(
        self,
        pool: Connector,
        *,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        is_wanted: Callable[[BrokerAddress], bool],
        on_open: Callable[[], None],
        on_unreachable: Callable[[BrokerAddress, NoBrokerError], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Start with nothing asked.

        Args:
            pool: makes connections.
            clock: bounds each wait.
            loop: runs the tasks.
            is_wanted: tells whether there is anything to send to an address.
            on_open: called when there is a connection, or nothing wanted any more.
            on_unreachable: called after each `patience_s` without a connection.
            patience_s: how long one wait takes, at most.
        """
        self._pool = pool
        self._clock = clock
        self._loop = loop
        self._is_wanted = is_wanted
        self._on_open = on_open
        self._on_unreachable = on_unreachable
        self._patience_s = patience_s
        self._tasks: dict[BrokerAddress, asyncio.Task[None]] = {}
        self._trouble: dict[BrokerAddress, NoBrokerError] = {}

    def trouble(self, address: BrokerAddress) -> NoBrokerError | None:
        """Return why an address was not reached lately; None when it was."""
        return self._trouble.get(address)

    def forget_trouble(self, address: BrokerAddress) -> None:
        """Take note that there is a connection, made here or elsewhere."""
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
                deadline_s = self._clock.monotonic_s() + self._patience_s
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
            # The client is closing. Its listeners would only come back here, so the
            # next event is the one that a tick brings.
            _log.debug("connections are closed: broker=%s error=%s", address, error)
        else:
            self._loop.call_soon(self._on_open)
        finally:
            del self._tasks[address]
