"""One connection to one broker, on the event loop: many requests in flight at once.

Theory of operation. `submit` queues bytes and a callback; requests queued in one turn
of the loop are sent together (see `net/channel.py`), unless one is sent alone. Replies
are paired by opaque only, in any order. The callback of each request is called exactly
once: with the reply, or with an error that shows whether the outcome is known. Puts may
be submitted as a run: their replies are read and paired in bulk, with no object or call
per put.

    RequestTimeoutError   its deadline passed; a later reply is dropped
    ConnectionLostError   the connection ended; the request may have been executed
    NotSentError          the connection ended before any byte of it was sent

There is one timer per connection and no task. It is set to the earliest deadline or the
next heartbeat. A broker is considered gone, although its connection is open, if

* nothing was received for `heartbeat_s`, so a heartbeat (`version`) was sent, and
  nothing moved in either direction for `heartbeat_timeout_s` after that;
* LATE_COUNT_MAX requests in a row passed their deadlines, and for `heartbeat_timeout_s`
  only heartbeats got replies;
* it breaks the rules of the wire.

    Invariant: `_in_flight` is in the order of `submit`, and a request is removed before
    its callback is called. The same holds for `_puts`, the puts of `_runs`.

Source: docs/metaq-1.4/client.md 2 and 16.
"""

import asyncio
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from itertools import accumulate
from typing import Final, ParamSpec, Protocol, TypeAlias, TypeVar

from metaq.clock import Clock
from metaq.errors import (
    ClientError,
    ClosedError,
    ConnectionLostError,
    MetaqError,
    NotSentError,
    RemoteProtocolError,
    RequestTimeoutError,
)
from metaq.model import BrokerAddress
from metaq.net.channel import Channel
from metaq.peer.options import ConnectionOptions
from metaq.peer.replies import ReceiptColumns, take_receipts, take_results
from metaq.protocol.commands import Command, Quit, Reply, Version
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from metaq.protocol.encoding import encode
from metaq.protocol.version import Capabilities
from metaq.retry import wait_set
from metaq.stats import counter, gauge

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

OnReply: TypeAlias = Callable[[Reply | MetaqError], None]
"""Gets the outcome of a request; called on the loop, exactly once; must not block."""

OPAQUE_MAX: Final = 999_999_999
"""Largest opaque; after it they restart at 1. Short, and far below the i32 maximum."""

LATE_COUNT_MAX: Final = 3
"""Consecutive missed deadlines after which a broker without replies is given up."""

TIMER_STEP_S: Final = 0.005
"""Shortest time between two checks of the deadlines, in seconds. Each check passes over
all requests in flight; deadlines are kept to within this time."""

# Callback, deadline, bytes submitted on this connection before it, its size in bytes. A
# plain tuple, because one is made for each request.
_Request: TypeAlias = tuple[OnReply, float, int, int]


class PutListener(Protocol):
    """Gets outcomes of puts, or of one `mput`; called on the loop; must not block."""

    def sizes(self) -> Sequence[int]:
        """Return the size of each frame; called when a connection ends."""

    def on_receipts(self, receipts: ReceiptColumns) -> None:
        """Called when puts are stored; `receipts` are in the order of opaques."""

    def on_outcome(self, opaques: Sequence[int], outcome: Reply | MetaqError) -> None:
        """Called with the reply to one put, or the error of many, opaques ascending."""


@dataclass(slots=True, eq=False)
class _Run:
    """Puts that were submitted together and that have some in flight."""

    listener: PutListener
    opaques: range
    deadline_s: float
    start: int
    """Number of bytes submitted on this connection before it."""
    size_bytes: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStatistics:
    """A snapshot of a connection's counters."""

    address: BrokerAddress = gauge(
        "metaq_client_connections",
        "Connections that are open.",
        default=MISSING,
        read=lambda _: 1,
    )
    peer: str
    broker_version: str
    in_flight_count: int = gauge(
        "metaq_client_in_flight_requests", "Requests sent and not answered."
    )
    in_flight_bytes: int = gauge(
        "metaq_client_in_flight_bytes", "Bytes of requests sent and not answered."
    )
    queued_bytes: int = gauge(
        "metaq_client_queued_bytes", "Bytes of requests that have not left yet."
    )
    sent_bytes: int = counter(
        "metaq_client_sent_bytes_total", "Bytes sent over the present connection."
    )
    received_bytes: int = counter(
        "metaq_client_received_bytes_total",
        "Bytes received over the present connection.",
    )
    request_count: int = counter(
        "metaq_client_requests_total",
        "Requests over the present connection, heartbeats included.",
    )
    timeout_count: int = counter(
        "metaq_client_request_timeouts_total",
        "Requests over the present connection that ran into their deadline.",
    )
    unknown_reply_count: int = counter(
        "metaq_client_unknown_replies_total",
        "Replies to nothing in flight, late ones mostly.",
    )
    heartbeat_count: int = counter(
        "metaq_client_heartbeats_total",
        "Times the broker was asked whether it is there.",
    )


