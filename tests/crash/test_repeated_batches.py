"""Producers that send their batches again after a kill: every record exactly once."""

import os
import socket
import threading
import time
import zlib
from pathlib import Path
from random import Random

import pytest

from metaq.record.layout import HEADER
from tests.crash.accounts import REPLY, read_log, seed_from_environment
from tests.rigs.process import BrokerProcess
from tests.sampling import IS_WHOLE

ROUNDS = int(os.environ.get("METAQ_CRASH_ROUNDS") or (8 if IS_WHOLE else 3))
IN_FLIGHT = 5

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(900)]


class Sender:
    """One producer; its batches are numbered on over any number of connections."""

    def __init__(self, name: str, random: Random) -> None:
        self.name = name
        self.random = random
        self.payloads: list[bytes] = []
        self.places: dict[int, bytes] = {}
        self.refused: list[bytes] = []
        self.is_over = False
        self._unanswered: dict[int, list[bytes]] = {}
        """Sequence of the first record → payloads, in the order of the sequences."""

    def run(self, port: int) -> None:
        """Send until the connection breaks, or `is_over` and all is answered."""
        try:
            with socket.create_connection(("127.0.0.1", port), 10) as sock:
                sock.settimeout(20)
                for sequence in self._unanswered:
                    sock.sendall(self._frame(sequence))
                buffer = b""
                while not (self.is_over and not self._unanswered):
                    while len(self._unanswered) < IN_FLIGHT and not self.is_over:
                        sock.sendall(self._frame(self._next_batch()))
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    buffer = self._take(buffer + data)
        except OSError:
            return

    def _next_batch(self) -> int:
        sequence = len(self.payloads)
        for number in range(self.random.randrange(1, 60)):
            size = self.random.choice((0, 10, 100, 20_000))
            text = f"{self.name}:{sequence + number}:".encode()
            self.payloads.append(text + self.random.randbytes(size))
        self._unanswered[sequence] = self.payloads[sequence:]
        return sequence

    def _frame(self, sequence: int) -> bytes:
        payloads = self._unanswered[sequence]
        body = b"".join(
            HEADER.pack(len(p), zlib.crc32(p) & 0x7FFFFFFF, 0, 0) + p for p in payloads
        )
        # The opaque says which batch is answered.
        line = f"mput crash 0 {len(body)} {len(payloads)} -1 {self.name} {sequence}"
        return f"{line} {sequence}\r\n".encode() + body

    def _take(self, buffer: bytes) -> bytes:
        while match := REPLY.match(buffer):
            end = match.end() + int(match[2])
            if end > len(buffer):
                break
            body, sequence = buffer[match.end() : end], int(match[3])
            if match[1] == b"200":
                _id, _partition, offset = map(int, body.split())
                self.places[offset] = self._unanswered.pop(sequence)[0]
            else:
                self.refused.append(body)
            buffer = buffer[end:]
        return buffer


def test_batches_sent_again_after_a_kill_are_stored_once(tmp_path: Path) -> None:
    """In order, with nothing missing, and where the receipts say."""
    seed = seed_from_environment()
    print(f"METAQ_SEED={seed}")
    random = Random(seed)
    senders = [Sender(f"p{n}", Random(seed + n)) for n in range(3)]
    with BrokerProcess(
        tmp_path / "data", topic="crash", partition_count=2, segment_bytes=3_000_000
    ) as broker:
        for round_number in range(ROUNDS + 1):
            if round_number:
                broker.start()
            threads = [
                threading.Thread(target=each.run, args=(broker.port,), daemon=True)
                for each in senders
            ]
            for sender in senders:
                sender.is_over = round_number == ROUNDS
            for thread in threads:
                thread.start()
            if round_number < ROUNDS:
                time.sleep(random.uniform(0.05, 0.5))
                broker.kill()
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
        found = read_log(broker.port, 0)
        assert broker.stop() == 0
    for sender in senders:
        assert not sender.refused
        mark = f"{sender.name}:".encode()
        stored = [payload for payload in found.values() if payload.startswith(mark)]
        assert stored == sender.payloads
        assert stored
        misplaced = [o for o, p in sender.places.items() if found.get(o) != p]
        assert not misplaced
