"""Write the messages of an archive back to topics; keeps the order per partition.

MetaQ 1.4 brokers may reorder messages that are in flight together.

With `keeps_origin`, two headers with UTF-8 texts are appended to a message. A message
replayed before keeps those that it has.

    replay.origin       orders/0-3@4096    topic, partition, offset in the archive
    replay.timestamp    1700000000000      milliseconds since 1970; omitted if unknown
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as sf

from metaq.client.names import name_some
from metaq.model import BrokerId, TopicPartition
from metaq.pipeline.errors import JobError
from metaq.pipeline.jobs.archive_store import ORDER, read_archive
from metaq.pipeline.jobs.session import job_errors
from metaq.spark.options import SinkOptions
from metaq.spark.schema import HEADERS_DDL
from metaq.spark.topics import put_targets

ORIGIN: Final = "replay.origin"
TIMESTAMP: Final = "replay.timestamp"


@dataclass(frozen=True, slots=True)
class WriteSummary:
    """Number of messages on the disks of brokers, and bytes of their values."""

    message_count: int
    size_bytes: int


def replay(
    spark: SparkSession,
    path: str,
    options: Mapping[str, str],
    *,
    where: str | None = None,
    keeps_partitions: bool = False,
    keeps_origin: bool = False,
) -> WriteSummary:
    """Write an archive, or a part of it, to topics.

    The messages of one archived partition are written by one task, in the order of
    their offsets. Of these, messages with the same key go to one partition, and so do
    all without a key. Delivery is that of the sink, at least once by default.

    Args:
        spark: the session.
        path: path or URL of the archive.
        options: of a write with `format("metaq")`. `topic` is the topic of all
            messages; without it, each message goes to the topic that it came from.
        where: SQL condition over the columns of the archive; None for all messages.
        keeps_partitions: send each message to the broker and partition it came from,
            after checking that the topic has them. If False, the key chooses the
            partition; without a key, the name of the original partition does.
        keeps_origin: store each message's place in the archive and its time in headers.

    Raises:
        ArchiveError: there is no archive, or it is damaged.
        JobError: reading or writing failed, or a topic lacks a partition.
        NoBrokerError: no broker takes puts to a topic whose partitions are kept.
        OptionError: an option of the write is wrong.
    """
    sink = SinkOptions.from_map(options)
    has_topic = sink.topic is not None
    rows = read_archive(spark, path)
    with job_errors("replay"):
        wanted = rows if where is None else rows.where(where)
        if keeps_partitions:
            _require_partitions(wanted, sink)
        spread = wanted.repartition("topic", "broker_id", "partition")
        ordered = spread.sortWithinPartitions(*ORDER)
        target: tuple[Column | str, ...] = ("broker_id", "partition")
        source = sf.concat_ws("/", "topic", sf.concat_ws("-", *target))
        if not keeps_partitions:
            spread_by = sf.coalesce("key", source.cast("binary"))
            target = (spread_by.alias("partition_key"),)
        # For null lists, PySpark takes time quadratic in the rows of a batch; for the
        # sink an empty list is the same.
        headers = sf.coalesce("headers", sf.array().cast(HEADERS_DDL))
        if keeps_origin:
            headers = _with_origin(headers, source)
        columns = ("attribute", "key", headers.alias("headers"), "value", *target)
        names = columns if has_topic else ("topic", *columns)
        return write_messages(ordered.select(*names), options)


def _with_origin(headers: Column, source: Column) -> Column:
    """Return headers with those for the message's place and time appended."""
    texts = {
        ORIGIN: sf.concat_ws("@", source, "offset"),
        TIMESTAMP: sf.unix_millis("timestamp").cast("string"),
    }
    pairs = [
        sf.struct(sf.lit(name).alias("key"), text.cast("binary").alias("value"))
        for name, text in texts.items()
    ]
    added = sf.filter(sf.array(*pairs), lambda pair: pair["value"].isNotNull())
    has_origin = sf.exists(headers, lambda pair: pair["key"] == ORIGIN)
    return sf.when(has_origin, headers).otherwise(sf.concat(headers, added))


def _require_partitions(rows: DataFrame, sink: SinkOptions) -> None:
    """Check that all partitions of the rows exist, before anything is written.

    Raises:
        JobError: a topic lacks a partition; the message names it.
        NoBrokerError: no broker takes puts to a topic.
    """
    places = rows.select("topic", "broker_id", "partition").distinct().collect()
    wanted = {
        TopicPartition(sink.topic or topic, BrokerId(broker_id), partition)
        for topic, broker_id, partition in places
    }
    targets = put_targets(sink, (place.topic for place in wanted))
    for place in sorted(wanted):
        there = targets[place.topic]
        if place not in there:
            raise JobError(
                f"replay: topic {place.topic} lacks partition"
                f" {place.name} of the archive, it has"
                f" {name_some(there)}; without keeping partitions they are spread"
            )


def write_messages(rows: DataFrame, options: Mapping[str, str]) -> WriteSummary:
    """Write rows with the sink, and count them.

    Args:
        rows: rows with the columns of the sink.
        options: of a write with `format("metaq")`.

    Raises:
        PySparkException: writing failed.
    """
    seen = Observation()
    counts = (
        sf.count(sf.lit(1)).alias("messages"),
        sf.sum(sf.octet_length("value")).alias("bytes"),
    )
    observed = rows.observe(seen, *counts)
    observed.write.format("metaq").options(**options).mode("append").save()
    return WriteSummary(seen.get["messages"], seen.get["bytes"] or 0)
