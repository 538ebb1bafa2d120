"""The figures of the Spark side: rows through a query on two local cores."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from bench import load
from bench.figures import TOPIC, Figure
from bench.floor.spark_rows import FloorSource
from bench.processes import ROOT
from metaq.spark.data_source import register
from metaq.spark.rows import BATCH_RECORDS_MAX
from metaq.spark.segments.segment_options import BYTES_PER_PARTITION
from tests.rigs.process import BrokerProcess

VALUE = b"x" * 200
RECORD_BYTES = 20 + len(VALUE)
WARM_UPS = 3
"""The first queries of a session compile; that is not what is measured."""


@contextmanager
def session(settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Run a session on two cores, whose Python workers find this checkout.

    Args:
        settings: Spark's own, beside those of all figures.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config(map=settings or {})
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def rows_per_second(frame: DataFrame, count: int) -> float:
    """Run a query that looks at every byte of every value."""
    started = time.perf_counter()
    (row,) = frame.selectExpr("count(*)", "sum(crc32(value))").collect()
    seconds = time.perf_counter() - started
    assert row[0] == count, (row, count)
    return count / seconds


def take_samples(
    figure: Figure, rounds: int, floor: Callable[[], float], ours: Callable[[], float]
) -> None:
    """Measure the floor and ours by turns, and keep what comes behind the warm-ups."""
    for sample in range(-WARM_UPS, rounds):
        floor_rate, rate = floor(), ours()
        if sample >= 0:
            figure.floor.append(floor_rate)
            figure.broker.append(rate)


def segments(directory: Path, rounds: int) -> Figure:
    """Read a data directory from disk into a count and a checksum over value."""
    records, batches = 4000, 750
    count = records * batches
    frame = load.mput_frame(TOPIC, VALUE, records, 1)
    figure = Figure(
        "Spark: segments from disk, 200 B values (floor: prepared batches)",
        "rows/s",
        [],
        [],
        at_least="800,000",
        aim="1,500,000",
    )
    with BrokerProcess(directory / "segments", topic=TOPIC) as broker:
        work = load.Blocks([frame] * batches, 1)
        load.pipeline(broker.port, work, 8, load.ok_counter())
    with session() as spark:
        register(spark)
        spark.dataSource.register(FloorSource)
        tasks = -(-count * RECORD_BYTES // BYTES_PER_PARTITION)
        each = -(-count // (tasks * BATCH_RECORDS_MAX))
        prepared = (
            spark.read.format(FloorSource.name())
            .options(tasks=tasks, batches=each, bytes=len(VALUE))
            .load()
        )
        stored = spark.read.format("metaq-segments").load(str(directory / "segments"))
        floor_count = tasks * each * BATCH_RECORDS_MAX
        take_samples(
            figure,
            rounds,
            lambda: rows_per_second(prepared, floor_count),
            lambda: rows_per_second(stored, count),
        )
    return figure
