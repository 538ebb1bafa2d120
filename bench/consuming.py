"""Figures of the consumer, in the user's own loop, with checksums verified."""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from zlib import crc32

from bench import load
from bench.figures import MIB, TOPIC, Figure, Turns, WithLines, batches
from bench.lines import Payloads
from bench.processes import ROOT, resident_bytes
from bench.producing import KEYED, with_keys
from metaq.client import AsyncClient, Client
from tests.rigs.process import BrokerProcess

COUNT = 1_000_000
GROUP = "bench-readers"
BATCH = 4000
RATE, DELIVERED = 2000, 10_000
BACKLOG_BYTES = 10 * 1024 * MIB
BACKLOG_PAYLOAD = bytes(1024)


def fill(broker: BrokerProcess, work: load.Blocks) -> None:
    """Send batches to a broker."""
    load.pipeline(broker.port, work, 8, load.ok_counter())


def read_and_check(port: int) -> float:
    """Get the same bytes in a blocking loop, with one checksum per record; seconds."""
    sock = load.connect(port)
    offset = count = 0
    begin = time.perf_counter()
    while count < COUNT:
        sock.sendall(f"get {TOPIC} g 0 {offset} {MIB} 1\r\n".encode())
        data = sock.recv(MIB)
        head, _, body = data.partition(b"\r\n")
        size = int(head.split()[1])
        parts = [body]
        left = size - len(body)
        while left:
            piece = sock.recv(min(left, MIB))
            parts.append(piece)
            left -= len(piece)
        body = b"".join(parts)
        start = 0
        while start + load.HEADER.size <= size:
            first = start + load.HEADER.size
            end = first + int.from_bytes(body[start : start + 4])
            if end > size:
                break
            crc32(body[first:end])
            start, count = end, count + 1
        offset += start
    sock.close()
    return time.perf_counter() - begin


def iterate_sync(port: int, total: int = COUNT) -> float:
    """Iterate over the backlog with the sync client; return seconds."""
    with (
        Client(brokers=[f"127.0.0.1:{port}"]) as client,
        client.consumer(GROUP, [TOPIC]) as consumer,
    ):
        begin = time.perf_counter()
        for count, _message in enumerate(consumer, 1):
            if count == total:
                break
        return time.perf_counter() - begin


async def iterate_async(port: int) -> float:
    """Iterate over the backlog with the async client; return seconds."""
    async with (
        AsyncClient(brokers=[f"127.0.0.1:{port}"]) as client,
        client.consumer(GROUP, [TOPIC]) as consumer,
    ):
        begin, count = time.perf_counter(), 0
        async for _message in consumer:
            count += 1
            if count == COUNT:
                break
        return time.perf_counter() - begin


