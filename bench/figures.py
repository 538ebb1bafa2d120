"""The figures: each runs floor and broker in turn and keeps every sample.

A figure is a function of (directory, rounds) that returns a `Figure`. Rounds
alternate, floor then broker, so that both see the same noise.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import load
from bench.processes import ROOT, cpu_seconds, floor, resident_bytes
from tests.rigs.process import BrokerProcess

PAYLOAD = b"x" * 128
TOPIC = "bench"
RECORD_BYTES = 20 + len(PAYLOAD)
PUT_REPLY_BYTES = 56
PARTITIONS = 10
"""Rounds that have a file of their own; numbers of one digit keep frames alike."""
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Figure:
    """Result of a measurement: samples of floor and broker in one unit."""

    name: str
    unit: str
    broker: list[float]
    floor: list[float] = field(default_factory=list)
    at_least: str = ""
    aim: str = ""
    is_ratio: bool = True
    """True where broker / floor means something (rates)."""

    @property
    def ratio(self) -> float | None:
        """Median of the rounds' ratios, broker over floor; None without a floor."""
        if not self.floor or not self.is_ratio:
            return None
        pairs = zip(self.broker, self.floor, strict=True)
        return statistics.median(b / f for b, f in pairs)


def puts_pipelined(directory: Path, rounds: int, in_flight: int = 1000) -> Figure:
    """Single puts of 128 B over one connection."""
    per_block, count = 250, 400_000

    def work(partition: int) -> load.Blocks:
        frames = [load.put_frame(TOPIC, PAYLOAD, i, partition) for i in range(count)]
        firsts = range(0, count, per_block)
        return load.Blocks(
            [b"".join(frames[first : first + per_block]) for first in firsts], per_block
        )

    figure = Figure(
        f"pipelined puts, 128 B, {in_flight:,} in flight",
        "puts/s",
        [],
        [],
        at_least="250,000 and 0.45",
        aim="450,000",
    )
    frame_bytes = len(load.put_frame(TOPIC, PAYLOAD, 0))
    _pipeline_in_turn(
        figure, directory / "puts", rounds, work, in_flight, count, frame_bytes
    )
    return figure


def puts_deep(directory: Path, rounds: int) -> Figure:
    """The same with four times as many in flight: fewer, larger groups."""
    figure = puts_pipelined(directory, rounds, in_flight=4000)
    return replace(figure, at_least="629,000", aim="692,000")


def puts_unchecked(directory: Path, rounds: int) -> Figure:
    """Pipelined puts without a checksum; the floor is the broker, with checksums."""
    return _puts_of_a_form(directory, rounds, "without checksum", checksum=-1)


def puts_any(directory: Path, rounds: int) -> Figure:
    """Pipelined puts to any partition; the floor is the broker, to one partition."""
    return _puts_of_a_form(directory, rounds, "to partition -1", partition=-1)


def _puts_of_a_form(directory: Path, rounds: int, form: str, **fields: int) -> Figure:
    per_block, count, in_flight = 250, 200_000, 1000
    figure = Figure(
        f"pipelined puts {form}, 128 B (floor: plain puts)",
        "puts/s",
        [],
        [],
        at_least="0.6",
        aim="0.9",
    )

    def work(**named: int) -> load.Blocks:
        frames = [load.put_frame(TOPIC, PAYLOAD, i, **named) for i in range(count)]
        firsts = range(0, count, per_block)
        return load.Blocks(
            [b"".join(frames[first : first + per_block]) for first in firsts], per_block
        )

    plain, other = work(), work(**fields)
    with BrokerProcess(directory / "puts", topic=TOPIC, partition_count=2) as broker:
        for number in range(rounds + 1):
            for blocks, samples in ((plain, figure.floor), (other, figure.broker)):
                seconds = load.pipeline(
                    broker.port, blocks, in_flight, load.ok_counter()
                )
                if number:
                    samples.append(count / seconds)
    return figure


