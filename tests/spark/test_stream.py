"""`spark.readStream.format("metaq")` against real brokers, through a checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from metaq.client import Client
from metaq.spark.versions import HAS_LIMITS
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.rigs.waiting import wait_until
from tests.spark.brokers import TOPIC, numbered, options_of, publish, tp

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 120.0


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker with a topic of two partitions."""
    with embedded_broker(topics={TOPIC: 2}) as found:
        yield found


class Archive:
    """A query that appends values to Parquet files, and its checkpoint."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._spark = spark
        self.checkpoint = directory / "checkpoint"
        self.rows = directory / "rows"

    def start(
        self,
        *brokers: EmbeddedBroker,
        trigger: dict[str, Any] | None = None,
        **more: Any,
    ) -> StreamingQuery:
        options = options_of(*brokers, **{"subscribe": TOPIC, **more})
        options = {name: text for name, text in options.items() if text is not None}
        frame = self._spark.readStream.format("metaq").options(**options).load()
        writer = frame.select("value", "partition", "broker_id").writeStream
        if trigger is not None:
            writer = writer.trigger(**trigger)
        return (
            writer.format("parquet")
            .option("checkpointLocation", str(self.checkpoint))
            .option("path", str(self.rows))
            .start()
        )

    def run(self, *brokers: EmbeddedBroker, **more: Any) -> StreamingQuery:
        """Read what is there now, and end."""
        query = self.start(*brokers, trigger={"availableNow": True}, **more)
        assert query.awaitTermination(DEADLINE_S)
        return query

    def values(self) -> list[bytes]:
        if not (self.rows / "_spark_metadata").exists():
            return []
        # The first batches may have no rows, and no file to take a schema from.
        found = (
            self._spark.read.schema("value binary").parquet(str(self.rows)).collect()
        )
        return sorted(bytes(row.value) for row in found)


@pytest.fixture
def archive(spark: SparkSession, tmp_path: Path) -> Archive:
    return Archive(spark, tmp_path)


def wait_for(query: StreamingQuery, condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; raise what ends the query before."""

    def is_true() -> bool:
        if (error := query.exception()) is not None:
            raise error
        return condition()

    wait_until(is_true, show=lambda: query.lastProgress)


def test_available_now_reads_what_is_there_and_goes_on_from_there(
    archive: Archive, broker: EmbeddedBroker
) -> None:
    """Each run ends by itself, limits cut it into batches, no row comes twice."""
    publish(broker, numbered(1000))
    publish(broker, numbered(500, 1000), partition=tp(1))
    query = archive.run(broker, startingOffsets="earliest", maxOffsetsPerTrigger=400)
    assert archive.values() == numbered(1500)
    counts = [p.numInputRows for p in query.recentProgress if p.numInputRows]
    if HAS_LIMITS:
        assert len(counts) == 4
        assert max(counts) <= 400
    else:
        assert counts == [1500]
    publish(broker, numbered(10, 1500))
    archive.run(broker)
    assert archive.values() == numbered(1510)


def test_what_comes_while_a_query_runs_is_read(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """New messages, a new topic of the pattern, and a broker that restarts."""
    with embedded_broker(topics={TOPIC: 1}) as broker:
        query = archive.start(broker, subscribe=None, subscribePattern="lo.*")
        try:
            wait_for(query, lambda: bool(query.lastProgress))
            publish(broker, numbered(100))
            wait_for(query, lambda: len(archive.values()) == 100)
            broker.create_topic("lobby", 2)
            publish(broker, numbered(100, 100), partition=tp(1, topic="lobby"))
            wait_for(query, lambda: len(archive.values()) == 200)
            broker.restart()
            publish(broker, numbered(100, 200))
            wait_for(query, lambda: len(archive.values()) == 300)
        finally:
            query.stop()
    assert archive.values() == numbered(300)


def test_a_filter_leaves_rows_out_and_progress_as_it_is(
    archive: Archive, broker: EmbeddedBroker
) -> None:
    """A run in which nothing matches ends, too, and the next one begins behind it."""
    where = "tag = 'paid'"
    with Client(brokers=[broker.address]) as client, client.producer() as producer:
        producer.send(TOPIC, b"paid", tag="paid")
        producer.send(TOPIC, b"void", tag="void")
        archive.run(broker, startingOffsets="earliest", where=where)
        assert archive.values() == [b"paid"]
        producer.send(TOPIC, b"void again", tag="void")
        query = archive.run(broker, where=where)
        assert archive.values() == [b"paid"]
        assert [p.numInputRows for p in query.recentProgress if p.numInputRows] == []
        producer.send(TOPIC, b"paid again", tag="paid")
        archive.run(broker, where=where)
    assert archive.values() == [b"paid", b"paid again"]
