"""Figures of delayed messages: sending, delivery at their due time, waiting.

A timed message begins with its due time, ms since 1970. Its lateness is the time past
that at which it is read; reader and broker have the same clock.
"""

import datetime as dt
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.figures import PAYLOAD, TOPIC, Figure, Turns, WithLines
from bench.lines import Payloads
from bench.processes import resident_bytes
from metaq.client import Client
from tests.rigs.process import BrokerProcess

SENDS = 40_000
PARTITIONS, IN_FLIGHT_MAX = 4, 5
WAITING = 5_000_000
HOUR_S, DAY_S = 3600.0, 86_400.0
RATE, SECONDS = 2000, 10
BURST = 200_000
STEP_MS = 10
"""Resolution of due times, as rounded by clients, in milliseconds."""
AHEAD_S = 4.0
"""Time for sending timed messages before the first one is due."""
FORM = "%013d"


def send(directory: Path, payloads: Payloads) -> Turns:
    """Send one by one with random delays, without waiting; the floor has no delays."""
    data, chance = payloads.repeat(SENDS), random.Random(1)
    with (
        BrokerProcess(
            directory / "send", topic=TOPIC, partition_count=PARTITIONS
        ) as broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as client,
        client.producer(
            timeout_s=60.0, in_flight_batches_max=IN_FLIGHT_MAX
        ) as producer,
    ):
        producer.send(TOPIC, b"connected")
        while True:
            rates = []
            for has_times in (False, True):
                delays = [chance.uniform(60, 30 * HOUR_S) for _ in data]
                start_s = time.perf_counter()
                for one, delay in zip(data, delays, strict=True):
                    if has_times:
                        producer.send_nowait(TOPIC, one, delay=delay)
                    else:
                        producer.send_nowait(TOPIC, one)
                producer.flush(60.0)
                rates.append(SENDS / (time.perf_counter() - start_s))
            yield rates[0], rates[1]


def timed(
    directory: Path, payloads: Payloads, *, count: int, length_ms: int
) -> Iterator[list[float]]:
    """Send messages due within `length_ms`; yield the lateness of each, in ms."""
    with (
        BrokerProcess(directory / "timed", topic=TOPIC) as broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as client,
        client.producer(timeout_s=60.0) as producer,
    ):
        producer.send(TOPIC, b"connected")
        data, steps = payloads.repeat(count), length_ms // STEP_MS
        while True:
            browsing = client.browse(TOPIC, start="latest", stop_at_end=False)
            begin_ms = round((time.time() + AHEAD_S) * 1000) // STEP_MS * STEP_MS
            for number in range(steps):
                due_ms = begin_ms + number * STEP_MS
                head = (FORM % due_ms).encode()
                part = data[number * count // steps : (number + 1) * count // steps]
                producer.send_many(
                    TOPIC,
                    [head + one for one in part],
                    deliver_at=dt.datetime.fromtimestamp(due_ms / 1000, dt.UTC),
                )
            assert time.time() * 1000 < begin_ms, "sending took too long"
            late = list[float]()
            for message in browsing:
                late.append(time.time() * 1000 - int(message.data[: len(FORM % 0)]))
                if len(late) == count:
                    break
            browsing.close()
            yield late


def lateness(directory: Path, payloads: Payloads) -> Turns:
    """Lateness p99 at a steady rate."""
    count = RATE * SECONDS
    for late in timed(directory, payloads, count=count, length_ms=SECONDS * 1000):
        yield None, sorted(late)[count * 99 // 100]


def burst(directory: Path, payloads: Payloads) -> Turns:
    """Messages per second, from the first due time to the last message read."""
    for late in timed(directory, payloads, count=BURST, length_ms=1000):
        yield None, BURST / (1 + (late[-1] - STEP_MS) / 1000)


def waiting(directory: Path, rounds: int, *, is_start: bool) -> Figure:
    """Memory, or time of a start, with many messages that wait for random times."""
    name = f"{WAITING:,} messages wait, with random times: "
    figure = Figure(
        name + ("a start, until one that is due comes" if is_start else "memory"),
        "s" if is_start else "MiB",
        [],
        at_least="5" if is_start else "20",
        is_ratio=False,
    )
    chance = random.Random(1)
    with BrokerProcess(directory / "waiting", topic=TOPIC) as broker:
        idle = resident_bytes(broker.pid)
        with (
            Client(brokers=[f"127.0.0.1:{broker.port}"]) as client,
            client.producer(timeout_s=60.0) as producer,
        ):
            producer.send(TOPIC, b"connected")
            for _ in range(WAITING):
                delay = chance.uniform(600, 40 * DAY_S)
                producer.send_nowait(TOPIC, PAYLOAD, delay=delay)
            producer.flush(60.0)
        for _ in range(rounds):
            broker.stop()
            start_s = time.perf_counter()
            broker.start()
            deliver_one(broker.port)
            if is_start:
                figure.broker.append(time.perf_counter() - start_s)
            else:
                figure.broker.append((resident_bytes(broker.pid) - idle) / (1 << 20))
    return figure


def deliver_one(port: int) -> None:
    """Send a message with a short delay; return once it is delivered."""
    mark = b"%d" % time.monotonic_ns()
    with (
        Client(brokers=[f"127.0.0.1:{port}"]) as client,
        client.producer(timeout_s=60.0) as producer,
    ):
        producer.send(TOPIC, mark, delay=0.01)
        while all(message.data != mark for message in client.browse(TOPIC)):
            time.sleep(0.01)


FIGURES = {
    "delay-send": WithLines(
        send,
        f"send_nowait with random times, {PARTITIONS} partitions (floor: without)",
        "messages/s",
    ),
    "delay-late": WithLines(
        lateness,
        f"lateness p99 at {RATE:,} due messages/s",
        "ms",
        "300",
        "150",
        is_ratio=False,
    ),
    "delay-burst": WithLines(
        burst,
        f"{BURST:,} messages due within a second, delivered",
        "messages/s",
        is_ratio=False,
    ),
    "delay-start": partial(waiting, is_start=True),
    "delay-memory": partial(waiting, is_start=False),
}
