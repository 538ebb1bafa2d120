"""Lookups by key: the newest ten messages of a key among many, over a connection."""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.committing import cluster
from bench.figures import PAYLOAD, TOPIC, Figure
from metaq.client import Client, OutgoingMessage

INDEXED = "indexed"
PARTITIONS = 4
COUNT = 1_000_000
MANY = "find-many"
"""Runs only if named: it takes 17 GB and most of an hour."""
FEW = 20
"""Messages per key."""
PER_LIST = 50_000
FOUND = 10
LOOKS = 100
BUILD_S_MAX = 120.0


def by_key(
    directory: Path, rounds: int, *, count: int = COUNT, bounds: tuple[str, str]
) -> Figure:
    """Median time of lookups of random keys."""
    figure = Figure(
        f"find the newest {FOUND} of a key among {count:,} messages, p50"
        f" (floor: among {COUNT:,} without an index)",
        "ms",
        [],
        at_least=bounds[0],
        aim=bounds[1],
        is_ratio=False,
    )
    with indexed(directory, count) as client:
        send(client, TOPIC, COUNT)
        for _ in range(rounds):
            figure.floor.append(median_ms(client, TOPIC, COUNT, LOOKS // 10))
            figure.broker.append(median_ms(client, INDEXED, count))
    return figure


@contextmanager
def indexed(directory: Path, count: int) -> Iterator[Client]:
    """Run a broker with `count` keyed messages and their complete index."""
    with (
        cluster(directory, PARTITIONS) as (address, _broker),
        Client(address) as client,
    ):
        with client.producer(timeout_s=60.0) as producer:
            producer.send(TOPIC, PAYLOAD)  # waits until the broker is registered
        settings = {"index": "key"}
        admin = client.admin()
        admin.create_topic(INDEXED, partitions=PARTITIONS, settings=settings)
        send(client, INDEXED, count)
        wait_indexed(client)
        yield client


def send(client: Client, topic: str, count: int) -> None:
    """Send `count` keyed messages."""
    with client.producer(timeout_s=60.0) as producer:
        producer.prepare(topic)
        for first in range(0, count, PER_LIST):
            producer.send_many(
                topic,
                [
                    OutgoingMessage(PAYLOAD, key=f"user-{number % (count // FEW)}")
                    for number in range(first, first + PER_LIST)
                ],
            )


def wait_indexed(client: Client) -> None:
    """Wait until all messages are indexed."""
    end_s = time.monotonic() + BUILD_S_MAX
    while True:
        read = [0]
        list(client.find(INDEXED, key="none", on_read=read.append))
        if not read[-1]:
            return
        if time.monotonic() > end_s:
            raise RuntimeError(f"no index after {BUILD_S_MAX} s: read={read[-1]}")
        time.sleep(1.0)


def median_ms(client: Client, topic: str, count: int, looks: int = LOOKS) -> float:
    """Return the median time of lookups among `count` messages."""
    rng, times = random.Random(1), []
    for _ in range(looks):
        key = f"user-{rng.randrange(count // FEW)}"
        started = time.perf_counter()
        found = list(client.find(topic, key=key, limit=FOUND))
        times.append((time.perf_counter() - started) * 1000)
        if len(found) != FOUND:
            raise RuntimeError(f"expected {FOUND} of {key}, got {len(found)}")
    return statistics.median(times)


FIGURES: dict[str, Callable[[Path, int], Figure]] = {
    "find": partial(by_key, bounds=("3", "1.2")),
    MANY: partial(by_key, count=100_000_000, bounds=("30", "15")),
}
