"""Spark streams into a replica set and out of it, while its leader changes."""

import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple, Self

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

from tests.cluster.failovers import COUNT, failover, faults
from tests.cluster.rig import SETTLE_S, TOPIC, Cluster
from tests.rigs.waiting import wait_until
from tests.sampling import IS_WHOLE

pytestmark = [
    pytest.mark.skipif(not IS_WHOLE, reason="minutes: with METAQ_WHOLE"),
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900 + 90 * COUNT),
]

LINES = 100
"""Of one file: so many are written each second."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as one:
        yield one


class Row(NamedTuple):
    """Rows of the source."""

    partition: int
    offset: int
    value: bytes


def rows_of(frame: DataFrame) -> list[Row]:
    """Return all rows of a frame of the source."""
    rows = frame.select("partition", "offset", "value").collect()
    return [Row(row.partition, row.offset, bytes(row.value)) for row in rows]


class Lines(threading.Thread):
    """Writes files of numbered lines until it is to end."""

    def __init__(self, directory: Path) -> None:
        super().__init__(name="lines", daemon=True)
        directory.mkdir()
        self._directory = directory
        self._is_ending = threading.Event()
        self.written: list[bytes] = []

    def run(self) -> None:
        for number in count():
            if self._is_ending.wait(1.0):
                return
            lines = [f"line {number * LINES + n:07d}" for n in range(LINES)]
            draft = self._directory / f".{number}.draft"
            draft.write_text("\n".join(lines) + "\n")
            draft.rename(self._directory / f"{number:06d}.txt")
            self.written += [line.encode() for line in lines]

    def end(self) -> None:
        self._is_ending.set()
        self.join()


class Streams:
    """Files → the topic of a set → an archive in memory."""

    def __init__(self, spark: SparkSession, cluster: Cluster, directory: Path) -> None:
        self._spark = spark
        self._cluster = cluster
        self._directory = directory
        self.lines = Lines(directory / "lines")
        self.lines.start()
        self.zookeeper = cluster.zookeeper.address
        options = {"zookeeper": self.zookeeper}
        there = spark.readStream.text(str(directory / "lines"))
        found = spark.readStream.format("metaq").options(
            **options, subscribe=TOPIC, startingOffsets="earliest"
        )
        self.archive: list[Row] = []
        self.queries = [
            self._start(
                "sink", there.writeStream.format("metaq"), **options, topic=TOPIC
            ),
            self._start("source", found.load().writeStream.foreachBatch(self._take)),
        ]

    def _start(
        self, name: str, writer: DataStreamWriter, **options: str
    ) -> StreamingQuery:
        checkpoint = str(self._directory / f"checkpoint-{name}")
        writer = writer.queryName(name).option("checkpointLocation", checkpoint)
        return writer.options(**options).start()

    def _take(self, batch: DataFrame, _number: int) -> None:
        self.archive += rows_of(batch)

    def wait_for(self, what: set[bytes]) -> None:
        """Wait until lines are in the archive; raise what ends a stream before."""

        def looks() -> bool:
            for query in self.queries:
                if (error := query.exception()) is not None:
                    raise error
            return what <= {row.value for row in self.archive}

        wait_until(looks, 2 * SETTLE_S, self.describe)

    def wait_more(self) -> None:
        """Wait until what is written from now on is in the archive."""
        before = len(self.lines.written)
        wait_until(lambda: len(self.lines.written) > before)
        self.wait_for(set(self.lines.written[: before + LINES]))

    def describe(self) -> str:
        progress = [str(query.lastProgress) for query in self.queries]
        return "\n".join([*progress, self._cluster.describe()])

    def report(self) -> None:
        """Print the batches that took long."""
        for query in self.queries:
            for one in query.recentProgress[-20:]:
                if one.durationMs.get("triggerExecution", 0) > 4000:
                    print(query.name, one.timestamp, one.batchId, one.durationMs)

    def end(self) -> set[Row]:
        """Let all come to their end, and compare the archive with the copies.

        Returns:
            What a copy has.
        """
        self.lines.end()
        self.wait_for(set(self.lines.written))
        for query in self.queries:
            query.stop()
        self._cluster.wait_whole()
        self._cluster.stop()
        first, *others = self._cluster.replicas.values()
        for other in others:
            assert other.files() == first.files(), (first.number, other.number)
        copy = {
            Row(number, offset, data)
            for number, log in first.read_log().items()
            for offset, data in log.items()
        }
        assert len(self.archive) == len(set(self.archive))
        assert set(self.archive) == copy
        values = [row.value for row in copy]
        assert set(values) == set(self.lines.written)
        print(f"{len(self.lines.written)} lines, {len(values)} stored", flush=True)
        return copy


class Reading(threading.Thread):
    """Reads all there is as a batch, while its block runs or longer."""

    def __init__(self, spark: SparkSession, streams: Streams) -> None:
        super().__init__(name="reading", daemon=True)
        self._streams = streams
        self._before = set(streams.archive)
        options = {"zookeeper": streams.zookeeper, "subscribe": TOPIC}
        self._frame = spark.read.format("metaq").options(**options).load()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self.rows = rows_of(self._frame)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.join(2 * SETTLE_S)
        assert not self.is_alive(), "a batch is read for ever"
        if self._error is not None:
            raise self._error
        assert self._before <= set(self.rows)


def test_streams_go_on_after_each_failover(
    spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    """No query ends, no line is lost, and each row stays at its offset.

    Nor does a batch end that is read on the way.
    """
    streams = Streams(spark, cluster, tmp_path)
    batches: list[Row] = []
    try:
        streams.wait_more()
        for fault in faults():
            begin_s = time.monotonic()
            reading = Reading(spark, streams)
            with reading, failover(cluster, fault):
                led_s = time.monotonic()
                streams.wait_more()
                done_s = time.monotonic()
            batches += reading.rows
            print(
                f"{fault}: another leads after {led_s - begin_s:.1f} s; new lines are"
                f" archived {done_s - led_s:.1f} s later",
                flush=True,
            )
            streams.report()
        assert set(batches) <= streams.end()
    finally:
        streams.lines.end()
        for query in streams.queries:
            query.stop()
