"""One blocking connection to one broker: requests go out together, replies come back.

Theory of operation: the socket never blocks. Requests are queued with a callback;
`pump` is the one place that waits, and it writes and reads in the same breath, because
a broker stops reading from a client that does not take its replies. Whoever wants an
answer pumps until its callback was called. Replies are paired by opaque alone: brokers
may answer in any order.

Deadlines are absolute, on the monotonic clock; nothing here invents one. When an
answer does not come, nobody knows what became of the request: `RequestTimeoutError`
says so, and so does `ConnectionLostError` when the connection broke.

Not thread-safe; one thread owns a connection. Source: client spec 2.
"""

import select
import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, TypeAlias

from metaq.client.errors import ConnectionLostError
from metaq.client.replies import (
    GetOutcome,
    PutReceipt,
    parse_get,
    parse_offset,
    parse_receipt,
    require_ok,
)
from metaq.clock import Clock
from metaq.errors import (
    ClosedError,
    LocalProtocolError,
    NoBrokerError,
    RemoteProtocolError,
    RequestTimeoutError,
)
from metaq.model import MAX_OFFSET, Offset
from metaq.protocol.commands import (
    Command,
    Get,
    Mput,
    OffsetQuery,
    Put,
    Reply,
    Result,
    Stats,
    Value,
    Version,
)
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from metaq.protocol.encode import encode
from metaq.protocol.status import Status
from metaq.protocol.version import Capabilities, decode_version_body
from metaq.record.checksum import checksum
from metaq.zk.znodes import BrokerAddress

RECEIVE_BYTES: Final = 256 * 1024
IN_FLIGHT_COUNT_MAX: Final = 4096
"""Requests sent and not yet answered; enough to keep a disk's sync busy."""
IN_FLIGHT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of them; the default bound of a broker per connection."""
OPAQUE_MAX: Final = 999_999_999
"""Opaques run from 1 to here and start again: short, and never near an i32's end."""
BROWSER_GROUP: Final = "metaq-browser"
"""The group named in gets and offset queries that belong to no group."""

OnReply: TypeAlias = Callable[[Reply], None]


