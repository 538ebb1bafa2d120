"""Figures of Spark: rows through a query on two local cores."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from bench import load
from bench.figures import TOPIC, Turns, WithLines, batches
from bench.floor.spark_rows import FloorSource
from bench.lines import Payloads
from bench.processes import ROOT
from metaq.spark.data_source import register
from metaq.spark.rows import BATCH_RECORDS_MAX
from metaq.spark.segments.segment_options import BYTES_PER_PARTITION
from tests.rigs.process import BrokerProcess

WARM_UPS = 3
"""Queries that warm up a session, because the first ones compile code."""


@contextmanager
def session(settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Run a session on two cores, whose Python workers import this checkout.

    Args:
        settings: further settings of Spark.
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
    """Run a query that reads every byte of every value; return rows per second."""
    started = time.perf_counter()
    (row,) = frame.selectExpr("count(*)", "sum(crc32(value))").collect()
    seconds = time.perf_counter() - started
    assert row[0] == count, (row, count)
    return count / seconds


def write_rows(directory: Path, payloads: Payloads, count: int) -> str:
    """Write `count` messages as a column `value`, for two tasks; return the path."""
    table = pa.table({"value": payloads.repeat(count // 2)})
    path = directory / "rows"
    path.mkdir()
    for number in range(2):
        pq.write_table(table, path / f"{number}.parquet", use_dictionary=False)
    return str(path)


def segments(directory: Path, payloads: Payloads) -> Turns:
    """Read a data directory from disk into a count and a checksum over value."""
    size, count = 4000, 500
    with BrokerProcess(directory / "segments", topic=TOPIC) as broker:
        work = batches(payloads, size, count)
        load.pipeline(broker.port, work, 8, load.ok_counter())
    with session() as spark:
        register(spark)
        total_bytes = sum(map(len, work.blocks))
        prepared, prepared_count = prepare(
            spark, payloads, size * count, -(-total_bytes // BYTES_PER_PARTITION)
        )
        stored = spark.read.format("metaq-segments").load(str(directory / "segments"))
        while True:
            plain = rows_per_second(prepared, prepared_count)
            yield plain, rows_per_second(stored, size * count)


def prepare(
    spark: SparkSession, payloads: Payloads, count: int, tasks: int
) -> tuple[DataFrame, int]:
    """Return a frame of prepared batches with values of the mean size, and its rows."""
    spark.dataSource.register(FloorSource)
    each = -(-count // (tasks * BATCH_RECORDS_MAX))
    size = round(payloads.mean_bytes)
    source = spark.read.format(FloorSource.name())
    frame = source.options(tasks=tasks, batches=each, bytes=size).load()
    return frame, tasks * each * BATCH_RECORDS_MAX


FIGURES = {
    "spark-segments": WithLines(
        segments,
        "Spark: segments from disk (floor: prepared batches)",
        "rows/s",
        "800,000",
        "1,500,000",
        warm_ups=WARM_UPS,
    ),
}