def closed_loop(directory: Path, rounds: int) -> Figure:
    """Many clients with one put of 1 KiB under way each, as most in the field have."""
    connections, count, payload = 64, 20_000, b"x" * 1024
    frame = load.put_frame(TOPIC, payload, 1)
    figure = Figure(
        f"puts of 1 KiB, {connections} connections with one under way",
        "puts/s",
        [],
        [],
        at_least="0.5",
        aim="0.75",
    )
    with (
        BrokerProcess(directory / "closed", topic=TOPIC) as broker,
        floor(
            "group", len(frame), PUT_REPLY_BYTES, 20 + len(payload), directory
        ) as floor_port,
    ):
        for number in range(rounds + 1):
            for port, samples in (
                (floor_port, figure.floor),
                (broker.port, figure.broker),
            ):
                seconds = load.closed_loop(port, frame, connections, count)
                if number:
                    samples.append(count / seconds)
    return figure


def mput(directory: Path, rounds: int) -> Figure:
    """Batches of 128 B records: 4,000 records each, eight in flight."""
    records, batches, in_flight = 4000, 500, 8

    def work(partition: int) -> load.Blocks:
        frame = load.mput_frame(TOPIC, PAYLOAD, records, 1, partition)
        return load.Blocks([frame] * batches, 1)

    figure = Figure(
        f"mput of 128 B records, {records:,} a batch",
        "records/s",
        [],
        [],
        at_least="1,000,000 and 0.65",
        aim="2,000,000 and 0.8",
    )
    frame_bytes = len(load.mput_frame(TOPIC, PAYLOAD, records, 1))
    _pipeline_in_turn(
        figure,
        directory / "mput",
        rounds,
        work,
        in_flight,
        records * batches,
        frame_bytes,
    )
    return figure


def _pipeline_in_turn(
    figure: Figure,
    data: Path,
    rounds: int,
    work: Callable[[int], load.Blocks],
    in_flight: int,
    count: int,
    frame_bytes: int,
) -> None:
    """Send the same load to floor and broker in turn; the first round warms up.

    Each round writes to files of its own: how long a sync takes depends on how many
    extents ext4 has given to a file, so on how long it is already.

    Args:
        figure: gets `count` over the seconds of each round, floor and broker.
        data: data directory of the broker.
        rounds: that are kept.
        work: the load for a partition.
        in_flight: frames.
        count: puts or records that the load is.
        frame_bytes: of each.
    """
    with (
        BrokerProcess(data, topic=TOPIC, partition_count=PARTITIONS) as broker,
        floor("server", frame_bytes, PUT_REPLY_BYTES, data.parent) as floor_port,
    ):
        for number in range(rounds + 1):
            blocks = work(number % PARTITIONS)
            for port, samples in (
                (floor_port, figure.floor),
                (broker.port, figure.broker),
            ):
                seconds = load.pipeline(port, blocks, in_flight, load.ok_counter())
                if number:
                    samples.append(count / seconds)


def put_alone(directory: Path, rounds: int) -> Figure:
    """One put at a time: what is added to the sync."""
    count = 1000
    frame = load.put_frame(TOPIC, PAYLOAD, 1)
    figure = Figure(
        "one put at a time, p50 (floor: write and sync)",
        "ms",
        [],
        [],
        at_least="floor + 0.15 ms",
        aim="floor + 0.08 ms",
        is_ratio=False,
    )
    with BrokerProcess(directory / "alone", topic=TOPIC) as broker:
        load.one_at_a_time(broker.port, frame, count)  # warm up
        for _ in range(rounds):
            samples = load.write_and_sync(directory / "sync", RECORD_BYTES, count)
            figure.floor.append(statistics.median(samples) * 1e3)
            samples = load.one_at_a_time(broker.port, frame, count)
            figure.broker.append(statistics.median(samples) * 1e3)
    return figure


