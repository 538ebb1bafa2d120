"""Figures of the consumer: what a user's own loop sees, checksums verified."""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from zlib import crc32

from bench import load
from bench.figures import MIB, PAYLOAD, RECORD_BYTES, TOPIC, Figure
from bench.processes import ROOT, resident_bytes
from metaq.client import AsyncClient, Client
from tests.rigs.process import BrokerProcess

COUNT = 1_000_000
GROUP = "bench-readers"
BATCH = 4000
BACKLOG_BYTES = 10 * 1024 * MIB
BACKLOG_PAYLOAD = bytes(1024)


def fill(broker: BrokerProcess, count: int, payload: bytes = PAYLOAD) -> None:
    """Put `count` messages, a multiple of BATCH."""
    frame = load.mput_frame(TOPIC, payload, BATCH, 1)
    work = load.Blocks([frame] * (count // BATCH), 1)
    load.pipeline(broker.port, work, 8, load.ok_counter())


def read_and_check(port: int, count: int) -> float:
    """Get the same bytes in a blocking loop, one checksum per record; seconds."""
    sock = load.connect(port)
    wanted = count * RECORD_BYTES
    offset, begin = 0, time.perf_counter()
    while offset < wanted:
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
        records = size // RECORD_BYTES
        for start in range(0, records * RECORD_BYTES, RECORD_BYTES):
            crc32(body[start + 20 : start + RECORD_BYTES])
        offset += records * RECORD_BYTES
    sock.close()
    return time.perf_counter() - begin


def iterate_sync(port: int) -> float:
    """Iterate over the backlog in the sync world; seconds."""
    with (
        Client(brokers=[f"127.0.0.1:{port}"]) as client,
        client.consumer(GROUP, [TOPIC]) as consumer,
    ):
        begin = time.perf_counter()
        for count, _message in enumerate(consumer, 1):
            if count == COUNT:
                break
        return time.perf_counter() - begin


async def iterate_async(port: int) -> float:
    """Iterate over the backlog in the async world; seconds."""
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


def iterate(directory: Path, rounds: int) -> Figure:
    """The sync iterator over a backlog of a million messages."""
    figure = Figure(
        "sync iterator, backlog of 1,000,000 x 128 B",
        "messages/s",
        [],
        at_least="600,000",
        aim="1,200,000",
    )
    with BrokerProcess(directory / "iterate", topic=TOPIC) as broker:
        fill(broker, COUNT)
        iterate_sync(broker.port)  # warm up
        for _ in range(rounds):
            figure.floor.append(COUNT / read_and_check(broker.port, COUNT))
            figure.broker.append(COUNT / iterate_sync(broker.port))
    return figure


def iterate_in_loop(directory: Path, rounds: int) -> Figure:
    """The async iterator; its floor is the sync one in the same round."""
    figure = Figure(
        "async iterator, the same (floor: the sync one)",
        "messages/s",
        [],
        at_least="0.8",
        aim="0.95",
    )
    with BrokerProcess(directory / "iterate-async", topic=TOPIC) as broker:
        fill(broker, COUNT)
        iterate_sync(broker.port)  # warm up
        for _ in range(rounds):
            figure.floor.append(COUNT / iterate_sync(broker.port))
            figure.broker.append(COUNT / asyncio.run(iterate_async(broker.port)))
    return figure


def delivery(directory: Path, rounds: int) -> Figure:
    """From put to the consumer's loop at 5,000 messages a second, p99."""
    rate, count = 5_000, 20_000
    figure = Figure(
        "put to delivery at 5,000/s, p99 (floor: write and sync, p99)",
        "ms",
        [],
        at_least="5",
        aim="1.5",
        is_ratio=False,
    )
    with BrokerProcess(directory / "delivery", topic=TOPIC) as broker:
        for _ in range(rounds):
            synced = load.write_and_sync(directory / "sync", RECORD_BYTES, 1000)
            figure.floor.append(_p99(synced) * 1e3)
            figure.broker.append(_p99(_deliver(broker.port, rate, count)) * 1e3)
    return figure


def _deliver(port: int, rate: int, count: int) -> list[float]:
    """Return the seconds from put to delivery of each message of a paced sender."""
    command = [sys.executable, "-m", "bench.paced", str(port), TOPIC]
    with (
        Client(brokers=[f"127.0.0.1:{port}"]) as client,
        client.consumer(GROUP, [TOPIC], start="latest") as consumer,
        subprocess.Popen([*command, str(rate), str(count)], cwd=ROOT) as sender,
    ):
        delays = []
        for message in consumer:
            stamp = int(message.data[:20])
            if stamp:
                delays.append((time.monotonic_ns() - stamp) / 1e9)
                if len(delays) == count:
                    break
        sender.wait()
    return delays


def _p99(samples: list[float]) -> float:
    return statistics.quantiles(samples, n=100)[98]


def consumer_memory(directory: Path, rounds: int) -> Figure:
    """Growth of a consumer's memory over the last nine tenths of a 10 GiB backlog.

    The default bound on fetched bytes is 16 MiB.
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
        fill(broker, total, BACKLOG_PAYLOAD)
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
    """Read a backlog; return bytes of memory at its end above those at a tenth."""
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
