"""Queries over real ZooKeeper, whose brokers come and go."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from metaq.client.offsets.query_progress import read_progress
from metaq.clock import Clock
from metaq.model import Offset
from metaq.spark.cluster import Cluster
from metaq.spark.options import WireOptions
from metaq.testing.embedded import EmbeddedBroker
from metaq.zk.coordinator import ZooKeeperCoordinator
from metaq.zk.session import Coordinator
from tests.spark.brokers import TOPIC, data_of, numbered, publish, stored, tp
from tests.spark.test_stream import wait_for

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900),
]


class RealZooKeeper:
    """ZooKeeper interface of an embedded broker, with a real one below it."""

    def __init__(self, address: str) -> None:
        self.address = address

    def coordinator(self, clock: Clock) -> Coordinator:
        return ZooKeeperCoordinator(
            self.address, session_timeout_ms=20_000, clock=clock
        )


@pytest.fixture
def start_broker(zookeeper: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return what starts brokers that register there; all stop at the end."""
    started: list[EmbeddedBroker] = []

    def start(broker_id: int, topics: dict[str, int]) -> EmbeddedBroker:
        broker = EmbeddedBroker(
            tmp_path / f"broker-{broker_id}",
            topics=topics,
            zookeeper=RealZooKeeper(zookeeper),  # type: ignore[arg-type]  # it will do
            settings={"brokerId": str(broker_id)},
        )
        broker.start()
        started.append(broker)
        return broker

    yield start
    for broker in started:
        broker.stop()


def test_a_query_survives_a_lost_start_and_finds_a_new_broker(
    spark: SparkSession,
    zookeeper: str,
    start_broker: Callable[..., EmbeddedBroker],
    tmp_path: Path,
) -> None:
    """Messages between the two starts are read; its lag is there for tools."""
    first = start_broker(0, {TOPIC: 1})
    publish(first, numbered(10))
    seen: list[bytes] = []

    def take(frame: DataFrame, _batch: int) -> None:
        seen.extend(bytes(row.value) for row in frame.select("value").collect())

    def start(place: str) -> Any:
        rows = (
            spark.readStream.format("metaq")
            .options(zookeeper=zookeeper, subscribe=TOPIC, progressGroup="query")
            .load()
        )
        return (
            rows.writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path / place))
            .start()
        )

    # Nothing is read, and the checkpoint is lost before a batch is committed.
    query = start("lost")
    wait_for(query, lambda: bool(query.lastProgress))
    query.stop()
    assert seen == []
    publish(first, numbered(10, 10))
    query = start("kept")
    try:
        wait_for(query, lambda: sorted(seen) == numbered(10, 10))
        second = start_broker(1, {TOPIC: 1})
        publish(second, numbered(10, 20), partition=tp(0, broker=1))
        wait_for(query, lambda: sorted(seen) == numbered(20, 10))
        publish(first, numbered(1, 30))
        wait_for(query, lambda: len(seen) == 21)
        wait_for(query, lambda: progress_of(zookeeper)[tp(0)] >= 20 * 35)
    finally:
        query.stop()


def test_a_micro_batch_that_is_run_again_goes_where_it_went(
    spark: SparkSession,
    zookeeper: str,
    start_broker: Callable[..., EmbeddedBroker],
    tmp_path: Path,
) -> None:
    """A driver died before the commit, and a broker left: an error, never doubles."""
    brokers = [start_broker(0, {"from": 2, "to": 2}), start_broker(1, {"to": 2})]
    for number in (0, 1):
        place = tp(number, topic="from")
        publish(brokers[0], numbered(1000, 1000 * number), partition=place)

    def copy() -> Any:
        rows = (
            spark.readStream.format("metaq")
            .options(zookeeper=zookeeper, subscribe="from", retryTimeoutMs=2000)
            .option("startingOffsets", "earliest")
            .load()
        )
        query = (
            rows.selectExpr("value", "string(value) AS key")
            .writeStream.format("metaq")
            .options(zookeeper=zookeeper, topic="to", retryTimeoutMs=2000)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(300)

    def copied() -> list[bytes]:
        return sorted(
            data for broker in brokers for data in data_of(stored(broker, "to"))
        )

    def forget_commits() -> None:
        for path in (tmp_path / "checkpoint" / "commits").iterdir():
            path.unlink()

    copy()
    assert copied() == numbered(2000)
    forget_commits()
    start_broker(2, {"to": 2})
    copy()
    assert copied() == numbered(2000)
    forget_commits()
    brokers[1].stop()
    with pytest.raises(PySparkException, match="was begun with to/1-0, to/1-1"):
        copy()
    brokers[1].start()
    copy()
    assert copied() == numbered(2000)


def progress_of(zookeeper: str) -> dict[Any, Offset]:
    """Return what the group has in ZooKeeper, 0 for nothing."""
    wire = WireOptions(
        zookeeper=zookeeper,
        zk_root="/meta",
        brokers=(),
        request_timeout_s=20.0,
        retry_timeout_s=20.0,
    )
    cluster = Cluster(wire)
    try:
        found = cluster.ask(read_progress, "query", [tp(0)])
    finally:
        cluster.close()
    return {tp(0): Offset(0), **found}