class WireConnection:
    """A connection and what is in flight on it.

    Lifecycle: `open`, use, `close`. Broken by the first `ConnectionLostError`: every
    later call raises `ClosedError`.
    """

    def __init__(self, sock: socket.socket, address: BrokerAddress, clock: Clock):
        """Take a connected socket; `open` is the usual way in."""
        sock.setblocking(False)
        self.address = address
        self.capabilities = Capabilities("")
        """What the broker announced; set by `open`."""
        self._socket: socket.socket | None = sock
        self._clock = clock
        self._protocol = Connection(Role.CLIENT, WireLimits())
        self._unsent: deque[memoryview] = deque()
        self._in_flight: dict[int, tuple[OnReply, int]] = {}
        self._in_flight_bytes = 0
        self._opaque = 0

    @classmethod
    def open(cls, address: BrokerAddress, *, timeout_s: float, clock: Clock) -> Self:
        """Connect, and ask what the broker can do.

        Raises:
            NoBrokerError: nobody listens there, or it did not answer in time.
        """
        deadline_s = clock.monotonic_s() + timeout_s
        try:
            sock = socket.create_connection((address.host, address.port), timeout_s)
        except OSError as error:
            reason = error.strerror or str(error)
            raise NoBrokerError(f"cannot connect to {address}: {reason}") from error
        connection = cls(sock, address, clock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            left_s = max(0.0, deadline_s - clock.monotonic_s())
            connection.capabilities = connection.version(timeout_s=left_s)
        except RequestTimeoutError as error:
            connection.close()
            raise NoBrokerError(f"{address} does not answer: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether it was neither closed nor lost."""
        return self._socket is not None

    @property
    def in_flight_count(self) -> int:
        """Requests sent and not yet answered."""
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether one more request may be submitted."""
        return (
            len(self._in_flight) < IN_FLIGHT_COUNT_MAX
            and self._in_flight_bytes < IN_FLIGHT_BYTES_MAX
        )

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for the socket to take them."""
        return bool(self._unsent)

    def fileno(self) -> int:
        """Return the socket's descriptor.

        Raises:
            ClosedError: the connection is closed.
        """
        return self._open_socket().fileno()

    def close(self) -> None:
        """Close the connection; what is in flight stays without an answer."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._in_flight.clear()
        self._unsent.clear()

    # -- requests ---------------------------------------------------------------------

    def next_opaque(self) -> int:
        """Return a number that no request in flight has."""
        self._opaque = self._opaque % OPAQUE_MAX + 1
        return self._opaque

    def submit(self, command: Command, opaque: int, on_reply: OnReply) -> None:
        """Queue a request; its reply is handed to `on_reply` during a later `pump`.

        Args:
            command: the request; carries `opaque`.
            opaque: from `next_opaque`.
            on_reply: called once, unless the connection breaks before.

        Raises:
            LocalProtocolError: the request cannot be written down, or there is no
                room for it (`has_room`).
            ClosedError: the connection is closed.
        """
        self._open_socket()
        if not self.has_room:
            raise LocalProtocolError(
                f"{self.address}: {len(self._in_flight)} requests are in flight"
            )
        data = encode(command)
        self._in_flight[opaque] = (on_reply, len(data))
        self._in_flight_bytes += len(data)
        self._unsent.append(memoryview(data))

    def call(self, command: Command, opaque: int, *, timeout_s: float) -> Reply:
        """Send a request and wait for its reply.

        Raises:
            RequestTimeoutError: no answer in time; the outcome is unknown.
            ConnectionLostError: the connection broke; the outcome is unknown.
        """
        deadline_s = self._clock.monotonic_s() + timeout_s
        replies: list[Reply] = []
        self.submit(command, opaque, replies.append)
        while not replies:
            if not pump([self], deadline_s=deadline_s, clock=self._clock):
                word = type(command).__name__.lower()
                raise RequestTimeoutError(
                    f"{word} to {self.address}: no answer within {timeout_s:g} s;"
                    " outcome unknown"
                )
        return replies[0]

    def version(self, *, timeout_s: float) -> Capabilities:
        """Ask what the broker is and can do."""
        opaque = self.next_opaque()
        reply = self.call(Version(opaque), opaque, timeout_s=timeout_s)
        return decode_version_body(require_ok(reply).text)

    def put(
        self,
        topic: str,
        partition: int,
        payload: bytes,
        *,
        flag: int = 0,
        timeout_s: float,
    ) -> PutReceipt:
        """Append one message.

        Args:
            topic: topic name.
            partition: partition on this broker; -1 leaves the choice to it.
            payload: attribute block, if `flag` says so, and application bytes.
            flag: stored as sent.
            timeout_s: bound on the whole call.

        Raises:
            WireError: the broker refused; nothing was stored.
            RequestTimeoutError: no answer came; outcome unknown.
        """
        opaque = self.next_opaque()
        command = Put(topic, partition, payload, flag, checksum(payload), opaque)
        return parse_receipt(self.call(command, opaque, timeout_s=timeout_s))

    def mput(
        self,
        topic: str,
        partition: int,
        payload: bytes,
        count: int,
        *,
        producer: str | None = None,
        sequence: int = -1,
        timeout_s: float,
    ) -> PutReceipt:
        """Append a batch of records, all or none; only where `mput` is announced.

        Args:
            topic: topic name.
            partition: partition on this broker; -1 leaves the choice to it.
            payload: `count` records in segment format with id 0.
            count: number of records.
            producer: who sends; None for nobody in particular.
            sequence: number of the first record among the producer's records.
            timeout_s: bound on the whole call.

        Raises:
            WireError: the broker refused; nothing was stored.
            RequestTimeoutError: no answer came; outcome unknown.
        """
        opaque = self.next_opaque()
        command = Mput(
            topic=topic,
            partition=partition,
            count=count,
            checksum=checksum(payload),
            opaque=opaque,
            payload=payload,
            producer=producer,
            sequence=sequence,
        )
        return parse_receipt(self.call(command, opaque, timeout_s=timeout_s))

    def get(
        self,
        topic: str,
        partition: int,
        offset: Offset,
        *,
        max_bytes: int,
        wait_ms: int = 0,
        group: str = BROWSER_GROUP,
        timeout_s: float,
    ) -> GetOutcome:
        """Read the log from an offset on.

        Args:
            topic: topic name.
            partition: partition on this broker.
            offset: first byte wanted.
            max_bytes: most bytes wanted; the broker has a bound of its own.
            wait_ms: how long the broker may wait for data; MetaQ brokers do not wait.
            group: consumer group, for the broker's statistics and filters.
            timeout_s: bound on the whole call, the wait included.

        Raises:
            WireError: the broker refused.
        """
        opaque = self.next_opaque()
        command = Get(topic, group, partition, offset, max_bytes, opaque, wait_ms)
        return parse_get(self.call(command, opaque, timeout_s=timeout_s))

    def offset(
        self, topic: str, partition: int, offset: int, *, timeout_s: float
    ) -> Offset | None:
        """Return the start of the segment that holds `offset`, or the nearest end.

        Returns:
            The log start for an offset before it, the log end for one behind it; None
            when the broker has no such partition on its disk.
        """
        opaque = self.next_opaque()
        command = OffsetQuery(topic, BROWSER_GROUP, partition, offset, opaque)
        reply = self.call(command, opaque, timeout_s=timeout_s)
        if isinstance(reply, Result) and reply.status == Status.NOT_FOUND:
            return None
        return parse_offset(require_ok(reply))

    def log_end(self, topic: str, partition: int, *, timeout_s: float) -> Offset | None:
        """Return the offset behind the last readable byte; None without a log."""
        return self.offset(topic, partition, MAX_OFFSET, timeout_s=timeout_s)

    def stats(self, item: str = "", *, timeout_s: float) -> str:
        """Return the text of one `stats` item; "" is the broker itself."""
        opaque = self.next_opaque()
        reply = self.call(Stats(item, opaque), opaque, timeout_s=timeout_s)
        return require_ok(reply).text

    # -- the socket -------------------------------------------------------------------

    def write_ready(self) -> None:
        """Send what the socket takes now; for `pump`."""
        sock = self._open_socket()
        try:
            while self._unsent:
                sent = sock.send(self._unsent[0])
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
        except BlockingIOError:
            return
        except OSError as error:
            # Replies to what was sent before may still be there to be read.
            self._unsent.clear()
            self._read_rest()
            self._lose(error.strerror or str(error))

    def read_ready(self) -> None:
        """Read what the socket has now and hand out the replies; for `pump`."""
        try:
            data = self._open_socket().recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        if not data:
            self._lose("the broker closed it")
        self._receive(data)

    def _read_rest(self) -> None:
        sock = self._open_socket()
        with suppress(OSError):
            while data := sock.recv(RECEIVE_BYTES):
                self._receive(data)

    def _receive(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        try:
            while (reply := self._protocol.next_event()) is not NEED_DATA:
                assert isinstance(reply, Result | Value)
                waiting = self._in_flight.pop(reply.opaque, None)
                # An unknown opaque answers a request that was given up.
                if waiting is not None:
                    on_reply, size_bytes = waiting
                    self._in_flight_bytes -= size_bytes
                    on_reply(reply)
        except RemoteProtocolError as error:
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        count = len(self._in_flight)
        self.close()
        raise ConnectionLostError(
            f"connection to {self.address} is lost: {reason}; outcome of {count}"
            f" request{'' if count == 1 else 's'} in flight unknown"
        )

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            raise ClosedError(f"connection to {self.address} is closed")
        return self._socket


def pump(
    connections: Iterable[WireConnection], *, deadline_s: float, clock: Clock
) -> bool:
    """Wait until some connection can move, and move it; callbacks run in here.

    Args:
        connections: open ones.
        deadline_s: absolute time at which waiting ends.
        clock: the clock of that time.

    Returns:
        False when the deadline passed and nothing could be moved.

    Raises:
        ConnectionLostError: a connection broke; it is closed now.
    """
    poll = select.poll()
    by_fd = {}
    for connection in connections:
        by_fd[connection.fileno()] = connection
        wanted = select.POLLIN | (select.POLLOUT if connection.has_unsent else 0)
        poll.register(connection.fileno(), wanted)
    left_ms = max(0.0, deadline_s - clock.monotonic_s()) * 1000
    ready = poll.poll(left_ms)
    for fd, events in ready:
        if events & select.POLLOUT:
            by_fd[fd].write_ready()
        if events & ~select.POLLOUT:
            by_fd[fd].read_ready()
    return bool(ready)
