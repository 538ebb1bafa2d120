"""The figures of what reads an archive: audit and replay, on two local cores."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from bench.figures import TOPIC, Figure
from bench.spark_archive import MANY, filled, seconds_to_archive
from bench.spark_figures import rows_per_second, session
from bench.spark_wire import seconds_to_write
from metaq.spark.data_source import register
from metaq.spark.jobs.archive_store import read_archive
from metaq.spark.jobs.audit import audit_archive
from metaq.spark.jobs.replay import replay

PARTITIONS = 4
WARM_UPS = 1


def audit(directory: Path, rounds: int) -> Figure:
    """Compare a topic with its archive; the floor looks at every value of both."""
    figure = Figure(
        "Spark: audit of 2,000,000 messages of 200 B (floor: both sides read)",
        "rows/s",
        [],
        [],
        at_least="250,000",
        aim="0.9",
    )
    with archived(directory) as (spark, wire, path):
        source = spark.read.format("metaq").options(**wire, subscribe=TOPIC).load()
        target = read_archive(spark, path)
        for sample in range(-WARM_UPS, rounds):
            one, other = rows_per_second(source, MANY), rows_per_second(target, MANY)
            started = time.perf_counter()
            found = audit_archive(spark, path, wire, [TOPIC])
            seconds = time.perf_counter() - started
            assert found.is_right, found
            assert found.source_count == found.target_count == MANY, found
            if sample >= 0:
                figure.floor.append(1 / (1 / one + 1 / other))
                figure.broker.append(MANY / seconds)
    return figure


def put_back(directory: Path, rounds: int) -> Figure:
    """Replay an archive; the floor writes its values in no order."""
    figure = Figure(
        "Spark: replay of 2,000,000 messages of 200 B (floor: values in no order)",
        "rows/s",
        [],
        [],
        at_least="250,000",
        aim="0.6",
    )
    with archived(directory) as (spark, wire, path):
        values = read_archive(spark, path).select("value")
        options = {**wire, "topic": TOPIC}
        for sample in range(-WARM_UPS, rounds):
            floor = MANY / seconds_to_write(values, "metaq", options)
            started = time.perf_counter()
            done = replay(spark, path, options, keeps_partitions=True)
            seconds = time.perf_counter() - started
            assert done.message_count == MANY, done
            if sample >= 0:
                figure.floor.append(floor)
                figure.broker.append(MANY / seconds)
    return figure


@contextmanager
def archived(directory: Path) -> Iterator[tuple[SparkSession, dict[str, str], str]]:
    """Run a session beside a broker whose topic is archived."""
    with (
        filled(directory, MANY, partition_count=PARTITIONS) as broker,
        session() as spark,
    ):
        register(spark)
        seconds_to_archive(spark, broker.port, directory / "archive", MANY)
        wire = {"brokers": f"127.0.0.1:{broker.port}"}
        yield spark, wire, str(directory / "archive")