def gets(directory: Path, rounds: int) -> Figure:
    """Gets of 1 MiB slices from page cache, one after another."""
    slices, passes = 200, 10
    count = slices * passes
    records = MIB // RECORD_BYTES + 1
    frame = load.mput_frame(TOPIC, PAYLOAD, records, 1)
    work = load.Blocks([frame] * (slices + 2), 1)
    figure = Figure(
        "gets of 1 MiB slices from page cache",
        "MiB/s",
        [],
        [],
        at_least="0.7",
        aim="0.9",
    )

    def request(index: int) -> bytes:
        offset = index % slices * MIB
        return f"get bench g 0 {offset:010d} {MIB} 1\r\n".encode()

    size = len(request(0))
    with BrokerProcess(directory / "gets", topic=TOPIC) as broker:
        load.pipeline(broker.port, work, 8, load.ok_counter())
        segment = next((directory / "gets").glob("bench-0/*.meta"))
        with floor("gets", size, 24, MIB, segment) as floor_port:
            load.read_slices(broker.port, request, MIB, slices)  # warm up
            load.read_slices(floor_port, request, MIB, slices)
            for _ in range(rounds):
                seconds = load.read_slices(floor_port, request, MIB, count)
                figure.floor.append(count / seconds)
                seconds = load.read_slices(broker.port, request, MIB, count)
                figure.broker.append(count / seconds)
    return figure


def restart(directory: Path, rounds: int) -> Figure:
    """Start on a 1 GiB active segment after kill -9, until the first reply."""
    records = 6000
    frame = load.mput_frame(TOPIC, PAYLOAD, records, 1)
    batches = GIB // (records * RECORD_BYTES)
    work = load.Blocks([frame] * batches, 1)
    figure = Figure(
        "restart, 1 GiB active segment, kill -9 (floor: read and checksum)",
        "s",
        [],
        [],
        at_least="3",
        aim="1",
        is_ratio=False,
    )
    broker = BrokerProcess(directory / "restart", topic=TOPIC, segment_bytes=2**31 - 1)
    broker.start()
    load.pipeline(broker.port, work, 8, load.ok_counter())
    segment = next((directory / "restart").glob("bench-0/*.meta"))
    for _ in range(rounds):
        broker.kill()
        started = time.perf_counter()
        command = [sys.executable, "-m", "bench.floor.restart", str(segment)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        figure.floor.append(time.perf_counter() - started)
        figure.broker.append(broker.start())
    broker.stop()
    return figure


def idle_memory(directory: Path, rounds: int) -> Figure:
    """Resident memory of a broker that has done nothing but start."""
    figure = Figure("idle broker, resident", "MiB", [], at_least="60")
    for index in range(rounds):
        with BrokerProcess(directory / f"idle-{index}", topic=TOPIC) as broker:
            time.sleep(1.0)
            figure.broker.append(resident_bytes(broker.pid) / MIB)
    return figure


def idle_cpu(directory: Path, rounds: int) -> Figure:
    """CPU time of an idle broker, as a share of one core."""
    seconds = 5.0
    figure = Figure("idle broker, CPU", "% of a core", [], at_least="0")
    with BrokerProcess(directory / "idle-cpu", topic=TOPIC) as broker:
        time.sleep(2.0)
        for _ in range(rounds):
            before = cpu_seconds(broker.pid)
            time.sleep(seconds)
            figure.broker.append((cpu_seconds(broker.pid) - before) / seconds * 100)
    return figure


FIGURES: dict[str, Callable[[Path, int], Figure]] = {
    "puts": puts_pipelined,
    "puts-deep": puts_deep,
    "puts-unchecked": puts_unchecked,
    "puts-any": puts_any,
    "closed-loop": closed_loop,
    "mput": mput,
    "alone": put_alone,
    "gets": gets,
    "restart": restart,
    "memory": idle_memory,
    "cpu": idle_cpu,
}
