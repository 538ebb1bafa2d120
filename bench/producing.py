"""Figures of the producer: lists, single messages, and the async world.

The floor is batches made beforehand, sent to the same broker by a plain socket, as
large and as many in flight as the producer's. So the ratio says what the producer adds
to a socket that has nothing to do but send.
"""

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from bench import load
from bench.figures import PAYLOAD, RECORD_BYTES, TOPIC, Figure
from metaq.client import AsyncClient, Client
from tests.rigs.process import BrokerProcess

COUNT = 1_000_000
BATCH_COUNT = 7000
IN_FLIGHT = 3
TIMEOUT_S = 60.0


def send_many(directory: Path, rounds: int) -> Figure:
    """One list of a million messages, acknowledged message by message."""

    def run(client: Client) -> float:
        with client.producer(timeout_s=TIMEOUT_S) as producer:
            messages = [PAYLOAD] * COUNT
            start = time.perf_counter()
            results = producer.send_many(TOPIC, messages)
            seconds = time.perf_counter() - start
            assert len(results) == COUNT
        return seconds

    figure = Figure(
        "send_many, 128 B (floor: prepared batches by socket)",
        "messages/s",
        [],
        [],
        at_least="800,000",
        aim="1,500,000",
    )
    return measure(directory / "many", rounds, figure, run)


def send_alone(directory: Path, rounds: int) -> Figure:
    """One `send` at a time in the sync world: what is added to the sync."""
    count = 1000
    figure = Figure(
        "send in the sync world, one at a time, p50 (floor: write and sync)",
        "ms",
        [],
        [],
        at_least="floor + 0.35 ms",
        aim="floor + 0.15 ms",
        is_ratio=False,
    )
    with (
        BrokerProcess(directory / "send", topic=TOPIC) as broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as client,
        client.producer(timeout_s=TIMEOUT_S) as producer,
    ):
        for number in range(rounds + 1):
            synced = load.write_and_sync(directory / "sync", RECORD_BYTES, count)
            samples = []
            for _ in range(count):
                start = time.perf_counter()
                producer.send(TOPIC, PAYLOAD)
                samples.append(time.perf_counter() - start)
            if number:  # the first round warms up
                figure.floor.append(statistics.median(synced) * 1e3)
                figure.broker.append(statistics.median(samples) * 1e3)
    return figure


def send_nowait(directory: Path, rounds: int) -> Figure:
    """A million messages one by one from one thread; the last future of each kept."""

    def run(client: Client) -> float:
        with client.producer(timeout_s=TIMEOUT_S) as producer:
            producer.send(TOPIC, PAYLOAD)
            send = producer.send_nowait
            start = time.perf_counter()
            for _ in range(COUNT):
                future = send(TOPIC, PAYLOAD)
            producer.flush(TIMEOUT_S)
            seconds = time.perf_counter() - start
            assert future.result(0)
            assert producer.statistics().acknowledged_count == COUNT + 1
        return seconds

    figure = Figure(
        "send_nowait, 128 B, one thread (floor: as send_many)",
        "messages/s",
        [],
        [],
        at_least="250,000",
        aim="500,000",
    )
    return measure(directory / "nowait", rounds, figure, run)


def send_nowait_in_loop(directory: Path, rounds: int) -> Figure:
    """The same in the async world, on the loop that also delivers."""

    async def send_all(port: int) -> float:
        async with (
            AsyncClient(brokers=[f"127.0.0.1:{port}"]) as client,
            client.producer(timeout_s=TIMEOUT_S) as producer,
        ):
            await producer.send(TOPIC, PAYLOAD)
            start = time.perf_counter()
            for _ in range(COUNT):
                future = await producer.send_nowait(TOPIC, PAYLOAD)
            await producer.flush(TIMEOUT_S)
            seconds = time.perf_counter() - start
            assert future.result()
        return seconds

    figure = Figure(
        "send_nowait in an event loop, 128 B (floor: as send_many)", "messages/s", []
    )
    with BrokerProcess(directory / "loop", topic=TOPIC) as broker:
        for _ in range(rounds):
            figure.floor.append(COUNT / push(broker.port))
            figure.broker.append(COUNT / asyncio.run(send_all(broker.port)))
    return figure


def unanswered(directory: Path, rounds: int) -> Figure:
    """Processor time while one message waits, after one to each of 1,000 partitions."""
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
    directory: Path, rounds: int, figure: Figure, run: Callable[[Client], float]
) -> Figure:
    with (
        BrokerProcess(directory, topic=TOPIC) as broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as client,
    ):
        run(client)  # warm up
        for _ in range(rounds):
            figure.floor.append(COUNT / push(broker.port))
            figure.broker.append(COUNT / run(client))
    return figure


def push(port: int) -> float:
    """Send as many messages in batches made beforehand; return seconds for COUNT."""
    frame = load.mput_frame(TOPIC, PAYLOAD, BATCH_COUNT, 1)
    batches = COUNT // BATCH_COUNT
    work = load.Blocks([frame] * batches, 1)
    seconds = load.pipeline(port, work, IN_FLIGHT, load.ok_counter())
    return seconds * COUNT / (batches * BATCH_COUNT)
