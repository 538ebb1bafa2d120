"""The receive buffer: bytes received and not read yet, at O(1) work per byte.

Three modes, one at a time:

* *lines*: `data[position:]` is unread. The search for the line end remembers where it
  was, and at most one partial line stays behind, so joining it to the next piece is
  bounded by the line cap.
* *collecting*: a payload of known length is incomplete. Its pieces wait in a list and
  are handed out together; `data` is empty. Small pieces are merged, so that a peer that
  sends byte by byte costs no more memory than the payload.
* *skipping*: an unwanted payload is dropped as it arrives.

Invariant: while collecting or skipping, `data[position:]` is empty.
"""

from typing import Final, TypeAlias

from metaq.errors import RemoteProtocolError

Piece: TypeAlias = bytes | bytearray | memoryview
"""Part of a payload; a view keeps all bytes that were received with it."""

PIECE_BYTES_MIN: Final = 4096
"""Smaller pieces are merged: an object of its own would cost more than its bytes."""

CRLF: Final = b"\r\n"


class ReceiveBuffer:
    """Unread bytes of one connection. Owner: its `Connection`.

    A hot loop may read `data` from `position` on and move `position` behind the
    frames that it has consumed, as long as `is_between_frames` holds; the general
    path goes on at exactly that byte.
    """

    __slots__ = (
        "_collected",
        "_is_collecting",
        "_missing",
        "_pieces",
        "_searched",
        "_skipping",
        "data",
        "position",
    )

    def __init__(self) -> None:
        self.data = b""
        """The piece that arrived last, with an unread rest of the one before."""
        self.position = 0
        """First unread byte of `data`."""
        self._searched = 0  # no line end starts in data before here
        self._pieces: list[Piece] = []
        self._is_collecting = False
        self._collected = 0  # bytes in the pieces
        self._missing = 0  # bytes that the payload being collected still lacks
        self._skipping = 0  # bytes still to drop

    @property
    def is_between_frames(self) -> bool:
        """Tell whether the unread bytes start with the line of a new frame."""
        return not self._is_collecting and not self._skipping

    @property
    def unread_bytes(self) -> int:
        """Return the bytes held: unread lines, and the payload being collected."""
        return len(self.data) - self.position + self._collected

    @property
    def missing_bytes(self) -> int:
        """Return what the payload being collected lacks; 0: none is."""
        return self._missing

    def append(self, data: bytes) -> None:
        """Add received bytes; takes ownership, copies at most a partial line."""
        if self._is_collecting:
            missing = self._missing
            if len(data) <= missing:
                self._add_piece(data)
                self._missing = missing - len(data)
                return
            self._add_piece(memoryview(data)[:missing])
            self._missing = 0
            self.data, self.position, self._searched = data, missing, 0
        elif self.position < len(self.data):
            rest = self.data[self.position :]
            self._searched = max(0, self._searched - self.position)
            self.data, self.position = rest + data, 0
        else:
            self.data, self.position, self._searched = data, 0, 0
            self.skip(self._skipping)

    def take_line(self, bytes_max: int) -> bytes | None:
        """Return the next line without its CRLF, or None when it is not there yet.

        Raises:
            RemoteProtocolError: the line is longer than `bytes_max`.
        """
        position = self.position
        end = self.data.find(CRLF, max(position, self._searched))
        # Without an end, the last byte may be the CR of one.
        if (end if end >= 0 else len(self.data) - 1) - position > bytes_max:
            raise RemoteProtocolError(f"line is longer than {bytes_max} bytes")
        if end >= 0:
            self.position = end + len(CRLF)
            return self.data[position:end]
        # Keep the partial line alone, not the whole piece that it came in.
        self.data, self.position = self.data[position:], 0
        self._searched = max(0, len(self.data) - 1)
        return None

    def take(self, length: int) -> list[Piece] | None:
        """Return the next `length` bytes as they came, or None until all are there.

        Until they are, it must be called again with the same length, and nothing may be
        taken in between.
        """
        if self._is_collecting:
            if self._missing:
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
        self._missing = length - len(rest)
        self.data, self.position = b"", 0
        return None

    def skip(self, length: int) -> None:
        """Drop the next `length` bytes, those yet to arrive included."""
        here = min(length, len(self.data) - self.position)
        self.position += here
        self._skipping = length - here

    def clear(self) -> None:
        """Drop everything that was not read."""
        self.data, self.position, self._searched = b"", 0, 0
        self._pieces, self._is_collecting = [], False
        self._collected = self._missing = self._skipping = 0

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
