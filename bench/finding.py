"""Look-up by key: the newest ten messages of one, among many, over a connection."""

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from bench.committing import cluster
from bench.figures import PAYLOAD, TOPIC, Figure
from metaq.client import Client

INDEXED = "indexed"
PARTITIONS = 4
COUNT = 1_000_000
KEYS = COUNT // 20
FOUND = 10
LOOKS = 100
BUILD_S_MAX = 120.0


def by_key(directory: Path, rounds: int) -> Figure:
    """Median of look-ups of keys drawn at random, once all is warm."""
    figure = Figure(
        f"find the newest {FOUND} of a key among {COUNT:,} messages, p50"
        " (floor: the same without an index)",
        "ms",
        [],
        at_least="30",
        aim="15",
        is_ratio=False,
    )
    with (
        cluster(directory, PARTITIONS) as (address, _broker),
        Client(address) as client,
    ):
        send(client, TOPIC)
        settings = {"index": "key"}
        admin = client.admin()
        admin.create_topic(INDEXED, partitions=PARTITIONS, settings=settings)
        send(client, INDEXED)
        wait_indexed(client)
        for _ in range(rounds):
            figure.floor.append(median_ms(client, TOPIC, LOOKS // 10))
            figure.broker.append(median_ms(client, INDEXED, LOOKS))
    return figure


def send(client: Client, topic: str) -> None:
    """Send all messages."""
    with client.producer(timeout_s=60.0) as producer:
        producer.prepare(topic)
        for number in range(COUNT):
            producer.send_nowait(topic, PAYLOAD, key=f"user-{number % KEYS}")
        producer.flush(60.0)


def wait_indexed(client: Client) -> None:
    """Wait until all but the last block of each partition has its index."""
    end_s = time.monotonic() + BUILD_S_MAX
    read = [0]
    while True:
        list(client.find(INDEXED, key="none", on_read=read.append))
        if read[-1] < PARTITIONS * (17 << 20):
            return
        if time.monotonic() > end_s:
            raise RuntimeError(f"no index after {BUILD_S_MAX} s: read={read[-1]}")
        time.sleep(1.0)


def median_ms(client: Client, topic: str, count: int) -> float:
    """Return the median time of so many look-ups."""
    rng, times = random.Random(1), []
    for _ in range(count):
        key = f"user-{rng.randrange(KEYS)}"
        started = time.perf_counter()
        found = list(client.find(topic, key=key, limit=FOUND))
        times.append((time.perf_counter() - started) * 1000)
        if len(found) != FOUND:
            raise RuntimeError(f"expected {FOUND} of {key}, got {len(found)}")
    return statistics.median(times)


FIGURES: dict[str, Callable[[Path, int], Figure]] = {"find": by_key}
