"""One connection to a ZooKeeper server: requests out, answers and events in.

    frame      length (i32) | body
    greeting   version (i32) | time-out in ms (i32) | session id (i64) | password
    request    number (i32) | type (i32) | fields
    answer     number (i32) | zxid (i64) | error (i32) | fields

The first frame each way is the greeting: a client names the session that it had, a
server the one that it grants, with a time-out of 0 when the former is over. Requests
are carried out and answered in their order. An event has the number EVENT, and says
that a watched node has changed. The fields are kazoo's work (docs/decisions/0062).

Nothing here waits, or knows what a session means: `coordinator.py` does.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from kazoo import exceptions as kz
from kazoo.protocol import serialization as jute

from metaq.clock import Clock
from metaq.dial import dial

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""Longest answer: the children of a node with a million of them. A server that speaks
another protocol seems to announce more."""
EVENT: Final = -1
NUMBER_MAX: Final = 2**31 - 1
NO_PASSWORD: Final = bytes(16)


@dataclass(slots=True)
class ZooKeeperSession:
    """A session, as it was granted; a session id of 0 asks for a new one."""

    timeout_ms: int
    """Granted; 0: the session is over. Before: wanted."""
    session_id: int = 0
    password: bytes = NO_PASSWORD
    zxid: int = 0
    """Last transaction that was seen; a server without it refuses its client."""


class ServerConnection(asyncio.Protocol):
    """A connection, from its greeting on. Owner: a coordinator; on its loop."""

    def __init__(
        self, session: ZooKeeperSession, clock: Clock, on_event: Callable[[str], None]
    ) -> None:
        """Greet with this session as soon as there is a connection."""
        self.session = session
        """After the greeting: the one that was granted, with the last zxid."""
        self._clock = clock
        self._on_event = on_event
        loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[None] = loop.create_future()
        """Done after the greeting, or when there will be none."""
        self.ended: asyncio.Future[str] = loop.create_future()
        """Done when the connection is over, with the reason."""
        self.sent_s = self.heard_s = self._asked_s = clock.monotonic_s()
        """Monotonic times of the greeting that was sent, and of the last bytes."""
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._pending: deque[tuple[int, Any, asyncio.Future[Any]]] = deque()
        self._number = 0

    def ask(self, request: Any) -> "asyncio.Future[Any]":
        """Send a request of kazoo's; it is carried out even if no one waits.

        Returns:
            A future of what kazoo makes of the answer, None for a node that does not
            exist; or of an exception of kazoo's, ConnectionLoss where there was none.
        """
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self.ended.done() or self._transport is None:
            answer.set_exception(kz.ConnectionLoss())
            return answer
        # First: of one that cannot be encoded no answer comes.
        fields = request.serialize()
        if not self._pending:
            self._asked_s = self._clock.monotonic_s()
        self._number = self._number % NUMBER_MAX + 1
        self._pending.append((self._number, request, answer))
        self._send(jute.int_int_struct.pack(self._number, request.type) + fields)
        return answer

    @property
    def silent_s(self) -> float:
        """Seconds without a word from a server that was asked; 0.0 if it was not."""
        since_s = max(self.heard_s, self._asked_s)
        return self._clock.monotonic_s() - since_s if self._pending else 0.0

    def drop(self, reason: str) -> None:
        """End the connection now; the session lives on, requests get ConnectionLoss."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        if self._transport is not None:
            self._transport.abort()
        if not self.greeted.done():
            self.greeted.set_result(None)
        for _number, _request, answer in self._pending:
            if not answer.done():
                answer.set_exception(kz.ConnectionLoss())

    # -- asyncio's calls --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet."""
        self._transport = cast("asyncio.Transport", transport)
        one = self.session
        self.sent_s = self._clock.monotonic_s()
        self._send(
            jute.Connect(
                0, one.zxid, one.timeout_ms, one.session_id, one.password, False
            ).serialize()
        )

    def data_received(self, data: bytes) -> None:
        """Handle the frames that are whole."""
        self.heard_s = self._clock.monotonic_s()
        self._received += data
        try:
            while (frame := self._next_frame()) is not None:
                self._on_frame(frame)
        except Exception as error:  # noqa: BLE001  # kazoo raises what Python does
            self.drop(f"an answer cannot be read: {error!r:.200}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the server, or the network, has ended the connection."""
        self.drop(str(exc) if exc else "closed by the server")

    # -- inside -----------------------------------------------------------------------

    def _send(self, body: bytes) -> None:
        assert self._transport is not None
        self._transport.write(jute.int_struct.pack(len(body)) + body)

    def _next_frame(self) -> bytes | None:
        """Take a whole frame from what has come."""
        received, head_bytes = self._received, jute.int_struct.size
        if len(received) < head_bytes:
            return None
        (size_bytes,) = jute.int_struct.unpack_from(received)
        if not 0 <= size_bytes <= FRAME_BYTES_MAX:
            raise ValueError(
                f"frame: expected 0 to {FRAME_BYTES_MAX}, got {size_bytes}"
            )
        end = head_bytes + size_bytes
        if len(received) < end:
            return None
        frame = bytes(received[head_bytes:end])
        del received[:end]
        return frame

    def _on_frame(self, frame: bytes) -> None:
        if not self.greeted.done():
            granted, _end = jute.Connect.deserialize(frame, 0)
            self.session = ZooKeeperSession(
                granted.time_out,
                granted.session_id,
                granted.passwd,
                self.session.zxid,
            )
            self.greeted.set_result(None)
            return
        head, start = jute.ReplyHeader.deserialize(frame, 0)
        if head.xid == EVENT:
            event, _end = jute.Watch.deserialize(frame, start)
            if event.path:
                self._on_event(event.path)
            return
        number, request, answer = self._pending[0]
        if head.xid != number:
            raise ValueError(f"expected answer {number}, got {head.xid}")
        value, error = None, None
        if not head.err:
            # A request to close has no fields, nor has its answer.
            value = request.deserialize(frame, start) if request else None
        elif request.type != jute.Exists.type or head.err != kz.NoNodeError.code:
            error = _error_of(head.err)
        self._pending.popleft()
        if head.zxid > 0:
            self.session.zxid = head.zxid
        if answer.done():  # its caller has gone
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)


def _error_of(code: int) -> Exception:
    """Return kazoo's exception for an error code of a server."""
    kind: type[Exception] | None = kz.EXCEPTIONS.get(code)
    return kz.ZookeeperError(f"error {code}") if kind is None else kind()


async def connect(
    host: str,
    port: int,
    session: ZooKeeperSession,
    *,
    clock: Clock,
    on_event: Callable[[str], None],
) -> ServerConnection:
    """Connect to a server, and return the connection when it has greeted.

    Args:
        host: name or address; all addresses of a name are tried.
        port: TCP port.
        session: the one that we had, or a new one.
        clock: for the times of the connection.
        on_event: gets the path of a watched node that has changed.

    Raises:
        OSError: no connection, or it ended before the greeting.

    Cancellation: ends the attempt. The caller bounds the time.
    """
    loop = asyncio.get_running_loop()
    sock = await dial(host, port, loop=loop)
    _transport, one = await loop.create_connection(
        lambda: ServerConnection(session, clock, on_event), sock=sock
    )
    try:
        await one.greeted
    except BaseException:
        one.drop("given up")
        raise
    if one.ended.done():
        raise ConnectionError(one.ended.result())
    return one
