"""One end of a connection without I/O: bytes in, commands or replies out.

The owner feeds bytes from its socket (`receive_data`) and asks for events until it gets
`NEED_DATA`. Server and client read the same grammar: a server gets commands and drops
replies, as MetaQ does; for a client, a command is a breach. The only state is the frame
being read and whether the connection has ended (by a quit or a breach). Sending has no
state; see `encode`.

Memory: the unread bytes of one piece, a partial line up to its cap and one payload up
to its cap. A payload over its cap is reported as `Oversized` and dropped as it arrives,
so that the connection stays in step and the owner can reply.

The buffer of unread bytes does O(1) work per byte received. It has three modes, one at
a time:

* *lines*: `data[position:]` is unread. The search for the line end continues where it
  stopped, and at most one partial line is left, so joining it to the next piece is
  bounded by the line cap.
* *collecting*: a payload of known length is incomplete. Its pieces wait in a list and
  are returned together; `data` is empty. Small pieces are merged, so that a peer that
  sends byte by byte costs no more memory than the payload.
* *skipping*: an unwanted payload is dropped as it arrives.

Invariant: while collecting or skipping, `data[position:]` is empty.
"""

import enum
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from metaq.errors import RemoteProtocolError
from metaq.protocol.commands import Command, Mput, Put, Quit, Reply, Result, Value
from metaq.protocol.decimals import I32_MAX
from metaq.protocol.decoding import Frame, decode_frame, decode_line

LINE_BYTES_MAX: Final = 8 * 1024
"""Default cap of a line, as in HTTP servers: two long names and an XA key fit."""

PAYLOAD_BYTES_MAX: Final = 16 * 1024 * 1024
"""Default cap of a put's payload: eight times what Java consumers can decode."""

BATCH_BYTES_MAX: Final = 16 * 1024 * 1024

REPLY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Default cap of a reply's body: far above any maxTransferSize in use."""

FOLLOW_BYTES_MAX: Final = 64 * 1024 * 1024
"""Default cap of a message between replicas: a join names all logs of a replica."""

Piece: TypeAlias = bytes | bytearray | memoryview
"""Part of a payload; a view keeps all the bytes that were received with it."""

PIECE_BYTES_MIN: Final = 4096
"""Smaller pieces are merged: a separate object would cost more than its bytes."""

CRLF: Final = b"\r\n"


