"""Connections to brokers: one per address, retried with pauses, without a limit.

Theory of operation. Connections are made on demand (`get`); all callers for one address
wait for the same attempt. Attempts to one address are separated by a pause that doubles
up to `reconnect_max_s`, regardless of the number of callers, so an absent broker costs
a bounded number of attempts and is found soon after it returns. The number of attempts
is not limited: callers have deadlines.

A connection that ends within `reconnect_max_s` counts as a failed attempt. Otherwise a
peer that accepts every connection and drops it would be retried without a pause.

    Invariant: an address has at most one running attempt and one open connection.

Source: docs/metaq-1.4/client.md 16.1, 16.2 and 21 (defects 7 to 9).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from metaq.clock import Clock
from metaq.dial import dial
from metaq.errors import ClosedError, MetaqError, NoBrokerError, RequestTimeoutError
from metaq.model import BrokerAddress, printable
from metaq.net.channel import Channel
from metaq.peer.connection import BrokerConnection, ConnectionStatistics, settling
from metaq.peer.options import ConnectionOptions
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Version
from metaq.protocol.version import decode_version_body
from metaq.retry import Backoff
from metaq.stats import counter, part

_log = logging.getLogger(__name__)

IDLE_ROUTE_COUNT_MAX: Final = 64
"""Maximum number of addresses kept without a caller; a full list is emptied."""

LAST_REPLIES_S: Final = 2.0
"""Longest wait of `close`, in seconds, for replies of a broker without long polls: a
MetaQ broker logs an error for each reply that it cannot send."""

CLOSED: Final = "the connection pool is closed"


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A snapshot of a pool's counters."""

    connections: tuple[ConnectionStatistics, ...] = part(
        default=(),
        labels=("address",),
        label=lambda one: (str(one.address).removeprefix("meta://"),),
    )
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


class _Waiter:
    """A caller that waits for a connection; it is called back once."""

    def __init__(
        self, on_end: Callable[[MetaqError | None], None], since_s: float
    ) -> None:
        self.on_end = on_end
        self.since_s = since_s
        self.handle: asyncio.Handle  # of the deadline, then of the call


class _Route:
    """State of one address."""

    def __init__(self, address: BrokerAddress) -> None:
        self.address = address
        self.connection: BrokerConnection | None = None
        self.opened_s = 0.0
        self.attempts: asyncio.Task[None] | None = None
        self.waiters: dict[_Waiter, None] = {}
        self.failures = 0  # in a row
        self.due_s = 0.0  # no attempt before
        self.reason = f"no connection to {address} yet"

    @property
    def usable(self) -> BrokerConnection | None:
        # A lost connection fails its requests before it calls the pool back.
        connection = self.connection
        return connection if connection is not None and connection.is_open else None

    @property
    def is_idle(self) -> bool:
        return self.connection is None and self.attempts is None and not self.waiters


