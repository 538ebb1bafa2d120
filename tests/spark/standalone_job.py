"""A job for a standalone cluster: `... MASTER ZOOKEEPER ZIP DIRECTORY COUNT WORDS`.

It writes a topic, loses a task that had written already, reads everything back, copies
it by a stream exactly once, archives the copy, and prints one line of JSON. Then it is
the command `metaq WORDS`, if there are any: its session is another one, in the Java
that is there. Run by `test_standalone.py`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

import metaq.spark
from metaq.cli.main import main as command
from metaq.pipeline.jobs.archive import archive
from metaq.pipeline.jobs.archive_store import read_archive

TASKS = 4
READS = 6


def die_once(rows: Iterator[tuple[bytes, str]]) -> Iterator[tuple[bytes, str]]:
    """Hand rows on; the first run of the first task fails when all were taken."""
    yield from rows
    task = TaskContext.get()
    assert task is not None
    if task.partitionId() == 0 and task.attemptNumber() == 0:
        raise RuntimeError("this run is to fail")


def reader_file(_rows: Iterator[int]) -> Iterator[str]:
    """Say where an executor has this package from."""
    import metaq.spark.source.read_task as reader

    yield reader.__file__


def summed(frame: DataFrame, *more: Column) -> dict[str, Any]:
    """Return how many rows there are, how many values, and the sum of their numbers.

    Args:
        frame: with the messages in a column `value`.
        more: what else to aggregate.
    """
    number = sf.substring(sf.col("value").cast("string"), 9, 7).cast("long")
    row = frame.agg(
        sf.count("*").alias("rows"),
        sf.count_distinct(number).alias("distinct"),
        sf.sum(number).alias("sum"),
        *more,
    ).collect()[0]
    return row.asDict()


def main(master: str, zookeeper: str, zipped: str, place: Path, count: int) -> None:
    spark = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        # Of the Java that the command finds, as it starts its own.
        .config("spark.driver.extraJavaOptions", "-Dderby.stream.error.file=/dev/null")
        .config("spark.driver.memory", "512m")
        .config("spark.executor.memory", "512m")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "1000")
        .config("spark.pyspark.python", sys.executable)
        .config("spark.submit.pyFiles", zipped)
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    metaq.spark.register(spark)
    wire = {"zookeeper": zookeeper}
    numbers = spark.sparkContext.parallelize(range(count), TASKS)
    rows = numbers.map(lambda n: (b"message %07d" % n, str(n))).mapPartitions(die_once)
    sink = spark.createDataFrame(rows, "value binary, key string").write.format("metaq")
    sink.options(**wire, topic="many", batchBytes=50_000).mode("append").save()
    source = {**wire, "subscribe": "many", "minPartitions": READS}
    read = spark.read.format("metaq").options(**source).load()
    found: dict[str, Any] = {
        "batch": summed(read, sf.count_distinct("broker_id").alias("brokers")),
        "tasks": read.rdd.getNumPartitions(),
    }
    query = (
        spark.readStream.format("metaq")
        .options(**source, startingOffsets="earliest", maxOffsetsPerTrigger=count // 2)
        .load()
        .select("key", "value")
        .writeStream.format("metaq")
        .options(**wire, topic="copy", delivery="exactly-once")
        .option("checkpointLocation", (place / "checkpoint").as_uri())
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found["batches"] = sum(p["numInputRows"] > 0 for p in query.recentProgress)
    archive(spark, str(place / "archive"), {**wire, "subscribe": "copy"})
    found["archive"] = summed(read_archive(spark, str(place / "archive")))
    tasks = spark.sparkContext.parallelize(range(TASKS), TASKS)
    found["files"] = tasks.mapPartitions(reader_file).collect()
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]), int(sys.argv[5]))
    if words := sys.argv[6:]:
        command(words)
