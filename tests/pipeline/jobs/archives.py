"""Rows for the tests of pipeline jobs, and feeds that give them without a broker."""

import datetime as dt
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.table import TableOptimizer
from pyspark.sql import DataFrame, SparkSession

from metaq.model import BrokerId, MessageId, Offset, TopicPartition
from metaq.pipeline.jobs.archive import ArchiveRun, ArchiveSummary
from metaq.pipeline.jobs.archive_store import ArchiveStore
from metaq.pipeline.jobs.day_files import Read
from metaq.record.flags import encode_payload
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.offsets import Offsets
from metaq.spark.plan import ReadRange
from metaq.spark.schema import ROW_DDL
from metaq.spark.source.read_task import ReadTask

DAY = dt.datetime(2026, 1, 31, 23, 59, 58, tzinfo=dt.UTC)
SECOND = dt.timedelta(seconds=1)
Row = tuple[Any, ...]
Place = tuple[str, int, int, int]


def row(
    topic: str,
    partition: int,
    offset: int,
    value: bytes | None = None,
    *,
    broker_id: int = 0,
    time: dt.datetime | None = DAY,
    attribute: str | None = None,
    key: bytes | None = None,
    headers: Sequence[tuple[str, bytes]] | None = None,
) -> Row:
    """Return one row of the source; the payload names its offset."""
    payload = b"%d at %d" % (partition, offset) if value is None else value
    _payload, flag = encode_payload(payload, attribute, key, headers or ())
    head = (topic, broker_id, partition, offset, offset + 1, time, attribute, flag)
    return (*head, key, headers, payload)


def log_rows(
    topic: str, partition: int, count: int, *, start: int = 0, stride: int = 50
) -> list[Row]:
    """Return messages of one partition, a second apart; the day changes soon."""
    return [
        row(topic, partition, n * stride, time=DAY + n * SECOND)
        for n in range(start, start + count)
    ]


def frame(spark: SparkSession, rows: Sequence[Row]) -> DataFrame:
    """Return rows as the source would."""
    return spark.createDataFrame(list(rows), ROW_DDL)


class Feed:
    """A directory of batches, in place of topics: each file is one batch."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory

    @property
    def read(self) -> Read:
        """Return what reads the rows of a task, in any process."""
        return partial(read_fed, directory=str(self._directory))

    def add(self, rows: Sequence[Row]) -> None:
        """Add a batch; in each partition offsets go up from one to the next."""
        count = len(fed(self._directory))
        (self._directory / f"{count:05}").write_bytes(pickle.dumps(list(rows)))

    def start(self) -> dict[TopicPartition, Offset]:
        return {}

    def changed(
        self, lasts: Mapping[TopicPartition, tuple[Offset, MessageId]]
    ) -> list[TopicPartition]:
        """Return those with another id than `row` gives a message."""
        return [each for each, (at, its_id) in lasts.items() if its_id != at + 1]

    def freeze(self) -> None:
        """Nothing comes in between, where that counts."""

    def advance(self, offsets: Offsets) -> dict[TopicPartition, Offset]:
        """Return the end of the next batch; that of a row is after its offset."""
        for rows in fed(self._directory):
            ends = {place_of(row): Offset(row[3] + 1) for row in rows}
            if any(end > offsets.get(place, 0) for place, end in ends.items()):
                return {**offsets, **ends}
        return dict(offsets)

    def tasks(self, start: Offsets, end: Offsets) -> list[ReadTask]:
        """Return a task for each partition that goes on."""
        spans = ((p, start.get(p, Offset(0)), at) for p, at in sorted(end.items()))
        return [
            ReadTask(ReadRange(p, first, at), None)
            for p, first, at in spans
            if first < at
        ]

    def commit(self, end: Offsets) -> None:
        """Keep nothing: the archive does."""


def fed(directory: Path) -> list[list[Row]]:
    """Return the batches of a feed."""
    return [pickle.loads(file.read_bytes()) for file in sorted(directory.iterdir())]


def read_fed(task: ReadTask, *, directory: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task that a feed has planned."""
    span = task.range
    for rows in fed(Path(directory)):
        its = [
            row
            for row in rows
            if place_of(row) == span.partition and span.start <= row[3] < span.end
        ]
        if its:
            yield arrow(its)


def place_of(row: Row) -> TopicPartition:
    """Return the partition of a row."""
    return TopicPartition(row[0], BrokerId(row[1]), row[2])


def arrow(rows: Sequence[Row]) -> pa.RecordBatch:
    """Return rows as a task of the source has them."""
    named = [dict(zip(ROW_SCHEMA.names, row, strict=True)) for row in rows]
    for each in named:
        if each["headers"] is not None:
            each["headers"] = [{"key": k, "value": v} for k, v in each["headers"]]
    return pa.RecordBatch.from_pylist(named, ROW_SCHEMA)


def archive_feed(
    spark: SparkSession, feed: Feed, path: str, **words: Any
) -> ArchiveSummary:
    """Archive what a feed has."""
    store = ArchiveStore(path, may_be_new=True)
    read = words.pop("read", feed.read)
    return ArchiveRun(spark, store, feed, read, **words).to_the_end()


def places(rows: Iterable[Any]) -> list[Place]:
    """Return where messages lie, in order."""
    names = ("topic", "broker_id", "partition", "offset")
    return sorted(tuple(row[name] for name in names) for row in rows)


def places_of(rows: Iterable[Row]) -> list[Place]:
    """Return the same of rows that were made here."""
    return sorted((r[0], r[1], r[2], r[3]) for r in rows)


def places_elsewhere(path: str) -> dict[str, list[Place]]:
    """Return where messages lie as other readers of a Delta table find them."""
    table = DeltaTable(path)
    messages = table.to_pyarrow_dataset()  # DuckDB finds it by its name
    query = 'SELECT topic, broker_id, "partition", "offset" FROM messages ORDER BY ALL'
    return {
        "Delta's engine": places(pa.table(table.scan()).to_pylist()),
        "Arrow": places(messages.to_table().to_pylist()),
        "DuckDB": duckdb.sql(query).fetchall(),
    }


@contextmanager
def overtaken_by(other: Callable[[], object]) -> Iterator[None]:
    """Have another one go in between the next compaction and its commit."""
    others = iter([other])

    def late(begin: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(begin)
        def begin_late(*words: Any, **named: Any) -> Any:
            for call in others:
                call()
            return begin(*words, **named)

        return begin_late

    # Of a table of latest messages the library does it, of an archive the job.
    with ExitStack() as stack:
        for owner, name in ((TableOptimizer, "compact"), (pq, "ParquetFile")):
            call = late(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, call))
        yield
