"""Soak with churn: clients come and go for minutes, brokers restart, nothing grows.

METAQ_SOAK_S says for how long; the default is what CI can afford. Figures are taken
when all short-lived clients are closed, and the first ones when everything has warmed
up: what is compared is the same process later.
"""

import asyncio
import gc
import logging
import os
import threading
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from metaq.client import AsyncClient, Client
from tests.matrix.scene import SESSION_TIMEOUT_S, broker_arguments
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until
from tests.sampling import IS_WHOLE

SOAK_S = float(os.environ.get("METAQ_SOAK_S") or (45 if IS_WHOLE else 20))
WARM_UP = 0.4
"""Part of the time after which the first figures are taken."""
RSS_GROWTH_MAX_BYTES = 12 << 20
"""Memory kept by malloc for threads that came and went; objects do not grow."""
FILE_GROWTH_MAX = 8
RESTART_EVERY = 20
"""Rounds between two restarts of the broker."""
SETTLE_ROUNDS = 5
"""Rounds behind a restart before figures are taken."""
COUNT = 40
"""Messages per round."""
TOPIC = "soak"
GROUP = "soaked"

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(int(SOAK_S) + 300),
]


class Figures(NamedTuple):
    """Figures that may not grow."""

    rss_bytes: int
    file_count: int
    thread_count: int
    broker_rss_bytes: int
    broker_file_count: int


def rss_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def file_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


class Books:
    """Acknowledged messages that were not delivered yet; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._early: set[bytes] = set()
        self._missing: set[bytes] = set()
        self.delivered_count = 0

    def on_sent(self, payloads: list[bytes]) -> None:
        with self._lock:
            for payload in payloads:
                if payload in self._early:
                    self._early.discard(payload)
                else:
                    self._missing.add(payload)

    def on_delivered(self, payload: bytes) -> None:
        with self._lock:
            self.delivered_count += 1
            if payload in self._missing:
                self._missing.discard(payload)
            else:
                self._early.add(payload)

    @property
    def missing_count(self) -> int:
        with self._lock:
            return len(self._missing)


class Steady(threading.Thread):
    """The member that stays."""

    def __init__(self, zookeeper: str, books: Books) -> None:
        super().__init__(name="steady", daemon=True)
        self.zookeeper = zookeeper
        self.books = books
        self.has_begun = threading.Event()
        self.ending = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with (
                Client(self.zookeeper, session_timeout_s=SESSION_TIMEOUT_S) as client,
                client.consumer(GROUP, [TOPIC], commit_interval_s=0.5) as consumer,
            ):
                self.has_begun.set()
                while not self.ending.is_set():
                    for message in consumer.receive_many(100, timeout=0.1):
                        self.books.on_delivered(message.data)
        except BaseException as error:
            self.error = error


def sync_round(zookeeper: str, payloads: list[bytes], books: Books) -> None:
    """A client, a producer and a consumer live for a moment."""
    with (
        Client(zookeeper, session_timeout_s=SESSION_TIMEOUT_S) as client,
        client.consumer(GROUP, [TOPIC]) as consumer,
        client.producer() as producer,
    ):
        producer.send_many(TOPIC, payloads, timeout=30)
        books.on_sent(payloads)
        for message in consumer.receive_many(COUNT, timeout=0.05):
            books.on_delivered(message.data)


async def async_round(zookeeper: str, payloads: list[bytes], books: Books) -> None:
    """The same in the other world."""
    async with (
        AsyncClient(zookeeper, session_timeout_s=SESSION_TIMEOUT_S) as client,
        client.producer() as producer,
        client.consumer(GROUP, [TOPIC]) as consumer,
    ):
        await producer.send_many(TOPIC, payloads, timeout=30)
        books.on_sent(payloads)
        for message in await consumer.receive_many(COUNT, timeout=0.05):
            books.on_delivered(message.data)


def take_figures(broker: BrokerProcess, thread_count: int) -> Figures:
    """Wait until what was closed has gone, then count."""
    wait_until(
        lambda: threading.active_count() <= thread_count,
        show=lambda: f"threads that stayed: {[t.name for t in threading.enumerate()]}",
    )
    gc.collect()
    return Figures(
        rss_bytes(os.getpid()),
        file_count(os.getpid()),
        threading.active_count(),
        rss_bytes(broker.pid),
        file_count(broker.pid),
    )


def test_nothing_grows_while_clients_come_and_go(
    zookeeper: str, tmp_path: Path, rng: Random, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory, descriptors and threads are flat, and nothing acknowledged is lost."""
    # What pytest keeps of a warning keeps the client that its error refers to.
    caplog.set_level(logging.CRITICAL)
    books = Books()
    steady = Steady(zookeeper, books)
    arguments = broker_arguments(zookeeper, 0, {TOPIC: 4})
    with BrokerProcess(
        tmp_path / "data", topic="unused", arguments=arguments
    ) as broker:
        steady.start()
        wait_until(steady.has_begun.is_set, show=lambda: f"no start: {steady.error}")
        sync_round(zookeeper, [b"first"], books)
        thread_count = threading.active_count()
        began_s = time.monotonic()
        first: Figures | None = None
        number = 0
        while (passed_s := time.monotonic() - began_s) < SOAK_S:
            number += 1
            # Behind a restart files of a partition open one by one, as they are used.
            is_warm = number % RESTART_EVERY >= SETTLE_ROUNDS
            if first is None and is_warm and passed_s > WARM_UP * SOAK_S:
                first = take_figures(broker, thread_count)
            payloads = [f"{number}:{n}".encode() for n in range(COUNT)]
            if rng.random() < 0.5:
                sync_round(zookeeper, payloads, books)
            else:
                asyncio.run(async_round(zookeeper, payloads, books))
            if number % RESTART_EVERY == 0:
                broker.stop()
                broker.start()
            assert steady.error is None, steady.error
        last = take_figures(broker, thread_count)
        wait_until(
            lambda: books.missing_count == 0,
            show=lambda: (
                f"{books.missing_count} acknowledged messages were not delivered"
            ),
        )
        steady.ending.set()
        steady.join(30)
        assert not steady.is_alive()
        assert steady.error is None, steady.error
    assert first is not None
    print(f"{number} rounds, {books.delivered_count} delivered\n{first}\n{last}")
    assert last.thread_count <= first.thread_count
    assert last.file_count <= first.file_count + FILE_GROWTH_MAX
    assert last.rss_bytes <= first.rss_bytes + RSS_GROWTH_MAX_BYTES
    assert last.broker_file_count <= first.broker_file_count + FILE_GROWTH_MAX
    assert last.broker_rss_bytes <= first.broker_rss_bytes + RSS_GROWTH_MAX_BYTES
