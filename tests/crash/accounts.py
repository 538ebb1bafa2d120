"""A putter that keeps accounts, and a reader of everything that is there."""

import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from metaq.record.layout import HEADER, HEADER_BYTES
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until

REPLY = re.compile(rb"result (\d+) (\d+) (-?\d+)\r\n")


@dataclass
class Accounts:
    """Knowledge of one putter: every acknowledged record, and every one it tried."""

    tried: set[bytes] = field(default_factory=set)
    acked: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """(partition, offset) → payload of each put that was answered with 200."""
    ids: list[int] = field(default_factory=list)
    """Message ids in the order of their acknowledgements."""
    refused: list[bytes] = field(default_factory=list)


class BrokerUser(threading.Thread):
    """A thread that uses a broker until it is stopped, or that is gone."""

    def __init__(self, port: int, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.port = port
        self.stopping = threading.Event()


class Putter(BrokerUser):
    """Puts over one connection, pipelined, until that ends or it is stopped."""

    def __init__(self, port: int, name: str, random: Random) -> None:
        super().__init__(port, name)
        self.random = random
        self.accounts = Accounts()
        self._waiting: dict[int, list[bytes]] = {}
        self._opaque = -1

    def run(self) -> None:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 10) as sock:
                sock.settimeout(20)
                reader = threading.Thread(target=self._read, args=(sock,), daemon=True)
                reader.start()
                while not self.stopping.is_set():
                    if len(self._waiting) < 500:
                        sock.sendall(b"".join(self._frames()))
                    else:
                        time.sleep(0.0005)
                sock.shutdown(socket.SHUT_WR)
                reader.join(20)
        except OSError:
            return

    def _payload(self) -> bytes:
        size = self.random.choice((0, 3, 100, 100, 100, 2000, 70_000))
        text = f"{self.name}:{len(self.accounts.tried)}:".encode()
        payload = text + self.random.randbytes(size)
        self.accounts.tried.add(payload)
        return payload

    def _frames(self) -> list[bytes]:
        frames = []
        for _ in range(self.random.randrange(1, 40)):
            self._opaque += 1
            partition = self.random.randrange(2)
            if self.random.random() < 0.1:
                frames.append(self._batch(partition))
                continue
            payload = self._payload()
            self._waiting[self._opaque] = [payload]
            crc = zlib.crc32(payload) & 0x7FFFFFFF
            line = f"put crash {partition} {len(payload)} 0 {crc} {self._opaque}\r\n"
            frames.append(line.encode() + payload)
        return frames

    def _batch(self, partition: int) -> bytes:
        payloads = [self._payload() for _ in range(self.random.randrange(1, 20))]
        self._waiting[self._opaque] = payloads
        body = b"".join(
            HEADER.pack(len(p), zlib.crc32(p) & 0x7FFFFFFF, 0, 0) + p for p in payloads
        )
        crc = zlib.crc32(body) & 0x7FFFFFFF
        line = f"mput crash {partition} {len(body)} {len(payloads)} {crc} - -1 "
        return f"{line}{self._opaque}\r\n".encode() + body

    def _read(self, sock: socket.socket) -> None:
        buffer = b""
        while True:
            try:
                data = sock.recv(1 << 18)
            except OSError:
                return
            if not data:
                return
            buffer += data
            while match := REPLY.match(buffer):
                end = match.end() + int(match[2])
                if end > len(buffer):
                    break
                self._account(int(match[1]), buffer[match.end() : end], int(match[3]))
                buffer = buffer[end:]

    def _account(self, status: int, body: bytes, opaque: int) -> None:
        payloads = self._waiting.pop(opaque)
        if status != 200:
            self.accounts.refused.append(body)
            return
        message_id, partition, offset = map(int, body.split())
        self.accounts.ids.append(message_id)
        for payload in payloads:
            self.accounts.acked[partition, offset] = payload
            offset += HEADER_BYTES + len(payload)


def read_log(port: int, partition: int) -> dict[int, bytes]:
    """Return offset → payload of everything that a consumer can read."""
    found = read_stamped(port, partition)
    return {offset: payload for offset, (_id, payload) in found.items()}


def read_stamped(port: int, partition: int) -> dict[int, tuple[int, bytes]]:
    """Return offset → id and payload of the same."""
    found: dict[int, tuple[int, bytes]] = {}
    offset, buffer = 0, b""
    with socket.create_connection(("127.0.0.1", port), 20) as sock:
        while True:
            position = offset + len(buffer)
            sock.sendall(f"get crash g {partition} {position} 1048576 1\r\n".encode())
            head = b""
            while b"\r\n" not in head:
                head += sock.recv(1)
            words = head.split()
            size = int(words[1] if words[0] == b"value" else words[2])
            body = bytearray()
            while len(body) < size:
                body += sock.recv(size - len(body))
            if words[0] != b"value":
                assert words[1] == b"404", bytes(body)
                assert not buffer, f"half a record at {offset}: {len(buffer)} bytes"
                return found
            buffer += body
            start = 0
            while start + HEADER_BYTES <= len(buffer):
                length, crc, number, _flag = HEADER.unpack_from(buffer, start)
                end = start + HEADER_BYTES + length
                if end > len(buffer):
                    break
                payload = buffer[start + HEADER_BYTES : end]
                assert zlib.crc32(payload) & 0x7FFFFFFF == crc
                found[offset] = number, payload
                offset += end - start
                start = end
            buffer = buffer[start:]


def seed_from_environment() -> int:
    return int(os.environ.get("METAQ_SEED", time.time_ns() % 10**9))


def kill_under(
    broker: BrokerProcess,
    users: Sequence[BrokerUser],
    after_s: float,
    is_enough: Callable[[], object] = lambda: True,
) -> None:
    """Kill a broker while others use it, and wait until they have noticed.

    It is used for so long at least, and until that is enough.
    """
    for user in users:
        user.start()
    time.sleep(after_s)
    wait_until(is_enough)
    broker.kill()
    for user in users:
        user.stopping.set()
        user.join(30)
        assert not user.is_alive()
