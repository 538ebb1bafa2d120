"""The latest message of each key: a Delta table that follows keyed topics.

    latest = LatestTable("/latest/orders")
    rows.writeStream.foreachBatch(latest.write).start(checkpointLocation=...)

A batch is one commit: it inserts, replaces and deletes rows by topic and key, and
stores the number of the batch as a version of Delta's application transactions. So a
batch that Spark repeats has no effect, whenever a process was killed.
"""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from metaq.pipeline.errors import ArchiveError
from metaq.pipeline.jobs.archive_store import (
    compact_table,
    may_lose,
    require_plain,
    root_of,
    table_errors,
)
from metaq.pipeline.jobs.compact import FILE_BYTES
from metaq.spark.columns import ROW_SCHEMA, partition_of
from metaq.spark.errors import RowError
from metaq.spark.schema import ROW_DDL

APPLICATION: Final = "metaq latest"
"""Prefix of the application whose version is the last batch of a query."""
QUERY_ID: Final = "sql.streaming.queryId"
"""Local property that Spark sets while it writes a batch."""
SMALL_FILES_MAX: Final = 32
"""Number of files below `file_bytes` at which they are compacted."""

_SAME_PLACE: Final = (
    "(source.broker_id = target.broker_id AND source.partition = target.partition)"
)
_IS_NEWER: Final = (
    f"(({_SAME_PLACE} AND source.offset > target.offset) OR (NOT {_SAME_PLACE}"
    " AND coalesce(source.timestamp >= target.timestamp, true)))"
)


class LatestTable:
    """One table, written by one query at a time. Used on the driver, by one thread.

    A message replaces the row of its topic and key if it is later in the partition.
    Producers put the messages of one key to one partition; if they are in several, the
    later timestamp wins. A message without data, a tombstone, deletes the row of its
    key.
    """

    def __init__(self, path: str, *, file_bytes: int = FILE_BYTES) -> None:
        """Prepare; the table need not exist yet.

        Args:
            path: path or URL of its directory.
            file_bytes: approximate size up to which small files are compacted.

        Raises:
            ArchiveError: Spark or the table's library cannot read such a path.
        """
        self.root: Final = root_of(path)
        self._file_bytes = file_bytes

    def write(self, batch: DataFrame, number: int) -> None:
        """Merge one batch into the table; no effect if the table already has it.

        The latest message of each key in the batch is loaded into the driver's memory:
        limit it by `maxOffsetsPerTrigger` and `maxBytesPerTrigger`.

        Args:
            batch: rows of the source, as passed by `foreachBatch`.
            number: number of the batch in its query.

        Raises:
            RowError: a message has no key.
            ArchiveError: the table cannot be written, has other columns, as an archive
                has, or another query wrote it at the same time.
        """
        context = batch.sparkSession.sparkContext
        name = f"{APPLICATION} {context.getLocalProperty(QUERY_ID) or ''}".strip()
        with table_errors(self.root):
            table = DeltaTable.create(self.root, ROW_SCHEMA, mode="ignore")
            require_plain(table, self.root)
            _require_columns(table, self.root)
            done = table.transaction_version(name)
        if done is not None and done >= number:
            return
        rows = _keyed(_latest_of(batch).toArrow())
        if rows.num_rows:
            with table_errors(self.root):
                _merge(table, rows, Transaction(name, number))
            with may_lose(self.root):
                _compact(table, self.root, self._file_bytes)


def _merge(table: DeltaTable, rows: pa.Table, progress: Transaction) -> None:
    (
        table.merge(
            rows,
            "source.topic = target.topic AND source.key = target.key",
            source_alias="source",
            target_alias="target",
            commit_properties=CommitProperties(app_transactions=[progress]),
        )
        .when_matched_delete(f"source.is_tombstone AND {_IS_NEWER}")
        .when_matched_update_all(
            f"NOT source.is_tombstone AND {_IS_NEWER}", except_cols=["is_tombstone"]
        )
        .when_not_matched_insert_all(
            "NOT source.is_tombstone", except_cols=["is_tombstone"]
        )
        .execute()
    )
    table.update_incremental()


def _compact(table: DeltaTable, root: str, file_bytes: int) -> None:
    """Compact the table if it has many small files."""
    sizes = pa.table(table.get_add_actions())["size_bytes"]
    small_count = pc.sum(pc.less(sizes, file_bytes)).as_py() or 0
    if small_count >= SMALL_FILES_MAX:
        compact_table(table, root, file_bytes)
        table.vacuum(dry_run=False)


def _latest_of(batch: DataFrame) -> DataFrame:
    """Return the last message of each key, and whether it is a tombstone."""
    whole = sf.struct(*ROW_SCHEMA.names).alias("row")
    of_place = batch.groupBy("topic", "key", "broker_id", "partition").agg(
        sf.max_by(whole, "offset").alias("row")
    )
    order = sf.struct("row.timestamp", "row.offset")
    return (
        of_place.groupBy("topic", "key")
        .agg(sf.max_by("row", order).alias("row"))
        .select("row.*", sf.expr("octet_length(row.value) = 0").alias("is_tombstone"))
    )


def _require_columns(table: DeltaTable, root: str) -> None:
    """Refuse a table with other columns, to protect its rows from a merge."""
    names = [field.name for field in table.schema().fields]
    if names != ROW_SCHEMA.names:
        raise ArchiveError(
            f"{root}: expected a table of latest messages, with the columns"
            f" {', '.join(ROW_SCHEMA.names)}, got {', '.join(names)}"
        )


def _keyed(rows: pa.Table) -> pa.Table:
    """Return a copy of the rows; raises RowError if one has no key.

    PySpark before 4.2 sends empty lists without the offsets that `deltalake` reads; the
    copy has them.
    """
    keyed = rows.filter(rows["key"].is_valid())
    if keyed.num_rows < rows.num_rows:
        (row,) = rows.filter(rows["key"].is_null()).slice(0, 1).to_pylist()
        raise RowError(
            f"{partition_of(row)}: message at offset {row['offset']} has no key: a"
            " table of the latest messages needs one"
        )
    return keyed


def read_latest(spark: SparkSession, path: str) -> DataFrame:
    """Return the latest message of each key, in no order.

    Args:
        spark: the session.
        path: path or URL of the table.

    Returns:
        The columns of the source. Batches written later are not seen.

    Raises:
        ArchiveError: there is no table, or Spark's Parquet reader cannot read it.
    """
    root = root_of(path)
    with table_errors(root):
        if not DeltaTable.is_deltatable(root):
            raise ArchiveError(f"{root}: no table: there is no _delta_log")
        table = DeltaTable(root)
        require_plain(table, root)
        files = table.file_uris()
    if not files:
        return spark.createDataFrame([], ROW_DDL)
    return spark.read.schema(ROW_DDL).parquet(*files)