def iterate(directory: Path, payloads: Payloads) -> Turns:
    """The sync iterator over a backlog of a million messages."""
    with BrokerProcess(directory / "iterate", topic=TOPIC) as broker:
        fill(broker, batches(payloads, BATCH, COUNT // BATCH))
        while True:
            plain = COUNT / read_and_check(broker.port)
            yield plain, COUNT / iterate_sync(broker.port)


def iterate_in_loop(directory: Path, payloads: Payloads) -> Turns:
    """The async iterator; its floor is the sync one in the same round."""
    with BrokerProcess(directory / "iterate-async", topic=TOPIC) as broker:
        fill(broker, batches(payloads, BATCH, COUNT // BATCH))
        while True:
            plain = COUNT / iterate_sync(broker.port)
            yield plain, COUNT / asyncio.run(iterate_async(broker.port))


def iterate_with_keys(directory: Path, payloads: Payloads) -> Turns:
    """The sync iterator over messages with key, attribute and header."""
    with (
        BrokerProcess(directory / "plain", topic=TOPIC) as plain,
        BrokerProcess(directory / "keyed", topic=TOPIC) as keyed,
    ):
        fill(plain, batches(payloads, BATCH, KEYED // BATCH))
        with (
            Client(brokers=[f"127.0.0.1:{keyed.port}"]) as client,
            client.producer() as producer,
        ):
            producer.send_many(TOPIC, with_keys(payloads.repeat(KEYED)))
        while True:
            without = KEYED / iterate_sync(plain.port, KEYED)
            yield without, KEYED / iterate_sync(keyed.port, KEYED)


def delivery(
    directory: Path, payloads: Payloads, *, percent: int, in_loop: bool = False
) -> Turns:
    """Latency from put to the consumer's loop at 2,000 messages per second."""
    with BrokerProcess(directory / "delivery", topic=TOPIC) as broker:
        lines = directory / "lines"
        lines.write_bytes(b"\n".join(payloads.data))
        size = load.HEADER.size + round(payloads.mean_bytes)
        while True:
            synced = load.write_and_sync(directory / "sync", size, 1000)
            if in_loop:
                delays = asyncio.run(deliver_in_loop(broker.port, lines))
            else:
                delays = deliver(broker.port, lines)
            kept = delays[RATE // 2 :]  # the first half second warms up
            yield _percentile_ms(synced, percent), _percentile_ms(kept, percent)


@contextmanager
def paced(port: int, lines: Path) -> Iterator[None]:
    """Run a sender in its own process during the block."""
    words = [str(port), TOPIC, str(RATE), str(DELIVERED), str(lines)]
    command = [sys.executable, "-m", "bench.paced", *words]
    with subprocess.Popen(command, cwd=ROOT):
        yield


def deliver(port: int, lines: Path) -> list[float]:
    """Return the seconds from put to delivery of each message of a paced sender."""
    delays: list[float] = []
    with (
        Client(brokers=[f"127.0.0.1:{port}"]) as client,
        client.consumer(GROUP, [TOPIC], start="latest") as consumer,
        paced(port, lines),
    ):
        for message in consumer:
            if is_last(message.data, delays):
                break
    return delays


async def deliver_in_loop(port: int, lines: Path) -> list[float]:
    """Return the same for a consumer in an event loop."""
    delays: list[float] = []
    async with (
        AsyncClient(brokers=[f"127.0.0.1:{port}"]) as client,
        client.consumer(GROUP, [TOPIC], start="latest") as consumer,
    ):
        with paced(port, lines):
            async for message in consumer:
                if is_last(message.data, delays):
                    break
    return delays


def is_last(data: bytes, delays: list[float]) -> bool:
    """Append the delay of a message; return whether it was the last message."""
    stamp = int(data[:20])
    if stamp:
        delays.append((time.monotonic_ns() - stamp) / 1e9)
    return len(delays) == DELIVERED


def _percentile_ms(samples: list[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100)[percent - 1] * 1e3


def consumer_memory(directory: Path, rounds: int) -> Figure:
    """Growth of a consumer's memory over the last nine tenths of a 10 GiB backlog.

    The default size of the fetch buffer is 16 MiB.
    """
    figure = Figure(
        "consumer on a backlog of 10 GiB: growth of resident memory",
        "MiB",
        [],
        at_least="flat",
    )
    record_bytes = len(BACKLOG_PAYLOAD) + load.HEADER.size
    total = BACKLOG_BYTES // record_bytes // BATCH * BATCH
    script = (
        "import sys; from bench.consuming import grow; print(grow(*map(int,"
        " sys.argv[1:])))"
    )
    with BrokerProcess(directory / "backlog", topic=TOPIC) as broker:
        frame = load.mput_frame(TOPIC, BACKLOG_PAYLOAD, BATCH, 1)
        fill(broker, load.Blocks([frame] * (total // BATCH), 1))
        for _ in range(rounds):
            done = subprocess.run(
                [sys.executable, "-c", script, str(broker.port), str(total)],
                cwd=ROOT,
                check=True,
                capture_output=True,
            )
            figure.broker.append(float(done.stdout) / MIB)
    return figure


def grow(port: int, total: int) -> int:
    """Read a backlog; return the growth of memory from its tenth to its end, bytes."""
    tenth = 0
    with (
        Client(brokers=[f"127.0.0.1:{port}"]) as client,
        client.consumer(GROUP, [TOPIC]) as consumer,
    ):
        for count, _message in enumerate(consumer, 1):
            if count == total // 10:
                tenth = resident_bytes(os.getpid())
            if count == total:
                break
        return resident_bytes(os.getpid()) - tenth


def _delivery(percent: int, *, in_loop: bool = False) -> WithLines:
    world = " in an event loop" if in_loop else ""
    return WithLines(
        partial(delivery, percent=percent, in_loop=in_loop),
        f"put to delivery{world} at {RATE:,}/s, p{percent} (floor: write and sync)",
        "ms",
        "8" if percent == 99 else "",
        "3" if percent == 99 else "",
        is_ratio=False,
    )


FIGURES: dict[str, Callable[[Path, int], Figure] | WithLines] = {
    "iterate": WithLines(
        iterate,
        "sync iterator, backlog of 1,000,000",
        "messages/s",
        "600,000",
        "1,200,000",
    ),
    "iterate-async": WithLines(
        iterate_in_loop,
        "async iterator, the same (floor: the sync one)",
        "messages/s",
        "0.8",
        "0.95",
    ),
    "iterate-keys": WithLines(
        iterate_with_keys,
        "sync iterator, messages with key and header (floor: without)",
        "messages/s",
    ),
    "delivery-p50": _delivery(50),
    "delivery": _delivery(99),
    "delivery-async": _delivery(99, in_loop=True),
    "consumer-memory": consumer_memory,
}
