"""A table that follows a keyed topic has the last message of each key, once."""

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from metaq.client import Client, OutgoingMessage
from metaq.pipeline.errors import ArchiveError
from metaq.pipeline.jobs.archive_store import compact_table
from metaq.pipeline.jobs.compact import FILE_BYTES
from metaq.pipeline.jobs.latest import SMALL_FILES_MAX, LatestTable, read_latest
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.errors import RowError
from metaq.spark.schema import ROW_DDL
from metaq.spark.versions import HAS_LIMITS
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.pipeline.jobs.archives import overtaken_by
from tests.spark.brokers import TOPIC, options_of, stored

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 120
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={TOPIC: 2}) as found:
        yield found


def put(broker: EmbeddedBroker, *pairs: tuple[str | None, bytes]) -> None:
    messages = [OutgoingMessage(data, key=key) for key, data in pairs]
    with Client(brokers=[broker.address]) as client, client.producer() as producer:
        producer.send_many(TOPIC, messages)


def changes(count: int, first: int = 0) -> list[tuple[str | None, bytes]]:
    """Return messages of 13 keys, every seventh of them a tombstone."""
    return [
        (f"key {n % 13}", b"" if n % 7 == 0 else b"value %d" % n)
        for n in range(first, first + count)
    ]


def expected(broker: EmbeddedBroker) -> dict[bytes, bytes]:
    """Return what plain Python makes of the topic."""
    found: dict[bytes, bytes] = {}
    for messages in stored(broker).values():
        for message in messages:
            key = message.key
            assert key is not None
            found.pop(key, None)
            if message.data:
                found[key] = message.data
    return found


def held(spark: SparkSession, path: Path) -> dict[bytes, bytes]:
    """Return key → value of the table; fails where a key is there twice."""
    rows = read_latest(spark, str(path)).select("key", "value").collect()
    found = {bytes(row.key): bytes(row.value) for row in rows}
    assert len(found) == len(rows)
    return found


