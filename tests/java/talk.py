"""A connection on which bytes are compared: frames in, frames out, nothing believed."""

import contextlib
import socket
from typing import NamedTuple, Self

from metaq.record.layout import HEADER, HEADER_BYTES

SILENCE = "silence"
CLOSED = "closed"
TIMEOUT_S = 60.0
SILENCE_S = 0.2
"""Silence that is taken for the end of the talk."""


class Frame(NamedTuple):
    """A reply: its first line without the CR LF, and what follows."""

    head: str
    body: bytes


class Talk:
    """One connection, made anew after the other side hung up. A context manager."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket = self._connect()
        self._data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._socket.close()

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), TIMEOUT_S)

    def ask(self, command: bytes, *, may_be_silent: bool = False) -> Frame | str:
        """Send bytes and return the next reply, CLOSED or SILENCE."""
        self.send(command)
        return self.read(SILENCE_S if may_be_silent else TIMEOUT_S)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the next read says that it hung up
            self._socket.sendall(data)

    def read(self, timeout_s: float = TIMEOUT_S) -> Frame | str:
        self._socket.settimeout(timeout_s)
        try:
            while (frame := self._take()) is None:
                data = self._socket.recv(1 << 20)
                if not data:
                    raise ConnectionResetError
                self._data += data
        except TimeoutError:
            self._again()
            return SILENCE
        except ConnectionError:
            assert not self._data, self._data
            self._again()
            return CLOSED
        return frame

    def _again(self) -> None:
        self._socket.close()
        self._socket, self._data = self._connect(), b""

    def _take(self) -> Frame | None:
        head, end, rest = self._data.partition(b"\r\n")
        if not end:
            return None
        words = head.split(b" ")
        size_bytes = int(words[2 if words[0] == b"result" else 1])
        if len(rest) < size_bytes:
            return None
        self._data = rest[size_bytes:]
        return Frame(head.decode(), rest[:size_bytes])


def blank_ids(records: bytes) -> bytes:
    """Return whole records with the id 0, which two brokers number differently."""
    blank, position = bytearray(records), 0
    while position + HEADER_BYTES <= len(blank):
        length, checksum, _, flag = HEADER.unpack_from(blank, position)
        HEADER.pack_into(blank, position, length, checksum, 0, flag)
        position += HEADER_BYTES + length
    return bytes(blank)
