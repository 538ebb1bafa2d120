"""A job for executors in processes of their own: `... ZOOKEEPER TOPIC COUNT`.

It writes, loses a task that had written already, reads everything back, and prints one
line of JSON. Run by `test_executors.py`.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

ROOT = Path(__file__).parents[2]


def die_once(rows: Iterator[tuple[bytes]]) -> Iterator[tuple[bytes]]:
    """Hand rows on; the first run of the first task fails when all were taken."""
    yield from rows
    task = TaskContext.get()
    assert task is not None
    if task.partitionId() == 0 and task.attemptNumber() == 0:
        raise RuntimeError("this run is to fail")


def main(zookeeper: str, topic: str, count: int) -> None:
    spark = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .config("spark.pyspark.python", sys.executable)
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "1000")
        .getOrCreate()
    )
    numbers = spark.sparkContext.parallelize(range(count), 2)
    rows = numbers.map(lambda n: (b"message %07d" % n,)).mapPartitions(die_once)
    spark.createDataFrame(rows, "value binary").write.format("metaq").options(
        zookeeper=zookeeper, topic=topic, batchBytes=50_000
    ).mode("append").save()
    found = (
        spark.read.format("metaq")
        .options(zookeeper=zookeeper, subscribe=topic, minPartitions=6)
        .load()
    )
    number = sf.substring(sf.col("value").cast("string"), 9, 7).cast("long")
    row = found.agg(
        sf.count("*").alias("rows"),
        sf.count_distinct(number).alias("distinct"),
        sf.sum(number).alias("sum"),
        sf.count_distinct("broker_id").alias("brokers"),
    ).collect()[0]
    print(json.dumps({**row.asDict(), "tasks": found.rdd.getNumPartitions()}))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
