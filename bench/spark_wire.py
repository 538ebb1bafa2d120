"""Figures of Spark with brokers: reads, writes, micro-batches, idle queries."""

import re
import socket
import statistics
import time
from collections.abc import Callable
from itertools import count as counter
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming import StreamingQuery

from bench import load
from bench.figures import TOPIC, Figure, Turns, WithLines, batches
from bench.floor.spark_stream import FloorStream
from bench.lines import Payloads
from bench.spark_figures import WARM_UPS, prepare, rows_per_second, session, write_rows
from metaq.client import Client
from metaq.spark.data_source import register
from metaq.zk.embedded import EmbeddedZooKeeper
from tests.rigs.process import BrokerProcess

RECORDS = 4000
TASKS = 4
READ_BATCHES = 250
WRITTEN, KEYED, EXACTLY = 1_000_000, 500_000, 600_000
"""Rows of a write."""
STREAM_BATCHES = 30
IDLE_S = 20.0


def where(broker: BrokerProcess, **more: Any) -> dict[str, Any]:
    return {"brokers": f"127.0.0.1:{broker.port}", **more}


def register_all(spark: SparkSession) -> None:
    register(spark)
    spark.dataSource.register(FloorStream)


def read(directory: Path, payloads: Payloads) -> Turns:
    """Read a topic into a count and a checksum over value."""
    count = RECORDS * READ_BATCHES
    with (
        BrokerProcess(directory / "read", topic=TOPIC) as broker,
        session() as spark,
    ):
        work = batches(payloads, RECORDS, READ_BATCHES)
        load.pipeline(broker.port, work, 8, load.ok_counter())
        register_all(spark)
        prepared, prepared_count = prepare(spark, payloads, count, TASKS)
        stored = (
            spark.read.format("metaq")
            .options(**where(broker, subscribe=TOPIC, minPartitions=TASKS))
            .load()
        )
        while True:
            plain = rows_per_second(prepared, prepared_count)
            yield plain, rows_per_second(stored, count)


def write(directory: Path, payloads: Payloads) -> Turns:
    """Write rows to a topic of four partitions, at least once."""
    with (
        BrokerProcess(directory / "write", topic=TOPIC, partition_count=4) as broker,
        session() as spark,
    ):
        yield from write_in_turn(
            spark, directory, payloads, WRITTEN, where(broker, topic=TOPIC)
        )


def write_in_turn(
    spark: SparkSession,
    directory: Path,
    payloads: Payloads,
    count: int,
    options: dict[str, Any],
) -> Turns:
    """Write rows to a sink that counts bytes (floor), and to a broker."""
    register_all(spark)
    rows = spark.read.parquet(write_rows(directory, payloads, count))
    while True:
        plain = count / seconds_to_write(rows, FloorStream.name(), {})
        yield plain, count / seconds_to_write(rows, "metaq", options)


def write_keyed(directory: Path, payloads: Payloads) -> Turns:
    """Write rows with different keys; the floor is the same rows without keys."""
    with (
        BrokerProcess(directory / "keyed", topic=TOPIC, partition_count=4) as broker,
        session() as spark,
    ):
        register_all(spark)
        plain = spark.read.parquet(write_rows(directory, payloads, KEYED))
        key = sf.monotonically_increasing_id().cast("string").alias("key")
        keyed = plain.select("value", key)
        options = where(broker, topic=TOPIC)
        while True:
            without = KEYED / seconds_to_write(plain, "metaq", options)
            yield without, KEYED / seconds_to_write(keyed, "metaq", options)


def write_exactly_once(directory: Path, payloads: Payloads) -> Turns:
    """Write rows to a topic of four partitions, exactly once.

    As many as a broker holds in a transaction, at 200 bytes of overhead for each.
    """
    with (
        EmbeddedZooKeeper(directory / "zookeeper") as zookeeper,
        BrokerProcess(
            directory / "exact",
            topic=TOPIC,
            partition_count=4,
            arguments=registered_in(zookeeper),
        ),
        session() as spark,
    ):
        yield from write_in_turn(
            spark, directory, payloads, EXACTLY, exactly_once(zookeeper)
        )


