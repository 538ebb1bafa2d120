"""Figures of the producer: lists, single messages, and the async client.

The floor is prepared batches, sent to the same broker by a plain socket, of the size
and number in flight of the producer's. So the ratio shows what the producer costs
beyond a socket that only sends.
"""

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from bench import load
from bench.figures import (
    MIB,
    PAYLOAD,
    TOPIC,
    Figure,
    Turns,
    WithLines,
    batches,
    write_and_sync,
)
from bench.lines import Payloads
from metaq.client import AsyncClient, Client, OutgoingMessage
from tests.rigs.process import BrokerProcess

COUNT = 1_000_000
ALONE = 1000
KEYS, KEYED = 200, 200_000
IN_FLIGHT = 3
TIMEOUT_S = 60.0


def send_many(directory: Path, payloads: Payloads) -> Turns:
    """One list of a million messages, with one result for each."""
    return measure(directory, payloads, partial(send_list, payloads.repeat(COUNT)))


def send_list(messages: list[Any], client: Client) -> float:
    """Send a list; return seconds."""
    with client.producer(timeout_s=TIMEOUT_S) as producer:
        start = time.perf_counter()
        results = producer.send_many(TOPIC, messages)
        seconds = time.perf_counter() - start
        assert len(results) == len(messages)
    return seconds


def with_keys(lines: list[bytes]) -> list[OutgoingMessage]:
    """Return messages with these lines, each with a key, an attribute and a header."""
    keys = [f"host-{number}" for number in range(KEYS)]
    headers = {"trace": b"4bf92f3577b34da6"}
    return [
        OutgoingMessage(line, "log", key, headers=headers)
        for line, key in zip(lines, cycle(keys), strict=False)
    ]


def send_many_with_keys(directory: Path, payloads: Payloads) -> Turns:
    """One list with keys, attributes and headers; the floor is the list without."""
    lines = payloads.repeat(KEYED)
    keyed = with_keys(lines)
    with (
        BrokerProcess(directory / "keys", topic=TOPIC) as broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as client,
    ):
        while True:
            plain = KEYED / send_list(lines, client)
            yield plain, KEYED / send_list(keyed, client)


def send_alone(directory: Path, payloads: Payloads) -> Turns:
    """One `send` of the sync client at a time, p50, beside a write and sync alone."""
    with (
        BrokerProcess(directory / "send", topic=TOPIC) as broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as client,
    ):
        while True:
            synced = write_and_sync(directory, payloads, ALONE)
            yield synced, send_one_by_one(client, payloads)


def send_one_by_one(client: Client, payloads: Payloads, *, topic: str = TOPIC) -> float:
    """Send each message once the one before is acknowledged; return p50 in ms."""
    samples = []
    with client.producer(timeout_s=TIMEOUT_S) as producer:
        for line in payloads.repeat(ALONE):
            start = time.perf_counter()
            producer.send(topic, line)
            samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1e3


def send_nowait(directory: Path, payloads: Payloads) -> Turns:
    """A million messages one by one from one thread."""
    return measure(directory, payloads, partial(send_all, payloads.repeat(COUNT)))


def send_all(messages: list[bytes], client: Client) -> float:
    """Send one by one, without waiting; return seconds until all are stored."""
    with client.producer(timeout_s=TIMEOUT_S) as producer:
        producer.send(TOPIC, messages[0])
        send = producer.send_nowait
        start = time.perf_counter()
        for message in messages:
            future = send(TOPIC, message)
        producer.flush(TIMEOUT_S)
        seconds = time.perf_counter() - start
        assert future.result(0)
        assert producer.statistics().acknowledged_count == len(messages) + 1
    return seconds


def send_nowait_in_loop(directory: Path, payloads: Payloads) -> Turns:
    """The same with the async client, on one event loop."""

    async def send_all(port: int) -> float:
        async with (
            AsyncClient(brokers=[f"127.0.0.1:{port}"]) as client,
            client.producer(timeout_s=TIMEOUT_S) as producer,
        ):
            await producer.send(TOPIC, messages[0])
            start = time.perf_counter()
            for message in messages:
                future = await producer.send_nowait(TOPIC, message)
            await producer.flush(TIMEOUT_S)
            seconds = time.perf_counter() - start
            assert future.result()
        return seconds

    messages = payloads.repeat(COUNT)
    with BrokerProcess(directory / "loop", topic=TOPIC) as broker:
        while True:
            plain = push(broker.port, payloads)
            yield plain, COUNT / asyncio.run(send_all(broker.port))


def unanswered(directory: Path, rounds: int) -> Figure:
    """Processor time while one message is unanswered; 1,000 partitions have had one."""
    partitions, seconds = 1000, 3.0
    figure = Figure(
        f"producer of {partitions:,} partitions, one message unanswered, CPU",
        "% of a core",
        [],
        at_least="1",
    )
    with (
        BrokerProcess(
            directory / "idle", topic=TOPIC, partition_count=partitions
        ) as broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as client,
        client.producer(timeout_s=TIMEOUT_S) as producer,
    ):
        for _ in range(partitions):
            producer.send_nowait(TOPIC, PAYLOAD)
        producer.flush(TIMEOUT_S)
        for _ in range(rounds):
            os.kill(broker.pid, signal.SIGSTOP)
            producer.send_nowait(TOPIC, PAYLOAD)
            before_s = time.process_time()
            time.sleep(seconds)
            figure.broker.append((time.process_time() - before_s) / seconds * 100)
            os.kill(broker.pid, signal.SIGCONT)
            producer.flush(TIMEOUT_S)
    return figure


def measure(
    directory: Path, payloads: Payloads, run: Callable[[Client], float]
) -> Turns:
    """Send the same number of messages by socket and by client in turn."""
    with (
        BrokerProcess(directory / "sent", topic=TOPIC) as broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as client,
    ):
        while True:
            plain = push(broker.port, payloads)
            yield plain, COUNT / run(client)


def push(port: int, payloads: Payloads) -> float:
    """Send as many messages in prepared batches; return messages per second."""
    size = int(MIB / (load.HEADER.size + payloads.mean_bytes))
    work = batches(payloads, size, COUNT // size)
    seconds = load.pipeline(port, work, IN_FLIGHT, load.ok_counter())
    return work.count * size / seconds


FIGURES: dict[str, Callable[[Path, int], Figure] | WithLines] = {
    "send": WithLines(
        send_alone,
        "send in the sync world, one at a time, p50 (floor: write and sync)",
        "ms",
        "floor + 0.35 ms",
        "floor + 0.15 ms",
        is_ratio=False,
    ),
    "send-many": WithLines(
        send_many,
        "send_many (floor: prepared batches by socket)",
        "messages/s",
        "800,000",
        "1,500,000",
    ),
    "send-many-keys": WithLines(
        send_many_with_keys,
        "send_many with keys and headers (floor: without)",
        "messages/s",
    ),
    "send-nowait": WithLines(
        send_nowait,
        "send_nowait, one thread (floor: as send_many)",
        "messages/s",
        "250,000",
        "500,000",
    ),
    "send-nowait-async": WithLines(
        send_nowait_in_loop,
        "send_nowait in an event loop (floor: as send_many)",
        "messages/s",
    ),
    "producer-cpu": unanswered,
}