def follow(
    spark: SparkSession,
    broker: EmbeddedBroker,
    path: Path,
    write: Callable[[DataFrame, int], None],
) -> None:
    """Take in what is there now, in several batches."""
    options = options_of(
        broker, subscribe=TOPIC, startingOffsets="earliest", maxOffsetsPerTrigger=40
    )
    rows = spark.readStream.format("metaq").options(**options).load()
    checkpoint = str(path.with_name("checkpoint"))
    query = (
        rows.writeStream.foreachBatch(write)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(DEADLINE_S)


def test_a_topic_is_followed_through_a_batch_that_is_repeated(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Its driver dies when the batch is in the table, and Spark does not know it."""
    last = 1 if HAS_LIMITS else 0  # then a run has one batch
    path = tmp_path / "latest"
    table = LatestTable(str(path))

    def die_behind_it(batch: DataFrame, number: int) -> None:
        table.write(batch, number)
        if number == last:
            raise InterruptedError("killed here")

    put(broker, *changes(100))
    with pytest.raises(StreamingQueryException, match="killed here"):
        follow(spark, broker, path, die_behind_it)
    version = DeltaTable(path).version()
    again: list[int] = []

    def note(batch: DataFrame, number: int) -> None:
        table.write(batch, number)
        if not again:
            assert DeltaTable(path).version() == version
        again.append(number)

    follow(spark, broker, path, note)
    assert again[0] == last
    assert held(spark, path) == expected(broker)
    put(broker, *changes(60, 500))
    follow(spark, broker, path, table.write)
    if not HAS_LIMITS:
        follow(spark, broker, path, table.write)
    assert held(spark, path) == expected(broker)


def at(seconds: int) -> dt.datetime:
    return NOON + dt.timedelta(seconds=seconds)


def rows(
    spark: SparkSession, *some: tuple[bytes | None, int, int, int, bytes]
) -> DataFrame:
    """Return rows: key, partition, offset, seconds after noon, value."""
    whole = [
        ("t", 0, place, offset, offset, at(s), None, 0, key, None, value)
        for key, place, offset, s, value in some
    ]
    return spark.createDataFrame(whole, ROW_DDL)


STEPS: list[tuple[Sequence[tuple[bytes, int, int, int, bytes]], dict[bytes, bytes]]] = [
    ([(b"a", 0, 10, 0, b"1"), (b"a", 0, 20, 0, b"2")], {b"a": b"2"}),
    ([(b"a", 0, 15, 9, b"older offset")], {b"a": b"2"}),
    (
        [(b"a", 0, 30, 1, b""), (b"a", 0, 25, 1, b"x"), (b"b", 0, 5, 1, b"y")],
        {b"b": b"y"},
    ),
    ([(b"nothing", 0, 40, 1, b"")], {b"b": b"y"}),
    ([(b"b", 1, 0, 0, b"elsewhere, before")], {b"b": b"y"}),
    ([(b"b", 1, 3, 2, b"elsewhere")], {b"b": b"elsewhere"}),
    ([(b"b", 0, 9, 3, b"p"), (b"b", 1, 9, 4, b"q")], {b"b": b"q"}),
    ([(b"b", 1, 12, 5, b"")], {}),
]


def test_offset_decides_and_time_between_partitions(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Step by step; a tombstone takes the row away, and one of no row is nothing."""
    table = LatestTable(str(tmp_path))
    for number, (batch, there) in enumerate(STEPS):
        table.write(rows(spark, *batch), number)
        assert held(spark, tmp_path) == there, number


def test_a_message_without_a_key_is_named(spark: SparkSession, tmp_path: Path) -> None:
    """It is not left out in silence, and nothing of its batch is in the table."""
    table = LatestTable(str(tmp_path))
    batch = rows(spark, (b"a", 0, 1, 0, b"x"), (None, 1, 7, 0, b"y"))
    with pytest.raises(RowError, match="t/0-1: message at offset 7 has no key"):
        table.write(batch, 0)
    assert held(spark, tmp_path) == {}


def test_where_there_is_no_table_reading_says_so(
    spark: SparkSession, tmp_path: Path
) -> None:
    """An empty frame would be taken for an empty topic."""
    with pytest.raises(ArchiveError, match="no table"):
        read_latest(spark, str(tmp_path))


def small_files(spark: SparkSession, path: Path, count: int) -> LatestTable:
    """Return a table of keys 0 to `count` - 1, with a file for each."""
    made = LatestTable(str(path))
    made.write(rows(spark, (b"0", 0, 0, 0, b"x")), 0)
    row = pa.table(DeltaTable(path).to_pyarrow_table()).cast(ROW_SCHEMA)
    place = row.column_names.index("key")
    for number in range(1, count):
        key = pa.array([b"%d" % number], pa.binary())
        write_deltalake(path, row.set_column(place, "key", key), mode="append")
    return made


def test_small_files_are_put_together(spark: SparkSession, tmp_path: Path) -> None:
    """The table goes on with few."""
    last = SMALL_FILES_MAX - 1
    table = small_files(spark, tmp_path, last)
    table.write(rows(spark, (b"%d" % last, 0, last, 0, b"x")), 1)
    assert len(DeltaTable(tmp_path).file_uris()) < SMALL_FILES_MAX
    assert len(held(spark, tmp_path)) == SMALL_FILES_MAX


@pytest.mark.parametrize("is_ours", [True, False])
def test_of_two_that_put_files_together_one_does(
    spark: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_ours: bool,
) -> None:
    """A job goes on without; of another engine it says what that may have done."""

    def compact() -> None:
        if is_ours:
            compact_table(DeltaTable(tmp_path), str(tmp_path), FILE_BYTES)
        else:
            DeltaTable(tmp_path).optimize.compact()

    table, last = small_files(spark, tmp_path, SMALL_FILES_MAX), SMALL_FILES_MAX
    batch = rows(spark, (b"%d" % last, 0, last, 0, b"x"))
    if not is_ours:
        with (
            overtaken_by(compact),
            pytest.raises(ArchiveError, match="restore the table to version"),
        ):
            table.write(batch, 1)
        return
    with overtaken_by(compact):
        table.write(batch, 1)
    assert "small files stay until the next batch" in caplog.text
    assert len(held(spark, tmp_path)) == last + 1
    table.write(rows(spark, (b"more", 0, last + 1, 0, b"x")), 2)
    assert len(held(spark, tmp_path)) == last + 2


def test_files_that_are_large_enough_are_left_alone(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Or a table of many files would be looked through with each batch."""
    last = SMALL_FILES_MAX
    small_files(spark, tmp_path, last)
    table = LatestTable(str(tmp_path), file_bytes=1)
    table.write(rows(spark, (b"%d" % last, 0, last, 0, b"x")), 1)
    history = DeltaTable(tmp_path).history()
    assert "OPTIMIZE" not in {commit["operation"] for commit in history}


def test_a_table_with_features_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's Parquet reader would show rows that are deleted."""
    path = str(tmp_path / "table")
    table = DeltaTable.create(path, ROW_SCHEMA)
    feature = TableFeatures.DeletionVectors
    table.alter.add_feature(feature, allow_protocol_versions_increase=True)
    batch = rows(spark, (b"a", 0, 1, 0, b"x"))
    for use in (
        lambda: read_latest(spark, path),
        lambda: LatestTable(path).write(batch, 0),
    ):
        with pytest.raises(ArchiveError, match="readers of version 1, got 3"):
            use()
