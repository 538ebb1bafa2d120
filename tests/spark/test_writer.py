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

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 120.0


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker with two topics of several partitions."""
    with embedded_broker(topics={TOPIC: 3, "copy": 4}) as found:
        yield found


def test_rows_are_messages_with_attribute_key_and_place(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """Every column means what the page says; where it was read is left out."""
    traces = [("trace", b"1"), ("trace", b"2")]
    rows = [
        ("v1", "a1", "k1", None, None, 1),
        ("v2", None, "k1", None, traces, 2),
        ("v3", None, None, "0-2", None, 3),
    ]
    frame = spark.createDataFrame(
        rows,
        "value string, attribute string, key string, partition string,"
        " headers array<struct<key: string, value: binary>>, offset bigint",
    )
    frame.coalesce(1).write.format("metaq").options(
        **options_of(broker, topic=TOPIC)
    ).mode("append").save()
    found = stored(broker)
    assert [m.data for m in found["0-2"]][-1:] == [b"v3"]
    of_key = {name for name, some in found.items() for m in some if m.data != b"v3"}
    assert len(of_key) == 1
    messages = sorted(
        (m for some in found.values() for m in some), key=lambda m: m.data
    )
    assert [(m.data, m.attribute, m.key, m.header_pairs) for m in messages] == [
        (b"v1", "a1", b"k1", ()),
        (b"v2", None, b"k1", tuple(traces)),
        (b"v3", None, None, ()),
    ]
    read = spark.read.format("metaq").options(
        **options_of(broker, subscribe=TOPIC, startingOffsets="earliest")
    )
    copies = read.load().select("value", "attribute", "key", "headers").collect()
    assert sorted((bytes(r.value), r.attribute) for r in copies) == [
        (m.data, m.attribute) for m in messages
    ]
    assert {bytes(r.value): r.key and bytes(r.key) for r in copies} == {
        m.data: m.key for m in messages
    }
    (found_traces,) = (r.headers for r in copies if r.headers is not None)
    assert [(h.key, bytes(h.value)) for h in found_traces] == traces


def test_wrong_writes_are_refused_with_one_sentence(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """Before anything is written."""
    good = spark.createDataFrame([("v",)], "value string")
    for options, frame, text in (
        ({"delivery": "exactly-once"}, good, "needs zookeeper"),
        ({}, good.toDF("text"), "expected a column value"),
        ({}, good.select(sf.lit(1).alias("value")), "column value: expected"),
    ):
        writer = frame.write.format("metaq").mode("append")
        with pytest.raises(PySparkException, match=text):
            writer.options(**options_of(broker, topic=TOPIC, **options)).save()
    with pytest.raises(PySparkException, match="only appends"):
        good.write.format("metaq").mode("overwrite").options(
            **options_of(broker, topic=TOPIC)
        ).save()
    assert data_of(stored(broker)) == []


def copy(spark: SparkSession, broker: EmbeddedBroker, checkpoint: Path) -> None:
    """Copy what is there of one topic to the other one, partition by partition."""
    rows = (
        spark.readStream.format("metaq")
        .options(**options_of(broker, subscribe=TOPIC, startingOffsets="earliest"))
        .load()
    )
    query = (
        rows.select("value", "attribute", "broker_id", "partition")
        .writeStream.format("metaq")
        .options(**options_of(broker, topic="copy", batchBytes=5000))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(DEADLINE_S)
    assert query.exception() is None


def test_a_stream_is_copied_and_goes_on_where_it_was(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Order within a partition is kept where the rows name it."""
    publish(broker, numbered(500))
    publish(broker, numbered(500, 500), partition=tp(1))
    copy(spark, broker, tmp_path)
    publish(broker, numbered(10, 1000))
    copy(spark, broker, tmp_path)
    found = stored(broker, "copy")
    assert [m.data for m in found["0-0"]] == numbered(500) + numbered(10, 1000)
    assert [m.data for m in found["0-1"]] == numbered(500, 500)


def test_a_driver_that_dies_before_the_commit_doubles_nothing(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """The micro-batch is run again under its number, and the broker knows it."""
    publish(broker, numbered(1000))
    copy(spark, broker, tmp_path)
    for path in (tmp_path / "commits").iterdir():
        path.unlink()  # as if the driver had died right before it wrote them
    copy(spark, broker, tmp_path)
    assert [m.data for m in stored(broker, "copy")["0-0"]] == numbered(1000)
