"""Source and sink over brokers of MetaQ 1.4: no counts, no times, no waits, no batches.

The broker answers out of order, cuts its answers anywhere, and hangs up on all that
MetaQ does not know.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from metaq.model import LogId
from metaq.spark.versions import HAS_LIMITS
from metaq.testing.fake_broker import FakeBroker, FaultKind
from tests.spark.brokers import TOPIC, numbered
from tests.spark.test_stream import DEADLINE_S

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

SIZE = 35


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """Return a broker with a topic of two partitions and one to write to."""
    with FakeBroker({TOPIC: 2, "copy": 2}) as found:
        found.reorder = True
        found.split_bytes = 1000
        yield found
        assert found.statistics().unknown_count == 0


def options_of(broker: FakeBroker, **more: Any) -> dict[str, Any]:
    return {
        "brokers": f"{broker.address.host}:{broker.address.port}",
        "requestTimeoutMs": 20_000,
        "retryTimeoutMs": 20_000,
        **more,
    }


def fill(broker: FakeBroker, count: int, *, partition: int = 0, first: int = 0) -> None:
    """Store messages whose ids are negative, as those of old Java brokers are."""
    for number, data in enumerate(numbered(count, first), first):
        broker.add(data, topic=TOPIC, partition=partition, message_id=-1 - number)


def read(spark: SparkSession, broker: FakeBroker, **more: Any) -> DataFrame:
    options = options_of(broker, subscribe=TOPIC, **more)
    return spark.read.format("metaq").options(**options).load()


def values(frame: DataFrame) -> list[bytes]:
    return sorted(bytes(row.value) for row in frame.select("value").collect())


def test_a_batch_is_all_there_is_or_what_offsets_say(
    spark: SparkSession, broker: FakeBroker
) -> None:
    """Ids may be negative; they have no time."""
    fill(broker, 300)
    fill(broker, 100, partition=1, first=300)
    rows = read(spark, broker)
    assert values(rows) == numbered(400)
    assert rows.where("message_id < 0 and timestamp is null").count() == 400
    assert rows.where("offset = message_id * -35 - 35 and partition = 0").count() == 300
    part = read(
        spark,
        broker,
        startingOffsets='{"logs": {"0-0": 350, "0-1": 3500}}',
        endingOffsets='{"logs": {"0-0": 700, "0-1": -1}}',
    )
    assert values(part) == numbered(10, 10)


def test_a_start_by_time_is_refused(spark: SparkSession, broker: FakeBroker) -> None:
    """The sentence says why; such a broker has no answer."""
    fill(broker, 1)
    for option in ("startingTimestamp", "endingTimestamp"):
        with pytest.raises(PySparkException, match="keeps no counts and no times"):
            values(read(spark, broker, **{option: 1}))


def test_tasks_are_cut_where_segments_begin(
    spark: SparkSession, broker: FakeBroker
) -> None:
    """It is all that such a broker knows of the inside of a log."""
    for first in range(0, 400, 100):
        fill(broker, 100, first=first)
        broker.roll(TOPIC, 0)
    assert read(spark, broker, minPartitions=4).rdd.getNumPartitions() == 4
    rows = read(spark, broker, maxRecordsPerPartition=1)
    assert rows.rdd.getNumPartitions() == 4
    assert values(rows) == numbered(400)


def test_a_stream_goes_on_where_it_was_and_its_limits_are_about_met(
    spark: SparkSession, broker: FakeBroker, tmp_path: Path
) -> None:
    """Such a broker counts nothing: what a batch may hold is read to find its end."""
    seen: list[int] = []

    def run() -> None:
        rows = (
            spark.readStream.format("metaq")
            .options(**options_of(broker, subscribe=TOPIC, startingOffsets="earliest"))
            .option("maxBytesPerTrigger", 100 * SIZE)
            .load()
        )
        copied = rows.select("value", "broker_id", "partition")
        query = (
            copied.writeStream.format("metaq")
            .options(**options_of(broker, topic="copy"))
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(DEADLINE_S)
        seen.extend(p.numInputRows for p in query.recentProgress if p.numInputRows)

    fill(broker, 150)
    broker.roll(TOPIC, 0)
    fill(broker, 150, first=150)
    run()
    assert broker.payloads("copy", 0) == numbered(300)
    if HAS_LIMITS:
        assert seen == [100, 100, 100]
    fill(broker, 10, first=300)
    run()
    assert broker.payloads("copy", 0) == numbered(310)


def test_a_partition_that_the_broker_forgot_at_its_start_is_not_lost(
    spark: SparkSession, broker: FakeBroker, tmp_path: Path
) -> None:
    """A query goes on with the rest, and there once a put has opened it again."""

    def run() -> list[bytes]:
        rows = (
            spark.readStream.format("metaq")
            .options(**options_of(broker, subscribe=TOPIC, startingOffsets="earliest"))
            .load()
        )
        query = (
            rows.select("value", "broker_id", "partition")
            .writeStream.format("metaq")
            .options(**options_of(broker, topic="copy"))
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(DEADLINE_S)
        return broker.payloads("copy", 0) + broker.payloads("copy", 1)

    fill(broker, 10)
    fill(broker, 10, partition=1, first=10)
    assert run() == numbered(20)
    forgotten = broker.metaq.logs.pop(LogId(TOPIC, 1))
    fill(broker, 5, first=20)
    assert sorted(run()) == numbered(25)
    some = json.dumps({TOPIC: {"0-1": 10 * SIZE}})
    with pytest.raises(PySparkException, match=r"logs/0-1: .* put a message there"):
        values(read(spark, broker, endingOffsets=some))
    broker.metaq.logs[LogId(TOPIC, 1)] = forgotten
    fill(broker, 5, partition=1, first=25)
    assert sorted(run()) == numbered(30)


def test_rows_are_put_one_by_one_and_may_be_there_twice(
    spark: SparkSession, broker: FakeBroker
) -> None:
    """An answer that is lost is followed by the put once more: at least once."""
    rows = [(data, "0-1") for data in numbered(50)]
    frame = spark.createDataFrame(rows, "value binary, partition string").coalesce(1)
    writer = frame.write.format("metaq").options(**options_of(broker, topic="copy"))
    writer.mode("append").save()
    assert broker.payloads("copy", 1) == numbered(50)
    broker.inject(FaultKind.DROP_STORED, verb="put", after=20)
    writer.mode("append").save()
    stored = broker.payloads("copy", 1)
    assert set(stored) == set(numbered(50))
    assert len(stored) > 100