class ReceiveBuffer:
    """Unread bytes of one connection. Owner: its `Connection`.

    A hot loop may read `data` from `position` on, and move `position` after the frames
    that it has consumed, while `is_between_frames` is true; the general path continues
    at exactly that byte.
    """

    __slots__ = (
        "_collected", "_is_collecting", "_pieces", "_searched", "_skipping", "data",
        "missing_bytes", "position",
    )  # fmt: skip

    def __init__(self) -> None:
        self.data = b""
        """The last piece received, preceded by the unread rest of the one before it."""
        self.position = 0
        self._searched = 0  # no line end starts in data before here
        self._pieces: list[Piece] = []
        self._is_collecting = False
        self._collected = 0  # bytes in the pieces
        self.missing_bytes = 0
        """Bytes still missing from the payload being collected; 0: there is none."""
        self._skipping = 0  # bytes still to drop

    @property
    def is_between_frames(self) -> bool:
        """Whether the unread bytes start with the line of a new frame."""
        return not self._is_collecting and not self._skipping

    @property
    def unread_bytes(self) -> int:
        """Number of bytes held: unread lines, and the payload being collected."""
        return len(self.data) - self.position + self._collected

    def append(self, data: bytes) -> None:
        """Add received bytes; takes ownership. Copies at most a partial line."""
        if self._is_collecting:
            missing = self.missing_bytes
            if len(data) <= missing:
                self._add_piece(data)
                self.missing_bytes = missing - len(data)
                return
            self._add_piece(memoryview(data)[:missing])
            self.missing_bytes = 0
            self.data, self.position, self._searched = data, missing, 0
        elif self.position < len(self.data):
            rest = self.data[self.position :]
            self._searched = max(0, self._searched - self.position)
            self.data, self.position = rest + data, 0
        else:
            self.data, self.position, self._searched = data, 0, 0
            self.skip(self._skipping)

    def take_line(self, bytes_max: int) -> bytes | None:
        """Return the next line without its CRLF, or None while it is incomplete.

        Raises:
            RemoteProtocolError: the line is longer than `bytes_max`.
        """
        position = self.position
        end = self.data.find(CRLF, max(position, self._searched))
        # If there is no line end, the last byte may be the CR of one.
        if (end if end >= 0 else len(self.data) - 1) - position > bytes_max:
            raise RemoteProtocolError(f"line is longer than {bytes_max} bytes")
        if end >= 0:
            self.position = end + len(CRLF)
            return self.data[position:end]
        # Keep only the partial line, not the whole piece that it came in.
        self.data, self.position = self.data[position:], 0
        self._searched = max(0, len(self.data) - 1)
        return None

    def take(self, length: int) -> list[Piece] | None:
        """Return the next `length` bytes as received, or None while some are missing.

        After None, call it again with the same length, with no other read in between.
        """
        if self._is_collecting:
            if self.missing_bytes:
                return None
            pieces, self._pieces = self._pieces, []
            self._is_collecting, self._collected = False, 0
            return pieces
        position, end = self.position, self.position + length
        if end <= len(self.data):
            self.position = end
            return [self.data[position:end]]
        rest = self.data[position:]
        self._pieces, self._is_collecting = [], True
        self._add_piece(rest)
        self.missing_bytes = length - len(rest)
        self.data, self.position = b"", 0
        return None

    def skip(self, length: int) -> None:
        """Drop the next `length` bytes, including those that have not arrived yet."""
        here = min(length, len(self.data) - self.position)
        self.position += here
        self._skipping = length - here

    def clear(self) -> None:
        """Drop all unread bytes."""
        self.data, self.position, self._searched = b"", 0, 0
        self._pieces, self._is_collecting = [], False
        self._collected = self.missing_bytes = self._skipping = 0

    def _add_piece(self, piece: Piece) -> None:
        self._collected += len(piece)
        if len(piece) >= PIECE_BYTES_MIN:
            self._pieces.append(piece)
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, bytearray):
            last += piece
        else:
            self._pieces.append(bytearray(piece))


class Role(enum.Enum):
    """End of the connection."""

    SERVER = "server"
    CLIENT = "client"


class NeedData(enum.Enum):
    """Type of `NEED_DATA`."""

    NEED_DATA = "need data"


NEED_DATA: Final = NeedData.NEED_DATA
"""No event until more bytes are received."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Caps that MetaQ does not have; in bytes."""

    line_bytes_max: int = LINE_BYTES_MAX
    """Longest line without its CRLF; a longer one is a breach."""
    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    """Largest payload of all other commands."""
    batch_bytes_max: int = BATCH_BYTES_MAX
    """Largest payload of an mput."""
    follow_bytes_max: int = FOLLOW_BYTES_MAX
    """Largest payload of a follow."""
    reply_bytes_max: int = REPLY_BYTES_MAX
    """Largest body of a reply to a client; a larger one is a breach."""
    joined_bytes_max: int = I32_MAX
    """Largest payload of a put or mput that is joined from its pieces; a larger one is
    returned in pieces."""


@dataclass(frozen=True, slots=True)
class Oversized:
    """A command whose payload exceeds its cap; the payload is being dropped."""

    word: str
    """Word of a command with a payload; see `decoding.Frame.word`."""
    opaque: int
    length: int
    limit: int


@dataclass(frozen=True, slots=True)
class InPieces:
    """A put or mput whose payload came in pieces and is too large to be joined."""

    command: Put | Mput
    """The command; its payload is empty."""
    pieces: list[Piece]
    """The payload, in order; owned by the receiver."""
    size_bytes: int


Event: TypeAlias = Command | Reply | Oversized | InPieces | Literal[NeedData.NEED_DATA]


