"""Figures of archiving: a topic into a table, on two local cores."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count as counter
from pathlib import Path

from pyspark.sql import SparkSession

from bench import load
from bench.figures import TOPIC, Turns, WithLines, batches
from bench.lines import Payloads
from bench.processes import ROOT
from bench.spark_figures import session
from metaq.pipeline.jobs.archive import archive
from metaq.spark.data_source import register
from tests.rigs.process import BrokerProcess

FEW, QUARTER, MANY = 10_000, 500_000, 2_000_000
RECORDS = 2000
TASKS = 4
LOOK_S = 0.2


def first(directory: Path, payloads: Payloads) -> Turns:
    """Archive 10,000 messages in a session that has just started."""
    with filled(directory, payloads, FEW) as broker:
        for number in counter():
            place = str(directory / f"archive-{number}")
            words = [sys.executable, "-m", __name__, str(broker.port), place]
            done = subprocess.run(
                words, cwd=ROOT, check=True, capture_output=True, text=True
            )
            yield None, float(done.stdout.split()[-1])


def warm(directory: Path, payloads: Payloads) -> Turns:
    """Archive 10,000 messages in a warm session."""
    for seconds in timed(directory, payloads, FEW):
        yield None, seconds


def rate(directory: Path, payloads: Payloads) -> Turns:
    """Archive 2,000,000 messages."""
    for seconds in timed(directory, payloads, MANY):
        yield None, MANY / seconds


def timed(directory: Path, payloads: Payloads, count: int) -> Iterator[float]:
    """Archive `count` messages repeatedly; yield the seconds of each round."""
    with filled(directory, payloads, count) as broker, session() as spark:
        register(spark)
        for number in counter():
            place = directory / f"archive{number}"
            yield seconds_to_archive(spark, broker.port, place, count)


def memory(directory: Path, payloads: Payloads) -> Turns:
    """Memory for an archive of 2,000,000 messages; the floor is a quarter of them.

    Peak of all processes of Spark together, without the broker, over the whole run with
    the start of the session.
    """
    (directory / "few").mkdir()
    with (
        filled(directory / "few", payloads, QUARTER) as few,
        filled(directory, payloads, MANY) as many,
    ):
        for turn in counter():
            plain, other = (
                peak_mib(
                    [
                        *(sys.executable, "-m", __name__, str(broker.port)),
                        *(str(directory / f"{number}-{turn}"), str(number)),
                    ]
                )
                for broker, number in ((few, QUARTER), (many, MANY))
            )
            yield plain, other


def peak_mib(words: list[str]) -> float:
    """Run a command; return the peak memory of its processes together, in MiB."""
    peak_bytes = 0
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as running:
        while running.poll() is None:
            family = descendants(running.pid)
            peak_bytes = max(peak_bytes, sum(map(resident_bytes, family)))
            time.sleep(LOOK_S)
    assert running.returncode == 0, words
    return peak_bytes / (1 << 20)


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def resident_bytes(pid: int) -> int:
    """Return the proportional set size of a process: shared pages count in part."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


@contextmanager
def filled(
    directory: Path, payloads: Payloads, count: int, *, partition_count: int = 1
) -> Iterator[BrokerProcess]:
    """Run a broker with `count` messages, spread over its partitions."""
    data = directory / "data"
    with BrokerProcess(data, topic=TOPIC, partition_count=partition_count) as broker:
        for number in range(partition_count):
            each = count // partition_count // RECORDS
            work = batches(payloads, RECORDS, each, number)
            load.pipeline(broker.port, work, 8, load.ok_counter())
        yield broker


def seconds_to_archive(
    spark: SparkSession, port: int, place: Path, count: int
) -> float:
    options = {
        "brokers": f"127.0.0.1:{port}",
        "subscribe": TOPIC,
        "minPartitions": str(TASKS),
    }
    started = time.perf_counter()
    done = archive(spark, str(place), options)
    seconds = time.perf_counter() - started
    assert done.message_count == done.total_message_count == count, done
    return seconds


def main(port: str, place: str, count: str = str(FEW)) -> None:
    with session() as spark:
        register(spark)
        seconds = seconds_to_archive(spark, int(port), Path(place), int(count))
        print(seconds, flush=True)


FIGURES = {
    "spark-archive-first": WithLines(
        first,
        "Spark: archive of 10,000 messages, session just started",
        "s",
        "10",
        "6",
        warm_ups=0,
    ),
    "spark-archive-warm": WithLines(
        warm,
        "Spark: archive of 10,000 messages, session warm",
        "s",
        "3",
        "1.5",
        warm_ups=2,
    ),
    "spark-archive": WithLines(
        rate, "Spark: archive of 2,000,000 messages", "rows/s", "350,000", "800,000"
    ),
    "spark-archive-memory": WithLines(
        memory,
        "Spark: memory for an archive of 2,000,000 messages (floor: 500,000)",
        "MiB",
        "floor",
        "floor",
        warm_ups=0,
    ),
}


if __name__ == "__main__":
    main(*sys.argv[1:])
