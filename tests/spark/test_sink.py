"""`df.write.format("metaq")` and `writeStream` against a real broker."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.spark.brokers import (
    TOPIC,
    data_of,
    numbered,
    options_of,
    publish,
    stored,
    tp,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

DEADLINE_S = 120.0


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker with two topics of several partitions."""
    with embedded_broker(topics={TOPIC: 3, "copy": 4}) as found:
        yield found


def test_rows_are_messages_with_attribute_key_and_place(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """Every column means what the page says; other columns are left out."""
    rows = [
        ("v1", "a1", "k1", None, 1),
        ("v2", None, "k1", None, 2),
        ("v3", None, None, "0-2", 3),
    ]
    frame = spark.createDataFrame(
        rows, "value string, attribute string, key string, partition string, n int"
    )
    frame.coalesce(1).write.format("metaq").options(
        **options_of(broker, topic=TOPIC)
    ).mode("append").save()
    found = stored(broker)
    assert [m.data for m in found["0-2"]][-1:] == [b"v3"]
    of_key = {name for name, some in found.items() for m in some if m.data != b"v3"}
    assert len(of_key) == 1
    attributes = {m.data: m.attribute for some in found.values() for m in some}
    assert attributes == {b"v1": "a1", b"v2": None, b"v3": None}


def test_wrong_writes_are_refused_with_one_sentence(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """Before anything is written."""
    good = spark.createDataFrame([("v",)], "value string")
    for options, frame, text in (
        ({"delivery": "exactly-once"}, good, "needs transactions"),
        ({}, good.toDF("text"), "expected a column value"),
        ({}, good.select(sf.lit(1).alias("value")), "column value: expected"),
    ):
        writer = frame.write.format("metaq").mode("append")
        with pytest.raises(PySparkException, match=text):
            writer.options(**options_of(broker, topic=TOPIC, **options)).save()
    with pytest.raises(PySparkException, match="appended to"):
        good.write.format("metaq").mode("overwrite").options(
            **options_of(broker, topic=TOPIC)
        ).save()
    assert data_of(stored(broker)) == []


def test_a_task_that_dies_after_writing_is_run_again_and_doubles_nothing(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Its batches have the same names, and the broker knows them."""
    marker = tmp_path / "died"

    def die_once(batches):  # type: ignore[no-untyped-def]  # Spark's iterator
        from pyspark import TaskContext

        yield from batches
        task = TaskContext.get()
        if task.partitionId() == 0 and not marker.exists():
            marker.write_text("")
            raise RuntimeError("this task is to die")

    source = spark.range(0, 30_000, numPartitions=2).select(
        sf.format_string("message %07d", "id").cast("binary").alias("value")
    )
    frame = source.mapInArrow(die_once, source.schema)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "1000")
    try:
        frame.write.format("metaq").mode("append").options(
            **options_of(broker, topic=TOPIC, batchBytes=20_000)
        ).save()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert marker.exists()
    assert data_of(stored(broker)) == numbered(30_000)


def test_a_stream_is_copied_from_topic_to_topic(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Order within a partition is kept where the rows name it; restarts go on."""
    publish(broker, numbered(500))
    publish(broker, numbered(500, 500), partition=tp(1))
    for _ in range(2):
        rows = (
            spark.readStream.format("metaq")
            .options(**options_of(broker, subscribe=TOPIC, startingOffsets="earliest"))
            .load()
        )
        query = (
            rows.select("value", "attribute", "broker_id", "partition")
            .writeStream.format("metaq")
            .options(**options_of(broker, topic="copy"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(DEADLINE_S)
        assert query.exception() is None
    found = stored(broker, "copy")
    assert [m.data for m in found["0-0"]] == numbered(500)
    assert [m.data for m in found["0-1"]] == numbered(500, 500)