class Connection:
    """Reads one end of one connection. Owned by the task that reads the socket.

    After the peer's first breach, every later `next_event` raises the same error; the
    owner sends the replies to earlier commands and closes. After a quit, nothing more
    is read.
    """

    __slots__ = ("_breach", "_frame", "_has_quit", "buffer", "limits", "role")

    def __init__(self, role: Role, limits: WireLimits) -> None:
        """Start at the first byte of a connection."""
        self.role = role
        self.limits = limits
        """May be replaced between two events (a reload)."""
        self.buffer = ReceiveBuffer()
        """Unread bytes; see `ReceiveBuffer` for the rules of hot loops."""
        self._frame: Frame | None = None
        self._breach: str | None = None
        self._has_quit = False

    @property
    def is_between_frames(self) -> bool:
        """Whether a hot loop may now read from `buffer` itself."""
        return (
            self.buffer.is_between_frames
            and self._frame is None
            and self._breach is None
            and not self._has_quit
        )

    def receive_data(self, data: bytes) -> None:
        """Add any number of bytes from the socket; takes ownership.

        First call `next_event` until it returns `NEED_DATA`: unread bytes would be
        copied together with the new ones.
        """
        if self._breach is None and not self._has_quit:
            self.buffer.append(data)

    def next_event(self) -> Event:
        """Return the next event of the received bytes.

        Returns:
            Server: a command or `Oversized`. Client: a reply. Both: `NEED_DATA` when
            the bytes end inside a frame or between two.

        Raises:
            RemoteProtocolError: the peer broke the rules; close after the replies to
                earlier commands. Any other exception is a bug.
        """
        if self._breach is not None:
            raise RemoteProtocolError(self._breach)
        try:
            return self._read()
        except RemoteProtocolError as error:
            self._breach = str(error)
            self._frame = None
            self.buffer.clear()
            raise

    def _read(self) -> Event:
        while self.buffer.is_between_frames or self._frame is not None:
            if self._frame is None:
                line = self.buffer.take_line(self.limits.line_bytes_max)
                if line is None:
                    return NEED_DATA
                event = self._on_line(decode_line(line))
            else:
                event = self._on_frame(self._frame)
            if event is not None:
                return event
        return NEED_DATA

    def _on_line(self, head: Command | Frame) -> Event | None:
        """Return a complete command or `Oversized`, or open a frame and return None."""
        if isinstance(head, Frame):
            is_reply = head.word in ("result", "value")
            if is_reply == (self.role is Role.CLIENT):
                return self._open(head)
            if self.role is Role.SERVER:
                # We have no request in flight for it. The line must still be valid.
                decode_frame(head, b"")
                self.buffer.skip(head.length)
                return None
            raise RemoteProtocolError(f"{head.word}: expected a reply, got a command")
        if self.role is Role.CLIENT:
            raise RemoteProtocolError(
                f"{type(head).__name__}: expected a reply, got a command"
            )
        if isinstance(head, Quit):
            self._has_quit = True
            self.buffer.clear()
        return head

    def _open(self, frame: Frame) -> Event | None:
        limit = self._limit_of(frame.word)
        if frame.length <= limit:
            self._frame = frame
            return None
        command = decode_frame(frame, b"")
        assert not isinstance(command, Quit), "it has no payload"
        if isinstance(command, Result | Value):
            raise RemoteProtocolError(
                f"{frame.word}: expected at most {limit} bytes, got {frame.length}"
            )
        self.buffer.skip(frame.length)
        return Oversized(frame.word, command.opaque, frame.length, limit)

    def _limit_of(self, word: str) -> int:
        if word == "mput":
            return self.limits.batch_bytes_max
        if word == "follow":
            return self.limits.follow_bytes_max
        if self.role is Role.CLIENT:
            return self.limits.reply_bytes_max
        return self.limits.payload_bytes_max

    def _on_frame(self, frame: Frame) -> Event:
        pieces = self.buffer.take(frame.length)
        if pieces is None:
            return NEED_DATA
        self._frame = None
        if len(pieces) > 1 and frame.length > self.limits.joined_bytes_max:
            command = decode_frame(frame, b"")
            if isinstance(command, Put | Mput):
                return InPieces(command, pieces, frame.length)
        return decode_frame(frame, b"".join(pieces))
