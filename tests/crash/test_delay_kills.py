"""A real broker with delayed messages, killed again and again while they are due."""

import os
import random
import socket
import time
import zlib
from pathlib import Path

import pytest

from metaq.model import MessageId, id_time
from metaq.record.layout import encode_record
from tests.crash.accounts import (
    BrokerUser,
    kill_under,
    read_stamped,
    seed_from_environment,
)
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until
from tests.sampling import IS_WHOLE

ROUNDS = int(os.environ.get("METAQ_CRASH_ROUNDS") or (8 if IS_WHOLE else 3))

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(900)]


class Scheduler(BrokerUser):
    """Sends messages with a time, one after the other, until the broker is gone."""

    def __init__(self, port: int, name: str, source: random.Random) -> None:
        super().__init__(port, name)
        self.source = source
        self.acked: dict[bytes, int] = {}
        """Payload → due time, of what was answered with 200."""
        self.tried: dict[bytes, int] = {}

    def run(self) -> None:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 10) as sock:
                sock.settimeout(20)
                reader = sock.makefile("rb")
                while not self.stopping.is_set():
                    self._send(sock)
                    words = reader.readline().split()
                    reader.read(int(words[2]))
                    assert words[1] == b"200", words
                    payload = [*self.tried][-1]
                    self.acked[payload] = self.tried[payload]
        except (OSError, IndexError):
            return

    def _send(self, sock: socket.socket) -> None:
        due_ms = time.time_ns() // 1_000_000 + self.source.randrange(30, 1500)
        payload = b"%b:%d:" % (self.name.encode(), len(self.tried))
        self.tried[payload] = due_ms
        body = encode_record(payload, id=MessageId(0))
        crc = zlib.crc32(body) & 0x7FFFFFFF
        partition = self.source.choice((-1, 0, 1))
        line = b"mput crash %d %d 1 %d - -1 7 deliver=%d\r\n"
        sock.sendall(line % (partition, len(body), crc, due_ms) + body)


def test_each_is_delivered_once_and_not_early_when_the_broker_is_killed(
    tmp_path: Path,
) -> None:
    """After kill -9 at random moments, while some are due and others are sent."""
    seed = seed_from_environment()
    print(f"METAQ_SEED={seed}")
    source = random.Random(seed)
    acked: dict[bytes, int] = {}
    tried: dict[bytes, int] = {}
    with BrokerProcess(
        tmp_path / "data", topic="crash", partition_count=2, segment_bytes=20_000
    ) as broker:
        for number in range(ROUNDS):
            senders = [
                Scheduler(broker.port, f"r{number}s{n}", random.Random(source.random()))
                for n in range(4)
            ]

            def is_enough(number: int = number) -> bool:
                # The others may be killed before anything is acknowledged.
                return number < ROUNDS - 1 or all(s.acked for s in senders)  # noqa: B023

            kill_under(broker, senders, source.uniform(0.3, 2.0), is_enough)
            for sender in senders:
                acked |= sender.acked
                tried |= sender.tried
            broker.start()

        def payloads() -> list[tuple[int, bytes]]:
            return [
                each
                for partition in range(2)
                for each in read_stamped(broker.port, partition).values()
            ]

        wait_until(lambda: {payload for _, payload in payloads()} >= {*acked})
        found = payloads()
        assert len({payload for _, payload in found}) == len(found), "delivered twice"
        for number, payload in found:
            delivered_ms = id_time(MessageId(number))
            assert delivered_ms is not None
            assert delivered_ms >= tried[payload], "delivered early"
        assert broker.stop() == 0
    assert acked
