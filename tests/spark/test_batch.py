"""`spark.read.format("metaq")` against a real broker."""

from collections.abc import Iterator

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from metaq.client import Client, read_origin
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.versions import HAS_FILTERS
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.sampling import IS_WHOLE
from tests.spark.brokers import TOPIC, numbered, publish, read, stored, tp, values

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker with a topic of two partitions."""
    with embedded_broker(topics={TOPIC: 2}) as found:
        yield found


def test_rows_come_in_the_order_of_the_log(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """The format is found by its name; every column is there."""
    publish(broker, numbered(100))
    publish(broker, numbered(50, 100), partition=tp(1))
    frame = read(spark, broker)
    table = frame.toArrow()
    assert table.schema.equals(ROW_SCHEMA)
    rows = table.to_pylist()
    assert {(r["topic"], r["broker_id"], r["partition"]) for r in rows} == {
        (TOPIC, 0, 0),
        (TOPIC, 0, 1),
    }
    first = [r for r in rows if r["partition"] == 0]
    assert [r["value"] for r in first] == numbered(100)
    assert [r["offset"] for r in first] == [n * 35 for n in range(100)]
    assert values(frame) == numbered(150)


def test_options_choose_what_is_read(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """Bounds, cuts and picked partitions; an unknown range is an error, not a hole."""
    publish(broker, numbered(1000))
    publish(broker, numbered(10, 1000), partition=tp(1))
    part = read(
        spark,
        broker,
        assign='{"logs": ["0-0"]}',
        startingOffsets='{"logs": {"0-0": 350}}',
        endingOffsets='{"logs": {"0-0": 3500}}',
        minPartitions=3,
    )
    assert part.rdd.getNumPartitions() == 3
    assert values(part) == numbered(90, 10)
    assert values(read(spark, broker, subscribePattern="l.gs")) == numbered(1010)
    assert read(spark, broker, maxRecordsPerPartition=100).rdd.getNumPartitions() >= 11
    with pytest.raises(PySparkException, match=r"lost \[35000, 99999\)"):
        values(read(spark, broker, endingOffsets='{"logs": {"0-0": 99999}}'))


def test_nothing_is_an_empty_frame(spark: SparkSession, broker: EmbeddedBroker) -> None:
    """A topic without a message; one that no broker has is not nothing."""
    assert values(read(spark, broker)) == []
    with pytest.raises(PySparkException, match="no broker has topic 'nobody'"):
        values(read(spark, broker, subscribe="nobody"))


def test_bad_values_go_to_the_dead_letter_topic(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """They are there once, with the place they came from, however often it is read."""
    broker.create_topic("dead")
    publish(broker, [b"good", b"\xff\xfe", b"fine"])
    frame = read(
        spark, broker, valueFormat="string", badRows="topic", deadLetterTopic="dead"
    )
    assert sorted(row.value for row in frame.collect()) == ["fine", "good"]
    (letter,) = stored(broker, "dead")["0-0"]
    assert letter.data == b"\xff\xfe"
    assert letter.attribute is None
    origin = read_origin(letter)
    assert origin is not None
    assert (origin.partition, origin.offset) == (tp(0), 24)
    assert (origin.error, origin.text) == ("", "no UTF-8: byte 0 of 2")


def test_many_rows_come_once_each(spark: SparkSession, broker: EmbeddedBroker) -> None:
    """Count, sum and distinct numbers agree, over tasks that share partitions.

    A whole run has a million; in any, each partition takes several gets.
    """
    half = 500_000 if IS_WHOLE else 100_000
    publish(broker, numbered(half))
    publish(broker, numbered(half, half), partition=tp(1))
    found = read(spark, broker, maxRecordsPerPartition=half // 4 + 5_000)
    number = sf.substring(sf.col("value").cast("string"), 9, 7).cast("long")
    (row,) = found.agg(
        sf.count("*"), sf.sum(number), sf.count_distinct(number)
    ).collect()
    count = 2 * half
    assert tuple(row) == (count, count * (count - 1) // 2, count)


def gets_of(broker: EmbeddedBroker, frame: DataFrame) -> int:
    """Return how many gets of 1 MiB or less a query takes."""

    def count() -> int:
        with Client(brokers=[broker.address]) as client:
            (stats,) = client.stats().values()
        return int(stats["cmd_get"])

    before = count()
    frame.collect()
    return count() - before


def test_a_limit_and_filters_read_no_more_than_they_need(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """Two partitions of 24 MiB: what the broker serves is counted."""
    value, count = b"x" * 65_516, 384  # 64 KiB with its header
    for number in (0, 1):
        publish(broker, [value] * count, partition=tp(number))
    found = read(spark, broker).select("offset")
    assert gets_of(broker, found) >= 48
    # Two pieces are read ahead, and a few batches wait on their way to the JVM.
    assert gets_of(broker, found.limit(10)) <= 16
    if not HAS_FILTERS:
        return
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        pushed = read(spark, broker, filterPushdown="true").select("offset")
        assert 24 <= gets_of(broker, pushed.where("partition = 1")) <= 30
        middle = 12 * 1024 * 1024
        at = f"offset >= {middle} and offset < {middle + 65_536}"
        assert gets_of(broker, pushed.where(at)) <= 6
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_filters_give_the_same_rows_pushed_or_not(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """Push-down only saves work."""
    publish(broker, numbered(500))
    publish(broker, numbered(500, 500), partition=tp(1))
    conditions = {
        "partition = 1": 500,
        "offset >= 3500 and offset < 7001": 202,
        "topic = 'none'": 0,
        "timestamp > timestamp_seconds(0)": 1000,
        "timestamp < timestamp_seconds(0)": 0,
    }
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        for condition, count in conditions.items():
            for pushed in ("true", "false"):
                found = read(spark, broker, filterPushdown=pushed)
                assert found.where(condition).count() == count, (condition, pushed)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