def batch_exactly_once(directory: Path, payloads: Payloads) -> Turns:
    """A micro-batch of 1,000 rows, exactly once and at least once."""
    with (
        EmbeddedZooKeeper(directory / "zookeeper") as zookeeper,
        BrokerProcess(
            directory / "exact-batch",
            topic=TOPIC,
            partition_count=2,
            arguments=registered_in(zookeeper),
        ) as broker,
        session() as spark,
    ):
        register_all(spark)
        work = batches(payloads, RECORDS, STREAM_BATCHES // 3)
        load.pipeline(broker.port, work, 1, load.ok_counter())
        logs = log_stream(spark, broker, message_count=1000)
        exact = exactly_once(zookeeper)
        least = {**exact, "delivery": "at-least-once"}
        for number in counter():
            place = directory / f"checkpoint-{number}"
            plain = median_batch_ms(logs, "metaq", least, place / "least")
            yield plain, median_batch_ms(logs, "metaq", exact, place / "exact")


def log_stream(
    spark: SparkSession, broker: BrokerProcess, *, message_count: int
) -> DataFrame:
    """Return partition 0 as a stream of small batches, addressed to partition 1."""
    source = where(
        broker,
        assign=f'{{"{TOPIC}": ["7-0"]}}',
        startingOffsets="earliest",
        maxOffsetsPerTrigger=message_count,
    )
    logs = spark.readStream.format("metaq").options(**source).load()
    return logs.selectExpr("value", "'7-1' as partition")


def exactly_once(zookeeper: EmbeddedZooKeeper) -> dict[str, Any]:
    return {
        "zookeeper": zookeeper.address,
        "topic": TOPIC,
        "delivery": "exactly-once",
    }


def seconds_to_write(rows: DataFrame, name: str, options: dict[str, Any]) -> float:
    started = time.perf_counter()
    rows.write.format(name).options(**options).mode("append").save()
    return time.perf_counter() - started


def overhead(directory: Path, rounds: int) -> Figure:
    """Micro-batches of one row, topic to topic; the floor has nothing to do."""
    figure = Figure(
        "Spark: micro-batch of one row, topic to topic, p50 (floor: nothing to do)",
        "ms",
        [],
        [],
        at_least="floor + 60 ms",
        aim="floor + 25 ms",
        is_ratio=False,
    )
    with (
        BrokerProcess(directory / "overhead", topic=TOPIC, partition_count=2) as broker,
        session() as spark,
    ):
        register_all(spark)
        frame = load.mput_frame(TOPIC, b"x", RECORDS, 1)
        load.pipeline(broker.port, load.Blocks([frame], 1), 1, load.ok_counter())
        for number in range(rounds):
            place = directory / f"checkpoint-{number}"
            nothing = spark.readStream.format(FloorStream.name()).load()
            figure.floor.append(
                median_batch_ms(nothing, FloorStream.name(), {}, place / "floor")
            )
            logs = log_stream(spark, broker, message_count=1)
            figure.broker.append(
                median_batch_ms(
                    logs, "metaq", where(broker, topic=TOPIC), place / "metaq"
                )
            )
    return figure


def median_batch_ms(
    frame: DataFrame, name: str, options: dict[str, Any], checkpoint: Path
) -> float:
    """Return the median time of micro-batches, without the first third."""
    query = start(frame, name, options, checkpoint)
    try:
        while (query.lastProgress or {"batchId": -1})["batchId"] < STREAM_BATCHES:
            time.sleep(0.1)
        done = query.recentProgress[STREAM_BATCHES // 3 :]
    finally:
        query.stop()
    return statistics.median(p["durationMs"]["triggerExecution"] for p in done)


def start(
    frame: DataFrame, name: str, options: dict[str, Any], checkpoint: Path
) -> StreamingQuery:
    return (
        frame.writeStream.format(name)
        .options(**options)
        .option("checkpointLocation", str(checkpoint))
        .start()
    )


def idle(directory: Path, rounds: int) -> Figure:
    """Requests to broker and ZooKeeper of an idle query.

    ZooKeeper counts packets, pings and those of the broker's session included.
    """
    figure = Figure(
        "Spark: requests of an idle query over four partitions, ZooKeeper's included",
        "requests/s",
        [],
        at_least="10",
        aim="2",
    )
    with (
        EmbeddedZooKeeper(directory / "zookeeper") as zookeeper,
        BrokerProcess(
            directory / "idle",
            topic=TOPIC,
            partition_count=4,
            arguments=registered_in(zookeeper),
        ) as broker,
        session() as spark,
    ):
        register_all(spark)
        logs = (
            spark.readStream.format("metaq")
            .options(zookeeper=zookeeper.address, subscribe=TOPIC, progressGroup="idle")
            .load()
            .select("value")
        )
        query = start(logs, FloorStream.name(), {}, directory / "idle-checkpoint")
        try:
            while not query.lastProgress:
                time.sleep(0.1)
            time.sleep(2.0)
            for _ in range(rounds):
                before = request_count(broker) + packet_count(zookeeper)
                time.sleep(IDLE_S)
                asked = request_count(broker) + packet_count(zookeeper) - before
                figure.broker.append(asked / IDLE_S)
        finally:
            query.stop()
    return figure


def request_count(broker: BrokerProcess) -> int:
    """Return the number of gets, puts and offset queries of a broker."""
    with Client(brokers=[f"127.0.0.1:{broker.port}"]) as client:
        (told,) = client.stats().values()
    return sum(int(told[name]) for name in ("cmd_get", "cmd_put", "cmd_offset"))


def registered_in(zookeeper: EmbeddedZooKeeper) -> list[str]:
    """Return the arguments with which a broker process registers in ZooKeeper."""
    settings = {
        "zk.zkEnable": "true",
        "zk.zkConnect": zookeeper.address,
        "hostName": "127.0.0.1",
    }
    return [f"--set={name}={text}" for name, text in settings.items()]


def packet_count(zookeeper: EmbeddedZooKeeper) -> int:
    """Return the number of packets that ZooKeeper has received, this query included."""
    with socket.create_connection(("127.0.0.1", zookeeper.port), 5) as sock:
        sock.sendall(b"srvr")
        told = b"".join(iter(lambda: sock.recv(4096), b"")).decode()
    found = re.search(r"^Received: (\d+)$", told, re.MULTILINE)
    assert found is not None, told
    return int(found[1])


FIGURES: dict[str, Callable[[Path, int], Figure] | WithLines] = {
    "spark-read": WithLines(
        read,
        "Spark: batch read (floor: prepared batches)",
        "rows/s",
        "600,000",
        "1,200,000",
        warm_ups=WARM_UPS,
    ),
    "spark-write": WithLines(
        write,
        "Spark: batch write (floor: a sink that counts bytes)",
        "rows/s",
        "300,000",
        "800,000",
        warm_ups=WARM_UPS,
    ),
    "spark-write-keyed": WithLines(
        write_keyed,
        "Spark: batch write with keys, all different (floor: without keys)",
        "rows/s",
        "0.6",
        "0.85",
        warm_ups=WARM_UPS,
    ),
    "spark-exactly-once": WithLines(
        write_exactly_once,
        "Spark: batch write exactly once (floor: a sink that counts bytes)",
        "rows/s",
        "200,000",
        "500,000",
        warm_ups=WARM_UPS,
    ),
    "spark-exactly-once-batch": WithLines(
        batch_exactly_once,
        "Spark: micro-batch of 1,000 rows, exactly once, p50 (floor: at least once)",
        "ms",
        "floor + 60 ms",
        "floor + 20 ms",
        is_ratio=False,
        warm_ups=0,
    ),
    "spark-overhead": overhead,
    "spark-idle": idle,
}
