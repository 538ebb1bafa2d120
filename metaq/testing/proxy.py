"""A TCP proxy that stalls, trickles, cuts or refuses on command.

It connects a client to any server, a broker or ZooKeeper, and does not depend on the
protocol:

    with Proxy("127.0.0.1", broker.port) as proxy:
        client = connect(proxy.address)
        proxy.stall()                        # a network that went silent
        proxy.stall(Direction.TO_CLIENT)     # commands arrive, answers do not
        proxy.trickle(piece_bytes=7)
        proxy.pass_all()
        proxy.cut()                          # both sides see a reset
        proxy.refuse(); proxy.accept()

Theory of operation: a connection is two flows, one per direction. A flow reads up to
BUFFER_BYTES_MAX from its source, and writes to its sink by the mode of its direction.
The end of the source is passed on after its bytes, so a stalled flow delays it too. The
proxy runs on its own thread; every method may be called from any thread, and applies to
open and to future connections.
"""

import asyncio
import contextlib
import enum
import socket
import struct
from dataclasses import dataclass
from typing import Final

from metaq.model import BrokerAddress
from metaq.testing.servers import HOST, ThreadOwner, reserve_port, stop_listening

BUFFER_BYTES_MAX: Final = 256 * 1024
"""Approximate maximum of bytes that a flow buffers."""

CONNECT_TIMEOUT_S: Final = 5.0
"""Time for the server to accept; then the client is reset."""

_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER value with which a close sends a reset."""


class Direction(enum.Flag):
    """Direction of bytes."""

    TO_SERVER = enum.auto()
    TO_CLIENT = enum.auto()
    BOTH = TO_SERVER | TO_CLIENT


@dataclass(frozen=True, slots=True)
class ProxyStatistics:
    """A snapshot of a proxy's counters since its creation."""

    connection_count: int
    open_connection_count: int
    failed_count: int
    """Connections that were reset because the server could not be reached."""
    to_server_bytes: int
    to_client_bytes: int


@dataclass(slots=True)
class _Mode:
    """Treatment of one direction, and its count of bytes."""

    is_stalled: bool = False
    piece_bytes: int = 0
    interval_s: float = 0.0
    passed_bytes: int = 0


