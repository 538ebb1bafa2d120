"""The figures: each measures floor and broker in turn and keeps all samples.

A figure is a function of (directory, rounds) that returns a `Figure`; a figure of
messages is a `WithLines`, which also takes the lines. Rounds alternate between floor
and broker, and between real lines and one length, so that all see the same noise.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count as counter
from pathlib import Path
from typing import Any

from bench import load
from bench.lines import COUNT, Payloads
from bench.processes import ROOT, cpu_seconds, floor, resident_bytes
from tests.rigs.process import BrokerProcess

PAYLOAD = b"x" * 128
TOPIC = "bench"
RECORD_BYTES = 20 + len(PAYLOAD)
PUT_REPLY_BYTES = 56
PUTS = 50 * COUNT
LOOP_PUTS = {1: 5000, 4: 15_000, 16: 40_000, 64: 80_000}
"""Number of connections of a closed loop → number of puts."""
PER_BLOCK = 250
BLOCK_SIZES = 320
"""Number of blocks after which their sizes repeat, at most."""
BATCHES_MADE = 8
MORE_TOPICS = [f"{TOPIC}-{number}" for number in range(16)]
PARTITIONS = 10
"""Partitions, one per round; one digit keeps frames of equal size."""
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
    """Whether broker / floor is meaningful (rates)."""
    one_length: list[float] = field(default_factory=list)
    """Samples of the broker with messages of one length, their mean."""
    one_length_floor: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """Median of the rounds' ratios, broker over floor; None without a floor."""
        if not self.floor or not self.is_ratio:
            return None
        pairs = zip(self.broker, self.floor, strict=True)
        return statistics.median(b / f for b, f in pairs)


Turns = Generator[tuple[float | None, float]]
"""Samples of floor (None: no floor) and broker, one pair per round."""


@dataclass(frozen=True, slots=True)
class WithLines:
    """A figure of messages, measured with real lines and with one length in turn.

    Each set has its own brokers and files. `turns` yields the samples of one round
    after the other; the first `warm_ups` rounds are discarded.
    """

    turns: Callable[[Path, Payloads], Turns]
    name: str
    unit: str
    at_least: str = ""
    aim: str = ""
    is_ratio: bool = True
    warm_ups: int = 1

    def __call__(self, directory: Path, rounds: int, lines: Payloads) -> Figure:
        """Measure both sets in turn."""
        figure = Figure(
            self.name, self.unit, [], [], self.at_least, self.aim, self.is_ratio
        )
        sets = {
            "lines": (lines, figure.floor, figure.broker),
            "one-length": (
                lines.of_one_length(),
                figure.one_length_floor,
                figure.one_length,
            ),
        }
        with ExitStack() as stack:
            runs = []
            for name, (payloads, *samples) in sets.items():
                (directory / name).mkdir()
                turns = self.turns(directory / name, payloads)
                runs.append((stack.enter_context(closing(turns)), samples))
            for number in range(-self.warm_ups, rounds):
                for turns, samples in runs:
                    for value, kept in zip(next(turns), samples, strict=True):
                        if number >= 0 and value is not None:
                            kept.append(value)
        return figure


def put_frames(payloads: Payloads, *, topic: str = TOPIC, **form: Any) -> list[bytes]:
    """Return a put of each payload; `form` is passed to `load.put_frame`."""
    return [
        load.put_frame(topic, one, i, **form) for i, one in enumerate(payloads.data)
    ]


