"""Costs of many partitions: the first put to each, and a start."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from bench import load
from bench.figures import PAYLOAD, RECORD_BYTES, TOPIC, Figure
from tests.rigs.process import BrokerProcess

COUNT = 5000
PER_BLOCK, IN_FLIGHT = 250, 1000


def first_puts(directory: Path, rounds: int) -> Figure:
    """One put to each partition of a new topic, over one connection."""
    figure = Figure(
        f"first put to each of {COUNT:,} partitions"
        " (floor: make the files, sync each and its directory once)",
        "s",
        [],
        [],
        at_least="25",
        aim="8",
        is_ratio=False,
    )
    for number in range(rounds):
        figure.floor.append(make_files(directory / f"floor-{number}"))
        with broker_of(directory / f"new-{number}") as broker:
            figure.broker.append(put_to_each(broker.port))
    return figure


def start(directory: Path, rounds: int) -> Figure:
    """Start after a clean stop, until the first reply."""
    figure = Figure(
        f"start with {COUNT:,} partitions after a clean stop"
        " (floor: list each directory, read what is in it)",
        "s",
        [],
        [],
        at_least="5",
        aim="2",
        is_ratio=False,
    )
    data = directory / "start"
    with broker_of(data) as broker:
        put_to_each(broker.port)
        for _ in range(rounds):
            broker.stop()
            figure.floor.append(read_files(data))
            figure.broker.append(broker.start())
    return figure


def broker_of(data: Path) -> BrokerProcess:
    return BrokerProcess(data, topic=TOPIC, partition_count=COUNT)


def put_to_each(port: int) -> float:
    frames = [load.put_frame(TOPIC, PAYLOAD, n, partition=n) for n in range(COUNT)]
    firsts = range(0, COUNT, PER_BLOCK)
    blocks = [b"".join(frames[first : first + PER_BLOCK]) for first in firsts]
    work = load.Blocks(blocks, PER_BLOCK)
    return load.pipeline(port, work, IN_FLIGHT, load.ok_counter())


def make_files(directory: Path) -> float:
    """Create the files of as many partitions durably; return seconds."""
    directory.mkdir()
    start_s = time.perf_counter()
    made = [directory / f"{TOPIC}-{number}" for number in range(COUNT)]
    for first in range(0, COUNT, PER_BLOCK):
        group = made[first : first + PER_BLOCK]
        for each in group:
            each.mkdir()
            (each / "spans").write_bytes(b"x" * 32)
            (each / "meta").touch()
        for each in (directory, *group):
            sync(each, os.O_RDONLY, os.fsync)
        for each in group:
            sync(each / "meta", os.O_WRONLY, os.fdatasync, b"x" * RECORD_BYTES)
    return time.perf_counter() - start_s


def sync(
    path: Path, flags: int, how: Callable[[int], None], written: bytes = b""
) -> None:
    fd = os.open(path, flags)
    if written:
        os.write(fd, written)
    how(fd)
    os.close(fd)


def read_files(directory: Path) -> float:
    """Read all files of all partitions; return seconds."""
    start_s = time.perf_counter()
    for each in directory.glob(f"{TOPIC}-*"):
        for file in each.iterdir():
            file.read_bytes()
    return time.perf_counter() - start_s


FIGURES = {"partitions-new": first_puts, "partitions-start": start}