class _End(asyncio.Protocol):
    """One socket of a connection: the source of one flow, the sink of the other."""

    def __init__(self, proxy: "Proxy", mode: _Mode) -> None:
        self.peer: _End
        self.is_lost = False
        self._proxy = proxy
        self._mode = mode
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._has_ended = False
        self.has_passed_end = False
        self._timer: asyncio.TimerHandle | None = None
        self.is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._proxy.on_made(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self.is_lost = True
        self._proxy.on_lost(self)
        self.pump()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self.pump()
        if len(self._buffer) >= BUFFER_BYTES_MAX and self.transport is not None:
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        self._has_ended = True
        self.pump()
        return True

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.peer.pump()

    def pump(self) -> None:
        """Write to the sink as many bytes as the mode allows now."""
        sink = self.peer.transport
        if sink is None or self._mode.is_stalled or self._timer is not None:
            return
        if self.is_lost:
            self.peer.reset()
            return
        if self.peer.is_full or sink.is_closing():
            return
        piece = bytes(self._buffer[: self._mode.piece_bytes or len(self._buffer)])
        del self._buffer[: len(piece)]
        self._mode.passed_bytes += len(piece)
        if piece:
            sink.write(piece)
        if self._buffer:
            self._timer = self._loop.call_later(self._mode.interval_s, self.go_on)
        elif self._has_ended:
            self._pass_end(sink)
        if len(self._buffer) < BUFFER_BYTES_MAX and self.transport is not None:
            self.transport.resume_reading()

    def go_on(self) -> None:
        """Pump now; cancel the pause before the next piece."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.pump()

    def _pass_end(self, sink: asyncio.Transport) -> None:
        if not self.has_passed_end:
            self.has_passed_end = True
            # If the connection is lost, `connection_lost` follows in the next turn.
            with contextlib.suppress(OSError):
                sink.write_eof()
        if self.peer.has_passed_end and self.transport is not None:
            sink.close()
            self.transport.close()

    def reset(self) -> None:
        """Close with a reset; buffered bytes are lost."""
        if self.transport is None or self.transport.is_closing():
            return
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()


class Proxy(ThreadOwner):
    """One proxy. Owned by the test.

    Lifecycle: `start` (or `with`), then `stop`, which is bounded and resets open
    connections. The port is chosen at the first start and kept.
    """

    def __init__(self, host: str, port: int) -> None:
        """Configure a proxy; nothing is opened before `start`.

        Args:
            host: host of the target server.
            port: TCP port of the target server.
        """
        super().__init__("proxy")
        self.port = 0
        """Port of the proxy's listener; valid after `start`."""
        self._target = (host, port)
        self._modes = {Direction.TO_SERVER: _Mode(), Direction.TO_CLIENT: _Mode()}
        self._ends: set[_End] = set()
        self._clients: set[_End] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._connection_count = self._failed_count = 0
        self._server: asyncio.Server | None = None

    # -- life -------------------------------------------------------------------------

    @property
    def address(self) -> BrokerAddress:
        """Address of the proxy, for clients; valid after `start`."""
        return BrokerAddress(HOST, self.port)

    async def _start(self) -> None:
        if self._server is None:
            self.port = self.port or reserve_port(self)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._make_end, HOST, self.port)

    async def _refuse(self) -> None:
        if self._server is not None:
            await stop_listening(self._server)
            self._server = None

    async def _stop(self) -> None:
        await self._refuse()
        for task in self._connecting:
            task.cancel()
        if self._connecting:
            await asyncio.wait(self._connecting)
        self._cut()
        while self._ends:  # noqa: ASYNC110  # takes a turn or two: they are reset
            await asyncio.sleep(0)

    # -- what a test may do to it -----------------------------------------------------

    def pass_all(self) -> None:
        """Pass all bytes at once again, buffered ones first."""
        self._change(Direction.BOTH, is_stalled=False)

    def stall(self, direction: Direction = Direction.BOTH) -> None:
        """Hold back bytes and ends of connections in this direction.

        New connections are accepted and stalled too.
        """
        self._change(direction, is_stalled=True)

    def trickle(
        self,
        piece_bytes: int = 1,
        interval_s: float = 0.001,
        direction: Direction = Direction.BOTH,
    ) -> None:
        """Pass small pieces with pauses between them.

        Args:
            piece_bytes: size of a piece, 1 or more.
            interval_s: pause after each piece, seconds.
            direction: direction of the bytes; by default both.
        """
        self._change(
            direction, is_stalled=False, piece_bytes=piece_bytes, interval_s=interval_s
        )

    def cut(self) -> None:
        """Reset every open connection, at both ends."""
        self._running.call(self._cut)

    def refuse(self) -> None:
        """Close the listener; open connections continue."""
        self._running.run(self._refuse())

    def accept(self) -> None:
        """Listen again, on the same port."""
        self._running.run(self._start())

    def retarget(self, host: str, port: int) -> None:
        """Connect future connections to another server.

        Args:
            host: name or address of the server.
            port: TCP port of the server.
        """
        self._target = (host, port)

    def statistics(self) -> ProxyStatistics:
        """Return a snapshot of the counters."""
        return ProxyStatistics(
            connection_count=self._connection_count,
            open_connection_count=len(self._clients),
            failed_count=self._failed_count,
            to_server_bytes=self._modes[Direction.TO_SERVER].passed_bytes,
            to_client_bytes=self._modes[Direction.TO_CLIENT].passed_bytes,
        )

    def _change(
        self,
        direction: Direction,
        *,
        is_stalled: bool,
        piece_bytes: int = 0,
        interval_s: float = 0.0,
    ) -> None:
        def change() -> None:
            for way, mode in self._modes.items():
                if way in direction:
                    mode.is_stalled = is_stalled
                    mode.piece_bytes = piece_bytes
                    mode.interval_s = interval_s
            for end in tuple(self._ends):
                end.go_on()
                end.peer.go_on()

        self._running.call(change)

    def _cut(self) -> None:
        for end in tuple(self._ends):
            end.reset()

    # -- connections ------------------------------------------------------------------

    def _make_end(self) -> _End:
        client = _End(self, self._modes[Direction.TO_SERVER])
        server = _End(self, self._modes[Direction.TO_CLIENT])
        client.peer, server.peer = server, client
        self._clients.add(client)
        return client

    def on_made(self, end: _End) -> None:
        """Add a socket; for a client's, connect to the server."""
        self._ends.add(end)
        if end not in self._clients:
            end.peer.pump()
            return
        self._connection_count += 1
        if self._server is None:
            # It was accepted just before the listener closed.
            end.reset()
            return
        task = asyncio.get_running_loop().create_task(self._connect(end))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def on_lost(self, end: _End) -> None:
        """Remove a socket."""
        self._ends.discard(end)
        self._clients.discard(end)

    async def _connect(self, client: _End) -> None:
        host, port = self._target
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: client.peer, host, port)
        except OSError:
            # Includes timeouts: `TimeoutError` is an OSError.
            self._failed_count += 1
            client.reset()
