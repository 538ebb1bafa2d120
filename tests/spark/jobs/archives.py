"""Rows for the tests of pipeline jobs, and streams that give them without a broker."""

import datetime as dt
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from metaq.record.flags import encode_payload
from metaq.spark.schema import ROW_DDL

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
    """Return one row of the source; the payload tells where it lies."""
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
    """A directory that a stream reads: each file is one batch."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._spark = spark
        self._directory = directory
        self._count = 0

    def add(self, rows: Sequence[Row]) -> None:
        """Add a batch."""
        name = f"{self._count:05}"
        staged = self._directory.parent / f"{self._directory.name}-{name}"
        frame(self._spark, rows).coalesce(1).write.parquet(str(staged))
        self._directory.mkdir(exist_ok=True)
        (part,) = staged.glob("*.parquet")
        part.rename(self._directory / f"{name}.parquet")
        self._count += 1

    def stream(self) -> DataFrame:
        """Return the stream."""
        self._directory.mkdir(exist_ok=True)
        reader = self._spark.readStream.schema(ROW_DDL)
        return reader.option("maxFilesPerTrigger", 1).parquet(str(self._directory))


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
