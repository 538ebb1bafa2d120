"""Figures of audit and replay of an archive, on two local cores."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from bench.figures import TOPIC, Turns, WithLines
from bench.lines import Payloads
from bench.spark_archive import MANY, filled, seconds_to_archive
from bench.spark_figures import rows_per_second, session
from bench.spark_wire import seconds_to_write
from metaq.pipeline.jobs.archive_store import read_archive
from metaq.pipeline.jobs.audit import audit_archive
from metaq.pipeline.jobs.replay import replay
from metaq.spark.data_source import register

PARTITIONS = 4


def audit(directory: Path, payloads: Payloads) -> Turns:
    """Compare a topic with its archive; the floor reads every value of both."""
    with archived(directory, payloads) as (spark, wire, path):
        source = spark.read.format("metaq").options(**wire, subscribe=TOPIC).load()
        target = read_archive(spark, path)
        while True:
            one, other = rows_per_second(source, MANY), rows_per_second(target, MANY)
            started = time.perf_counter()
            found = audit_archive(spark, path, wire, [TOPIC])
            seconds = time.perf_counter() - started
            assert found.is_right, found
            assert found.source_count == found.target_count == MANY, found
            yield 1 / (1 / one + 1 / other), MANY / seconds


def put_back(directory: Path, payloads: Payloads) -> Turns:
    """Replay an archive; the floor writes its values without an order."""
    with archived(directory, payloads) as (spark, wire, path):
        values = read_archive(spark, path).select("value")
        options = {**wire, "topic": TOPIC}
        while True:
            floor = MANY / seconds_to_write(values, "metaq", options)
            started = time.perf_counter()
            done = replay(spark, path, options, keeps_partitions=True)
            seconds = time.perf_counter() - started
            assert done.message_count == MANY, done
            yield floor, MANY / seconds


@contextmanager
def archived(
    directory: Path, payloads: Payloads
) -> Iterator[tuple[SparkSession, dict[str, str], str]]:
    """Run a session and a broker whose topic is archived."""
    with (
        filled(directory, payloads, MANY, partition_count=PARTITIONS) as broker,
        session() as spark,
    ):
        register(spark)
        seconds_to_archive(spark, broker.port, directory / "archive", MANY)
        wire = {"brokers": f"127.0.0.1:{broker.port}"}
        yield spark, wire, str(directory / "archive")


FIGURES = {
    "spark-audit": WithLines(
        audit,
        "Spark: audit of 2,000,000 messages (floor: both sides read)",
        "rows/s",
        "250,000",
        "0.9",
    ),
    "spark-replay": WithLines(
        put_back,
        "Spark: replay of 2,000,000 messages (floor: values in no order)",
        "rows/s",
        "250,000",
        "0.6",
    ),
}
