"""The figures of the archive: a topic on its way into a table, on two local cores."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from bench import load
from bench.figures import TOPIC, Figure
from bench.processes import ROOT
from bench.spark_figures import VALUE, session
from metaq.spark.jobs.archive import archive
from metaq.spark.register import register
from tests.rigs.process import BrokerProcess

FEW, MANY = 10_000, 2_000_000
RECORDS = 2000
TASKS = 4


def first(directory: Path, rounds: int) -> Figure:
    """Archive 10,000 messages in a session that has just started."""
    figure = Figure(
        "Spark: archive of 10,000 messages, session just started",
        "s",
        [],
        at_least="10",
        aim="6",
    )
    with filled(directory, FEW) as broker:
        for number in range(rounds):
            place = str(directory / f"archive-{number}")
            words = [sys.executable, "-m", __name__, str(broker.port), place]
            done = subprocess.run(
                words, cwd=ROOT, check=True, capture_output=True, text=True
            )
            figure.broker.append(float(done.stdout.split()[-1]))
    return figure


def warm(directory: Path, rounds: int) -> Figure:
    """The same behind others like it."""
    figure = Figure(
        "Spark: archive of 10,000 messages, session warm",
        "s",
        [],
        at_least="3",
        aim="1.5",
    )
    figure.broker += timed(directory, FEW, rounds, warm_ups=2)
    return figure


def rate(directory: Path, rounds: int) -> Figure:
    """Archive 2,000,000 messages of 200 bytes."""
    figure = Figure(
        "Spark: archive of 2,000,000 messages of 200 B",
        "rows/s",
        [],
        at_least="350,000",
        aim="800,000",
    )
    seconds = timed(directory, MANY, rounds, warm_ups=1)
    figure.broker += [MANY / each for each in seconds]
    return figure


def timed(directory: Path, count: int, rounds: int, *, warm_ups: int) -> list[float]:
    """Archive so many messages again and again; return the seconds of each round."""
    with filled(directory, count) as broker, session() as spark:
        register(spark)
        seconds = [
            seconds_to_archive(
                spark, broker.port, directory / f"archive{number}", count
            )
            for number in range(warm_ups + rounds)
        ]
    return seconds[warm_ups:]


@contextmanager
def filled(directory: Path, count: int) -> Iterator[BrokerProcess]:
    """Run a broker that has so many messages."""
    frame = load.mput_frame(TOPIC, VALUE, RECORDS, 1)
    with BrokerProcess(directory / "data", topic=TOPIC) as broker:
        work = load.Blocks([frame] * (count // RECORDS), 1)
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


def main(port: str, place: str) -> None:
    with session() as spark:
        register(spark)
        print(seconds_to_archive(spark, int(port), Path(place), FEW), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