class BrokerConnection:
    """An open connection. Owned by its pool or creator; used on the loop.

    Lifecycle: `open_connection`, use, `close`. It ends once, by `close` or by the
    broker. Then the callbacks of all requests in flight are called in the order of
    submission, and after them the callbacks of `on_closed`.
    """

    def __init__(
        self,
        channel: Channel,
        address: BrokerAddress,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        options: ConnectionOptions,
    ) -> None:
        """Take over a connected channel; see `open_connection`."""
        self.address = address
        self.peer = channel.peer
        self.capabilities = Capabilities("")
        self._channel = channel
        self._loop = loop
        self._clock = clock
        self._heartbeat_s = options.heartbeat_s
        self._heartbeat_timeout_s = options.heartbeat_timeout_s
        self._in_flight_bytes_max = options.in_flight_bytes_max
        self._protocol = Connection(Role.CLIENT, WireLimits())
        self._in_flight: dict[int, _Request] = {}
        self._runs: dict[_Run, None] = {}
        self._puts: dict[int, _Run] = {}  # opaque -> its run
        self.in_flight_bytes = 0
        self._submitted_bytes = 0
        self._opaque = 0
        self._reason: str | None = None
        self._all_answered = asyncio.Event()
        self._listeners: dict[object, Callable[[str], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wake_s = math.inf
        self._received_s = self._answered_s = clock.monotonic_s()
        self._late_count = 0
        self._heartbeat: int | None = None
        self._request_count = 0
        self._timeout_count = 0
        self._unknown_reply_count = 0
        self._heartbeat_count = 0
        channel.start(
            on_data=self._on_data,
            on_end=lambda: self.close("the broker closed it"),
            on_room=lambda: None,
            on_closed=self._end,
            reads_rest=True,
        )
        self._wake_at(self._received_s + self._heartbeat_s)

    # -- state ------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it was neither closed nor lost."""
        return self._reason is None

    @property
    def in_flight_count(self) -> int:
        """Number of requests sent and not yet answered."""
        return len(self._in_flight) + len(self._puts)

    @property
    def has_room(self) -> bool:
        """Whether `in_flight_bytes_max` allows a request; callers check it first."""
        return self.in_flight_bytes < self._in_flight_bytes_max

    def statistics(self) -> ConnectionStatistics:
        """Return a snapshot of the counters."""
        return ConnectionStatistics(
            address=self.address,
            peer=self.peer,
            broker_version=self.capabilities.version,
            in_flight_count=self.in_flight_count,
            in_flight_bytes=self.in_flight_bytes,
            queued_bytes=self._channel.queued_bytes,
            sent_bytes=self._channel.sent_bytes,
            received_bytes=self._channel.received_bytes,
            request_count=self._request_count,
            timeout_count=self._timeout_count,
            unknown_reply_count=self._unknown_reply_count,
            heartbeat_count=self._heartbeat_count,
        )

    # -- requests ---------------------------------------------------------------------

    def next_opaque(self) -> int:
        """Return an opaque that no request in flight has."""
        self._opaque = opaque = self._opaque % OPAQUE_MAX + 1
        return opaque

    def next_opaques(self, count: int) -> range:
        """Return `count` such opaques, ascending, without a gap."""
        if self._opaque + count > OPAQUE_MAX:
            self._opaque = 0
        first = self._opaque + 1
        self._opaque += count
        return range(first, first + count)

    def submit(
        self,
        frame: Sequence[bytes] | bytes,
        opaque: int,
        on_reply: OnReply,
        *,
        deadline_s: float,
        is_alone: bool = False,
        gathers_bytes: int = 0,
    ) -> None:
        """Send a request; the hot call.

        Args:
            frame: its bytes, or pieces of them in order.
            opaque: from `next_opaque`; also in the frame.
            on_reply: gets its outcome.
            deadline_s: absolute; kept to within TIMER_STEP_S.
            is_alone: send it within this call; for one that others seldom join.
            gathers_bytes: send it once so much is queued, or at the end of the turn.

        Raises:
            ClosedError: the connection is closed; nothing was sent, and `on_reply` is
                not called.
        """
        self._begin_request()
        if isinstance(frame, bytes):
            size_bytes = len(frame)
            if is_alone:
                self._channel.send_now(frame)
            elif gathers_bytes:
                self._channel.send_gathered(frame, gathers_bytes)
            else:
                self._channel.send(frame)
        else:
            size_bytes = 0
            for part in frame:
                size_bytes += len(part)
                self._channel.send(part)
        start = self._submitted_bytes
        self._in_flight[opaque] = (on_reply, deadline_s, start, size_bytes)
        self._note_request(1, size_bytes, deadline_s)

    def submit_puts(
        self, frames: bytes, opaques: range, listener: PutListener, *, deadline_s: float
    ) -> None:
        """Send a run of puts, or one `mput`.

        Args:
            frames: frames of all puts, back to back.
            opaques: from `next_opaques`; also in the frames.
            listener: gets the outcome of each put.
            deadline_s: of all puts; as in `submit`.

        Raises:
            ClosedError: as `submit`.
        """
        self._begin_request()
        self._channel.send(frames)
        size, count = len(frames), len(opaques)
        start = self._submitted_bytes
        run = _Run(listener, opaques, deadline_s, start, size, left=count)
        self._runs[run] = None
        self._puts.update(dict.fromkeys(opaques, run))
        self._note_request(count, size, deadline_s)

    def _begin_request(self) -> None:
        if self._reason is not None:
            raise ClosedError(f"connection to {self.address} is closed: {self._reason}")
        if not self._late_count and not self.in_flight_count:
            self._answered_s = self._clock.monotonic_s()

    def _note_request(self, count: int, size_bytes: int, deadline_s: float) -> None:
        self._submitted_bytes += size_bytes
        self.in_flight_bytes += size_bytes
        self._request_count += count
        if deadline_s < self._wake_s:
            self._wake_at(deadline_s)

    async def call(self, command: Command, *, deadline_s: float) -> Reply:
        """Send a command, whose opaque is from `next_opaque`, and return its reply.

        Raises:
            ClosedError, NotSentError: it was not sent.
            RequestTimeoutError, ConnectionLostError: the outcome is unknown.
            LocalProtocolError: it cannot be encoded.

        Cancellation: the request stays in flight, and its reply is dropped.
        """
        assert not isinstance(command, Quit), "a quit is not answered"
        answer: asyncio.Future[Reply] = self._loop.create_future()
        on_reply = settling(answer)
        self.submit(encode(command), command.opaque, on_reply, deadline_s=deadline_s)
        return await answer

    # -- the end ----------------------------------------------------------------------

    async def wait_answered(self, deadline_s: float) -> None:
        """Wait until no request is in flight, the connection ends, or time is over.

        Args:
            deadline_s: absolute.
        """
        self._all_answered.clear()
        if self.in_flight_count and self._reason is None:
            left_s = max(0.0, deadline_s - self._clock.monotonic_s())
            await wait_set(self._all_answered, left_s)

    def on_closed(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call `callback` once, with the reason, when the connection ends.

        If it has ended already, the call is made at once: the peer may have broken the
        rules right after the awaited reply.

        Returns:
            A function that removes the callback; may be called at any time.
        """
        key = object()
        if self._reason is None:
            self._listeners[key] = callback
        else:
            callback(self._reason)
        return lambda: ignore(self._listeners.pop(key, None))

    def close(self, reason: str) -> None:
        """Close at once; requests in flight fail. A second call does nothing."""
        if self.in_flight_count or self._late_count or self._channel.queued_bytes:
            self._channel.abort(reason)
        else:
            self._channel.hang_up(reason)

    def close_for(self, error: RemoteProtocolError) -> None:
        """Close because the broker broke the rules, in a frame or in its content."""
        self.close(f"malformed reply: {error}")

    def _end(self, reason: str) -> None:
        """Report the end to all requests and listeners; the channel is closed."""
        self._reason = reason
        self._all_answered.set()
        if self._timer is not None:
            self._timer.cancel()
        requests, runs = list(self._in_flight.values()), list(self._runs)
        unanswered = [self._take_unanswered(run) for run in runs]
        self._in_flight.clear()
        self.in_flight_bytes = 0
        sent_bytes = self._channel.sent_bytes
        for on_reply, _deadline_s, start, _size_bytes in requests:
            self._call(on_reply, self._loss(reason, has_left=start < sent_bytes))
        for run, opaques in zip(runs, unanswered, strict=True):
            try:
                starts = accumulate(run.listener.sizes(), initial=run.start)
                left = bisect_left(list(starts), sent_bytes) + run.opaques.start
                at = bisect_left(opaques, left)
            except MemoryError:
                at = len(opaques)  # as if all were sent: their outcome is unknown
            for some, has_left in ((opaques[:at], True), (opaques[at:], False)):
                if some:
                    error = self._loss(reason, has_left=has_left)
                    self._call(run.listener.on_outcome, some, error)
        listeners = list(self._listeners.values())
        self._listeners.clear()
        for listener in listeners:
            listener(reason)

    def _loss(self, reason: str, *, has_left: bool) -> ClientError:
        kind: type[ClientError] = NotSentError
        outcome = "not sent"
        if has_left:
            kind, outcome = ConnectionLostError, "outcome unknown"
        return kind(
            f"connection to {self.address} is lost: {reason}; request {outcome}"
        )

    # -- replies ----------------------------------------------------------------------

    def _on_data(self, data: bytes) -> None:
        self._received_s = self._clock.monotonic_s()
        protocol = self._protocol
        protocol.receive_data(data)
        try:
            while True:
                if protocol.is_between_frames:
                    if self._puts and (receipts := take_receipts(protocol.buffer)):
                        self._on_receipts(receipts)
                    results = take_results(protocol.buffer)
                    if results and not protocol.buffer.unread_bytes:
                        # The usual case: return at once. See `Delivery._on_reply`.
                        self._on_replies(results)
                        return
                    self._on_replies(results)
                if self._reason is not None:  # a callback may have closed it
                    return
                reply = protocol.next_event()
                if reply is NEED_DATA:
                    return
                assert isinstance(reply, Reply), "brokers send no commands"
                self._on_replies((reply,))
        except RemoteProtocolError as error:
            self.close_for(error)
        finally:
            if not self.in_flight_count:
                self._all_answered.set()

    def _on_receipts(self, receipts: ReceiptColumns) -> None:
        """Pair receipts with the runs in flight; the hot loop over puts."""
        rows = sorted(zip(*receipts, strict=True))
        opaques, first = [row[0] for row in rows], 0
        while first < len(rows):
            run = self._puts.get(opaques[first])
            if run is None:
                # It belongs to a single request, or is late.
                self._on_replies(_columns(rows[first : first + 1]).replies())
                first += 1
                continue
            end = bisect_left(opaques, run.opaques.stop, first)
            self._on_run(run, rows[first:end])
            first = end

    def _on_run(self, run: _Run, rows: Sequence[tuple[int, ...]]) -> None:
        """Report receipts to the listener of their run."""
        taken = [self._puts.pop(row[0], None) for row in rows]
        if None in taken:
            rows = [row for row, of in zip(rows, taken, strict=True) if of is not None]
            self._unknown_reply_count += len(taken) - len(rows)
        self._late_count = 0
        self._answered_s = self._received_s
        self._note_answered(run, len(rows))
        try:
            run.listener.on_receipts(_columns(rows))
        except Exception:  # noqa: BLE001  # the other requests need their outcome
            self._log_callback()

    def _note_answered(self, run: _Run, count: int) -> None:
        run.left -= count
        if not run.left:
            del self._runs[run]
            self.in_flight_bytes -= run.size_bytes

    def _take_unanswered(self, run: _Run) -> list[int]:
        """Remove the unanswered puts of a run and return their opaques."""
        opaques = [one for one in run.opaques if self._puts.pop(one, None)]
        self._note_answered(run, len(opaques))
        return opaques

    def _on_replies(self, replies: Sequence[Reply]) -> None:
        """Pair replies with requests in flight; the hot loop."""
        pop = self._in_flight.pop
        for reply in replies:
            request = pop(reply.opaque, None)
            if reply.opaque == self._heartbeat:
                self._heartbeat = None
            else:
                # A late reply also proves that the broker executes requests.
                self._late_count = 0
                self._answered_s = self._received_s
            if request is None:
                run = self._puts.pop(reply.opaque, None)
                if run is None:
                    self._unknown_reply_count += 1
                    continue
                self._note_answered(run, 1)
                self._call(run.listener.on_outcome, (reply.opaque,), reply)
                continue
            self.in_flight_bytes -= request[3]
            try:
                request[0](reply)
            except Exception:  # noqa: BLE001  # the other requests need their outcome
                self._log_callback()

    def _call(
        self, callback: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        try:
            callback(*args, **kwargs)
        except Exception:  # noqa: BLE001  # the other requests need their outcome
            self._log_callback()

    def _log_callback(self) -> None:
        _log.exception("reply callback failed: broker=%s", self.address)

    # -- time -------------------------------------------------------------------------

    def _wake_at(self, time_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wake_s = time_s
        left_s = max(0.0, time_s - self._clock.monotonic_s())
        self._timer = self._loop.call_later(left_s, self._on_timer)

    def _on_timer(self) -> None:
        now_s = self._clock.monotonic_s()
        try:
            self._expire(now_s)
            self._beat(now_s)
        finally:
            # Also after an exception: no other timer checks deadlines and silence.
            if self._reason is None:
                self._wake_at(self._next_look_s(now_s))

    def _next_look_s(self, now_s: float) -> float:
        """Return the time of the next deadline or heartbeat."""
        since_s = self._received_s if self._heartbeat is None else now_s
        wake_s = since_s + self._heartbeat_s
        for _on_reply, deadline_s, _start, _size_bytes in self._in_flight.values():
            wake_s = min(wake_s, deadline_s)
        for run in self._runs:
            wake_s = min(wake_s, run.deadline_s)
        if self._late_count >= LATE_COUNT_MAX:
            # See `is_deaf` in `_expire`.
            wake_s = min(wake_s, self._answered_s + self._heartbeat_timeout_s)
        return max(wake_s, now_s + TIMER_STEP_S)

    def _expire(self, now_s: float) -> None:
        """Fail requests past their deadline, in the order of submission."""
        late = [
            (opaque, request)
            for opaque, request in self._in_flight.items()
            if request[1] <= now_s and opaque != self._heartbeat
        ]
        for opaque, (on_reply, _deadline_s, _start, size_bytes) in late:
            if self._in_flight.pop(opaque, None) is None:
                continue
            self.in_flight_bytes -= size_bytes
            self._timeout_count += 1
            self._late_count += 1
            self._call(on_reply, self._lateness())
        for run in [run for run in self._runs if run.deadline_s <= now_s]:
            if run not in self._runs:
                continue
            opaques = self._take_unanswered(run)
            self._timeout_count += len(opaques)
            self._late_count += len(opaques)
            self._call(run.listener.on_outcome, opaques, self._lateness())
        is_deaf = now_s - self._answered_s >= self._heartbeat_timeout_s
        if self._late_count >= LATE_COUNT_MAX and is_deaf:
            self.close(f"{self._late_count} requests in a row were not answered")

    def _lateness(self) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"{self.address}: no answer before the deadline; outcome unknown"
        )

    def _beat(self, now_s: float) -> None:
        """Send a heartbeat to a silent broker; close if it stays silent."""
        if self._reason is not None:
            return
        timeout_s = self._heartbeat_timeout_s
        if self._heartbeat is None:
            if now_s - self._received_s >= self._heartbeat_s:
                opaque = self.next_opaque()
                self.submit(
                    encode(Version(opaque)),
                    opaque,
                    ignore,
                    deadline_s=now_s + timeout_s,
                )
                self._heartbeat = opaque
                self._heartbeat_count += 1
            return
        on_reply, deadline_s, start, size_bytes = self._in_flight[self._heartbeat]
        if now_s < deadline_s:
            return
        quiet_s = self._channel.idle_s(now_s)
        if quiet_s >= timeout_s:
            self.close(f"no answer to a heartbeat within {timeout_s:g} s")
            return
        # Large frames may be in transit before it, or before its reply.
        deadline_s = now_s + timeout_s - quiet_s
        self._in_flight[self._heartbeat] = (on_reply, deadline_s, start, size_bytes)


def _columns(rows: Sequence[tuple[int, ...]]) -> ReceiptColumns:
    return ReceiptColumns(*zip(*rows, strict=True))


def settling(answer: asyncio.Future[T]) -> Callable[[T | MetaqError], None]:
    """Return a callback that sets the result of `answer`, or its exception."""

    def on_end(outcome: T | MetaqError) -> None:
        if answer.done():
            return
        if isinstance(outcome, MetaqError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    return on_end


def ignore(_value: object) -> None:
    """Do nothing with a value."""