def in_blocks(
    frames: list[bytes], count: int, per_block: int = PER_BLOCK
) -> load.Blocks:
    """Return `count` puts as blocks; `count` is a multiple of `len(frames)`."""
    firsts = range(0, len(frames), per_block)
    blocks = [b"".join(frames[first : first + per_block]) for first in firsts]
    return load.Blocks(blocks * (count // len(frames)), per_block)


def batches(
    payloads: Payloads,
    size: int,
    count: int,
    partition: int = 0,
    *,
    topic: str = TOPIC,
) -> load.Blocks:
    """Return `count` batches of `size` records: `BATCHES_MADE` different ones."""
    data = payloads.repeat(size * BATCHES_MADE)
    firsts = range(0, len(data), size)
    made = [
        load.batch_frame(topic, data[first : first + size], 1, partition)
        for first in firsts
    ]
    return load.Blocks((made * (-(-count // len(made))))[:count], 1)


def puts(directory: Path, payloads: Payloads, *, in_flight: int) -> Turns:
    """Single puts over one connection."""
    per_block = min(PER_BLOCK, in_flight // 4)

    def work(partition: int) -> load.Blocks:
        return in_blocks(put_frames(payloads, partition=partition), PUTS, per_block)

    return _pipeline_in_turn(directory, work, in_flight, PUTS)


def puts_of_a_form(directory: Path, payloads: Payloads, **form: Any) -> Turns:
    """Pipelined puts of a form; the floor is the broker with plain puts."""

    def work(partition: int) -> load.Blocks:
        fields = {"partition": partition, **form}
        return in_blocks(put_frames(payloads, **fields), PUTS)

    return _beside_plain_puts(directory, payloads, work)


def puts_to_topics(directory: Path, payloads: Payloads) -> Turns:
    """Pipelined puts to 16 topics in turn; the floor is the broker with one topic."""

    def work(partition: int) -> load.Blocks:
        frames = [
            load.put_frame(MORE_TOPICS[i % len(MORE_TOPICS)], one, i, partition)
            for i, one in enumerate(payloads.data)
        ]
        return in_blocks(frames, PUTS)

    return _beside_plain_puts(directory, payloads, work)


def _beside_plain_puts(
    directory: Path, payloads: Payloads, work: Callable[[int], load.Blocks]
) -> Turns:
    """Send plain puts and others in turn, to different partitions."""
    with BrokerProcess(
        directory / "puts",
        topic=TOPIC,
        partition_count=PARTITIONS,
        more_topics=MORE_TOPICS,
    ) as broker:
        for number in counter():
            first = 2 * number % PARTITIONS
            frames = put_frames(payloads, partition=first)
            plain, other = (
                PUTS / load.pipeline(broker.port, blocks, 1000, load.ok_counter())
                for blocks in (in_blocks(frames, PUTS), work(first + 1))
            )
            yield plain, other


def closed_loop(directory: Path, payloads: Payloads, *, connections: int) -> Turns:
    """Clients with one put under way each, as most applications have."""
    frames, count = put_frames(payloads), LOOP_PUTS[connections]
    with (
        BrokerProcess(directory / "closed", topic=TOPIC) as broker,
        floor("group", PUT_REPLY_BYTES, directory) as floor_port,
    ):
        while True:
            plain, other = (
                count / load.closed_loop(port, frames, connections, count)
                for port in (floor_port, broker.port)
            )
            yield plain, other


def processor(directory: Path, payloads: Payloads, *, connections: int) -> Turns:
    """Processor time of the broker per put, in a closed loop."""
    frames, count = put_frames(payloads), LOOP_PUTS[connections]
    with BrokerProcess(directory / "closed", topic=TOPIC) as broker:
        while True:
            before_s = cpu_seconds(broker.pid)
            load.closed_loop(broker.port, frames, connections, count)
            yield None, (cpu_seconds(broker.pid) - before_s) / count * 1e6


def mput(directory: Path, payloads: Payloads) -> Turns:
    """Batches of 4,000 records each, eight in flight."""
    size, count = 4000, 500

    def work(partition: int) -> load.Blocks:
        return batches(payloads, size, count, partition)

    return _pipeline_in_turn(directory, work, 8, size * count)


def _pipeline_in_turn(
    directory: Path, work: Callable[[int], load.Blocks], in_flight: int, count: int
) -> Turns:
    """Send the same load to floor and broker in turn.

    Each round writes to new files, because the time of a sync depends on the number
    of extents that ext4 has given to a file, and so on its size.

    Args:
        directory: parent of the broker's data directory.
        work: returns the load for a partition.
        in_flight: maximum number of unanswered frames.
        count: puts or records in the load.
    """
    first = work(0)
    sizes = [len(block) for block in first.blocks[:BLOCK_SIZES]]
    with (
        BrokerProcess(
            directory / "puts", topic=TOPIC, partition_count=PARTITIONS
        ) as broker,
        floor(
            "server", first.per_block, PUT_REPLY_BYTES, directory, *sizes
        ) as floor_port,
    ):
        for number in counter():
            blocks = work(number % PARTITIONS)
            plain, other = (
                count / load.pipeline(port, blocks, in_flight, load.ok_counter())
                for port in (floor_port, broker.port)
            )
            yield plain, other


def put_alone(directory: Path, payloads: Payloads) -> Turns:
    """One put at a time, p50, beside a write and sync alone."""
    count, frames = 1000, put_frames(payloads)
    with BrokerProcess(directory / "alone", topic=TOPIC) as broker:
        while True:
            synced = write_and_sync(directory, payloads, count)
            samples = load.one_at_a_time(broker.port, frames, count)
            yield synced, statistics.median(samples) * 1e3


def write_and_sync(directory: Path, payloads: Payloads, count: int) -> float:
    """Write a record of the mean size and sync, `count` times; return p50 in ms."""
    size = load.HEADER.size + round(payloads.mean_bytes)
    samples = load.write_and_sync(directory / "sync", size, count)
    return statistics.median(samples) * 1e3


def session_memory(directory: Path, rounds: int) -> Figure:
    """Memory of a session after puts of 4,000 lengths; of one length for the floor."""
    sessions, lengths = 32, 4000
    figure = Figure(
        f"session after puts of {lengths:,} lengths (floor: of one)",
        "KiB",
        [],
        [],
        at_least="64",
        aim="16",
        is_ratio=False,
    )
    sides = (
        ([lengths // 2] * lengths, figure.floor),
        (range(1, lengths + 1), figure.broker),
    )
    for number in range(rounds):
        for sizes, samples in sides:
            frames = [load.put_frame(TOPIC, bytes(n), i) for i, n in enumerate(sizes)]
            work = in_blocks(frames, lengths)
            data = directory / f"{number}-{samples is figure.broker}"
            with BrokerProcess(data, topic=TOPIC) as broker, ExitStack() as stack:
                load.pipeline(broker.port, work, 1000, load.ok_counter())
                before = resident_bytes(broker.pid)
                for _ in range(sessions):
                    sock = stack.enter_context(load.connect(broker.port))
                    load.pipeline_over(sock, work, 1000, load.ok_counter())
                samples.append((resident_bytes(broker.pid) - before) / sessions / 1024)
    return figure


def gets(directory: Path, payloads: Payloads) -> Turns:
    """Gets of 1 MiB slices from page cache, one at a time."""
    slices, passes = 200, 10
    count = slices * passes
    size = int(MIB / (load.HEADER.size + payloads.mean_bytes)) + 100
    work = batches(payloads, size, slices + 2)

    def request(index: int) -> bytes:
        offset = index % slices * MIB
        return f"get bench g 0 {offset:010d} {MIB} 1\r\n".encode()

    with BrokerProcess(directory / "gets", topic=TOPIC) as broker:
        load.pipeline(broker.port, work, 8, load.ok_counter())
        segment = next((directory / "gets").glob("bench-0/*.meta"))
        with floor("gets", len(request(0)), 24, MIB, segment) as floor_port:
            while True:
                plain, other = (
                    count / load.read_slices(port, request, MIB, count)
                    for port in (floor_port, broker.port)
                )
                yield plain, other


def restart(directory: Path, payloads: Payloads) -> Turns:
    """Start on a 1 GiB active segment after kill -9, until the first reply."""
    size = 6000
    batch_bytes = size * (load.HEADER.size + payloads.mean_bytes)
    work = batches(payloads, size, int(GIB / batch_bytes))
    broker = BrokerProcess(directory / "restart", topic=TOPIC, segment_bytes=2**31 - 1)
    with broker:
        load.pipeline(broker.port, work, 8, load.ok_counter())
        segment = next((directory / "restart").glob("bench-0/*.meta"))
        command = [sys.executable, "-m", "bench.floor.restart", str(segment)]
        while True:
            broker.kill()
            started = time.perf_counter()
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            plain = time.perf_counter() - started
            yield plain, broker.start()


def idle_memory(directory: Path, rounds: int) -> Figure:
    """Resident memory of a broker that has just started."""
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


def _puts(in_flight: int, at_least: str = "", aim: str = "") -> WithLines:
    name = f"pipelined puts, {in_flight:,} in flight"
    turns = partial(puts, in_flight=in_flight)
    return WithLines(turns, name, "puts/s", at_least, aim)


def _form(name: str, turns: Callable[[Path, Payloads], Turns]) -> WithLines:
    name = f"pipelined puts {name} (floor: plain puts)"
    return WithLines(turns, name, "puts/s", "0.6", "0.9")


def _loop(connections: int, at_least: str = "", aim: str = "") -> WithLines:
    name = f"puts, {connections} connections with one under way"
    turns = partial(closed_loop, connections=connections)
    return WithLines(turns, name, "puts/s", at_least, aim)


def _processor(connections: int) -> WithLines:
    name = f"broker's processor time for a put, {connections} connections"
    turns = partial(processor, connections=connections)
    return WithLines(turns, name, "µs", is_ratio=False)


FIGURES: dict[str, Callable[[Path, int], Figure] | WithLines] = {
    "puts-100": _puts(100),
    "puts": _puts(1000, "250,000 and 0.45", "450,000"),
    "puts-deep": _puts(4000),
    "puts-six-words": _form("of six words", partial(puts_of_a_form, checksum="")),
    "puts-unchecked": _form("without checksum", partial(puts_of_a_form, checksum=-1)),
    "puts-any": _form("to partition -1", partial(puts_of_a_form, partition=-1)),
    "puts-topics": _form("to 16 topics", puts_to_topics),
    "closed-loop-4": _loop(4),
    "closed-loop-16": _loop(16),
    "closed-loop": _loop(64, "0.5", "0.75"),
    "processor-1": _processor(1),
    "processor-64": _processor(64),
    "session-memory": session_memory,
    "mput": WithLines(
        mput,
        "mput, 4,000 records a batch",
        "records/s",
        "1,000,000 and 0.65",
        "2,000,000 and 0.8",
    ),
    "alone": WithLines(
        put_alone,
        "one put at a time, p50 (floor: write and sync)",
        "ms",
        "floor + 0.15 ms",
        "floor + 0.08 ms",
        is_ratio=False,
    ),
    "gets": WithLines(
        gets, "gets of 1 MiB slices from page cache", "MiB/s", "0.7", "0.9"
    ),
    "restart": WithLines(
        restart,
        "restart, 1 GiB active segment, kill -9 (floor: read and checksum)",
        "s",
        "3",
        "1",
        is_ratio=False,
    ),
    "memory": idle_memory,
    "cpu": idle_cpu,
}
