"""One connection of a fake broker; delays, splits, reorders or withholds answers."""

import asyncio
import time
from typing import Any, Final, Protocol

from metaq.errors import RemoteProtocolError
from metaq.protocol.commands import Put, Quit, Reply
from metaq.protocol.connection import NEED_DATA, Connection, Event, Role, WireLimits
from metaq.protocol.decimals import I32_MAX
from metaq.protocol.encoding import encode
from metaq.testing.fake_metaq import Known

REORDER_WINDOW_S: Final = 0.002
"""Time for which answers are collected to be shuffled."""

SPLIT_PAUSE_S: Final = 0.000_05
"""Pause after each piece, so that a reader in this process receives it alone."""

LIMITS: Final = WireLimits(
    line_bytes_max=I32_MAX,
    payload_bytes_max=I32_MAX,
    # Every batch is too large, so its line is refused like an unknown word.
    batch_bytes_max=-1,
)
"""MetaQ has no limits (docs/metaq-1.4/broker.md 1.2)."""


class Host(Protocol):
    """Interface of the broker for its connections; used on the broker's loop."""

    delay_s: float
    reorder: bool
    misorders_puts: bool

    def on_opened(self, session: "FakeSession") -> None:
        """Add a new connection."""

    def on_closed(self, session: "FakeSession") -> None:
        """Remove a connection."""

    def on_unknown(self) -> None:
        """Count a command unknown to MetaQ."""

    def on_command(
        self, command: Known, session: "FakeSession"
    ) -> tuple[Reply | None, bool]:
        """Carry out a command; return its answer, and whether to cut the connection."""

    def shuffle(self, items: list[Any]) -> None:
        """Shuffle answers or commands in place."""

    def piece_bytes(self, queued_bytes: int) -> int:
        """Return the maximum size of the next piece to write, 1 or more."""


class FakeSession(asyncio.Protocol):
    """One connection. Owned by the broker's loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(Role.SERVER, LIMITS)
        self._delayed = 0
        self._held: list[bytes] = []
        self._puts: list[Put] = []
        self._queued = bytearray()
        self._is_over = False
        self._transport: asyncio.Transport

    # -- asyncio's side ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add the connection to the broker."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._host.on_opened(self)

    def connection_lost(self, _error: Exception | None) -> None:
        """Report to the broker that the connection is closed."""
        self._is_over = True
        self._host.on_closed(self)

    def data_received(self, data: bytes) -> None:
        """Carry out the commands that have arrived."""
        if self._is_over:
            return
        self._connection.receive_data(data)
        try:
            while not self._is_over:
                event = self._connection.next_event()
                if self._host.misorders_puts and isinstance(event, Put):
                    self._puts.append(event)
                    continue
                self._carry_out_puts()
                if event is NEED_DATA:
                    return
                self._on_event(event)
        except RemoteProtocolError:
            self._carry_out_puts()
            self._host.on_unknown()
            self._end()

    # -- the broker's side ------------------------------------------------------------

    def cut(self) -> None:
        """Close at once; queued answers are lost."""
        self._is_over = True
        self._transport.abort()

    def _carry_out_puts(self) -> None:
        puts, self._puts = self._puts, []
        self._host.shuffle(puts)
        for put in puts:
            if not self._is_over:
                self._on_event(put)

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, Known):
            if not isinstance(event, Quit):
                self._host.on_unknown()
            self._end()
            return
        reply, is_cut = self._host.on_command(event, self)
        if is_cut:
            self.cut()
        elif reply is not None:
            self._answer(encode(reply))

    def _answer(self, answer: bytes) -> None:
        delay_s = self._host.delay_s
        if self._host.reorder:
            if not self._held:
                self._loop.call_later(delay_s + REORDER_WINDOW_S, self._release)
            self._held.append(answer)
        elif delay_s > 0:
            self._delayed += 1
            self._loop.call_later(delay_s, self._write_delayed, answer)
        else:
            self._write(answer)

    def _release(self) -> None:
        answers, self._held = self._held, []
        self._host.shuffle(answers)
        for answer in answers:
            self._write(answer)
        self._close_if_settled()

    def _write_delayed(self, answer: bytes) -> None:
        self._delayed -= 1
        self._write(answer)
        self._close_if_settled()

    def _write(self, answer: bytes) -> None:
        if self._transport.is_closing():
            return
        if not self._queued:
            if self._host.piece_bytes(len(answer)) >= len(answer):
                self._transport.write(answer)
                return
            self._loop.call_soon(self._write_piece)
        self._queued += answer

    def _write_piece(self) -> None:
        if self._transport.is_closing():
            self._queued.clear()
            return
        size_bytes = self._host.piece_bytes(len(self._queued))
        self._transport.write(bytes(self._queued[:size_bytes]))
        del self._queued[:size_bytes]
        time.sleep(SPLIT_PAUSE_S)
        if self._queued:
            self._loop.call_soon(self._write_piece)
        self._close_if_settled()

    def _end(self) -> None:
        """Stop reading; close once the answers to earlier commands are sent."""
        self._is_over = True
        self._close_if_settled()

    def _close_if_settled(self) -> None:
        is_settled = not (self._delayed or self._held or self._queued)
        if self._is_over and is_settled:
            self._transport.close()