class ConnectionPool:
    """The connections of one owner, which closes the pool; used on the loop.

    Lifecycle: create, use, `close` once.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        options: ConnectionOptions,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._clock = clock
        self._options = options
        self._loop = loop
        self._backoff = Backoff(
            first_s=options.reconnect_first_s, max_s=options.reconnect_max_s
        )
        self._routes: dict[BrokerAddress, _Route] = {}
        self.is_closed = False
        self._attempt_count = 0
        self._failure_count = 0
        self._lost_count = 0

    def ready(self, address: BrokerAddress) -> BrokerConnection | None:
        """Return the open connection to an address; None if there is none now."""
        route = self._routes.get(address)
        return None if route is None else route.usable

    async def get(
        self, address: BrokerAddress, *, deadline_s: float
    ) -> BrokerConnection:
        """Return a connection to an address, opening one if there is none.

        Joins the running attempt, or the pause before the next one.

        Args:
            address: the broker.
            deadline_s: absolute; when to stop trying.

        Raises:
            NoBrokerError: there was none before the deadline; the text has the address,
                the reason of the last failure and how long this call tried.
            ClosedError: the pool is closed, or was closed during the call.

        Cancellation: the attempt continues for the other callers.
        """
        while (connection := self.ready(address)) is None:
            ended: asyncio.Future[None] = self._loop.create_future()
            forget = self.when_open(address, settling(ended), deadline_s=deadline_s)
            try:
                await ended
            finally:
                forget()
        return connection

    def when_open(
        self,
        address: BrokerAddress,
        on_end: Callable[[MetaqError | None], None],
        *,
        deadline_s: float,
    ) -> Callable[[], None]:
        """Call back once: when there is a connection to an address, or with an error.

        Args:
            address: the broker; an attempt is started if none is running.
            on_end: gets None, or the error of `get`; never called within this call.
            deadline_s: absolute; when to stop trying.

        Returns:
            A function that cancels the callback; may be called at any time.
        """
        waiter = _Waiter(on_end, self._clock.monotonic_s())
        if self.is_closed:
            self._end(waiter, ClosedError(CLOSED))
            return waiter.handle.cancel
        route = self._route(address)
        if route.usable is not None:
            self._end(waiter, None)
            return waiter.handle.cancel
        left_s = max(0.0, deadline_s - waiter.since_s)
        waiter.handle = self._loop.call_later(left_s, self._on_late, route, waiter)
        route.waiters[waiter] = None
        if route.attempts is None:
            route.attempts = self._loop.create_task(
                self._run_attempts(route), name=f"connect {route.address}"
            )

        def forget() -> None:
            route.waiters.pop(waiter, None)
            waiter.handle.cancel()

        return forget

    def require_open(self) -> None:
        """Raise ClosedError if the pool is closed."""
        if self.is_closed:
            raise ClosedError(CLOSED)

    def leave(self, address: BrokerAddress, reason: str) -> None:
        """Close the connection to an address, and fail the callers waiting for one."""
        route = self._routes.get(address)
        if route is not None:
            error = NoBrokerError(f"no connection to {address} any more: {reason}")
            self._end_waiters(route, error)
            if route.usable is not None:
                route.usable.close(reason)

    async def close(self, *, deadline_s: float) -> None:
        """Close every connection; requests still in flight on them fail.

        Args:
            deadline_s: absolute; limits the wait for replies, which is at most
                `LAST_REPLIES_S`, and for running attempts.
        """
        self.is_closed = True
        attempts = []
        for route in self._routes.values():
            self._end_waiters(route, ClosedError(CLOSED))
            if route.attempts is not None:
                route.attempts.cancel()
                attempts.append(route.attempts)
        await self._take_last_replies(deadline_s)
        for route in list(self._routes.values()):
            if route.connection is not None:
                route.connection.close(CLOSED)
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

    async def _take_last_replies(self, deadline_s: float) -> None:
        deadline_s = min(deadline_s, self._clock.monotonic_s() + LAST_REPLIES_S)
        for route in list(self._routes.values()):
            connection = route.connection
            if connection is not None and not connection.capabilities.wait_ms_max:
                await connection.wait_answered(deadline_s)

    def _route(self, address: BrokerAddress) -> _Route:
        route = self._routes.get(address)
        if route is not None:
            return route
        idle = [known for known, route in self._routes.items() if route.is_idle]
        if len(idle) >= IDLE_ROUTE_COUNT_MAX:
            for known in idle:
                del self._routes[known]
        route = self._routes[address] = _Route(address)
        return route

    def _end(self, waiter: _Waiter, error: MetaqError | None) -> None:
        waiter.handle = self._loop.call_soon(waiter.on_end, error)

    def _end_waiters(self, route: _Route, error: MetaqError | None) -> None:
        for waiter in route.waiters:
            waiter.handle.cancel()
            self._end(waiter, error)
        route.waiters.clear()

    def _on_late(self, route: _Route, waiter: _Waiter) -> None:
        del route.waiters[waiter]
        tried_s = self._clock.monotonic_s() - waiter.since_s
        waiter.on_end(NoBrokerError(f"{route.reason} (tried for {tried_s:.3g} s)"))

    async def _run_attempts(self, route: _Route) -> None:
        """Try until there is a connection, or no caller waits for one."""
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
        self._end_waiters(route, None)

    def _note_failure(self, route: _Route, reason: str) -> None:
        route.failures += 1
        route.reason = reason
        pause_s = self._backoff.delay_s(route.failures)
        route.due_s = self._clock.monotonic_s() + pause_s

    def _on_lost(self, route: _Route, reason: str) -> None:
        route.connection = None
        if self.is_closed:
            return
        self._lost_count += 1
        reason = f"connection to {route.address} is lost: {reason}"
        lived_s = self._clock.monotonic_s() - route.opened_s
        if lived_s < self._options.reconnect_max_s:
            self._note_failure(route, reason)
        else:
            route.failures, route.due_s, route.reason = 0, 0.0, reason


async def open_connection(
    address: BrokerAddress,
    *,
    clock: Clock,
    deadline_s: float,
    options: ConnectionOptions,
) -> BrokerConnection:
    """Return a connection to a broker with known capabilities.

    Args:
        address: address of the broker; its host name may have several addresses.
        clock: for all deadlines of the connection.
        deadline_s: absolute; for connecting and the `version` reply.
        options: limits and times of the connection.

    Raises:
        NoBrokerError: the connection was refused, or no reply came in time; the text
            has the address and the reason. Only a `version` may have been sent.

    Cancellation: the connection is closed.
    """
    loop = asyncio.get_running_loop()
    left_s = max(0.0, deadline_s - clock.monotonic_s())
    try:
        async with asyncio.timeout(left_s):
            sock = await dial(address.host, address.port, loop=loop)
    except TimeoutError as error:
        raise NoBrokerError(
            f"cannot connect to {address}: no connection within {left_s:.3g} s"
        ) from error
    except (OSError, UnicodeError) as error:
        # A name that no resolver accepts raises UnicodeError.
        reason = getattr(error, "strerror", None) or error
        raise NoBrokerError(f"cannot connect to {address}: {reason}") from error
    room_bytes = options.in_flight_bytes_max
    channel = Channel(sock, loop=loop, clock=clock, room_bytes=room_bytes)
    connection = BrokerConnection(
        channel, address, loop=loop, clock=clock, options=options
    )
    try:
        command = Version(connection.next_opaque())
        reply = await connection.call(command, deadline_s=deadline_s)
        body = printable(require_ok(reply).text)
        connection.capabilities = decode_version_body(body)
    except RequestTimeoutError as error:
        connection.close("no version")
        reason = f"connected, but no answer within {left_s:.3g} s"
        raise NoBrokerError(f"{address}: {reason}") from error
    except MetaqError as error:
        connection.close("no version")
        raise NoBrokerError(f"{address}: {error}") from error
    except BaseException:
        connection.close("given up")
        raise
    return connection
