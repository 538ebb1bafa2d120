"""`delivery=exactly-once` against real brokers and a real ZooKeeper."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from metaq.broker.admin_socket import call_admin
from metaq.spark.versions import HAS_LIMITS
from metaq.testing.embedded import EmbeddedBroker
from tests.spark.brokers import TOPIC, data_of, numbered, publish, stored, tp, watched
from tests.spark.test_executors import RealZooKeeper

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900),
]

DEADLINE_S = 120
BACK = dict.fromkeys(["back-0", "back-0-copy", "back-1", "back-1-copy"], 1)


@pytest.fixture(scope="module")
def brokers(
    zookeeper: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[EmbeddedBroker]]:
    """Return two brokers that register there; both are there at the end of a test."""
    started = []
    for broker_id in (0, 1):
        broker = EmbeddedBroker(
            tmp_path_factory.mktemp(f"broker-{broker_id}"),
            topics={TOPIC: 2, "copy": 2, "batch": 2, "failed": 2, "whole": 1, **BACK},
            zookeeper=RealZooKeeper(zookeeper),  # type: ignore[arg-type]  # it will do
            settings={"brokerId": str(broker_id)},
        )
        broker.start()
        started.append(broker)
    yield started
    for broker in started:
        broker.stop()


def exactly(zookeeper: str, **more: Any) -> dict[str, Any]:
    return {"zookeeper": zookeeper, "delivery": "exactly-once", **more}


def all_of(brokers: list[EmbeddedBroker], topic: str) -> list[bytes]:
    return sorted(data for broker in brokers for data in data_of(stored(broker, topic)))


def prepared(brokers: list[EmbeddedBroker]) -> list[object]:
    """Return what brokers have prepared, for any query."""
    found: list[object] = []
    for broker in brokers:
        reply = call_admin(broker.data_path, {"command": "transactions"}, timeout_s=20)
        listed = reply["transactions"]
        assert isinstance(listed, list)
        found += [one["key"] for one in listed if one["state"] == "prepared"]
    return found


def test_a_batch_write_is_there_once(
    spark: SparkSession, zookeeper: str, brokers: list[EmbeddedBroker]
) -> None:
    """Over two brokers; nothing is left of it in ZooKeeper."""
    rows = [(value, value.decode(), "batch") for value in numbered(1000)]
    frame = spark.createDataFrame(rows, "value binary, key string, topic string")
    writer = frame.repartition(3).write.format("metaq").mode("append")
    writer.options(**exactly(zookeeper)).save()
    assert all_of(brokers, "batch") == numbered(1000)
    assert all(data_of(stored(broker, "batch")) for broker in brokers)
    assert prepared(brokers) == []
    keeper = KazooClient(zookeeper)
    keeper.start()
    try:
        left = keeper.get_children("/meta/queries")
    finally:
        keeper.stop()
        keeper.close()
    assert not [name for name in left if name.startswith("write-")]


def test_a_write_that_fails_leaves_nothing(
    spark: SparkSession, zookeeper: str, brokers: list[EmbeddedBroker]
) -> None:
    """One task has prepared its rows, another one has a row that cannot be written."""
    good = spark.createDataFrame([("good",)], "value string").coalesce(1)
    bad = spark.createDataFrame([(None,)], "value string").coalesce(1)
    writer = good.union(bad).write.format("metaq").mode("append")
    with pytest.raises(PySparkException, match="rows have no value"):
        writer.options(**exactly(zookeeper, topic="failed")).save()
    assert all_of(brokers, "failed") == []
    assert prepared(brokers) == []


def test_a_null_value_may_be_a_tombstone(
    spark: SparkSession, zookeeper: str, brokers: list[EmbeddedBroker]
) -> None:
    """With both deliveries, beside a row that has a value."""
    rows = spark.createDataFrame([("k", None), ("k", "v")], "key string, value string")
    for delivery in ("at-least-once", "exactly-once"):
        writer = rows.coalesce(1).write.format("metaq").mode("append")
        writer.options(
            zookeeper=zookeeper, topic="failed", nullValue="tombstone"
        ).option("delivery", delivery).save()
    found = [m for b in brokers for some in stored(b, "failed").values() for m in some]
    assert [(m.key, m.data) for m in found] == [(b"k", b""), (b"k", b"v")] * 2


def copy(
    spark: SparkSession,
    zookeeper: str,
    checkpoint: Path,
    *,
    source: str = TOPIC,
    target: str = "copy",
    rows_max: int = 500,
) -> None:
    """Copy what is there of a topic, in batches."""
    rows = (
        spark.readStream.format("metaq")
        .options(zookeeper=zookeeper, subscribe=source)
        .option("maxOffsetsPerTrigger", rows_max)
        .option("startingOffsets", "earliest")
        .load()
    )
    query = (
        rows.selectExpr("value", "string(value) AS key")
        .writeStream.format("metaq")
        .options(**exactly(zookeeper, topic=target))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(DEADLINE_S)


def test_a_stream_is_there_once(
    spark: SparkSession, zookeeper: str, brokers: list[EmbeddedBroker], tmp_path: Path
) -> None:
    """Also when its driver died before it wrote the commit of a batch, or of all."""
    publish(brokers[0], numbered(1000))
    copy(spark, zookeeper, tmp_path)
    assert all_of(brokers, "copy") == numbered(1000)
    for path in (tmp_path / "commits").iterdir():
        path.unlink()
    publish(brokers[0], numbered(100, 1000), partition=tp(1))
    copy(spark, zookeeper, tmp_path)
    if not HAS_LIMITS:
        # The one batch of a run was the one that had no commit.
        copy(spark, zookeeper, tmp_path)
    assert all_of(brokers, "copy") == numbered(1100)
    assert prepared(brokers) == []


@pytest.mark.parametrize("kept", [0, 1])
def test_a_checkpoint_that_was_set_back_is_refused(
    spark: SparkSession,
    zookeeper: str,
    brokers: list[EmbeddedBroker],
    tmp_path: Path,
    kept: int,
) -> None:
    """Its number was decided for other rows, or is below the decided one (issue 30).

    Rows that nobody has written never count as processed, and none is lost in silence.
    """
    topic = f"back-{kept}"
    publish(brokers[0], numbered(350), partition=tp(0, topic=topic))
    again = partial(
        copy, spark, zookeeper, tmp_path, source=topic, target=f"{topic}-copy"
    )
    again(rows_max=200)
    written = all_of(brokers, f"{topic}-copy")
    for name in ("commits", "offsets"):
        for path in (tmp_path / name).iterdir():
            if not path.name.lstrip(".").startswith(f"{kept - 1}"):
                path.unlink()
    publish(brokers[0], numbered(200, 350), partition=tp(0, topic=topic))
    with pytest.raises(PySparkException, match=r"set back"):
        again(rows_max=10_000)
    assert all_of(brokers, f"{topic}-copy") == written
    assert prepared(brokers) == []


def test_a_stream_without_a_checkpoint_of_its_own_is_refused(
    spark: SparkSession, zookeeper: str, brokers: list[EmbeddedBroker], tmp_path: Path
) -> None:
    """A query that only the session's settings place cannot be distinguished."""
    del brokers
    name = "spark.sql.streaming.checkpointLocation"
    spark.conf.set(name, str(tmp_path))
    try:
        query = (
            spark.readStream.format("rate")
            .load()
            .selectExpr("string(value) AS value")
            .writeStream.format("metaq")
            .options(**exactly(zookeeper, topic="copy"))
            .trigger(availableNow=True)
            .start()
        )
        with pytest.raises(PySparkException, match="needs the option checkpointLoc"):
            query.awaitTermination(DEADLINE_S)
    finally:
        spark.conf.unset(name)


def test_a_batch_of_several_tasks_in_a_partition_is_seen_whole_or_not_at_all(
    spark: SparkSession, zookeeper: str, brokers: list[EmbeddedBroker]
) -> None:
    """By a reader that looks all the time, at both brokers."""
    marks = [b"<write %d>" % number for number in range(3)]
    with ExitStack() as watching:
        looks = [watching.enter_context(watched(broker, "whole")) for broker in brokers]
        for number in range(len(marks)):
            frame = spark.range(400).repartition(4)
            frame = frame.selectExpr(
                f"concat('<write {number}>', spark_partition_id()) AS value"
            )
            writer = frame.write.format("metaq").mode("append")
            writer.options(**exactly(zookeeper, topic="whole")).save()
    for broker, found in zip(brokers, looks, strict=True):
        there = data_of(stored(broker, "whole"))
        for mark in marks:
            rows = [data for data in there if data.startswith(mark)]
            assert len(set(rows)) > 1, "rows of several tasks"
            assert {data.count(mark) for data in found} <= {0, len(rows)}
    assert prepared(brokers) == []
